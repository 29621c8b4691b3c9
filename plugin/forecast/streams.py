"""One loader worker's stream without Energon: rows drawn as a blend draws them, packs as `carry_over` makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from plugin.forecast.rows import RowColumns
from plugin.packing import PackLimits, pack, shuffled
from plugin.packing.limits import IntArray
from plugin.settings import is_running_low


class RowOrder:
    """Rows one after another: their source by weight, and within a source in a random order that is a new one each epoch."""

    def __init__(self, sources: Sequence[IntArray], weights: Sequence[float], chance: np.random.Generator) -> None:
        """Args:
        sources: the rows of each, at least one.
        """
        self._sources = sources
        self._shares = np.array(weights, np.float64) / sum(weights)
        self._chance = chance
        self._left: list[IntArray] = [rows[:0] for rows in sources]
        self.num_drawn = 0

    def draw(self, number: int) -> IntArray:
        """The next rows."""
        chosen = self._chance.choice(len(self._sources), number, p=self._shares)
        rows = np.empty(number, np.int64)
        for source, count in enumerate(np.bincount(chosen, minlength=len(self._sources)).tolist()):
            if count:
                rows[chosen == source] = self._take(source, count)
        self.num_drawn += number
        return rows

    def _take(self, source: int, count: int) -> IntArray:
        left = [self._left[source]]
        while (missing := count - sum(map(len, left))) > 0:
            left += [self._chance.permutation(self._sources[source]) for _ in range(-(-missing // len(self._sources[source])))]
        rows = np.concatenate(left)
        self._left[source] = rows[count:]
        return rows[:count]


def packs_of_stream(
    columns: RowColumns,
    draw: Callable[[int], IntArray],
    limits: PackLimits,
    *,
    buffer_size: int,
    max_age: int,
    worker_seed: int,
) -> Iterator[list[IntArray]]:
    """Packs, as rows, in the order in which a loader worker yields them; in one list those between two plans. Never ends.

    Args:
        draw: so many rows more. A list shorter than that ends the stream, and what still waits is dropped.
        worker_seed: of the order of the packs of one plan.
    """
    waiting, ages = np.zeros(0, np.int64), np.zeros(0, np.int64)
    planned: deque[IntArray] = deque()
    num_planned = 0
    num_plans = 0
    while True:
        wanted = buffer_size - len(waiting) - num_planned
        more = draw(wanted)
        if len(more) < wanted:
            return
        waiting, ages = np.concatenate([waiting, more]), np.concatenate([ages, np.zeros(len(more), np.int64)])
        packing = pack(columns.samples(waiting, ages), limits, max_age=max_age)
        packs = shuffled(packing.packs, worker_seed=worker_seed, sample_index=num_plans)
        planned.extend(waiting[places] for places in packs)
        num_planned += sum(map(len, packs))
        num_plans += 1
        waiting, ages = waiting[packing.leftovers], packing.leftover_age
        leaving: list[IntArray] = []
        while planned and (not leaving or not is_running_low(num_planned, buffer_size)):
            leaving.append(planned.popleft())
            num_planned -= len(leaving[-1])
        yield leaving
