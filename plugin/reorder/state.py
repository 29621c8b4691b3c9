"""The state of a balanced loader: plain values around the source's own state, and when it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer.format.errors import UsageError

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands: before microbatch `yielded` of a step, whose packs come after `snapshot`."""

    step: int
    yielded: int
    snapshot: Any
    """State of the source before the global batch; None on a rank that does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a state belongs to."""

    dp_size: int
    profile: str
    cost: str
    planner: str
    reads: bool


def encode(position: Position, identity: Identity, num_microbatches: int) -> dict[str, Any]:
    """Builtin types around the snapshot, for trainers whose checkpoints load nothing else."""
    return {
        "version": VERSION,
        "dp_size": identity.dp_size,
        "profile": identity.profile,
        "cost": identity.cost,
        "planner": identity.planner,
        "num_microbatches": num_microbatches,
        "has_snapshot": identity.reads,
        "snapshot": position.snapshot,
        "step": position.step,
        "yielded": position.yielded,
    }


def decode(state: Any, identity: Identity, num_microbatches: int | None) -> Position:
    """Raises:
    UsageError: the state of another loader, or of another run; both values are in the message.

    Args:
        num_microbatches: of the state's step here; None to leave it unchecked.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("version"), int):
        raise UsageError(f"state: found a {type(state).__name__}, expected what save_state of a balanced loader returned")
    expected = {"version": VERSION, "dp_size": identity.dp_size, "profile": identity.profile, "cost": identity.cost}
    if state.get("yielded"):
        # The rest of a batch that was begun is only known to the planner that dealt it.
        expected |= {"planner": identity.planner}
        expected |= {} if num_microbatches is None else {"num_microbatches": num_microbatches}
    if not _is_position(state):
        step, yielded, number = (state.get(name) for name in ("step", "yielded", "num_microbatches"))
        raise UsageError(
            f"state: found microbatch {yielded!r} of {number!r} at step {step!r}, expected a place before the last; the state is "
            "damaged"
        )
    wrong = [f"{name} {state.get(name)!r} instead of {value!r}" for name, value in expected.items() if state.get(name) != value]
    if wrong:
        raise UsageError(
            f"state: found {', '.join(wrong)}; restore it with the settings it was saved with, or start without a state"
        )
    if identity.reads and not state.get("has_snapshot"):
        raise UsageError(
            "state: found that of a rank that does not read, expected one of the first rank of its replica: its peers' states "
            "say how far they are, not what comes next"
        )
    return Position(step=state["step"], yielded=state["yielded"], snapshot=state["snapshot"])


def _is_position(state: Mapping[str, Any]) -> bool:
    step, yielded, number = (state.get(name) for name in ("step", "yielded", "num_microbatches"))
    if not (isinstance(step, int) and isinstance(yielded, int) and isinstance(number, int)):
        return False
    return "snapshot" in state and step >= 0 and 0 <= yielded < number
