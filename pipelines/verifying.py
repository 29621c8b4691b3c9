"""`bayplan verify`: checks the parts of a dataset in several processes and lists every problem."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import click
import msgspec
from rich.console import Console
from rich.progress import track

from packer.format import layout
from packer.format.errors import BayplanError
from packer.format.manifest import PartManifest, Totals, total
from packer.storage import FileStat, Storage, open_storage
from packer.verify import PartVerdict, verify_part, verify_source
from pipelines import dataset
from pipelines.inputs import InputFile, read_inventory
from pipelines.ledger import check_coverage, collect_manifests
from pipelines.report_text import counts_line


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What checking a dataset showed."""

    totals: Totals
    problems: list[str] = field(default_factory=list)
    num_images: int = 0
    num_bytes: int = 0
    deep: bool = False


def verify_dataset(url: str, *, deep: bool, workers: int | None, console: Console) -> Verdict:
    """Check every source, every part, every record and every image.

    Raises:
        UsageError: when there is no dataset.
    """
    storage = open_storage(url)
    identity = dataset.require_identity(storage)
    problems: list[str] = []
    manifests: list[PartManifest] = []
    inventory = _inventory(storage, problems)
    for source in identity.fingerprints:
        found, damaged = collect_manifests(storage, source)
        problems += map(str, damaged)
        problems += verify_source(storage, source, found)
        if identity.limit is None:
            problems += [f"{source}: {problem}" for problem in check_coverage(inventory.get(source, []), found)]
        manifests += found
    problems += _verify_top(storage, identity, manifests)
    verdict = Verdict(totals=total(manifests), problems=problems, deep=deep)
    count = min(workers or os.cpu_count() or 1, max(len(manifests), 1))
    check = partial(_verify, storage.url, deep)
    if count == 1:
        _collect(verdict, map(check, manifests))
    else:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            parts = pool.map(check, manifests)
            shown = track(parts, "parts", len(manifests), console=console, transient=True) if console.is_terminal else parts
            _collect(verdict, shown)
    return verdict


def _inventory(storage: Storage, problems: list[str]) -> dict[str, list[InputFile]]:
    """The inputs as the last run saw them: what of them is in no part is not packed yet."""
    try:
        inventory = read_inventory(storage)
    except BayplanError as error:
        problems.append(str(error))
        return {}
    return {
        source: [InputFile(stat=FileStat(name=file, size=size, stamp=stamp), file=file) for file, (size, stamp) in files.items()]
        for source, files in inventory.items()
    }


def _verify_top(storage: Storage, identity: dataset.Identity, manifests: Sequence[PartManifest]) -> Iterator[str]:
    """Problems of the files at the top: sources nobody names, a recipe that cannot be read, a view of other parts."""
    for name in storage.list_dirs(layout.SOURCES_DIR):
        if name not in identity.fingerprints:
            yield f"{layout.source_dir(name)}: {layout.DATASET_FILE} names no such source"
    try:
        recipe = dataset.read_recipe(storage)
        stock = storage.read_bytes(layout.STOCK_FILE)
    except (BayplanError, OSError) as error:
        yield f"{error}: the run did not end, or the file was damaged; run `bayplan pack` again"
        return
    if recipe is None:
        yield f"{layout.RECIPE_FILE}: found nothing: the run did not end; run `bayplan pack` again"
        return
    by_source: dict[str, list[PartManifest]] = {}
    for manifest in manifests:
        by_source.setdefault(manifest.source, []).append(manifest)
    if stock != dataset.stock_view(recipe, by_source)[0]:
        yield f"{layout.STOCK_FILE}: does not name the parts that are there: run `bayplan pack` again"


def _verify(url: str, deep: bool, manifest: PartManifest) -> PartVerdict:
    return verify_part(open_storage(url), manifest, deep=deep)


def _collect(verdict: Verdict, parts: Iterable[PartVerdict]) -> None:
    for part in parts:
        verdict.problems += part.problems
        verdict.num_images += part.num_images
        verdict.num_bytes += part.num_bytes


def print_verdict(verdict: Verdict, as_json: bool) -> None:
    """Show a verdict, its sums in the last line."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(verdict), indent=2))
        return
    for problem in verdict.problems:
        click.secho(f"PROBLEM {problem}", fg="red")
    how = "decoded" if verdict.deep else "read back"
    click.echo(f"{verdict.totals.num_parts} parts, {verdict.num_bytes / 1e6:,.1f} MB, {verdict.num_images} images {how}")
    click.echo(f"{len(verdict.problems)} problems; {counts_line(verdict.totals)}")
