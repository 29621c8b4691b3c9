"""The data states of a trainer's checkpoint: where each rank's lies, and what is said when there is none for a step.

A stream is cut by data-parallel rank, so a state is of one rank of one size, and another size cannot take it up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packer.format.errors import UsageError

_FILE = re.compile(r"train_dataloader_dprank(\d{3,})\.pt")
_STEP = re.compile(r"iter_(\d{7,})")
WAY_OUT = "or start the data over on purpose (`starts_over`)"


def state_file(folder: str | Path, step: int, rank: int) -> Path:
    """Where Megatron Bridge keeps the state of one data-parallel rank (its `training/checkpointing.py`)."""
    return Path(folder) / f"iter_{step:07d}" / f"train_dataloader_dprank{rank:03d}.pt"


def ranks_with_state(folder: str | Path) -> dict[int, frozenset[int]]:
    """Step -> data-parallel ranks that saved a state at it; empty if there is no such folder."""
    found = {}
    for path in Path(folder).glob("iter_*"):
        ranks = frozenset(int(match[1]) for file in path.glob("*.pt") if (match := _FILE.fullmatch(file.name)))
        if ranks and (step := _STEP.fullmatch(path.name)):
            found[int(step[1])] = ranks
    return found


def require_state(folders: Sequence[str | Path], step: int, *, rank: int, size: int) -> Path:
    """The state of a rank at a step, in the first of the folders that has the step.

    Args:
        rank, size: of the data-parallel group now.

    Raises:
        UsageError: no data state for the step, or that of another number of ranks: with what there is instead.
    """
    found = {folder: ranks_with_state(folder) for folder in folders}
    for folder, steps in found.items():
        if (ranks := steps.get(step)) is not None:
            refuse_other_ranks(f"data state of step {step} in {folder}", ranks, size)
            return state_file(folder, step, rank)
    others = sorted({other for steps in found.values() for other in steps})
    where = ", ".join(map(str, folders)) or "any folder"
    if others:
        what = f"found those of steps {listed(others)}; resume from one of them, "
    else:
        what = "found none of any step; give the folder that has them, "
    raise UsageError(f"no data state for step {step} in {where}: {what}{WAY_OUT}")


def refuse_other_ranks(what: str, ranks: frozenset[int], size: int) -> None:
    """Args:
        what: the states, for the message. ranks: those that have one; at least one.

    Raises:
        UsageError: they are not ranks 0 to `size` - 1.
    """
    if missing := sorted(set(range(max(ranks))) - ranks):
        raise UsageError(
            f"{what}: found none of data-parallel ranks {listed(missing)}: the checkpoint is not whole, "
            f"or lies in folders that not all nodes see; resume from another step, {WAY_OUT}"
        )
    if len(ranks) != size:
        raise UsageError(
            f"{what}: found {len(ranks)} data-parallel ranks, expected {size}: streams cannot be dealt out anew; "
            f"resume with data-parallel size {len(ranks)}, or, where nodes have folders of their own, put all files into each, "
            f"{WAY_OUT}"
        )


def is_balanced(state: Any) -> bool:
    """Whether a balanced loader saved it."""
    return isinstance(state, Mapping) and {"step", "yielded", "has_snapshot", "snapshot"} <= state.keys()


def of_unbalanced(state: Any) -> Any:
    """For a run that leaves balancing: between two global batches the state of the loader inside; any other as it is."""
    if is_balanced(state) and state["has_snapshot"] and not state["yielded"]:
        return state["snapshot"]
    return state


def listed(numbers: Iterable[int]) -> str:
    """For a message."""
    return ", ".join(map(str, numbers))
