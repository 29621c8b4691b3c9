"""`bayplan verify`: checks the parts of a dataset in several processes and lists every problem."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import click
import msgspec
from rich.console import Console
from rich.progress import track

from packer.format.errors import BayplanError
from packer.format.manifest import PartManifest, Totals, total
from packer.storage import open_storage
from packer.verify import PartVerdict, verify_part, verify_source
from pipelines import dataset
from pipelines.ledger import read_manifests
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
    for source in identity.fingerprints:
        try:
            found = read_manifests(storage, source)
        except BayplanError as error:
            problems.append(str(error))
            continue
        if found or not identity.limit:
            problems += verify_source(storage, source, found)
        manifests += found
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
