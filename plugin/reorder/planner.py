"""What the loader asks of a planner. `plugin.balance` has good ones; any pure function of its arguments will do."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

Ints = npt.NDArray[np.int64]


class Plan(Protocol):
    """Which pack each rank trains on at each microbatch. May have `before`, `after` and `bound`: imbalance, for the counters."""

    @property
    def taken(self) -> npt.NDArray[np.integer]:
        """[ranks, microbatches]: rank * microbatches + position of the pack that is trained there."""
        ...

    @property
    def inverse(self) -> npt.NDArray[np.integer]:
        """[ranks * microbatches]: rank * microbatches + microbatch at which each pack is trained."""
        ...


class Planner(Protocol):
    """The same plan on every rank for the same numbers: integers only, no clock, no random state, no hash."""

    @property
    def name(self) -> str:
        """Mode and settings: ranks must have the same one, and a batch is not finished with another."""
        ...

    def __call__(self, encoder: Ints, llm: Ints, num_bytes: Ints) -> Plan:
        """All [ranks, packs of a rank]."""
        ...


def refuse_broken(plan: Plan, shape: tuple[int, int], name: str) -> None:
    """Raises:
    UsageError: a plan that loses a pack or has one twice, or whose inverse is another plan's.
    """
    taken, inverse = np.asarray(plan.taken), np.asarray(plan.inverse)
    if taken.shape != shape or inverse.shape != (taken.size,):
        raise UsageError(
            f"planner {name!r}: found a plan of shape {taken.shape} and an inverse of {inverse.shape}, "
            f"expected {shape} and {(shape[0] * shape[1],)}"
        )
    flat = taken.reshape(-1)
    everything = np.arange(taken.size)
    if flat.size and (flat.min() < 0 or flat.max() >= flat.size or not np.array_equal(inverse[flat], everything)):
        raise UsageError(f"planner {name!r}: found a plan and an inverse that do not undo each other; packs would be lost")


def imbalance(plan: Plan, which: str) -> Any:
    """`before`, `after` or `bound`; None where the planner does not say."""
    return getattr(plan, which, None)
