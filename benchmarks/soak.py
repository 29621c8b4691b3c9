"""Memory, descriptors and threads of a loader that runs for long: the process tree, every so many samples.

    PYTHONPATH=. python benchmarks/soak.py [--samples 100000] [--every 10000] [--workers 2] [--scratch FOLDER]

Icons, seen over and over. Memory is RSS and so counts what processes share more than once. Growth is over the first line, after
which every buffer is full.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path

import psutil
from loader_data import PROFILE, make_dataset
from rich.console import Console
from rich.table import Table

from plugin import PackLoader, PackSettings

NUM_SAMPLES, SIDES = 2000, (16, 64)
SETTINGS = PackSettings(sequence_length=4096, buffer_size=500)


def measured() -> tuple[int, int, int]:
    """Bytes, descriptors, threads of this process and all below it."""
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    return (
        sum(process.memory_info().rss for process in processes),
        sum(process.num_fds() for process in processes),
        sum(process.num_threads() for process in processes),
    )


def soak(dataset: str, *, num_samples: int, every: int, num_workers: int) -> Table:
    table = Table(title=f"{num_workers} workers, {num_samples:,} samples")
    for column in ("samples", "seconds", "RSS, MiB", "growth", "descriptors", "threads"):
        table.add_column(column, justify="right")
    first, found, started = 0, 0, time.perf_counter()
    with PackLoader.open(dataset, PROFILE, SETTINGS, num_workers=num_workers, shuffle_buffer_size=500) as loader:
        for mark in range(every, num_samples + 1, every):
            while found < mark:
                found += len(next(loader).batch.sample_ids)
            memory, descriptors, threads = measured()
            first = first or memory
            seconds = f"{time.perf_counter() - started:.0f}"
            growth = f"{memory / first - 1:+.1%}"
            table.add_row(f"{found:,}", seconds, f"{memory >> 20:,}", growth, str(descriptors), str(threads))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="a folder for the samples; a temporary one when not given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch on pinned memory without a device
    with tempfile.TemporaryDirectory(prefix="bayplan-soak-", dir=options.scratch) as name:
        dataset = make_dataset(Path(name) / "data", NUM_SAMPLES, SIDES)
        table = soak(dataset, num_samples=options.samples, every=options.every, num_workers=options.workers)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
