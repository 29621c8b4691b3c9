"""`bayplan status`: what a dataset holds so far, from its manifests alone; a running job does not mind."""

from __future__ import annotations

from dataclasses import dataclass

import click
import msgspec

from packer.format import layout
from packer.format.manifest import Totals, total
from packer.storage import Storage, open_storage
from pipelines import dataset
from pipelines.inputs import Inventory, read_inventory
from pipelines.ledger import read_manifests
from pipelines.report_text import add_totals, counts_line


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """What a source holds so far."""

    totals: Totals
    num_files: int
    """Input files that are not empty, as the last run saw them."""
    files_not_begun: list[str]
    cut_inputs: list[str]
    is_consolidated: bool
    """Whether a run has ended since the first part was committed."""


def read_status(storage: Storage, source: str, inventory: Inventory) -> SourceStatus:
    """The status of one source."""
    manifests = read_manifests(storage, source)
    files = {file for file, (size, _) in inventory.get(source, {}).items() if size}
    return SourceStatus(
        totals=total(manifests),
        num_files=len(files),
        files_not_begun=sorted(files - {manifest.input.file for manifest in manifests}),
        cut_inputs=sorted({manifest.input.file for manifest in manifests if not manifest.input.input_complete}),
        is_consolidated=storage.stat(layout.source_file(source)) is not None,
    )


def print_status(url: str, as_json: bool) -> None:
    """Print counts per source and in all, and what is unfinished."""
    storage = open_storage(url)
    identity = dataset.require_identity(storage)
    inventory = read_inventory(storage)
    sources = {name: read_status(storage, name, inventory) for name in identity.fingerprints}
    everything = add_totals([status.totals for status in sources.values()])
    if as_json:
        document = {"name": identity.name, "limit": identity.limit, "sources": sources, "totals": everything}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    click.echo(f"dataset {identity.name}" + (f", a trial of {identity.limit} rows a source" if identity.limit else ""))
    for name, status in sources.items():
        not_begun = f", {len(status.files_not_begun)} of {status.num_files} files not begun" if status.files_not_begun else ""
        cut = f", cut inputs: {', '.join(status.cut_inputs)}" if status.cut_inputs else ""
        click.echo(f"{name}: {status.totals.num_parts} parts, {counts_line(status.totals)}{not_begun}{cut}")
    click.echo(f"{everything.num_parts} parts, {everything.num_bytes / 1e6:,.1f} MB, {counts_line(everything)}")
