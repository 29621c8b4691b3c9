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
    """One run, all its steps; the first is not timed, since packs of nobody's step before it have to be read and dealt."""

    seconds: tuple[float, ...]
    exposed_seconds: tuple[float, ...]
    """In `next`, of the rank that waited longest."""
    losses: tuple[float, ...]
    num_late: int
    """Microbatches of all ranks whose real training took longer than the simulated."""


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
        return PackLoader.open(self.job.url, PROFILE, settings, num_workers=1, shuffle_buffer_size=200, **place)

    def costs(self) -> Ints:
        """[step, rank, position, 2] of all ranks' packs, the first step's too."""
        shape = (self.job.steps + 1, NUM_MICROBATCHES, 2)
        with self.open() as packs:
            drawn = [(pack.batch.encoder_cost, pack.batch.llm_cost) for pack in itertools.islice(packs, shape[0] * shape[1])]
        return np.stack(gathered(np.array(drawn, np.int64).reshape(shape)), axis=1)

    def train(self, groups: str, order: str, seconds_per_cost: float, expected: Forecast) -> Measured:
        """One run from the beginning of the stream."""
        import torch
        import torch.distributed as dist
        from expert_corpus import PROFILE
        from train_tiny_vlm import build_model

        from plugin import BalancedPackLoader, BalanceSettings

        packs = self.open()
        model = build_model(Namespace(dataset=self.job.url, profile=PROFILE, seed=0, hidden=16, layers=1), packs)
        microbatch, optimizer = Microbatch(model, self.groups[groups], seconds_per_cost), torch.optim.AdamW(model.parameters())
        if order != ARRIVAL:
            packs = BalancedPackLoader(
                packs,
                num_microbatches=NUM_MICROBATCHES,
                settings=BalanceSettings(mode=order, loss_per_token=True),
                topology=topology(GROUPS[groups]),
            )
        seconds, exposed, losses = [], [], []
        with packs:
            for step in range(self.job.steps + 1):
                dist.barrier()
                started = time.perf_counter()
                loss, waited = train_step(microbatch, packs, optimizer)
                seconds.append(time.perf_counter() - started)
                exposed.append(waited)
                losses.append(loss)
                if order != ARRIVAL:
                    refuse_other(packs.balance.after.cost, expected.costs[step], step)
        ranks = gathered((seconds, exposed, microbatch.num_late))
        return Measured(
            seconds=tuple(max(one) for one in zip(*(rank[0] for rank in ranks), strict=True)),
            exposed_seconds=tuple(max(one) for one in zip(*(rank[1] for rank in ranks), strict=True)),
            losses=tuple(losses),
            num_late=sum(rank[2] for rank in ranks),
        )

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


class Microbatch:
    """Forward and backward of one pack: simulated compute that ends in the meetings of an expert group, and a tiny model's."""

    def __init__(self, model: Any, group: Any, seconds_per_cost: float) -> None:
        self.model = model
        self.num_late = 0
        self._group, self._seconds_per_cost = group, seconds_per_cost

    def __call__(self, pack: Any) -> tuple[float, int]:
        """Sum of losses, and loss tokens."""
        time.sleep(pack.batch.encoder_cost * self._seconds_per_cost)
        meet(self._group)
        started = time.perf_counter()
        loss, num_loss_tokens = self.model.loss(pack)
        loss.backward()
        left = pack.batch.llm_cost * self._seconds_per_cost - (time.perf_counter() - started)
        self.num_late += left < 0
        time.sleep(max(0.0, left))
        meet(self._group)
        return loss.item(), num_loss_tokens


def train_step(microbatch: Microbatch, packs: Iterator[Any], optimizer: Any) -> tuple[float, float]:
    """Loss per token of the global batch, and seconds this rank waited for packs."""
    import torch
    from train_tiny_vlm import reduce_gradients, sum_over_ranks

    waited, total = 0.0, torch.zeros(2, dtype=torch.float64)
    for _ in range(NUM_MICROBATCHES):
        started = time.perf_counter()
        pack = next(packs)
        waited += time.perf_counter() - started
        total += torch.tensor(microbatch(pack), dtype=torch.float64)
    loss, num_loss_tokens = sum_over_ranks(total).tolist()
    reduce_gradients(microbatch.model, int(num_loss_tokens))
    optimizer.step()
    optimizer.zero_grad()
    return loss / num_loss_tokens, waited


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
