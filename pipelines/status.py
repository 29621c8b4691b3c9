"""`bayplan status`: what a dataset holds so far, from its manifests alone; a running job does not mind."""

from __future__ import annotations

import click
import msgspec

from packer.format import layout
from packer.format.manifest import Totals, total
from packer.storage import open_storage
from pipelines import dataset
from pipelines.inputs import read_inventory
from pipelines.ledger import read_manifests
from pipelines.report_text import add_totals, counts_line


def print_status(url: str, as_json: bool) -> None:
    """Print counts per source and in all, and what is unfinished."""
    storage = open_storage(url)
    identity = dataset.require_identity(storage)
    inventory = read_inventory(storage)
    sources: dict[str, dict[str, object]] = {}
    every: list[Totals] = []
    for name in identity.fingerprints:
        manifests = read_manifests(storage, name)
        totals = total(manifests)
        every.append(totals)
        whole = {manifest.input.file for manifest in manifests if manifest.is_last_of_range}
        files = {file for file, (size, _) in inventory.get(name, {}).items() if size}
        sources[name] = {
            "totals": totals,
            "num_files": len(files),
            "files_not_begun": sorted(files - {manifest.input.file for manifest in manifests}),
            "num_files_with_a_finished_range": len(whole),
            "cut_inputs": sorted({part.input.file for part in manifests if not part.input.input_complete}),
            "is_consolidated": storage.stat(layout.source_file(name)) is not None,
        }
    everything = add_totals(every)
    if as_json:
        document = {"name": identity.name, "limit": identity.limit, "sources": sources, "totals": everything}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    click.echo(f"dataset {identity.name}" + (f", a trial of {identity.limit} rows a source" if identity.limit else ""))
    for name, state in sources.items():
        not_begun, cut = state["files_not_begun"], state["cut_inputs"]
        assert isinstance(not_begun, list)
        assert isinstance(cut, list)
        assert isinstance(state["totals"], Totals)
        more = f", {len(not_begun)} of {state['num_files']} files not begun" if not_begun else ""
        more += f", cut inputs: {', '.join(cut)}" if cut else ""
        click.echo(f"{name}: {state['totals'].num_parts} parts, {counts_line(state['totals'])}{more}")
    click.echo(f"{everything.num_parts} parts, {everything.num_bytes / 1e6:,.1f} MB, {counts_line(everything)}")
