"""What each rank of `expert_step.py` does: forecast, then train with simulated compute as often as it is told."""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from plugin.balance import Topology

NUM_RANKS = 4
NUM_MICROBATCHES = 16
TRAINED_STEPS = 2
"""Of a run, before the timed ones: the model trains for real, and nobody sleeps."""
WORK_SECONDS = 1.2
"""Of a rank in a mean step, without waiting."""
GROUPS = {"2 groups of 2": (0, 0, 1, 1), "1 group of 4": (0, 0, 0, 0)}
"""Expert group of each rank."""
ARRIVAL, LOCAL, EP = ORDERS = ("arrival", "local", "ep")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Of one kind of groups and one order; costs of each step."""

    costs: tuple[int, ...]
    bounds: tuple[int, ...]
    work: tuple[int, ...]
    """Of a mean rank."""
    num_moved: int
    num_packs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    losses: tuple[float, ...]
    """Of the trained steps."""
    seconds: tuple[float, ...]
    """Of the timed steps."""
    exposed_seconds: tuple[float, ...]
    """Of the same: in `next`, of the rank that waited longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told."""

    url: str
    cost: str
    store: str
    steps: int
    """Timed ones."""
    rounds: int


def forecast(costs: Ints, groups: Sequence[int], order: str) -> Forecast:
    """Of the packs as they come: [step, rank, position, 2], encoder and language model."""
    from plugin.balance import assign

    plans = [assign(one[..., 0], one[..., 1], topology(groups), LOCAL if order == ARRIVAL else order) for one in costs]
    return Forecast(
        costs=tuple((plan.before if order == ARRIVAL else plan.after).cost for plan in plans),
        bounds=tuple(plan.bound.cost for plan in plans),
        work=tuple(plan.before.work // NUM_RANKS for plan in plans),
        num_moved=0 if order == ARRIVAL else sum(plan.num_moved for plan in plans),
        num_packs=costs[..., 0].size,
    )


def topology(groups: Sequence[int]) -> Topology:
    from plugin.balance import Topology

    return Topology(num_ranks=NUM_RANKS, expert_group=groups)


class Rank:
    """One process of the world: draws costs, then trains as often as it is told."""

    def __init__(self, rank: int, job: Job) -> None:
        import torch
        import torch.distributed as dist

        self.rank, self.job = rank, job
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=rank, world_size=NUM_RANKS)
        # Every rank makes all groups, in one order.
        made = {name: {label: _group(labels, label) for label in sorted(set(labels))} for name, labels in GROUPS.items()}
        self.groups = {name: made[name][labels[rank]] for name, labels in GROUPS.items()}

    def open(self) -> Any:
        """The same packs at every call."""
        from expert_corpus import PROFILE, SEQUENCE_LENGTH

        from plugin import PackLoader, PackSettings

        settings = PackSettings(sequence_length=SEQUENCE_LENGTH, buffer_size=200, num_threads=4, cost=self.job.cost)
        place = {"rank": self.rank, "world_size": NUM_RANKS}
        return PackLoader.open(
            self.job.url, PROFILE, settings, num_workers=1, prefetch_factor=4, shuffle_buffer_size=200, **place
        )

    def costs(self) -> Ints:
        """[step, rank, position, 2] of all ranks' packs in the timed steps."""
        shape = (TRAINED_STEPS + self.job.steps, NUM_MICROBATCHES, 2)
        with self.open() as packs:
            drawn = [(pack.batch.encoder_cost, pack.batch.llm_cost) for pack in itertools.islice(packs, shape[0] * shape[1])]
        return np.stack(gathered(np.array(drawn, np.int64).reshape(shape)[TRAINED_STEPS:]), axis=1)

    def train(self, groups: str, order: str, seconds_per_cost: float, expected: Forecast) -> Measured:
        """One run from the beginning of the stream."""
        import torch
        from expert_corpus import PROFILE
        from train_tiny_vlm import build_model

        from plugin import BalancedPackLoader, BalanceSettings

        packs = self.open()
        model = build_model(Namespace(dataset=self.job.url, profile=PROFILE, seed=0, hidden=16, layers=1), packs)
        optimizer = torch.optim.AdamW(model.parameters())
        if order != ARRIVAL:
            packs = BalancedPackLoader(
                packs,
                num_microbatches=NUM_MICROBATCHES,
                settings=BalanceSettings(mode=order, loss_per_token=True),
                topology=topology(GROUPS[groups]),
            )
        with packs:
            losses = tuple(trained_step(model, packs, optimizer) for _ in range(TRAINED_STEPS))
            timed = []
            for step in range(self.job.steps):
                timed.append(simulated_step(packs, self.groups[groups], seconds_per_cost))
                if order != ARRIVAL:
                    refuse_other(packs.balance.after.cost, expected.costs[step], step)
        slowest = np.max(gathered(np.array(timed)), axis=0)
        return Measured(losses=losses, seconds=tuple(slowest[:, 0]), exposed_seconds=tuple(slowest[:, 1]))

    def meetings(self, groups: str) -> float:
        """Seconds of a step's all-reduces where nobody computes."""
        import torch.distributed as dist

        found = []
        for _ in range(self.job.steps):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(2 * NUM_MICROBATCHES):
                meet(self.groups[groups])
            found.append(time.perf_counter() - started)
        return statistics.median(found)


def refuse_other(found: int, expected: int, step: int) -> None:
    """Ranks tell each other costs to 27 bits; more than that would be other packs, or another plan."""
    if abs(found - expected) > expected >> 20:
        raise RuntimeError(f"step {step}: found a plan that costs {found:,}, forecast was {expected:,}")


def trained_step(model: Any, packs: Iterator[Any], optimizer: Any) -> float:
    """Loss per token of a global batch."""
    from train_tiny_vlm import accumulate, reduce_gradients

    loss, num_loss_tokens = accumulate(model, packs, NUM_MICROBATCHES)
    reduce_gradients(model, num_loss_tokens)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def simulated_step(packs: Iterator[Any], group: Any, seconds_per_cost: float) -> tuple[float, float]:
    """Seconds of a step in which ranks sleep instead of computing, and those that this rank waited for packs."""
    import torch.distributed as dist

    dist.barrier()
    began, waited = time.perf_counter(), 0.0
    for _ in range(NUM_MICROBATCHES):
        started = time.perf_counter()
        pack = next(packs)
        waited += time.perf_counter() - started
        for cost in (pack.batch.encoder_cost, pack.batch.llm_cost):
            time.sleep(cost * seconds_per_cost)
            meet(group)
    dist.barrier()  # As where gradients are summed.
    return time.perf_counter() - began, waited


def meet(group: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1), group=group)


def gathered(value: Any) -> list[Any]:
    import torch.distributed as dist

    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, value)
    return found


def _group(labels: Sequence[int], label: int) -> Any:
    import torch.distributed as dist

    return dist.new_group([rank for rank, other in enumerate(labels) if other == label])


def serve(rank: int, job: Job, pipe: Any) -> None:
    """A rank's process; the first one tells what was found."""
    _prepare()
    import torch.distributed as dist

    here = Rank(rank, job)
    costs = here.costs()
    forecasts = {(groups, order): forecast(costs, GROUPS[groups], order) for groups in GROUPS for order in ORDERS}
    seconds_per_cost = WORK_SECONDS / statistics.mean(forecasts[next(iter(GROUPS)), ARRIVAL].work)
    if rank == 0:
        pipe.send((forecasts, seconds_per_cost, float(costs[..., 0].sum() / costs.sum())))
    meetings = {groups: here.meetings(groups) for groups in GROUPS}
    if rank == 0:
        pipe.send(meetings)
    for _, (groups, order) in itertools.product(range(job.rounds), forecasts):
        found = here.train(groups, order, seconds_per_cost, forecasts[groups, order])
        if rank == 0:
            pipe.send((groups, order, found))
    dist.destroy_process_group()


def _prepare() -> None:
    """What loaders print is not part of the tables."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
