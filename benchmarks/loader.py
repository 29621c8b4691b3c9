"""Samples a second into packs: ours against stock Energon; and how much of a slow store's latency a trainer does not see.

    PYTHONPATH=. python benchmarks/loader.py [--samples 2000] [--runs 3] [--workers 0 2] [--scratch FOLDER]

All contestants encode, decode, plan and build packs with the same code; they differ in where samples come from and when they are
read. Without decoding, files are read and pixels left out. Measured from asking for the first pack on, so that every contestant
fills its buffer within its time. Store: each read takes 20 ms, the trainer sleeps 50 ms a pack.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem
from loader_data import PROFILE, make_dataset, make_loose, make_shards
from loader_peers import cook_loose, cook_shard, open_peer
from rich.console import Console
from rich.table import Table

from plugin import BundleReader, PackLoader, PackSettings

SIDES = (64, 256)
SETTINGS = PackSettings(sequence_length=4096, buffer_size=500)
LATENCY_SECONDS, COMPUTE_SECONDS = 0.020, 0.050
NUM_PACKS, NUM_ALONE = 40, 10
"""Packs with reads ahead, and packs with reads one after the other, which take long."""

Open = Callable[[], tuple[Any, Iterator[Any]]]
"""Opens a loader and its packs."""


class SlowFileSystem(AbstractFileSystem):
    """slow://: a local folder whose every read takes the latency."""

    protocol = "slow"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        time.sleep(LATENCY_SECONDS)
        with open(path, "rb") as file:
            first = start or 0
            return os.pread(file.fileno(), (os.fstat(file.fileno()).st_size if end is None else end) - first, first)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": os.stat(path).st_size, "type": "file"}


fsspec.register_implementation("slow", SlowFileSystem, clobber=True)


def open_ours(dataset: str, num_workers: int, decodes: bool) -> tuple[PackLoader, Iterator[Any]]:
    loader = PackLoader.open(dataset, PROFILE, SETTINGS, num_workers=num_workers, shuffle_buffer_size=500)
    if not decodes:
        builder = loader.encoder.builder
        builder._samples = replace(builder._samples, with_pixels=False)
    return loader, loader


def samples_a_second(open_packs: Open, num_samples: int) -> float:
    loader, packs = open_packs()
    started, found = time.perf_counter(), 0
    while found < num_samples:
        found += len(next(packs).batch.sample_ids)
    rate = found / (time.perf_counter() - started)
    if isinstance(loader, PackLoader):
        loader.close()
    return rate


def local(dataset: str, folder: Path, *, num_samples: int, runs: int, all_workers: list[int]) -> Table:
    loose, shards = make_loose(dataset, folder / "loose"), make_shards(dataset, folder / "shards")
    table = Table(title=f"samples/s, median of {runs}; in brackets: ours over this, median of the rounds")
    for column in ("decoding", "workers", "ours", "Energon, JSONL and files", "Energon, shards"):
        table.add_column(column, justify="right")
    for decodes in (True, False):
        for number in all_workers:
            ways: list[Open] = [
                partial(open_ours, dataset, number, decodes),
                partial(open_peer, loose, dataset, SETTINGS, cook_loose, num_workers=number, decodes=decodes),
                partial(open_peer, shards, dataset, SETTINGS, cook_shard, num_workers=number, decodes=decodes),
            ]
            rounds = [[samples_a_second(way, num_samples) for way in ways] for _ in range(runs)]
            rates = [statistics.median(rates) for rates in zip(*rounds, strict=True)]
            ratios = [statistics.median(one[0] / one[place] for one in rounds) for place in range(len(ways))]
            cells = [f"{rate:,.0f} ({ratio:.2f})" for rate, ratio in zip(rates, ratios, strict=True)]
            table.add_row("on" if decodes else "off", str(number), *cells)
    return table


def store(dataset: str, runs: int) -> Table:
    table = Table(
        title=f"{NUM_PACKS} packs from a store of 20 ms a read; the trainer sleeps {COMPUTE_SECONDS * 1e3:.0f} ms a pack"
    )
    for column in ("how", "waiting for files a pack, ms", "hidden"):
        table.add_column(column, justify="right")
    alone = _read_wait(dataset, replace(SETTINGS, packs_ahead=1, num_threads=1), NUM_ALONE)
    table.add_row("one read after the other", f"{alone * 1e3:.1f}", "0")
    for ahead in (1, 2, 4):
        settings = replace(SETTINGS, packs_ahead=ahead)
        wait = statistics.median(_read_wait(dataset, settings, NUM_PACKS) for _ in range(runs))
        table.add_row(f"16 threads, packs_ahead {ahead}", f"{wait * 1e3:.1f}", f"{1 - wait / alone:.1%}")
    return table


def _read_wait(dataset: str, settings: PackSettings, num_packs: int) -> float:
    """Seconds a pack; that of the first pack, which nothing can hide, counts too."""
    with PackLoader.open(dataset, PROFILE, settings, num_workers=0, shuffle_buffer_size=500) as loader:
        builder = loader.encoder.builder
        builder.reader = BundleReader(f"slow://{dataset}")
        builder._pool = builder._new_pool()
        for _ in range(num_packs):
            next(loader)
            time.sleep(COMPUTE_SECONDS)
        return builder.counters()["wait_seconds"] / num_packs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--scratch", type=Path, help="a folder for the samples; a temporary one when not given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch on pinned memory without a device
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="bayplan-loader-", dir=options.scratch) as name:
        dataset = make_dataset(Path(name) / "ours", options.samples, SIDES)
        console.print(store(dataset, options.runs))
        arguments = {"num_samples": options.samples, "runs": options.runs, "all_workers": options.workers}
        console.print(local(dataset, Path(name), **arguments))


if __name__ == "__main__":
    main()
