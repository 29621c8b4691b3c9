"""A forecast's document as tables for the terminal."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from packer.storage import open_storage
from pipelines.report_page import visible

Document = Mapping[str, Any]

_GB, _MB = 1e9, 1e6


def write_forecast(document: Document, json_file: str | None) -> None:
    """Tables on stdout, and JSON into a file; JSON alone where the file is `-`."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    if json_file == "-":
        click.echo(text, nl=False)
        return
    print_forecast(document, Console(highlight=False))
    if json_file is not None:
        folder, name = posixpath.split(json_file)
        open_storage(folder or ".").publish_bytes(name, text.encode())
        click.echo(f"written to {json_file}")


def print_forecast(document: Document, console: Console) -> None:
    """Two tables, packing and balance, and what a reader of them has to know."""
    cost = document["cost"]
    default = " (default)" if cost["is_default"] else ""
    title = f"{visible(document['dataset'])}, profile {document['profile']}, costs of {visible(cost['name'])}{default}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Group(_packing_table(document), Text(), _balance_table(document)))
    for line in closing_lines(document):
        console.print(Text(line), soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _packing_table(document: Document) -> Table:
    table = _table("tokens", "full", "+-", "bound", "samples", "images", "patches", "MB a pack", "no image", "encoder", "fit no pack")
    for one in document["packing"]:
        refused = sum(one["refused"].values())
        size = one["pack_bytes"]
        table.add_row(
            f"{one['sequence_length']:,}",
            f"{one['efficiency']['value']:.3%}",
            _percent_error(one["efficiency"], 3),
            f"{one['bound']['value']:.3%}",
            f"{one['samples_per_pack']['value']:.1f}",
            f"{one['images_per_pack']['value']:.1f}",
            f"{one['patches_per_pack']['value']:,.0f}",
            "-" if size is None else f"{size['value'] / _MB:.1f}",
            f"{one['without_image']['value']:.1%}",
            f"{one['encoder_share']['value']:.1%}",
            f"{refused:,}",
        )
    return table


def _balance_table(document: Document) -> Table:
    table = _table(
        "tokens", "ranks x packs", "order", "imbalance", "+-", "bound", "throughput", "+-", "moved", "off node", "GB a rank", "ms"
    )
    table.columns[2].justify = "left"
    for one in document["balance"]:
        setting = [f"{one['sequence_length']:,}", f"{one['num_ranks']:,} x {one['num_microbatches']:,}"]
        arrival = [f"{one['arrival']['value']:.3f}", _error(one["arrival"]), f"{one['bound']['value']:.3f}"]
        table.add_row(*setting, "arrival", *arrival, *[""] * 6)
        for mode in one["modes"]:
            sent = mode["moved_bytes"]
            table.add_row(
                "",
                "",
                mode["mode"] + (" (auto)" if mode["is_auto"] else ""),
                f"{mode['imbalance']['value']:.3f}",
                _error(mode["imbalance"]),
                "",
                f"{mode['gain']['value']:+.1%}",
                _percent_error(mode["gain"], 1),
                f"{mode['moved_share']['value']:.1%}",
                f"{mode['off_node_share']['value']:.1%}",
                "-" if sent is None else f"{sent['value'] / one['num_ranks'] / _GB:.2f}",
                f"{1000 * mode['solver_seconds']:,.0f}",
            )
    return table


def _error(found: Document) -> str:
    return "-" if found["error"] is None else f"{found['error']:.3f}"


def _percent_error(found: Document, digits: int) -> str:
    return "-" if found["error"] is None else f"{found['error']:.{digits}%}"


def closing_lines(document: Document) -> Iterator[str]:
    """What stands below the tables, there and in the report."""
    settings = document["settings"]
    yield f"imbalance: predicted time over the same work without waiting; {_where(settings)}"
    yield (
        f"+-: standard error over {settings['num_batches']} independent batches; throughput: against the order of arrival; "
        "GB a rank: sent in a global batch; ms: the solver, here"
    )
    for one in document["packing"]:
        yield (
            f"{one['sequence_length']:,} tokens: {one['num_packs']:,} packs were really packed, in {one['num_streams']} independent "
            f"streams, from {one['num_drawn_samples']:,} samples drawn by the blend"
        )
        if one["refused"]:
            yield _refused(one)
    for one in document["balance"]:
        setting = f"{one['num_ranks']:,} x {one['num_microbatches']:,} packs of {one['sequence_length']:,} tokens"
        if one["is_sampled"]:
            drawn = one["num_packs"] * settings["num_batches"]
            yield f"{setting}: {drawn:,} packs were drawn, most of them more than once, since a batch has more than were packed for it"
        if one["epochs_per_batch"]:
            most = max(one["epochs_per_batch"].items(), key=lambda item: float(item[1]))
            yield (
                f"{setting}: a global batch takes more samples than {len(one['epochs_per_batch'])} of "
                f"{len(document['sources'])} sources have, and repeats them: {visible(most[0])} {most[1]:,.1f} times"
            )
        if any(mode["is_auto"] and not mode["gain"]["value"] for mode in one["modes"]):
            yield f"{setting}: nothing is gained, so `auto` leaves the order of arrival (less than 1% is not worth the traffic)"
    yield from (f"note: {visible(note)}" for note in document["notes"])


def _where(settings: Document) -> str:
    if settings["synchronises"] == "microbatch":
        return "all ranks meet at each microbatch"
    if (settings["expert_parallel"] or 1) > 1:
        return f"expert groups of {settings['expert_parallel']} consecutive ranks meet at each microbatch"
    return "ranks meet at the end of the global batch only"


def _refused(one: Document) -> str:
    total = sum(one["refused"].values())
    reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in one["refused"].items())
    largest = max(one["refused_by_source"].items(), key=lambda item: sum(item[1].values()))
    return (
        f"{one['sequence_length']:,} tokens: {total:,} of {one['num_looked_at']:,} samples ({total / one['num_looked_at']:.1%}) fit no "
        f"pack and are left out, as the loader does: {reasons}; most of them in {visible(largest[0])}"
    )
