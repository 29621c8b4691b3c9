"""Totals of groups of ranks brought together by swaps: as few as possible, since most of them leave the machine.

Round by round the heaviest group is paired with the lightest, the second with the second, and so on. A pair swaps one pack each,
so that the difference comes nearest to what the heavy one has too much, or to what the light one has room for. No pack moves
twice.
"""

from __future__ import annotations

import numpy as np

from plugin.balance.keys import IntArray, cost_order

CANDIDATES = 64
"""Packs of the heavy group that are tried, evenly over its costs; their partners are found by bisection."""
MAX_ROUNDS = 256


class Rows:
    """The packs of each group that may still move, by rising cost, one row after another."""

    def __init__(self, pools: list[IntArray], costs: IntArray) -> None:
        starts = np.cumsum([0, *(pool.size for pool in pools)])
        orders = [cost_order(costs.take(pool))[:, ::-1].reshape(-1) for pool in pools]
        self.packs = np.concatenate([pool.reshape(-1) for pool in pools])
        """By place; packs that are swapped take each other's."""
        self.costs = costs.take(self.packs)
        """By place, before any swap."""
        self.places = np.concatenate([order + start for order, start in zip(orders, starts[:-1], strict=True)])
        self.counts = np.repeat([pool.shape[1] for pool in pools], [len(pool) for pool in pools])
        self.starts = np.cumsum(self.counts) - self.counts

    def swap(self, one: int, two: int, index_one: int, index_two: int) -> int:
        """Swap two packs of two groups; returns what the first group loses by it."""
        first, second = self._take(one, index_one), self._take(two, index_two)
        self.packs[[first, second]] = self.packs[[second, first]]
        return int(self.costs[first] - self.costs[second])

    def _take(self, group: int, index: int) -> int:
        """The place of a pack, by its index in the rows; it moves no more."""
        place = int(self.places[index])
        end = int(self.starts[group] + self.counts[group])
        self.places[index : end - 1] = self.places[index + 1 : end]
        self.counts[group] -= 1
        return place

    def spread(self, groups: IntArray) -> IntArray:
        """Indices of packs evenly over the costs of each group: [group, candidate]."""
        last = self.counts[groups][:, None] - 1
        indices: IntArray = self.starts[groups][:, None] + last * np.arange(CANDIDATES) // (CANDIDATES - 1)
        return indices

    def nearest(self, groups: IntArray, wanted: IntArray) -> tuple[IntArray, IntArray]:
        """Indices of the packs of each group next below and next above each wanted cost: [group, candidate]."""
        first = self.starts[groups][:, None]
        last = first + self.counts[groups][:, None] - 1
        low, high = np.broadcast_to(first, wanted.shape), np.broadcast_to(last + 1, wanted.shape)
        for _ in range(int(self.counts[groups].max()).bit_length()):
            middle = (low + high) // 2
            is_below = (low < high) & (self.at(np.minimum(middle, last)) < wanted)
            low, high = np.where(is_below, middle + 1, low), np.where(is_below, high, middle)
        return np.clip(low - 1, first, last), np.clip(low, first, last)

    def at(self, indices: IntArray) -> IntArray:
        """Costs of packs, by their indices in the rows."""
        return self.costs.take(self.places.take(indices))


def repaired(
    pools: list[IntArray], costs: IntArray, sizes: IntArray, fixed: IntArray, tolerance_per_mille: int
) -> list[IntArray]:
    """The packs of each group after the swaps: packs that are swapped have taken each other's places.

    Args:
        pools: the packs that may move, [group, pack] for each size of group; groups are numbered through.
        costs: of all packs.
        sizes: [group] ranks.
        fixed: [group] costs of the packs that may not move.
        tolerance_per_mille: groups that are less than so much above the mean are left as they are.
    """
    rows = Rows(pools, costs)
    sums = fixed + np.concatenate([costs.take(pool).sum(axis=1) for pool in pools])
    whole, num_ranks = int(sums.sum()), int(sizes.sum())
    excess = sums - np.array([whole * size // num_ranks for size in sizes.tolist()], np.int64)
    allowed = np.array([whole * size * tolerance_per_mille // (num_ranks * 1000) for size in sizes.tolist()], np.int64)
    for _ in range(MAX_ROUNDS):
        heavy, light = _pairs(excess, allowed, sizes, rows.counts)
        swaps = _swaps(rows, heavy, light, excess, allowed, sizes) if len(heavy) else []
        if not swaps:
            break
        for one, two, *indices in swaps:
            gain = rows.swap(one, two, *indices)
            excess[one] -= gain
            excess[two] += gain
    ends = np.cumsum([pool.size for pool in pools])
    return [part.reshape(pool.shape) for part, pool in zip(np.split(rows.packs, ends[:-1]), pools, strict=True)]


def _pairs(excess: IntArray, allowed: IntArray, sizes: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Heaviest and lightest groups by excess per rank; equal ones by number."""
    order = np.argsort(excess // sizes, kind="stable")
    order = order[counts[order] > 0]
    heavy = order[excess[order] > allowed[order]][::-1]
    light = order[excess[order] < 0]
    number = min(len(heavy), len(light))
    return heavy[:number], light[:number]


def _swaps(rows: Rows, heavy: IntArray, light: IntArray, excess: IntArray, allowed: IntArray, sizes: IntArray) -> list[list[int]]:
    """For each pair that gains by it the two groups and the indices of the packs they swap."""
    over, under, ranks = excess[heavy], excess[light], (sizes[heavy], sizes[light])
    target = np.minimum(over, allowed[light] - under)[:, None]
    ones = rows.spread(heavy)
    twos = np.concatenate(rows.nearest(light, rows.at(ones) - target), axis=1)
    ones = np.concatenate([ones, ones], axis=1)
    gains = rows.at(ones) - rows.at(twos)
    best = np.abs(gains - target).argmin(axis=1)[:, None]
    ones, twos, gains = (np.take_along_axis(values, best, axis=1)[:, 0] for values in (ones, twos, gains))
    worst = np.maximum((over - gains) // ranks[0], (under + gains) // ranks[1])
    useful = np.flatnonzero((gains > 0) & (worst < over // ranks[0]))
    swaps: list[list[int]] = np.stack([heavy, light, ones, twos], axis=1)[useful].tolist()
    return swaps
