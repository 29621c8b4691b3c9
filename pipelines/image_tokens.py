"""`bayplan image-tokens`: what image rules make of sizes, as a table or as JSON lines, some thousands of sizes at a time."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice

import click
import msgspec

from indexer.image_rules import MAX_SIDE, PRESETS, ImageCount, ImageRule, ImageSizes, image_rule
from packer.format.errors import UsageError

Size = tuple[int, int]

_SIZE = re.compile(r"([0-9]{1,20})[xX×]([0-9]{1,20})")
_AT_ONCE = 4096
_NUMBERS = ("image tokens", "wrapper tokens", "patches")


def print_image_tokens(words: Sequence[str], names: Sequence[str], as_json: bool) -> None:
    """Print the counts of every size under every named rule (all of them if none is named)."""
    rules = {name: image_rule(name) for name in names or PRESETS}
    width = max(map(len, rules))
    for number, (size, name, count) in enumerate(_counts(_sizes(words), rules)):
        if number == 0 and not as_json:
            click.echo(f"{'size':<11}  {'rule':<{width}}  {'  '.join(_NUMBERS)}  grid (rows x columns)")
        click.echo(_json_line(size, name, count) if as_json else _table_line(size, f"{name:<{width}}", count))


def _sizes(words: Sequence[str]) -> Iterator[Size]:
    if not words and sys.stdin.isatty():
        raise UsageError("no sizes given: name them as WIDTHxHEIGHT, or pipe them in")
    for word in words or ["-"]:
        if word == "-":
            yield from _sizes_of_stdin()
        else:
            yield _size(word)


def _sizes_of_stdin() -> Iterator[Size]:
    try:
        for line in sys.stdin:
            yield from map(_size, line.split())
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not text ({error.reason}), expected sizes as in 1920x1080") from error


def _size(word: str) -> Size:
    match = _SIZE.fullmatch(word)
    if match is None:
        raise UsageError(f"{word!r} is not a size, expected WIDTHxHEIGHT as in 1920x1080")
    size = int(match[1]), int(match[2])
    if not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise UsageError(f"{word} has a side outside 1 to {MAX_SIDE:,}")
    return size


def _counts(sizes: Iterable[Size], rules: dict[str, ImageRule]) -> Iterator[tuple[Size, str, ImageCount]]:
    """Size by size, each under all rules."""
    rest = iter(sizes)
    while batch := list(islice(rest, _AT_ONCE)):
        arrays = ImageSizes.of(batch)
        counted = {name: rule(arrays) for name, rule in rules.items()}
        for position, size in enumerate(batch):
            for name, counts in counted.items():
                yield size, name, counts.at(position)


def _table_line(size: Size, name: str, count: ImageCount) -> str:
    start = f"{size[0]}x{size[1]}".ljust(11) + f"  {name}  "
    if count.refusal is not None:
        return f"{start}refused: {count.refusal}"
    values = (count.num_image_tokens, count.num_wrapper_tokens, count.num_patches)
    numbers = "  ".join(f"{value:>{len(title)},}" for value, title in zip(values, _NUMBERS, strict=True))
    return f"{start}{numbers}  {count.grid_rows} x {count.grid_columns} {count.grid_unit}"


def _json_line(size: Size, name: str, count: ImageCount) -> str:
    row = {"width": size[0], "height": size[1], "rule": name, **asdict(count)}
    return msgspec.json.encode(row).decode()
