"""A forecast's document: as tables for the terminal, as a file, and read again from that file."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from packer.format.errors import FormatError, UsageError
from packer.storage import open_storage
from pipelines.forecast_document import VERSION
from pipelines.report_page import visible

Document = Mapping[str, Any]

_WIDTH = 110
"""What the tables need; a narrower terminal wraps their lines."""


def write_forecast(document: Document, json_file: str | None) -> None:
    """Tables on stdout, and JSON into a file; JSON alone where the file is `-`."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if json_file == "-":
        click.echo(text, nl=False)
        return
    if json_file is not None:
        folder, name = posixpath.split(json_file)
        open_storage(folder or ".").publish_bytes(name, text.encode())
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    print_forecast(document, console)
    if json_file is not None:
        click.echo(f"written to {json_file}")


def read_forecast(file: str) -> Document:
    """What `write_forecast` wrote.

    Raises:
        FormatError: another file, or that of another release.
    """
    folder, name = posixpath.split(file)
    try:
        document = json.loads(open_storage(folder or ".").read_bytes(name))
    except ValueError as error:
        raise FormatError(f"{file}: not valid JSON: {error}; give the file of `bayplan forecast --json`") from error
    if not isinstance(document, dict) or document.get("bayplan_forecast") != VERSION:
        found = document.get("bayplan_forecast") if isinstance(document, dict) else None
        raise FormatError(
            f"{file}: found bayplan_forecast {found!r}, expected {VERSION}: give the file of `bayplan forecast --json`"
        )
    return document


def refuse_foreign(forecast: Document, file: str, report: Document) -> None:
    """Raises:
    UsageError: the forecast is of a profile that the report does not show, or was made before it was counted anew.
    """
    shown, name = report["profiles"], forecast["profile"]
    if name not in shown or shown[name]["fingerprint"] != forecast["profile_fingerprint"]:
        known = ", ".join(f"{name} ({profile['fingerprint'][:8]})" for name, profile in shown.items())
        raise UsageError(
            f"{file}: found a forecast of profile {name} ({forecast['profile_fingerprint'][:8]}), expected one of {known}; make "
            "it again with `bayplan forecast`"
        )


def print_forecast(document: Document, console: Console) -> None:
    """Two tables, packing and balance, and what a reader of them has to know."""
    cost = document["cost"]
    default = " (default)" if cost["is_default"] else ""
    title = f"{visible(document['dataset'])}, profile {document['profile']}, costs of {visible(cost['name'])}{default}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Group(_packing_table(document), Text(), _balance_table(document), Text()))
    for line in closing_lines(document):
        console.print(Text(line), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _packing_table(document: Document) -> Table:
    table = _table("tokens", "full", "bound", "samples", "images", "patches", "MB a pack", "no image", "encoder", "fit no pack")
    for one in document["packing"]:
        size = one["pack_bytes"]
        table.add_row(
            f"{one['sequence_length']:,}",
            _share(one["efficiency"], 3),
            f"{one['bound']['value']:.3%}",
            f"{one['samples_per_pack']['value']:.1f}",
            f"{one['images_per_pack']['value']:.1f}",
            f"{one['patches_per_pack']['value']:,.0f}",
            "-" if size is None else f"{size['value'] / 1e6:.1f}",
            f"{one['without_image']['value']:.1%}",
            f"{one['encoder_share']['value']:.1%}",
            f"{sum(one['refused'].values()):,}",
        )
    return table


def _balance_table(document: Document) -> Table:
    names = ("tokens", "ranks x packs", "order", "imbalance", "bound", "throughput", "moved", "off node", "GB a rank", "ms")
    table = _table(*names)
    table.columns[2].justify = "left"
    for one in document["balance"]:
        setting = (f"{one['sequence_length']:,}", f"{one['num_ranks']:,} x {one['num_microbatches']:,}")
        table.add_row(*setting, "arrival", _ratio(one["arrival"]), f"{one['bound']['value']:.3f}", *[""] * 5)
        for mode in one["modes"]:
            sent = mode["moved_bytes"]
            table.add_row(
                *("", "", mode["mode"] + (" (auto)" if mode["is_auto"] else "")),
                _ratio(mode["imbalance"]),
                "",
                f"{'+' if mode['gain']['value'] >= 0 else ''}{_share(mode['gain'], 1)}",
                f"{mode['moved_share']['value']:.1%}",
                f"{mode['off_node_share']['value']:.1%}",
                "-" if sent is None else f"{sent['value'] / one['num_ranks'] / 1e9:.2f}",
                f"{1000 * mode['solver_seconds']:,.0f}",
            )
    return table


def _ratio(found: Document) -> str:
    return f"{found['value']:.3f}" + ("" if found["error"] is None else f" ± {found['error']:.3f}")


def _share(found: Document, digits: int) -> str:
    return f"{found['value']:.{digits}%}" + ("" if found["error"] is None else f" ± {100 * found['error']:.{digits}f}")


def closing_lines(document: Document) -> Iterator[str]:
    """What stands below the tables, on the terminal and in the report."""
    settings = document["settings"]
    errors = f"±: standard error over {settings['num_batches']} independent global batches"
    yield f"imbalance: predicted time over the same work without waiting; {_where(settings)}. bound: no dealing can beat it"
    yield f"{errors if settings['num_batches'] > 1 else 'one global batch only, so no error is known'}"
    yield "throughput: against the order of arrival. GB a rank: sent in a global batch. ms: the solver, measured here"
    for one in document["packing"]:
        yield (
            f"{one['sequence_length']:,} tokens: {one['num_packs']:,} packs were really packed, in {one['num_streams']} "
            f"independent streams, from {one['num_drawn_samples']:,} samples drawn by the blend"
        )
        if one["refused"]:
            yield _refused(one)
    yield from _dealing_lines(document)
    yield from (f"note: {visible(note)}" for note in document["notes"])


def _dealing_lines(document: Document) -> Iterator[str]:
    for one in document["balance"]:
        drawn = one["num_packs"] * document["settings"]["num_batches"]
        if one["is_sampled"]:
            yield f"{_setting(one)}: {drawn:,} packs were drawn, some more than once, since fewer were packed"
        if any(mode["is_auto"] and not mode["gain"]["value"] for mode in one["modes"]):
            yield f"{_setting(one)}: `auto` leaves the order of arrival; a gain of less than 1% is not worth the traffic"
    largest = max(document["balance"], key=lambda one: float(one["num_samples"]))
    num_train = sum(source["num_train"] for source in document["sources"])
    repeats = largest["epochs_per_batch"]
    if repeats:
        most = max(repeats.items(), key=lambda item: float(item[1]))
        whole = f", more than all {num_train:,} of the dataset" if largest["num_samples"] > num_train else ""
        yield (
            f"{_setting(largest)}: a global batch takes {largest['num_samples']:,.0f} samples{whole}; as in training, "
            f"{len(repeats)} of {len(document['sources'])} sources are repeated within it, {visible(most[0])} "
            f"{most[1]:,.1f} times"
        )


def _setting(one: Document) -> str:
    return f"{one['num_ranks']:,} x {one['num_microbatches']:,} packs of {one['sequence_length']:,} tokens"


def _where(settings: Document) -> str:
    if settings["synchronises"] == "microbatch":
        return "all ranks meet at each microbatch"
    if (settings["expert_parallel"] or 1) > 1:
        return f"expert groups of {settings['expert_parallel']} consecutive ranks meet at each microbatch"
    return "ranks meet at the end of the global batch only"


def _refused(one: Document) -> str:
    total = sum(one["refused"].values())
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in one["refused"].items())
    largest, counts = max(one["refused_by_source"].items(), key=lambda item: sum(item[1].values()))
    share = total / one["num_looked_at"]
    line = (
        f"{one['sequence_length']:,} tokens: {total:,} of {one['num_looked_at']:,} samples ({share:.1%}) fit no pack "
        f"and are left out, as the loader does: {reasons}; {sum(counts.values()):,} of them in {visible(largest)}"
    )
    if one["in_vain"]:
        line += f". NOTHING fits of {', '.join(map(visible, one['in_vain']))}: their part of the blend is not trained on"
    return line
