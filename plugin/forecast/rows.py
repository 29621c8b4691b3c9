"""Rows of an index that training draws, as columns with their costs: small sources whole, of large ones random slices.

Rows of a slice follow each other, so that a slice costs one place on the disk; of 100 million rows some 400,000 are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from indexer.splits import held_out
from plugin.cost import CostModel
from plugin.cost.index import sample_costs
from plugin.packing import PackLimits, Refusal, Samples, refusals
from plugin.packing.limits import IntArray

if TYPE_CHECKING:
    import pyarrow as pa

    from indexer.table import IndexTable

MAX_ROWS = 400_000
"""Read of a dataset, shared out by the weights of its sources."""
LEAST_ROWS = 2048
"""Read of every source that has as many."""
SLICE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWeight:
    """A source of a blend."""

    name: str
    weight: float
    """Probability that the next sample is from it, or in proportion to it."""
    val: float
    """Share of its samples, by their ids, that training does not see."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowColumns:
    """One value a row."""

    num_tokens: IntArray
    num_images: IntArray
    num_patches: IntArray
    encoder_cost: IntArray
    llm_cost: IntArray

    def __len__(self) -> int:
        return len(self.num_tokens)

    def samples(self, rows: IntArray | slice, age: IntArray | None = None) -> Samples:
        """Some rows as the packer takes them."""
        tokens = self.num_tokens[rows]
        return Samples(
            num_tokens=tokens,
            num_images=self.num_images[rows],
            num_patches=self.num_patches[rows],
            age=np.zeros_like(tokens) if age is None else age,
        )

    @classmethod
    def concatenated(cls, pieces: Sequence[RowColumns]) -> RowColumns:
        """All rows of some pieces, in order."""
        return cls(**{name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceRows:
    """What was read of a source."""

    name: str
    weight: float
    num_rows: int
    """In its index."""
    num_read: int
    slices: Sequence[RowColumns]
    """Rows that training draws, slice by slice."""

    @property
    def is_whole(self) -> bool:
        return self.num_read == self.num_rows

    @property
    def num_train(self) -> int:
        """Rows that training draws, reckoned from those read where these are not all."""
        found = sum(map(len, self.slices))
        return found if self.is_whole else round(found * self.num_rows / self.num_read)

    def refused(self, limits: PackLimits) -> Mapping[Refusal, int]:
        """How many of the rows read for training fit no pack, by reason."""
        reasons = [refusals(piece.samples(slice(None)), limits) for piece in self.slices]
        counts = np.bincount(np.concatenate([*reasons, np.zeros(0, np.uint8)]), minlength=len(Refusal)).tolist()
        return {reason: counts[reason] for reason in Refusal if reason != Refusal.NONE and counts[reason]}

    def is_in_vain(self, limits: PackLimits) -> bool:
        """Whether it is drawn from and nothing of what was read fits a pack."""
        return bool(self.slices) and sum(self.refused(limits).values()) == sum(map(len, self.slices))


def read_rows(
    table: IndexTable, sources: Sequence[SourceWeight], model: CostModel, *, seed: int = 0, max_rows: int = MAX_ROWS
) -> list[SourceRows]:
    """Rows of the split `train` of each source: usable, not excluded, not held out.

    Raises:
        UsageError: a row whose cost leaves what costs may be.
    """
    chance = np.random.default_rng([seed, 0])
    whole = sum(source.weight for source in sources)
    found = []
    for source in sources:
        num_rows = len(table.rows_of_source(source.name))
        wanted = max(LEAST_ROWS, round(max_rows * source.weight / whole))
        starts = _slice_starts(num_rows, wanted, chance)
        pieces = list(_slices(table, source, starts, model))
        num_read = sum(min(SLICE_ROWS, num_rows - start) for start in starts)
        slices = [piece for piece in pieces if len(piece)]
        found.append(SourceRows(name=source.name, weight=source.weight, num_rows=num_rows, num_read=num_read, slices=slices))
    return found


def _slice_starts(num_rows: int, wanted: int, chance: np.random.Generator) -> list[int]:
    """Where the slices to read begin, in a source; rising."""
    num_slices = -(-num_rows // SLICE_ROWS)
    number = min(num_slices, -(-wanted // SLICE_ROWS))
    return sorted((chance.choice(num_slices, number, replace=False) * SLICE_ROWS).tolist()) if number else []


def _slices(table: IndexTable, source: SourceWeight, starts: Sequence[int], model: CostModel) -> Iterator[RowColumns]:
    own = table.rows_of_source(source.name)
    excluded = np.zeros(0, np.int64) if table.exclusion is None else table.exclusion.rows
    left = deque((own.start + start, min(own.start + start + SLICE_ROWS, own.stop)) for start in starts)
    end = 0
    for batch in table.batches():
        start, end = end, end + batch.num_rows
        while left and left[0][0] < end:
            first, last = left.popleft()
            if last > end:
                left.appendleft((end, last))  # it goes on in the next batch
            yield _columns(batch.slice(first - start, min(last, end) - first), first, source.val, excluded, model)


def _columns(batch: pa.RecordBatch, first_row: int, val: float, excluded: npt.NDArray[np.int64], model: CostModel) -> RowColumns:
    from indexer.rows import Status, as_numpy

    kept = as_numpy(batch.column("status")) == Status.USABLE
    if val:
        kept &= ~held_out(as_numpy(batch.column("id_hash")), val)
    left_out = excluded[np.searchsorted(excluded, first_row) : np.searchsorted(excluded, first_row + batch.num_rows)]
    kept[left_out - first_row] = False
    costs = sample_costs(model, batch)[kept]
    counts = {name: as_numpy(batch.column(name))[kept].astype(np.int64) for name in ("num_tokens", "num_images", "num_patches")}
    return RowColumns(**counts, encoder_cost=costs[:, 0].copy(), llm_cost=costs[:, 1].copy())
