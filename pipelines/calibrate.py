"""`bayplan calibrate`: a cost model fitted to timings, its residuals, and the file that other commands take."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

import click
import msgspec

from packer.format.errors import UsageError
from packer.storage import open_storage
from plugin.cost import CostModel, Fit, PartFit, Timings, cost_file, fit_timings, read_timings

_SHOWN_BAD = 5


def calibrate(paths: Sequence[str], to: str | None, as_json: bool) -> None:
    """Fit, print, and write if asked to."""
    if to is not None and not to.endswith(".json"):
        raise UsageError(f"found --to {to}, expected a name ending in .json")
    timings = read_timings(paths)
    _name_bad(timings)
    fit = fit_timings(timings)
    model = fit.model(name="calibrated", source=f"{len(timings.rows)} measured microbatches")
    if to is not None:
        folder, name = posixpath.split(to)
        open_storage(folder or ".").publish_bytes(name, cost_file(model, fit.state()))
    if as_json:
        document = msgspec.json.decode(cost_file(model, fit.state()))
        document |= {"fingerprint": model.fingerprint, "num_bad_lines": len(timings.bad)}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
        return
    for line in fit_lines(fit, model, timings):
        click.echo(line)
    if to is not None:
        click.echo(f"written to {to}")


def _name_bad(timings: Timings) -> None:
    for bad in timings.bad[:_SHOWN_BAD]:
        click.echo(f"{bad.place} left out: {bad.reason}", err=True)
    if len(timings.bad) > _SHOWN_BAD:
        click.echo(f"{len(timings.bad) - _SHOWN_BAD} more bad lines left out", err=True)


def fit_lines(fit: Fit, model: CostModel, timings: Timings) -> Iterator[str]:
    """A fit as text."""
    for part in fit.parts:
        yield from _part_lines(part)
        yield ""
    for warning in fit.warnings:
        yield f"WARNING {warning}"
    yield f"fingerprint {model.fingerprint}; {len(timings.rows)} good lines, {len(timings.bad)} bad"


def _part_lines(part: PartFit) -> Iterator[str]:
    yield f"{part.part}: {part.num_rows:,} microbatches"
    yield f"  {'column':<22}  {'nanoseconds each':>16}  {'+-':>12}  {'of the time':>11}"
    for column in part.columns:
        error = "-" if column.error is None else f"{column.error * 1e9:,.4g}"
        numbers = f"{column.seconds * 1e9:>16,.5g}  {error:>12}  {column.share:>11.1%}"
        yield f"  {column.name:<22}  {numbers}  {column.note}".rstrip()
    yield (
        f"  R^2 {part.r_squared:.4f}; relative error: median {part.median_error:.1%}, worst {part.worst_error:.1%} "
        f"({part.worst_place})"
    )
