"""`bayplan quarantine`: what could not become a record and why, with examples; rows a retry made good are left out."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packer.format.errors import UsageError
from packer.format.manifest import PartManifest
from packer.format.quarantine import QuarantineLine
from packer.format.reasons import EXPLANATIONS, Reason
from packer.redact import one_line
from packer.retry import quarantined_rows, superseded_offsets
from packer.storage import Storage, open_storage
from pipelines import dataset
from pipelines.ledger import read_manifests
from pipelines.recipe import Recipe

_SHOWN_CHARS = 400
_PIPE_COLUMNS = 1000
"""Lines are not broken where a program reads them."""


def still_quarantined(storage: Storage, manifests: list[PartManifest]) -> Iterator[QuarantineLine]:
    """Quarantine lines of a source, without the rows that retries turned into records."""
    retries = defaultdict(list)
    for manifest in manifests:
        if manifest.supersedes is not None:
            retries[manifest.supersedes.part_id].append(manifest)
    for manifest in manifests:
        done = superseded_offsets(retries[manifest.part_id])
        yield from (row for row in quarantined_rows(storage, manifest) if row.byte_offset not in done)


@dataclass(slots=True)
class _Group:
    count: int = 0
    examples: list[QuarantineLine] = field(default_factory=list)


def print_quarantine(url: str, *, source: str | None, reason: str | None, examples: int, as_json: bool) -> None:
    """Print a table by source and reason, or every line as JSON."""
    storage = open_storage(url)
    identity = dataset.require_identity(storage)
    if source is not None and source not in identity.fingerprints:
        raise UsageError(f"found no source {source!r} in {storage.url}; its sources: {', '.join(identity.fingerprints)}")
    if reason is not None and reason not in set(Reason):
        raise UsageError(f"found no reason {reason!r}; the nearest: {', '.join(get_close_matches(reason, list(Reason)))}")
    groups: dict[tuple[str, Reason], _Group] = {}
    for name in identity.fingerprints:
        if source not in (None, name):
            continue
        for row in still_quarantined(storage, read_manifests(storage, name)):
            if reason not in (None, row.reason.value):
                continue
            if as_json:
                sys.stdout.buffer.write(row.encode())
                continue
            group = groups.setdefault((name, row.reason), _Group())
            group.count += 1
            if len(group.examples) < examples:
                group.examples.append(row)
    if not as_json:
        _print_table(groups, _places(dataset.read_recipe(storage)))


def _places(recipe: Recipe | None) -> dict[str, dict[str, str | None]]:
    """What `<image_root>` and `<archive>` in the details of each source stand for."""
    sources = recipe.sources if recipe is not None else ()
    return {source.name: {"<image_root>": source.resolved_image_root, "<archive>": source.archive} for source in sources}


def _print_table(groups: dict[tuple[str, Reason], _Group], places: dict[str, dict[str, str | None]]) -> None:
    table = Table("source", "reason", "rows", "what it means", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for (name, reason), group in groups.items():
        table.add_row(escape(name), reason.value, f"{group.count:,}", EXPLANATIONS[reason])
        for row in group.examples:
            detail = f"{row.file} byte {row.byte_offset}, id {row.sample_id}: {row.detail}"
            for mark, place in places.get(name, {}).items():
                detail = detail.replace(mark, place or mark, 1)
            detail = one_line(detail, _SHOWN_CHARS)  # no control characters on a terminal
            table.add_row("", "", "", escape(f"e.g. {detail}"), style="dim")
    console = Console() if sys.stdout.isatty() else Console(soft_wrap=True, width=_PIPE_COLUMNS)
    if groups:
        console.print(table)
    by_reason = Counter[str]()
    for (_, reason), group in groups.items():
        by_reason[reason.value] += group.count
    click.echo(f"{by_reason.total()} rows quarantined" + "".join(f", {name} {count}" for name, count in by_reason.most_common()))
