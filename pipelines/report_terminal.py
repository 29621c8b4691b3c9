"""The statistics report as a table for the terminal: one row per source and the totals; fits 80 columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.report_page import visible

_COLUMNS = ("samples", "images", "tokens", "text/img/other", "med/p95/max", "over", "quar")
_GAP, _MIN_NAME = 1, 8
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))


def human(number: float | None) -> str:
    """Three digits and a unit: 2.1T, 340M, 9,120; a dash for what is not known."""
    if number is None:
        return "-"
    if abs(number) < 10_000:
        return f"{number:,.0f}"
    for size, unit in _UNITS:
        if abs(number) >= 0.9995 * size:
            return f"{number / size:.3g}{unit}" if abs(number) < 999.5 * size else f"{number / size:,.0f}{unit}"
    raise AssertionError(number)


def summary(document: Mapping[str, Any], *, profile: str | None = None, width: int = 80, color: bool = False) -> str:
    """The summary of one profile, the first by default; plain text unless `color`."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=color, no_color=not color, highlight=False, legacy_windows=False)
    print_summary(document, console, profile=profile)
    return out.getvalue()


def print_summary(document: Mapping[str, Any], console: Console, *, profile: str | None = None) -> None:
    """Print the summary of one profile, the first by default, as wide as the console."""
    name = profile if profile is not None else next(iter(document["profiles"]), None)
    dataset = document["dataset"]
    title = visible(dataset["name"]) + (f", profile {visible(name)}" if name else "")
    console.print(Text(title, style="bold"), soft_wrap=True)
    if name is None:
        console.print("no profile is indexed yet")
        return
    counted = document["profiles"][name]
    console.print(_table(counted, console.width))
    for line in _closing_lines(document, counted):
        console.print(line, soft_wrap=True)


def _table(counted: Mapping[str, Any], width: int) -> Table:
    """All sources and their sum; names are cut where the numbers need the room."""
    rows = {visible(source): _cells(numbers) for source, numbers in counted["sources"].items()}
    whole = _cells(counted["all"])
    widths = (max(map(len, column)) for column in zip(_COLUMNS, whole, *rows.values(), strict=True))
    room = max(width - sum(column + _GAP for column in widths), _MIN_NAME)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim", show_footer=True, footer_style="bold")
    table.add_column("source", footer="all", max_width=room, overflow="ellipsis", no_wrap=True)
    for header, cell in zip(_COLUMNS, whole, strict=True):
        table.add_column(header, footer=cell, justify="right", no_wrap=True)
    for source, cells in rows.items():
        table.add_row(Text(source), *cells)
    return table


def _cells(numbers: Mapping[str, Any]) -> list[str]:
    lengths = numbers["distributions"]["tokens_per_sample"]
    quantiles = lengths["quantiles"] or {}
    over = numbers["over_long"]
    return [
        human(numbers["num_samples"]),
        human(numbers["num_images"]),
        human(numbers["num_tokens"]),
        _shares(numbers),
        "/".join(human(value) for value in (quantiles.get("0.5"), quantiles.get("0.95"), lengths["max"])),
        human(over[0]["num_samples"]) if over else "-",
        human(numbers["num_quarantined"]),
    ]


def _shares(numbers: Mapping[str, Any]) -> str:
    if not numbers["num_tokens"]:
        return "-"
    kinds = ("num_text_tokens", "num_image_tokens", "num_other_tokens")
    return "/".join(f"{100 * numbers[kind] / numbers['num_tokens']:.0f}" for kind in kinds) + "%"


def _closing_lines(document: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[Text]:
    everything = counted["all"]
    num_tokens = everything["num_tokens"]
    loss = f", {100 * everything['num_loss_tokens'] / num_tokens:.1f}% of tokens in the loss" if num_tokens else ""
    yield Text(f"{everything['num_samples']:,} samples, {everything['num_images']:,} images, {num_tokens:,} tokens{loss}")
    for over in everything["over_long"]:
        yield Text(f"longer than {over['sequence_length']:,}: {over['num_samples']:,} samples with {over['num_tokens']:,} tokens")
    if counted["sequence_lengths"]:
        yield Text(f"over: longer than {counted['sequence_lengths'][0]:,} tokens; quar: quarantined rows", style="dim")
    for source, facts in document["sources"].items():
        if facts["failure"]:
            yield Text(f"FAILED {visible(source)}: {visible(facts['failure'])}", style="red")
    for note in document["notes"]:
        yield Text(f"note: {visible(note)}")
