"""What is counted for each global batch, on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plugin.exchange.moves import Moves


@dataclass(slots=True, kw_only=True)
class Counters:
    """Of one global batch; numbers of packs, bytes and tokens are the group's, times this rank's."""

    step: int
    num_packs: int = 0
    num_loss_tokens: int = 0
    """The denominator of a loss per token: of all ranks and microbatches."""
    num_moved: int = 0
    moved_bytes: int = 0
    num_off_node: int = 0
    """Of the moved: to another host."""
    off_node_bytes: int = 0
    before: Any = None
    """Imbalance in order of arrival, as the planner predicts it."""
    after: Any = None
    bound: Any = None
    """No plan can be better."""
    read_seconds: float = 0.0
    gathered_seconds: float = 0.0
    """Waiting for the slowest rank to have read is part of it."""
    solved_seconds: float = 0.0
    exchanged_seconds: float = 0.0
    exposed_seconds: float = 0.0
    """What the trainer's thread waited for this batch, its own reading included: all of the above is hidden but this."""

    def count_moves(self, moves: Moves, node: npt.NDArray[np.int64]) -> None:
        """`node`: [ranks], a number for the host of each."""
        off_node = node[moves.source] != node[moves.target]
        self.num_moved, self.moved_bytes = len(moves.pack), int(moves.num_bytes.sum())
        self.num_off_node, self.off_node_bytes = int(off_node.sum()), int(moves.num_bytes[off_node].sum())

    def __str__(self) -> str:
        share = 100 * self.num_moved / max(1, self.num_packs)
        before, after, bound = (shown(imbalance) for imbalance in (self.before, self.after, self.bound))
        return (
            f"step {self.step}: imbalance {before} before, {after} after, {bound} at best; {self.num_moved:,} of "
            f"{self.num_packs:,} packs moved ({share:.1f}%, {self.moved_bytes / 2**20:.1f} MiB), {self.num_off_node:,} off node "
            f"({self.off_node_bytes / 2**20:.1f} MiB); read {self.read_seconds:.3f} s, gathered {self.gathered_seconds:.3f} s, "
            f"solved {self.solved_seconds:.3f} s, exchanged {self.exchanged_seconds:.3f} s, exposed {self.exposed_seconds:.3f} s"
        )


def shown(imbalance: Any) -> str:
    """Its ratio to the mean, where it has one."""
    ratio = getattr(imbalance, "ratio", imbalance)
    return f"{ratio:.3f}" if isinstance(ratio, float) else str(ratio)
