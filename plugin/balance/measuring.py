"""What a plan costs: how long ranks compute and wait, against the same work without waiting, and what no plan can beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugin.balance.costs import Costs
from plugin.balance.keys import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Imbalance:
    """Predicted cost of a global batch: that of the last group to finish. 1.0 as a ratio is no waiting at all.

    In a group of ranks that meet at each microbatch, encoder and LLM each end in their own barrier.
    """

    cost: int
    """Over the groups the largest sum, over microbatches, of the dearest encoder cost plus the dearest LLM cost."""
    encoder_cost: int
    """The same of the encoder alone."""
    work: int
    """Sum of all costs."""
    encoder_work: int
    num_ranks: int

    @property
    def ratio(self) -> float:
        """Cost over the mean work of a rank."""
        return self.num_ranks * self.cost / self.work if self.work else 1.0

    @property
    def encoder_ratio(self) -> float:
        return self.num_ranks * self.encoder_cost / self.encoder_work if self.encoder_work else 1.0


def measure(costs: Costs, taken: IntArray, meeting: IntArray) -> Imbalance:
    """Of a plan.

    Args:
        costs: of the packs.
        taken: [rank, microbatch], indices into the flat costs.
        meeting: one label a rank, 0 and up; ranks with the same label meet at each microbatch.
    """
    encoder, llm = (_dearest(values.reshape(-1).take(taken), meeting) for values in (costs.encoder, costs.llm))
    return _imbalance(costs, int((encoder + llm).sum(axis=1).max()), int(encoder.sum(axis=1).max()))


def lower_bound(costs: Costs, meeting: IntArray) -> Imbalance:
    """What no assignment of these packs to ranks and microbatches can beat."""
    sizes = np.bincount(meeting)
    encoder, llm, total = (np.sort(values, axis=None) for values in (costs.encoder, costs.llm, costs.total))
    encoder_cost = _bound((encoder,), encoder, sizes)
    return _imbalance(costs, max(encoder_cost, _bound((encoder, llm), total, sizes)), encoder_cost)


def _imbalance(costs: Costs, cost: int, encoder_cost: int) -> Imbalance:
    encoder_work = int(costs.encoder.sum())
    return Imbalance(
        cost=cost,
        encoder_cost=encoder_cost,
        work=encoder_work + int(costs.llm.sum()),
        encoder_work=encoder_work,
        num_ranks=costs.num_ranks,
    )


def _dearest(values: IntArray, meeting: IntArray) -> IntArray:
    """[group, microbatch]"""
    order = np.argsort(meeting, kind="stable")
    starts = np.flatnonzero(np.diff(meeting[order], prepend=-1))
    return np.maximum.reduceat(values[order], starts, axis=0)


def _bound(parts: tuple[IntArray, ...], total: IntArray, sizes: IntArray) -> int:
    """The largest of three bounds on the dearest group; costs are sorted.

    1. No group finishes before the mean work of a rank.
    2. Sum of the maxima over all slots of all groups: least for one cost if packs are sorted and cut into slots, large slots
       first. The dearest group is not below the mean of the groups.
    3. The rank with the dearest pack trains as many others as there are microbatches less one.
    """
    num_ranks = int(sizes.sum())
    num_others = len(total) // num_ranks - 1
    slots = np.repeat(np.sort(sizes)[::-1], num_others + 1)
    dearest = len(total) - 1 - (np.cumsum(slots) - slots)
    maxima = sum(int(part[dearest].sum()) for part in parts)
    return max(-(-int(total.sum()) // num_ranks), -(-maxima // len(sizes)), int(total[-1]) + int(total[:num_others].sum()))
