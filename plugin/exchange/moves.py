"""Which packs go where, in which slices. Pure: every rank computes the same from what all ranks know."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Packs that are trained on another rank than they were read on; arrays of [moves]."""

    pack: Ints
    """rank * num_microbatches + position: which of the global batch."""
    source: Ints
    target: Ints
    microbatch: Ints
    """At which the target trains on it."""
    num_bytes: Ints
    slice: Ints
    """Ascending with the microbatch."""
    num_slices: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """One slice as one rank sees it: packs lie behind each other by rank, then by microbatch."""

    sent: Ints
    """Positions in this rank's own pool."""
    sent_bytes: list[int]
    """To each rank."""
    received: Ints
    """Packs, as in `Moves.pack`."""
    microbatches: Ints
    """Of the received."""
    pack_bytes: Ints
    """Of the received."""
    received_bytes: list[int]
    """From each rank."""


def moves_of(taken: npt.NDArray[np.integer], num_bytes: Ints, *, slice_bytes: int) -> Moves:
    """Moves of a plan, in slices for which no rank holds more than `slice_bytes` to send, nor to receive, if packs allow it.

    Args:
        taken: [ranks, microbatches], the pack that each trains on.
        num_bytes: [ranks, packs of a rank].
    """
    num_ranks, num_microbatches = taken.shape
    target, microbatch = np.nonzero(taken // num_microbatches != np.arange(num_ranks)[:, None])
    pack = taken[target, microbatch].astype(np.int64)
    order = np.lexsort((target, microbatch))
    pack, target, microbatch = pack[order], target[order], microbatch[order]
    source = pack // num_microbatches
    size = num_bytes.reshape(-1)[pack]
    slices, num_slices = _slices(source, target, microbatch, size, num_ranks, slice_bytes)
    return Moves(
        pack=pack,
        source=source,
        target=target,
        microbatch=microbatch,
        num_bytes=size,
        slice=slices,
        num_slices=num_slices,
    )


def routes_of(moves: Moves, rank: int, *, num_ranks: int, num_microbatches: int) -> list[Route]:
    """What one rank sends and receives in each slice."""
    return [
        _route(moves, rank, number, num_ranks=num_ranks, num_microbatches=num_microbatches) for number in range(moves.num_slices)
    ]


def launch_indices(num_slices: int, num_microbatches: int) -> list[int]:
    """At which microbatch of the batch before each slice is launched: over its second half, since plans are made in the first."""
    first = num_microbatches // 2
    return [first + number * (num_microbatches - first) // num_slices for number in range(num_slices)]


def _route(moves: Moves, rank: int, number: int, *, num_ranks: int, num_microbatches: int) -> Route:
    sent = np.flatnonzero((moves.slice == number) & (moves.source == rank))
    sent = sent[np.lexsort((moves.microbatch[sent], moves.target[sent]))]
    received = np.flatnonzero((moves.slice == number) & (moves.target == rank))
    received = received[np.lexsort((moves.microbatch[received], moves.source[received]))]
    return Route(
        sent=moves.pack[sent] - rank * num_microbatches,
        sent_bytes=_summed(moves.target[sent], moves.num_bytes[sent], num_ranks),
        received=moves.pack[received],
        microbatches=moves.microbatch[received],
        pack_bytes=moves.num_bytes[received],
        received_bytes=_summed(moves.source[received], moves.num_bytes[received], num_ranks),
    )


def _summed(where: Ints, what: Ints, length: int) -> list[int]:
    sums = np.zeros(length, np.int64)
    np.add.at(sums, where, what)
    return [int(value) for value in sums]


def _slices(source: Ints, target: Ints, microbatch: Ints, size: Ints, num_ranks: int, slice_bytes: int) -> tuple[Ints, int]:
    """Neighbouring microbatches while they fit; a microbatch for which one rank sends too much is cut into waves."""
    if not len(source):
        return np.zeros(0, np.int64), 0
    wave = _before(microbatch * num_ranks + source, size) // slice_bytes
    key, inverse = np.unique(microbatch * (int(wave.max()) + 1) + wave, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    bounds = np.searchsorted(inverse[order], np.arange(len(key) + 1))
    slice_of_key = np.zeros(len(key), np.int64)
    held = np.zeros((2, num_ranks), np.int64)
    number = 0
    for place in range(len(key)):
        rows = order[bounds[place] : bounds[place + 1]]
        added = np.zeros((2, num_ranks), np.int64)
        np.add.at(added[0], source[rows], size[rows])
        np.add.at(added[1], target[rows], size[rows])
        if place and int((held + added).max()) > slice_bytes:
            number += 1
            held[:] = 0
        held += added
        slice_of_key[place] = number
    return slice_of_key[inverse], number + 1


def _before(group: Ints, size: Ints) -> Ints:
    """Sum of the sizes that stand before each one in its group."""
    order = np.argsort(group, kind="stable")
    sums = np.cumsum(size[order]) - size[order]
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    lengths = np.diff(np.append(starts, len(group)))
    before = np.empty(len(group), np.int64)
    before[order] = sums - np.repeat(sums[starts], lengths)
    return before
