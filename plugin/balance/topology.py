"""Which ranks wait for each other at each microbatch, and which share a node.

Facts of the run, never guessed from rank numbers or from the size of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.balance.keys import IntArray


class Mode(StrEnum):
    """What is balanced, by where ranks meet."""

    EP = "ep"
    """The ranks of an expert group meet at each microbatch: totals of groups, then slots inside each group."""
    FSDP = "fsdp"
    """All ranks meet at each microbatch: slots over all ranks."""
    DP = "dp"
    """Ranks meet at the end of the global batch only: totals of ranks."""
    LOCAL = "local"
    """Each rank orders its own packs; nothing moves."""
    AUTO = "auto"
    """The first three, by the topology."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Topology:
    """The ranks of one data-parallel group."""

    num_ranks: int
    expert_group: npt.ArrayLike | None = None
    """One label a rank: ranks with the same label meet at each microbatch. From the members of the trainer's process groups,
    as data-parallel ranks; labels may be any integers, groups of any size."""
    node: npt.ArrayLike | None = None
    """One label a rank: ranks with the same label are in one machine."""
    synchronises: Literal["microbatch", "batch"] = "batch"
    """Whether all ranks meet at each microbatch (FSDP) or only at the end of the global batch."""

    def __post_init__(self) -> None:
        if isinstance(self.num_ranks, bool) or not isinstance(self.num_ranks, int) or self.num_ranks < 1:
            raise UsageError(f"topology: found num_ranks {self.num_ranks!r}, expected a whole number of at least 1")
        if self.synchronises not in ("microbatch", "batch"):
            raise UsageError(f"topology: found synchronises {self.synchronises!r}, expected 'microbatch' or 'batch'")
        for name in ("expert_group", "node"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _labels(name, getattr(self, name), self.num_ranks))

    def resolve(self, mode: Mode | str) -> Mode:
        """The mode that `auto` stands for here; any other mode, if the topology has what it needs."""
        try:
            mode = Mode(mode)
        except ValueError:
            raise UsageError(f"found mode {mode!r}, expected one of {', '.join(Mode)}") from None
        if mode is Mode.EP and self.expert_group is None:
            raise UsageError("found mode 'ep' without expert groups; give Topology(expert_group=one label per rank)")
        if mode is not Mode.AUTO:
            return mode
        if self.synchronises == "microbatch":
            return Mode.FSDP
        if self.expert_group is None:
            return Mode.DP
        return Mode.EP if len(np.unique(self.expert_group)) > 1 else Mode.FSDP

    def meeting(self, mode: Mode) -> IntArray:
        """One label a rank, 0 and up: ranks with the same label meet at each microbatch, by the view of a mode.

        `local` is judged by what `auto` would do; where no two ranks meet, as if all did, since an order changes nothing else.
        """
        if mode is Mode.LOCAL:
            labels = self.meeting(self.resolve(Mode.AUTO))
            return labels if np.bincount(labels).max() > 1 else np.zeros_like(labels)
        mode = self.resolve(mode)
        if mode is Mode.EP:
            return np.unique(np.asarray(self.expert_group), return_inverse=True)[1].astype(np.int64)
        return np.zeros(self.num_ranks, np.int64) if mode is Mode.FSDP else np.arange(self.num_ranks)

    @property
    def nodes(self) -> IntArray | None:
        """Labels of nodes, 0 and up; nothing if they are unknown."""
        return None if self.node is None else np.unique(np.asarray(self.node), return_inverse=True)[1].astype(np.int64)


def _labels(name: str, values: npt.ArrayLike, num_ranks: int) -> IntArray:
    labels = np.array(values)
    if labels.shape != (num_ranks,) or labels.dtype.kind not in "iu":
        raise UsageError(
            f"topology: found {name} as {labels.dtype} of shape {labels.shape}, expected integers of shape ({num_ranks},): "
            "one label per data-parallel rank"
        )
    labels = labels.astype(np.int64)
    labels.setflags(write=False)
    return labels
