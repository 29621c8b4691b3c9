"""Global batches drawn from a pool of packs, dealt as a run would deal them, and what that gives against the order of arrival."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packer.format.errors import UsageError
from plugin.balance import Mode, Plan, Topology, assign, lower_bound, measure
from plugin.balance.costs import Costs, checked_costs
from plugin.forecast.estimates import Estimate
from plugin.forecast.pool import PackPool, Packs
from plugin.packing.limits import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The data-parallel ranks of a run, and where they meet."""

    num_ranks: int
    expert_parallel: int | None = None
    """Consecutive ranks that form an expert group, and meet at each microbatch."""
    synchronises: Literal["microbatch", "batch"] = "batch"
    """Where all ranks meet."""
    ranks_per_node: int = 8
    """Consecutive ranks on one machine."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"found {name} {getattr(self, name)}, expected at least 1")
        if self.expert_parallel is not None and (self.expert_parallel < 1 or self.num_ranks % self.expert_parallel):
            raise UsageError(
                f"found {self.num_ranks} data-parallel ranks with expert parallel {self.expert_parallel}, expected a divisor of "
                f"{self.num_ranks}: consecutive ranks form groups; change one of the two"
            )

    @property
    def topology(self) -> Topology:
        ranks = np.arange(self.num_ranks)
        # Groups of one do not meet anybody.
        groups = ranks // self.expert_parallel if self.expert_parallel is not None and self.expert_parallel > 1 else None
        return Topology(
            num_ranks=self.num_ranks,
            expert_group=groups,
            node=ranks // self.ranks_per_node,
            synchronises=self.synchronises,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeForecast:
    """One mode of balancing, judged by where the ranks of the cluster meet."""

    mode: Mode
    is_auto: bool
    """It is what `auto` picks."""
    imbalance: Estimate
    """Cost over the mean work of a rank; 1 is no waiting."""
    gain: Estimate
    """Throughput against the order of arrival, less 1."""
    moved_share: Estimate
    """Of the packs, trained by another rank than the one that made them."""
    off_node_share: Estimate
    moved_bytes: Estimate | None
    """Of a global batch, all ranks together."""
    off_node_bytes: Estimate | None
    solver_seconds: float
    """Measured here, median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceForecast:
    """One setting of a run."""

    cluster: Cluster
    num_microbatches: int
    is_sampled: bool
    """A global batch has more packs than a replicate of the pool: packs are drawn again and again."""
    arrival: Estimate
    """Imbalance of the order of arrival."""
    bound: Estimate
    """Imbalance that no assignment of the same packs can beat."""
    encoder_arrival: Estimate
    """Imbalance of the encoder's work alone."""
    modes: Sequence[ModeForecast]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dealt:
    """One mode on one global batch."""

    ratio: float
    gain: float
    plan: Plan
    seconds: float


def balance(pool: PackPool, cluster: Cluster, num_microbatches: int, *, seed: int = 0) -> BalanceForecast:
    """Deal one global batch of each replicate of the pool.

    Raises:
        UsageError: costs whose sums leave 64 bits.
    """
    topology = cluster.topology
    auto = topology.resolve(Mode.AUTO)
    meeting = topology.meeting(auto)
    befores, bounds = [], []
    dealt: dict[Mode, list[_Dealt]] = {mode: [] for mode in _modes(topology, auto)}
    number = cluster.num_ranks * num_microbatches
    for replicate, packs in enumerate(pool.replicates):
        chance = np.random.default_rng([seed, 2, replicate, cluster.num_ranks, num_microbatches])
        chosen = drawn(packs, cluster.num_ranks, num_microbatches, chance)
        costs = checked_costs(packs.encoder_cost[chosen], packs.llm_cost[chosen], cluster.num_ranks)
        before = measure(costs, np.arange(number).reshape(chosen.shape), meeting)
        befores.append(before)
        bounds.append(lower_bound(costs, meeting))
        sizes = None if packs.num_bytes is None else packs.num_bytes[chosen]
        for mode, found in dealt.items():
            found.append(_deal(costs, topology, mode, meeting, before.cost, sizes))
    return BalanceForecast(
        cluster=cluster,
        num_microbatches=num_microbatches,
        is_sampled=any(len(packs) < number for packs in pool.replicates),
        arrival=Estimate.of(before.ratio for before in befores),
        bound=Estimate.of(bound.ratio for bound in bounds),
        encoder_arrival=Estimate.of(before.encoder_ratio for before in befores),
        modes=[_mode_forecast(mode, mode is auto, found, number) for mode, found in dealt.items()],
    )


def drawn(packs: Packs, num_ranks: int, num_microbatches: int, chance: np.random.Generator) -> IntArray:
    """Packs [rank, position]: runs of packs that followed each other in a stream, as a rank gets them, from all over the pool.

    Each pack at most once if there are enough; otherwise runs begin at random places.
    """
    room = len(packs) // num_ranks
    if room >= num_microbatches:
        starts = chance.permutation(num_ranks) * room + chance.integers(0, room - num_microbatches + 1)
    else:
        starts = chance.integers(0, len(packs), num_ranks)
    return np.asarray((starts[:, None] + np.arange(num_microbatches)) % len(packs))


def _modes(topology: Topology, auto: Mode) -> list[Mode]:
    """Those that make sense: an order of a rank's own changes nothing where no two ranks meet at a microbatch."""
    if auto is Mode.DP:
        return [Mode.DP]
    return [Mode.LOCAL, Mode.FSDP] if auto is Mode.FSDP else [Mode.LOCAL, Mode.EP, Mode.FSDP]


def _deal(costs: Costs, topology: Topology, mode: Mode, meeting: IntArray, before: int, sizes: IntArray | None) -> _Dealt:
    start = time.perf_counter()
    plan = assign(costs.encoder, costs.llm, topology, mode, num_bytes=sizes)
    seconds = time.perf_counter() - start
    # By where ranks meet in truth: a mode's own figures are of where it takes them to meet.
    after = measure(costs, plan.taken, meeting)
    return _Dealt(ratio=after.ratio, gain=before / after.cost - 1 if after.cost else 0.0, plan=plan, seconds=seconds)


def _mode_forecast(mode: Mode, is_auto: bool, found: Sequence[_Dealt], number: int) -> ModeForecast:
    plans = [one.plan for one in found]
    moved = [plan.moved_bytes for plan in plans if plan.moved_bytes is not None]
    off_node = [plan.moved_off_node_bytes for plan in plans if plan.moved_off_node_bytes is not None]
    return ModeForecast(
        mode=mode,
        is_auto=is_auto,
        imbalance=Estimate.of(one.ratio for one in found),
        gain=Estimate.of(one.gain for one in found),
        moved_share=Estimate.of(plan.num_moved / number for plan in plans),
        off_node_share=Estimate.of((plan.num_moved_off_node or 0) / number for plan in plans),
        moved_bytes=Estimate.of(moved) if moved else None,
        off_node_bytes=Estimate.of(off_node) if off_node else None,
        solver_seconds=statistics.median(one.seconds for one in found),
    )
