"""How full packs get, against the bound, for fresh pools and for streams that hand samples back; and the time of a call.

python benchmarks/packing.py [--quick]

Lengths are drawn, not real: four kinds of samples with log-normal text and images (64 to 16,384 tokens, four patches a token),
mixed as MIXES says. Samples that fit no pack are refused, as in training; their share is a column. "bound" is what no packer of
whole samples could pass. Everything is one process on one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from plugin.packing import Packing, PackLimits, Refusal, Samples, fewest_packs, pack, refusals
from plugin.packing.filling import Pool, exact_fill, first_fit_decreasing

# Shares of text, caption, interleaved and document samples.
MIXES = {"web": (0.3, 0.4, 0.2, 0.1), "doc": (0.15, 0.25, 0.15, 0.45), "ocr": (0.05, 0.1, 0.05, 0.8)}
SETTINGS = (("web", 8192), ("doc", 8192), ("ocr", 8192), ("web", 16384), ("doc", 16384))
TIGHT = (
    ("web", PackLimits(sequence_length=8192, max_patches=24_576)),
    ("web", PackLimits(sequence_length=8192, max_patches=16_384)),
    ("web", PackLimits(sequence_length=8192, max_images=12)),
    ("doc", PackLimits(sequence_length=8192, max_patches=24_576)),
)
POOLS = (1000, 10_000)
BUFFERS = (300, 1000, 3000)
AGES = (0, 5, 20)
ALIGNMENTS = (1, 8, 16, 64)


def draw(mix: str, number: int, seed: int) -> Samples:
    """Samples of a mix in random order."""
    chance = np.random.default_rng(seed)
    kinds = chance.choice(4, number, p=MIXES[mix])
    rows = np.array([KINDS[kind](chance) for kind in kinds], np.int64)
    return Samples.of(rows[:, 0] + rows[:, 1], num_images=rows[:, 2], num_patches=4 * rows[:, 1])


def lognormal(chance: np.random.Generator, median: float, spread: float, low: float, high: float) -> int:
    return int(min(max(chance.lognormal(np.log(median), spread), low), high))


def image_tokens(chance: np.random.Generator, median: float, spread: float, number: int) -> int:
    return int(np.clip(chance.lognormal(np.log(median), spread, number), 64, 16_384).astype(np.int64).sum())


def text(chance: np.random.Generator) -> tuple[int, int, int]:
    return lognormal(chance, 600, 1.3, 16, 1e6), 0, 0


def caption(chance: np.random.Generator) -> tuple[int, int, int]:
    return lognormal(chance, 60, 0.7, 8, 2000), image_tokens(chance, 600, 0.9, 1), 1


def interleaved(chance: np.random.Generator) -> tuple[int, int, int]:
    number = lognormal(chance, 5, 0.8, 2, 64)
    return lognormal(chance, 150 * number, 0.8, 32, 1e6), image_tokens(chance, 350, 0.9, number), number


def document(chance: np.random.Generator) -> tuple[int, int, int]:
    return lognormal(chance, 1100, 0.95, 32, 1e6), image_tokens(chance, 3400, 0.55, 1), 1


KINDS = (text, caption, interleaved, document)


def taken(samples: Samples, indices: np.ndarray, ages: np.ndarray | None = None) -> Samples:
    columns = (samples.num_tokens[indices], samples.num_images[indices], samples.num_patches[indices])
    return Samples.of(columns[0], num_images=columns[1], num_patches=columns[2], age=ages)


@dataclass
class Sums:
    """Over the calls of one epoch or over several pools."""

    num_packs: int = 0
    num_bound: int = 0
    num_tokens: int = 0
    alignment_tokens: int = 0
    capacity_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    longest_wait: int = 0
    """Packs emitted by the calls between a sample's coming and its leaving."""

    def add(self, packing: Packing) -> None:
        self.num_packs += len(packing.packs)
        for name in ("num_tokens", "alignment_tokens", "capacity_tokens"):
            setattr(self, name, getattr(self, name) + getattr(packing, name))

    @property
    def bound(self) -> float:
        """Efficiency of `num_bound` packs."""
        return self.efficiency * self.num_packs / self.num_bound

    @property
    def efficiency(self) -> float:
        return self.num_tokens / self.capacity_tokens

    @property
    def milliseconds(self) -> float:
        return 1000 * statistics.median(self.seconds)


def timed_pack(sums: Sums, samples: Samples, limits: PackLimits, **options) -> Packing:
    start = time.perf_counter()
    packing = pack(samples, limits, **options)
    sums.seconds.append(time.perf_counter() - start)
    return packing


def pools(samples: Samples, limits: PackLimits, size: int, most: int) -> Sums:
    """Fresh pools, everything emitted."""
    sums = Sums()
    for start in range(0, min(len(samples) - size + 1, most * size), size):
        pool = taken(samples, np.arange(start, start + size))
        sums.add(timed_pack(sums, pool, limits, flush=True))
        sums.num_bound += fewest_packs(pool, limits)
    return sums


def epoch(samples: Samples, limits: PackLimits, buffer: int, max_age: int) -> Sums:
    """All samples once, leftovers handed back, the last buffer flushed: nothing is left out of the figures."""
    sums = Sums(num_bound=fewest_packs(samples, limits))
    held, ages, came = (np.zeros(0, np.int64) for _ in range(3))
    drawn = 0
    while drawn < len(samples):
        new = np.arange(drawn, min(drawn + buffer - len(held), len(samples)))
        drawn += len(new)
        held = np.concatenate([held, new])
        ages = np.concatenate([ages, np.zeros(len(new), np.int64)])
        came = np.concatenate([came, np.full(len(new), sums.num_packs)])
        sums.add(packing := timed_pack(sums, taken(samples, held, ages), limits, flush=drawn == len(samples), max_age=max_age))
        gone = np.concatenate(packing.packs)
        sums.longest_wait = max(sums.longest_wait, int(sums.num_packs - came[gone].min()))
        held, ages, came = held[packing.leftovers], packing.leftover_age, came[packing.leftovers]
    return sums


def single_plans(lengths: np.ndarray, capacity: int) -> list[float]:
    """Fewest milliseconds of 7 for each method alone."""
    sizes = np.sort(lengths)[::-1]
    found = []
    for fill in (first_fit_decreasing, exact_fill):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            fill(Pool(sizes, capacity), sizes.tolist(), capacity)
            times.append(time.perf_counter() - start)
        found.append(1000 * min(times))
    return found


def next_fit(lengths: list[int], capacity: int) -> float:
    """In order of arrival, one open pack: the figure that tells one mix of lengths from another."""
    num_packs, room = 1, capacity
    for length in lengths:
        if length > room:
            num_packs, room = num_packs + 1, capacity
        room -= length
    return sum(lengths) / (num_packs * capacity)


def percent(share: float, digits: int = 3) -> str:
    return f"{100 * share:.{digits}f}"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples")
    options = parser.parse_args()
    number, most = (30_000, 3) if options.quick else (300_000, 20)
    console = Console(width=130)
    fresh = new_table(
        "fresh pools, all emitted: % of real tokens per slot",
        *(
            "mix",
            "length",
            "refused %",
            "samples a pack",
            "next-fit",
            "pool",
            "ours",
            "bound",
            "packs over bound",
            "ms a call",
            "FFD ms",
            "exact ms",
        ),
    )
    streams = new_table(
        "one epoch, leftovers handed back: % of real tokens per slot",
        *(
            "mix",
            "length",
            "buffer",
            *(f"age {age}" for age in AGES),
            "bound",
            *(f"wait, age {age}" for age in AGES[1:]),
            "ms a call",
        ),
    )
    for mix, length in SETTINGS:
        limits, drawn = PackLimits(sequence_length=length), draw(mix, number, seed=1)
        fits = np.flatnonzero(refusals(drawn, limits) == Refusal.NONE)
        samples = taken(drawn, fits)
        lengths = samples.num_tokens
        about = (
            percent(1 - len(fits) / number, 1),
            f"{length / lengths.mean():.2f}",
            percent(next_fit(lengths.tolist(), length), 1),
        )
        for size in POOLS:
            sums = pools(samples, limits, size, most)
            times = [f"{value:.1f}" for value in (sums.milliseconds, *single_plans(lengths[:size], length))]
            over = f"{sums.num_packs - sums.num_bound} of {sums.num_bound}"
            fresh.add_row(mix, str(length), *about, str(size), percent(sums.efficiency), percent(sums.bound), over, *times)
        for buffer in BUFFERS:
            by_age = [epoch(taken(samples, np.arange(min(len(samples), 100 * buffer))), limits, buffer, age) for age in AGES]
            waits = [f"{sums.longest_wait:,} packs" for sums in by_age[1:]]
            full = [percent(sums.efficiency, 4) for sums in by_age]
            streams.add_row(
                mix, str(length), str(buffer), *full, percent(by_age[0].bound, 4), *waits, f"{by_age[1].milliseconds:.1f}"
            )
    console.print(fresh)
    console.print(streams)

    tight = new_table(
        "limits on images and patches, buffer 1,000: % of real tokens per slot (the bound minds the limits too)",
        *("mix", "max_images", "max_patches", "refused %", "fresh", "age 5", "bound", "ms a call"),
    )
    for mix, limits in TIGHT:
        drawn = draw(mix, number // 3, seed=1)
        samples = taken(drawn, np.flatnonzero(refusals(drawn, limits) == Refusal.NONE))
        fresh_sums, sums = pools(samples, limits, 1000, most), epoch(samples, limits, 1000, 5)
        shares = [percent(value, 2) for value in (fresh_sums.efficiency, sums.efficiency, sums.bound)]
        refused = percent(1 - 3 * len(samples) / number, 1)
        tight.add_row(
            mix, str(limits.max_images or ""), str(limits.max_patches or ""), refused, *shares, f"{sums.milliseconds:.0f}"
        )
    console.print(tight)

    aligned = new_table(
        "alignment, web at 8192, buffer 1,000, age 5: % of slots", "alignment", "real tokens", "alignment", "unfilled"
    )
    for alignment in ALIGNMENTS:
        limits, drawn = PackLimits(sequence_length=8192, alignment=alignment), draw("web", number, seed=1)
        samples = taken(drawn, np.flatnonzero(refusals(drawn, limits) == Refusal.NONE))
        sums = epoch(samples, limits, 1000, 5)
        unfilled = sums.capacity_tokens - sums.num_tokens - sums.alignment_tokens
        shares = (count / sums.capacity_tokens for count in (sums.num_tokens, sums.alignment_tokens, unfilled))
        aligned.add_row(str(alignment), *map(percent, shares))
    console.print(aligned)


if __name__ == "__main__":
    main()
