"""The plan of one global batch: who trains which pack when, with its inverse, and what it moves and gains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugin.balance.keys import IdArray, IntArray
from plugin.balance.measuring import Imbalance
from plugin.balance.topology import Mode


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Transfers:
    """The packs that one rank sends or receives, ordered by the other rank, then by the microbatch that trains them.

    Both sides of a pair list the same packs in the same order.
    """

    ranks: IntArray
    """The other side of each."""
    positions: IntArray
    """Where the pack stands among those that its sender's loader yielded."""
    microbatches: IntArray
    """When its receiver trains it."""

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """An assignment of all packs of a global batch. The same on every rank."""

    mode: Mode
    taken: IdArray
    """[rank, microbatch]: the pack trained there, as rank * num_microbatches + position of where it was yielded."""
    inverse: IdArray
    """[pack]: where it is trained, as rank * num_microbatches + microbatch."""
    before: Imbalance
    """Of the order of arrival."""
    after: Imbalance
    bound: Imbalance
    num_moved: int
    """Packs trained by another rank than the one that holds them."""
    num_moved_off_node: int | None
    """Of these, packs that leave their machine; nothing if nodes are unknown."""
    moved_bytes: int | None = None
    moved_off_node_bytes: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.taken)

    @property
    def num_microbatches(self) -> int:
        return int(self.taken.shape[1])

    @property
    def is_identity(self) -> bool:
        """Every rank trains its own packs in the order in which they came."""
        return bool((self.taken.reshape(-1) == np.arange(self.taken.size)).all())

    def sends(self, rank: int) -> Transfers:
        """What a rank gives to others."""
        positions = np.arange(self.num_microbatches)
        ranks, microbatches = np.divmod(self._row(self.inverse, rank), self.num_microbatches)
        return _transfers(rank, ranks, positions, microbatches)

    def receives(self, rank: int) -> Transfers:
        """What a rank gets from others."""
        microbatches = np.arange(self.num_microbatches)
        ranks, positions = np.divmod(self._row(self.taken, rank), self.num_microbatches)
        return _transfers(rank, ranks, positions, microbatches)

    def _row(self, values: IdArray, rank: int) -> IntArray:
        row: IntArray = values.reshape(self.taken.shape)[rank].astype(np.int64)
        return row


def _transfers(rank: int, ranks: IntArray, positions: IntArray, microbatches: IntArray) -> Transfers:
    others = np.flatnonzero(ranks != rank)
    order = others[np.lexsort((microbatches[others], ranks[others]))]
    return Transfers(ranks=ranks[order], positions=positions[order], microbatches=microbatches[order])


def plan_of(
    taken: IdArray, node: IntArray | None, num_bytes: IntArray | None, mode: Mode, costs: tuple[Imbalance, Imbalance, Imbalance]
) -> Plan:
    """A plan with its inverse and what it moves; `costs` are before, after and bound.

    Packs that are lost or trained twice are a bug of ours, found here in one pass.
    """
    flat = taken.reshape(-1)
    inverse = np.full(flat.size, -1, np.int32)
    inverse[flat] = np.arange(flat.size, dtype=np.int32)
    assert (inverse >= 0).all(), "a plan lost packs"
    for array in (taken, inverse):
        array.setflags(write=False)
    holders, trainers = taken // taken.shape[1], np.arange(len(taken))[:, None]
    moved = taken[holders != trainers]
    off_node = None if node is None else taken[node[holders] != node[trainers]]
    before, after, bound = costs
    return Plan(
        mode=mode,
        taken=taken,
        inverse=inverse,
        before=before,
        after=after,
        bound=bound,
        num_moved=len(moved),
        num_moved_off_node=None if off_node is None else len(off_node),
        moved_bytes=_sum(num_bytes, moved),
        moved_off_node_bytes=_sum(num_bytes, off_node),
    )


def _sum(num_bytes: IntArray | None, packs: IntArray | None) -> int | None:
    return None if num_bytes is None or packs is None else int(num_bytes.reshape(-1)[packs].sum())
