"""A pool of packs that were really packed, as columns, and what it says of packing itself.

Several replicates of several streams each, since a stream's packs are not independent: packs of one plan share a buffer. What a
stream yields before the first samples have waited their longest is left out, since only full packs leave at first; then it goes
on for that long twice more at least, since samples that waited leave together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packer.format.errors import UsageError
from plugin.forecast.estimates import Estimate
from plugin.forecast.rows import RowColumns, SourceRows
from plugin.forecast.sizes import PackSize
from plugin.forecast.streams import RowOrder, packs_of_stream
from plugin.packing import PackLimits, fewest_packs
from plugin.packing.limits import IntArray
from plugin.settings import PackSettings, Peers

MAX_PACKS = 1 << 17
"""Packed, all replicates together."""
MAX_DRAWN_ROWS = 2_000_000
"""For these packs: a bound on time, some ten seconds, where packs hold many short samples."""
MAX_STREAMS = 4
"""Of a replicate: more ranks than that take turns with its streams."""
SLOWER = 8
"""A plan takes so many times longer where images or patches limit packs: less is packed then."""
_BUFFERS_IN_VAIN = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """One value a pack, stream after stream in the order in which each yields them."""

    num_tokens: IntArray
    padded_tokens: IntArray
    num_samples: IntArray
    num_images: IntArray
    num_patches: IntArray
    encoder_cost: IntArray
    llm_cost: IntArray
    num_bytes: IntArray | None

    def __len__(self) -> int:
        return len(self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPool:
    """Packs of one sequence length."""

    limits: PackLimits
    replicates: Sequence[Packs]
    fewest: Sequence[int]
    """Packs that the samples of each replicate would need at least."""
    num_streams: int
    """Of each replicate."""
    num_drawn_rows: int

    def __len__(self) -> int:
        return sum(map(len, self.replicates))

    @property
    def efficiency(self) -> Estimate:
        """Real tokens per slot."""
        return Estimate.of(packs.num_tokens.sum() / (len(packs) * self.limits.sequence_length) for packs in self.replicates)

    @property
    def bound(self) -> Estimate:
        """Efficiency that no packer of the same samples could pass."""
        pairs = zip(self.replicates, self.fewest, strict=True)
        return Estimate.of(packs.num_tokens.sum() / (fewest * self.limits.sequence_length) for packs, fewest in pairs)

    @property
    def alignment_loss(self) -> Estimate:
        """Slots lost to the padding of samples, of all."""
        padding = ((packs.padded_tokens - packs.num_tokens).sum() / len(packs) for packs in self.replicates)
        return Estimate.of(lost / self.limits.sequence_length for lost in padding)

    @property
    def encoder_share(self) -> Estimate:
        """Of all work."""
        works = ((int(packs.encoder_cost.sum()), int(packs.llm_cost.sum())) for packs in self.replicates)
        return Estimate.of(encoder / max(1, encoder + llm) for encoder, llm in works)

    def mean(self, name: str) -> Estimate:
        """Of a column of `Packs`."""
        return Estimate.of(getattr(packs, name).mean() for packs in self.replicates)

    def most(self, name: str) -> int:
        """Largest of a column of `Packs`."""
        return max(int(getattr(packs, name).max()) for packs in self.replicates)

    @property
    def without_image(self) -> Estimate:
        """Share of packs that hold no image."""
        return Estimate.of((packs.num_images == 0).mean() for packs in self.replicates)


def pack_pool(
    sources: Sequence[SourceRows],
    settings: PackSettings,
    *,
    num_packs: int,
    num_replicates: int,
    num_streams: int,
    size: PackSize | None = None,
    seed: int = 0,
    max_packs: int = MAX_PACKS,
    max_drawn_rows: int = MAX_DRAWN_ROWS,
) -> PackPool:
    """Pack what a loader with these settings would.

    Args:
        num_packs: wanted of each replicate, at least; fewer are made where that would pass the limits.
        num_streams: at most so many in each replicate, `MAX_STREAMS` in any case.
        size: of the buffers; None where it is not known.

    Raises:
        UsageError: no sample fits a pack.
    """
    limits = settings.limits(Peers())
    if not any(len(piece) for source in sources for piece in source.slices):
        raise UsageError("found no sample to train on in any source of the blend, expected at least one")
    num_streams = min(num_streams, MAX_STREAMS)
    if limits.max_images is not None or limits.max_patches is not None:
        num_streams, max_drawn_rows = 1, max_drawn_rows // SLOWER
    each = max(1, -(-min(num_packs, max_packs // num_replicates) // num_streams))
    rows_each = max(settings.buffer_size, max_drawn_rows // (num_replicates * num_streams))
    replicates, fewest, num_drawn = [], [], 0
    for replicate in range(num_replicates):
        columns, starts, weights = _reservoir(sources, replicate, num_replicates)
        packs: list[IntArray] = []
        for stream in range(num_streams):
            order = RowOrder(starts, weights, np.random.default_rng([seed, 1, replicate, stream]))
            packs += _stream(columns, order, limits, settings, each, rows_each, worker_seed=replicate * num_streams + stream)
            num_drawn += order.num_drawn
        replicates.append(_summed(columns, packs, limits, size))
        fewest.append(fewest_packs(columns.samples(np.concatenate(packs)), limits))
    return PackPool(limits=limits, replicates=replicates, fewest=fewest, num_streams=num_streams, num_drawn_rows=num_drawn)


def _reservoir(
    sources: Sequence[SourceRows], replicate: int, num_replicates: int
) -> tuple[RowColumns, list[IntArray], list[float]]:
    """Columns of the rows a replicate draws from, which of them are of each source, and the weights of these.

    Where a source was not read whole, each replicate has slices of its own: what the others show tells how good a sample
    they are.
    """
    pieces: list[RowColumns] = []
    rows, weights = [], []
    start = 0
    for source in sources:
        apart = not source.is_whole and len(source.slices) >= num_replicates
        own = source.slices[replicate::num_replicates] if apart else source.slices
        if not own:
            continue
        pieces += own
        number = sum(map(len, own))
        rows.append(np.arange(start, start + number))
        weights.append(source.weight)
        start += number
    return RowColumns.concatenated(pieces), rows, weights


def _stream(
    columns: RowColumns,
    order: RowOrder,
    limits: PackLimits,
    settings: PackSettings,
    num_packs: int,
    max_rows: int,
    *,
    worker_seed: int,
) -> list[IntArray]:
    packs: list[IntArray] = []
    plans = packs_of_stream(
        columns,
        order.draw,
        limits,
        buffer_size=settings.buffer_size,
        max_age=settings.max_age,
        worker_seed=worker_seed,
    )
    wait = settings.max_age + 1
    for number, more in enumerate(plans, start=1):
        if number > wait:
            packs += more
        if number >= 3 * wait and packs and (len(packs) >= num_packs or order.num_drawn >= max_rows):
            return packs
        if not packs and order.num_drawn > _BUFFERS_IN_VAIN * settings.buffer_size:
            break
    raise UsageError(
        f"found no pack in {order.num_drawn:,} samples: hardly any fits {limits}; raise the limits, or take the profile that was "
        "made for them"
    )


def _summed(columns: RowColumns, packs: Sequence[IntArray], limits: PackLimits, size: PackSize | None) -> Packs:
    lengths = np.array([len(pack) for pack in packs])
    starts = np.cumsum(lengths) - lengths
    rows = np.concatenate(packs)

    def summed(column: IntArray) -> IntArray:
        return np.asarray(np.add.reduceat(column[rows], starts))

    images, patches = summed(columns.num_images), summed(columns.num_patches)
    return Packs(
        num_tokens=summed(columns.num_tokens),
        padded_tokens=summed(-(-columns.num_tokens // limits.alignment) * limits.alignment),
        num_samples=lengths,
        num_images=images,
        num_patches=patches,
        encoder_cost=summed(columns.encoder_cost),
        llm_cost=summed(columns.llm_cost),
        num_bytes=None if size is None else size.num_bytes(limits.sequence_length, lengths, images, patches),
    )
