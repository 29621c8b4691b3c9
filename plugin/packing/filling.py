"""Two ways to fill bins: first-fit decreasing, and exact fill. Ranks in, bins of ranks out; rank 0 is the largest sample.

Both fill one bin after the other. For first-fit decreasing that is the same plan as the textbook's sample after sample: a bin
takes a sample when it fits beside the larger ones already there, whatever the bins after it hold. What is left is then a set
of sizes, and the two questions asked of it are cheap in plain Python: the largest size up to x (disjoint sets that skip the
sizes used up), and whether two sizes sum to x (sets of sizes as the bits of an integer, the sum as a shift and an AND).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plugin.packing.limits import IntArray

NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bins of ranks: bin i holds `order[starts[i]:starts[i + 1]]`."""

    order: IntArray
    starts: IntArray

    def totals(self, column: IntArray) -> IntArray:
        """Sum of a column, by bin."""
        return np.add.reduceat(column[self.order], self.starts)

    def largest(self, column: IntArray) -> IntArray:
        """Largest of a column, by bin."""
        return np.maximum.reduceat(column[self.order], self.starts)


class Pool:
    """Samples not yet placed. `take_*` removes them and gives their ranks, or NONE; equal sizes go by rank."""

    def __init__(self, sizes: IntArray, capacity: int) -> None:
        """`sizes` of 1 to `capacity`, largest first."""
        values, counts = np.unique(sizes, return_counts=True)
        ends = len(sizes) - np.concatenate([[0], np.cumsum(counts)])
        self.num_left = len(sizes)
        # Group 0 stands for "no such size"; the others ascend. A group's ranks end before _end_rank.
        self._values: list[int] = [0, *values.tolist()]
        self._end_rank: list[int] = [0, *ends[:-1].tolist()]
        self._left: list[int] = [0, *counts.tolist()]
        self._group_of = {value: group for group, value in enumerate(self._values) if group}
        self._below = list(range(len(self._values)))
        self._capacity = capacity
        # Sizes left as bits, and the same from the other end; first-fit decreasing never asks for pairs and goes without.
        self._present = self._mirrored = 0
        self._has_bits = False

    def open_bin(self) -> None:
        """The next ranks taken go to a new bin."""

    def take_largest(self, room: int) -> int:
        group = self._largest_group(room)
        return self._take(group) if group else NONE

    def take_exactly(self, room: int) -> int:
        group = self._group_of.get(room, 0)
        return self._take(group) if group else NONE

    def take_pair(self, room: int) -> tuple[int, int]:
        """Two that together are as large as `room`: the largest that has a counterpart, and that."""
        sizes = self._pairs(room)
        if not sizes:
            return NONE, NONE
        size = sizes.bit_length() - 1
        return self._take(self._group_of[size]), self._take(self._group_of[room - size])

    def _largest_group(self, room: int) -> int:
        below = self._below
        group = bisect_right(self._values, room) - 1
        while below[group] != group:
            below[group] = below[below[group]]
            group = below[group]
        return group

    def _pairs(self, room: int) -> int:
        """Bit a is set when sizes a and room - a are both there, in two samples."""
        if not self._has_bits:
            self._set_bits()
        sizes = self._present & (self._mirrored >> (self._capacity - room))
        half = room >> 1
        if room == half << 1 and sizes >> half & 1:
            if self._left[self._group_of[half]] == 1:
                sizes ^= 1 << half
        return sizes

    def _take(self, group: int) -> int:
        rank = self._end_rank[group] - self._left[group]
        self._remove(group)
        return rank

    def _remove(self, group: int) -> None:
        self.num_left -= 1
        self._left[group] -= 1
        if self._left[group]:
            return
        size = self._values[group]
        self._below[group] = group - 1
        del self._group_of[size]
        if self._has_bits:
            self._present ^= 1 << size
            self._mirrored ^= 1 << (self._capacity - size)

    def _set_bits(self) -> None:
        flags = np.zeros(self._capacity + 1, np.uint8)
        flags[list(self._group_of)] = 1
        self._present, self._mirrored = _bits(flags), _bits(flags[::-1])
        self._has_bits = True


def first_fit_decreasing(pool: Pool, sizes: list[int], capacity: int) -> Plan:
    """Each bin takes the largest that fits, until nothing does. `sizes` by rank."""
    order: list[int] = []
    starts: list[int] = []
    while pool.num_left:
        pool.open_bin()
        starts.append(len(order))
        room = capacity
        while (rank := pool.take_largest(room)) != NONE:
            order.append(rank)
            room -= sizes[rank]
    return plan_of(order, starts)


def exact_fill(pool: Pool, sizes: list[int], capacity: int) -> Plan:
    """Each bin takes the largest that fits, unless one or two samples finish it to the last token."""
    order: list[int] = []
    starts: list[int] = []
    while pool.num_left:
        pool.open_bin()
        starts.append(len(order))
        rank = pool.take_largest(capacity)
        room = capacity
        while rank != NONE:
            order.append(rank)
            room -= sizes[rank]
            if not room:
                break
            if (rank := pool.take_exactly(room)) != NONE:
                order.append(rank)
                break
            first, second = pool.take_pair(room)
            if first != NONE:
                order += (first, second)
                break
            rank = pool.take_largest(room)
    return plan_of(order, starts)


def plan_of(order: list[int], starts: list[int]) -> Plan:
    return Plan(order=np.array(order, np.int64), starts=np.array(starts, np.int64))


def _bits(flags: npt.NDArray[np.uint8]) -> int:
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
