"""The pool for packs whose images or patches are limited too: same questions as `filling.Pool`, with two more rooms to mind.

Only asked when a plan by tokens alone breaks a limit, since it costs several times as much (numpy calls per sample placed).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from plugin.packing.filling import NONE, Pool
from plugin.packing.limits import IntArray

CHUNK = 128
"""Ranks looked at in one numpy call; doubled until one fits."""
MAX_PAIRS = 8
"""Pairs of sizes tried for an exact end."""


class LimitedPool(Pool):
    """Samples not yet placed, of which a bin may hold so many images and so many patches."""

    def __init__(self, sizes: IntArray, capacity: int, columns: tuple[IntArray, ...], limits: tuple[int, ...]) -> None:
        """`columns` by rank (images, patches), and what a bin may hold of each."""
        super().__init__(sizes, capacity)
        self._ascending = -sizes
        self._columns = tuple(column.copy() for column in columns)
        self._limits = limits
        self._first = 0
        self.open_bin()

    def open_bin(self) -> None:
        self._rooms = list(self._limits)
        self._start = self._first

    def take_largest(self, room: int) -> int:
        # Ranks passed over in this bin need not be seen again: its rooms only shrink.
        start = max(self._start, int(np.searchsorted(self._ascending, -room)))
        rank = self._fitting(start, len(self._ascending))
        if rank == NONE:
            return NONE
        self._start = rank + 1
        return self._take_rank(rank)

    def take_exactly(self, room: int) -> int:
        group = self._group_of.get(room, 0)
        rank = self._fitting_of(group) if group else NONE
        return NONE if rank == NONE else self._take_rank(rank)

    def take_pair(self, room: int) -> tuple[int, int]:
        for size in _highest_bits(self._pairs(room), MAX_PAIRS):
            rank = self._fitting_of(self._group_of[size])
            if rank == NONE:
                continue
            rooms = self._rooms.copy()
            self._use_up(rank)
            other = self._fitting_of(self._group_of[room - size], rank)
            self._rooms = rooms
            if other != NONE:
                return self._take_rank(rank), self._take_rank(other)
        return NONE, NONE

    def _fitting_of(self, group: int, but: int = NONE) -> int:
        size = self._values[group]
        start, stop = np.searchsorted(self._ascending, (-size, -size + 1))
        rank = self._fitting(int(start), int(stop))
        return rank if rank != but or rank == NONE else self._fitting(rank + 1, int(stop))

    def _fitting(self, start: int, stop: int) -> int:
        """The first rank of a range that fits beside what the bin holds."""
        chunk = CHUNK
        while start < stop:
            end = min(start + chunk, stop)
            fits = self._columns[0][start:end] <= self._rooms[0]
            for column, room in zip(self._columns[1:], self._rooms[1:], strict=True):
                fits &= column[start:end] <= room
            first = int(fits.argmax())
            if fits[first]:
                return start + first
            start, chunk = end, 2 * chunk
        return NONE

    def _take_rank(self, rank: int) -> int:
        self._use_up(rank)
        # Taken is: fits nowhere.
        self._columns[0][rank] = self._limits[0] + 1
        while self._first < len(self._ascending) and self._columns[0][self._first] > self._limits[0]:
            self._first += 1
        self._remove(self._group_of[-int(self._ascending[rank])])
        return rank

    def _use_up(self, rank: int) -> None:
        for number, column in enumerate(self._columns):
            self._rooms[number] -= int(column[rank])


def _highest_bits(bits: int, most: int) -> Iterator[int]:
    while bits and most:
        highest = bits.bit_length() - 1
        yield highest
        bits ^= 1 << highest
        most -= 1
