"""What a trainer waits for reordered packs: exchanged behind compute, exchanged in line, and in order of arrival.

    PYTHONPATH=. python benchmarks/overlap.py [--ranks 2] [--runs 3] [--steps 2] [--microbatches 10] [--compute 150 50]

Real ranks over gloo, our planner and exchange. Packs are made in memory: 8,192 tokens, 2 to 10 images of 3,072 patches of 588
bytes, 11 MB on average. The trainer computes for a known length at each microbatch, whatever the pack, and meets the others at
the end of each step, as gradients do. Two trainers: one spins (0.1 ms of bytecode, which holds the GIL, then a small matrix
product, which lets go of it, and so on: a fixed amount of work, so that what the thread takes from it shows), one waits without
the GIL and without a core, as for a device. "In line" is the same loader, whose thread may only begin when the trainer needs the
batch, and which the trainer then waits for until nothing travels any more. "All moved" stands for more traffic than two ranks
need: every pack but each rank's first goes to the other rank.

Exposed is the time inside `next`, letting go of the pack before included. On a machine with no more cores than spinning trainers,
the thread's work is taken from their compute: the column "compute" says how much longer that took than in order of arrival.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from exchange_scenarios import Shifted
from pack_samples import pack_sample
from rank_processes import RankProcesses

from plugin.balance import Topology
from plugin.batch import Patches, PatchImage, build
from plugin.batch.torch_batch import TorchBatch
from plugin.reorder import Assigned, BalancedLoader, Parallel, Planner

LENGTH, GRID, PATCH_BYTES = 8192, (1, 48, 64), 588
MODES = ("arrival", "behind compute", "in line", "all moved, behind compute", "all moved, in line")
TRAINERS = ("spins", "waits")
_made: dict[int, list[TorchBatch]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    microbatches: int
    steps: int
    """After the first, which nothing can hide."""
    compute_seconds: float
    """A microbatch."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Of one rank, each step: seconds."""

    step: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    background: list[tuple[float, float, float]] = field(default_factory=list)
    """Gathering, planning, exchanging."""
    moved_bytes: list[int] = field(default_factory=list)


class Packs:
    """Over and over, as loader workers hand them out: they were made elsewhere. `allowed` holds reading back."""

    def __init__(self, packs: list[TorchBatch], allowed: threading.Semaphore | None) -> None:
        self.packs, self.allowed = packs, allowed
        self.taken = 0

    def __next__(self) -> TorchBatch:
        if self.allowed is not None:
            self.allowed.acquire()
        self.taken += 1
        return self.packs[self.taken % len(self.packs)]

    def save_state(self) -> int:
        return self.taken

    def restore_state(self, state: int) -> None:
        self.taken = state


def packs_of(rank: int, number: int) -> list[TorchBatch]:
    if rank not in _made:
        chance = np.random.default_rng(rank)
        pixels = chance.integers(0, 256, (GRID[1] * GRID[2], PATCH_BYTES), np.uint8)
        _made[rank] = [_pack(f"{rank}/{place}", int(chance.integers(2, 11)), pixels) for place in range(number)]
    return _made[rank]


def _pack(name: str, num_images: int, pixels: np.ndarray) -> TorchBatch:
    images = [PatchImage(grid_thw=GRID, pixels=pixels)] * num_images
    num_patches = num_images * len(pixels)
    text = LENGTH - num_images * (len(pixels) // 4 + 2)
    sample = pack_sample(
        [*images, text], name, num_patches=num_patches, encoder_cost=num_patches * 8, llm_cost=LENGTH * 86, row=num_images
    )
    form = Patches(patch_bytes=PATCH_BYTES, merge_size=2)
    return build([sample], form=form, sequence_length=LENGTH, pad_id=0, fingerprint="profile").to_torch()


def spin(units: int, weights: torch.Tensor = torch.ones(64, 64)) -> None:  # noqa: B008 -- never written to
    for _ in range(units):
        total = 0
        for number in range(1500):
            total += number * number
        torch.mm(weights, weights)


def calibrated() -> float:
    """Units of `spin` a second, with all ranks spinning."""
    torch.set_num_threads(1)
    spin(500)
    dist.barrier()
    started = time.perf_counter()
    spin(5000)
    return 5000 / (time.perf_counter() - started)


def measure(mode: str, trainer: str, setting: Setting, units_per_second: float) -> Measured:
    """On each rank: train."""
    rank, number = dist.get_rank(), setting.microbatches
    allowed = threading.Semaphore(0) if mode.endswith("in line") else None
    source = Packs(packs_of(rank, number + 1), allowed)
    loader = None if mode == "arrival" else balanced(source, number, Shifted() if mode.startswith("all moved") else None)
    iterator: Iterator[TorchBatch] = loader or source  # type: ignore[assignment]
    found = Measured()
    units = round(setting.compute_seconds * units_per_second)
    pack: Any = None
    for step in range(setting.steps + 1):
        exposed = compute = 0.0
        dist.barrier()
        began = time.perf_counter()
        for microbatch in range(number):
            started = time.perf_counter()
            if allowed is not None and not microbatch:
                allowed.release(number)
            pack = next(iterator)
            if allowed is not None and not microbatch:
                _wait_for_all(loader, number)
            exposed += time.perf_counter() - started
            started = time.perf_counter()
            spin(units) if trainer == "spins" else time.sleep(setting.compute_seconds)
            compute += time.perf_counter() - started
        if step:
            found.step.append(time.perf_counter() - began)
            found.exposed.append(exposed)
            found.compute.append(compute)
            if loader is not None:
                one = loader.counters
                found.background.append((one.gathered_seconds, one.solved_seconds, one.exchanged_seconds))
                found.moved_bytes.append(one.moved_bytes)
    if allowed is not None:
        allowed.release(number)
    dist.barrier()
    if loader is not None:
        loader.close()
    del pack
    return found


def balanced(source: Packs, number: int, planner: Planner | None) -> BalancedLoader:
    topology = Topology(num_ranks=dist.get_world_size(), synchronises="microbatch")
    return BalancedLoader(
        source,
        parallel=Parallel.world(),
        planner=planner or Assigned(topology=topology, mode="fsdp"),
        num_microbatches=number,
        profile="profile",
        cost="cost",
        sequence_length=LENGTH,
    )


def _wait_for_all(loader: BalancedLoader | None, number: int) -> None:
    """Until nothing of the batch travels any more."""
    assert loader is not None
    pool = loader._pool
    assert pool is not None
    while not all(pool.has(microbatch) for microbatch in range(1, number)):
        time.sleep(0.0005)


def row(mode: str, trainer: str, runs: list[list[Measured]], alone: list[list[Measured]]) -> list[str]:
    """Of runs of ranks; `alone` is in order of arrival."""

    def median(name: str) -> float:
        return statistics.median(value for run in runs for one in run for value in getattr(one, name))

    shares = [e / s for run in runs for one in run for e, s in zip(one.exposed, one.step, strict=True)]
    slowed = statistics.median(_computed(run) / _computed(other) - 1 for run, other in zip(runs, alone, strict=True))
    background = [part for run in runs for one in run for part in one.background]
    parts = [f"{1000 * statistics.median(times):.0f}" for times in zip(*background, strict=True)] if background else []
    moved = f"{median('moved_bytes') / 1e6:.0f}" if background else ""
    return [
        f"{trainer}, {mode}",
        f"{median('step'):.3f}",
        f"{1000 * median('exposed'):.1f}",
        f"{statistics.median(shares):.2%}",
        f"{max(shares):.2%}",
        "" if mode == "arrival" else f"{slowed:+.1%}",
        " + ".join(parts),
        moved,
    ]


def _computed(run: list[Measured]) -> float:
    return statistics.median(value for one in run for value in one.compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that is not")
    parser.add_argument("--microbatches", type=int, default=10)
    parser.add_argument("--compute", type=float, nargs="+", default=[150, 50], help="milliseconds a microbatch")
    options = parser.parse_args()
    found: dict[tuple[float, str, str], list[list[Measured]]] = {}
    ranks = RankProcesses(options.ranks)
    try:
        rate = statistics.mean(_values(ranks.run(calibrated)))
        for _, length, trainer, mode in product(range(options.runs), options.compute, TRAINERS, MODES):
            setting = Setting(microbatches=options.microbatches, steps=options.steps, compute_seconds=length / 1000)
            measured = _values(ranks.run(measure, mode, trainer, setting, rate))
            found.setdefault((length, trainer, mode), []).append(measured)
    finally:
        ranks.close()
    for length in options.compute:
        of_length = {(trainer, mode): runs for (one, trainer, mode), runs in found.items() if one == length}
        title = f"{options.ranks} ranks, {options.microbatches} microbatches of {length:g} ms"
        Console(width=140).print(table(title, of_length))


def table(title: str, found: dict[tuple[str, str], list[list[Measured]]]) -> Table:
    table = Table(title=title)
    for column in ("", "step, s", "exposed, ms", "of the step", "worst", "compute", "gather + plan + exchange, ms", "moved, MB"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for (trainer, mode), runs in found.items():
        table.add_row(*row(mode, trainer, runs, found[trainer, "arrival"]))
    return table


def _values(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if outcome is None or outcome.error:
            raise SystemExit(outcome.traceback if outcome else "a rank died")
    return [outcome.value for outcome in outcomes]


if __name__ == "__main__":
    main()
