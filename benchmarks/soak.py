"""Memory, descriptors and threads of a loader over a hundred thousand icon-size samples: they must stay as they were.

    PYTHONPATH=. python benchmarks/soak.py [--samples 100000] [--workers 2] [--scratch FOLDER]

Memory is the proportional share (PSS) of the trainer's process and its workers, so that pages they share count once. Growth
compares the medians of the first and the last quarter of what comes after the warm-up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

NUM_RECORDS = 20_000
"""Of the dataset; the stream repeats."""
WARM_SHARE = 0.25
NUM_LOOKS = 120
"""How often the processes are looked at."""
SEQUENCE_LENGTH = 2048
AIM = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """All processes at one moment."""

    num_samples: int
    """Handed out so far."""
    pss_mib: tuple[float, ...]
    """Of each process, the trainer's first."""
    rss_mib: float
    num_descriptors: tuple[int, ...]
    """Those of packs on their way between processes come and go, and are not counted."""
    num_threads: tuple[int, ...]


def look(num_samples: int) -> Look:
    processes = [os.getpid(), *sorted(child.pid for child in multiprocessing.active_children() if child.pid)]
    memory = [_memory(one) for one in processes]
    return Look(
        num_samples=num_samples,
        pss_mib=tuple(one["Pss"] / 1024 for one in memory),
        rss_mib=sum(one["Rss"] for one in memory) / 1024,
        num_descriptors=tuple(map(_num_descriptors, processes)),
        num_threads=tuple(len(os.listdir(f"/proc/{one}/task")) for one in processes),
    )


def _num_descriptors(process: int) -> int:
    found = 0
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{name}")
        except FileNotFoundError:
            continue  # closed in between
        found += not target.startswith(("/dev/shm/torch", "socket:"))
    return found


def _memory(process: int) -> dict[str, int]:
    """KiB by kind."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}


def soak(dataset: str, num_samples: int, num_workers: int) -> tuple[list[Look], float]:
    """Draw so many samples; what was seen on the way, and samples a second."""
    from loader_corpus import PROFILE

    from plugin.loader import PackLoader
    from plugin.settings import PackSettings

    settings = PackSettings(sequence_length=SEQUENCE_LENGTH, max_patches_per_pack=8192)
    looks: list[Look] = []
    drawn = 0
    with PackLoader.open(dataset, PROFILE, settings, num_workers=num_workers) as stream:
        started = time.perf_counter()
        for pack in stream:
            drawn += pack.batch.num_samples
            if drawn >= len(looks) * num_samples / NUM_LOOKS:
                looks.append(look(drawn))
            if drawn >= num_samples:
                break
        rate = drawn / (time.perf_counter() - started)
    return looks, rate


def quarters(looks: Sequence[Look]) -> list[Sequence[Look]]:
    """The looks after the warm-up in four parts."""
    steady = looks[int(len(looks) * WARM_SHARE) :]
    size = max(1, len(steady) // 4)
    return [steady[:size], steady[size : 2 * size], steady[2 * size : 3 * size], steady[-size:]]


def table(looks: Sequence[Look]) -> Table:
    shown = Table(title="after the warm-up, by quarter")
    for column in ("samples", "PSS, MiB", "of each process", "RSS, MiB", "descriptors", "threads"):
        shown.add_column(column, justify="right")
    for part in quarters(looks):
        shown.add_row(
            f"{part[0].num_samples:,} to {part[-1].num_samples:,}",
            f"{_pss(part):,.1f}",
            ", ".join(f"{statistics.median(one):,.1f}" for one in zip(*(one.pss_mib for one in part), strict=True)),
            f"{statistics.median(one.rss_mib for one in part):,.1f}",
            _spread([one.num_descriptors for one in part]),
            _spread([one.num_threads for one in part]),
        )
    return shown


def _pss(part: Sequence[Look]) -> float:
    """Of all processes, MiB."""
    return statistics.median(sum(one.pss_mib) for one in part)


def _spread(seen: Sequence[tuple[int, ...]]) -> str:
    """By process: the one number it always was, or the range."""
    return ", ".join(str(min(one)) if min(one) == max(one) else f"{min(one)}-{max(one)}" for one in zip(*seen, strict=True))


def growth(looks: Sequence[Look]) -> float:
    first, *_, last = quarters(looks)
    return _pss(last) / _pss(first) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=NUM_RECORDS, help="of the dataset; the stream repeats")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="a folder for the dataset; a temporary one when not given")
    options = parser.parse_args()
    console = Console(width=130)
    with tempfile.TemporaryDirectory(prefix="bayplan-soak-", dir=options.scratch) as scratch:
        from loader_corpus import in_child, write_icons

        # In a process of its own: what packing leaves in memory is not the loader's.
        dataset = in_child(lambda: write_icons(Path(scratch), options.records))
        looks, rate = soak(dataset, options.samples, options.workers)
    console.print(table(looks))
    steady = looks[int(len(looks) * WARM_SHARE) :]
    is_constant = len({(one.num_descriptors, one.num_threads) for one in steady}) == 1
    console.print(
        f"{looks[-1].num_samples:,} samples, {rate:,.0f} a second; memory grew by {growth(looks):+.2%} "
        f"(aim: less than {AIM:.0%}); descriptors and threads {'constant' if is_constant else 'NOT constant'}"
    )
    return 0 if growth(looks) < AIM and is_constant else 1


if __name__ == "__main__":
    sys.exit(main())
