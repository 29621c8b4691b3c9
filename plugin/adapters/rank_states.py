"""A file of data state for each data-parallel rank, in whatever folder a trainer keeps its checkpoint. Imports no trainer.

Energon's states are objects, so they are pickled; reading makes objects of those classes and of none else.
"""

from __future__ import annotations

import pickle
import re
import uuid
from pathlib import Path
from typing import Any, Protocol

from packer.format.errors import FormatError, UsageError
from plugin.adapters.data_state import WAY_OUT, is_balanced, listed, of_unbalanced, refuse_other_ranks

_VERSION = 1
_KIND = "bayplan data state"
_FILE = re.compile(r"bayplan_data_rank(\d{5,})\.pickle")
_STEP = re.compile(r"checkpoint-(\d+)")
_ENERGON = {
    "FlexState",
    "SavableDataLoaderState",
    "SavableDatasetCheckpoint",
    "SavableDatasetState",
    "SliceState",
    "SystemRngState",
}
_NUMPY = {"_reconstruct", "dtype", "ndarray", "scalar"}


class HasState(Protocol):
    """A `PackLoader`, or what stands around one."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def save_state(self) -> Any: ...

    def restore_state(self, state: Any) -> None: ...


def state_file(folder: str | Path, rank: int) -> Path:
    """Where the state of a data-parallel rank lies in a checkpoint's folder."""
    return Path(folder) / f"bayplan_data_rank{rank:05d}.pickle"


def ranks_with_state(folder: str | Path) -> frozenset[int]:
    """Data-parallel ranks that saved a state into a checkpoint's folder; none if there is no such folder."""
    return frozenset(int(match[1]) for path in Path(folder).glob("*") if (match := _FILE.fullmatch(path.name)))


def save_rank(loader: HasState, folder: str | Path, *, step: int | None = None) -> Path:
    """Write this rank's state after the latest pack; where one rank reads for its replica, that one's alone.

    Args:
        step: of the trainer; whoever reads can ask for the same.
    """
    path, state = state_file(folder, loader.rank), loader.save_state()
    if is_balanced(state) and not state["has_snapshot"]:
        return path  # It would not say what comes next, and may be written over that of the reader.
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"kind": _KIND, "version": _VERSION, "step": step, "loader": state}
    # Ranks of one replica write the same file: each a temporary one of its own, then the whole of it.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "wb") as file:
        _StatePickler(file).dump(document)
    temporary.replace(path)
    return path


def restore_rank(loader: HasState, folder: str | Path, *, step: int | None = None) -> None:
    """Go on where `save_rank` saved this rank; before the first pack.

    Raises:
        UsageError: no data state there, one of another step or number of ranks, or one that the loader refuses.
        FormatError: a file that is no state.
    """
    if not (ranks := ranks_with_state(folder)):
        raise UsageError(f"no data state in {folder}: {_others(Path(folder))}{WAY_OUT}")
    refuse_other_ranks(f"data state in {folder}", ranks, loader.world_size)
    document = _read(state_file(folder, loader.rank))
    if step is not None and document["step"] != step:
        raise UsageError(
            f"data state in {folder}: found one of step {document['step']}, expected step {step}, where the model stands: the "
            f"folder holds files of two checkpoints; resume from another, {WAY_OUT}"
        )
    state = document["loader"]
    loader.restore_state(state if hasattr(type(loader), "balance") else of_unbalanced(state))


def _others(folder: Path) -> str:
    """Which checkpoints beside this one have a state."""
    steps = [int(match[1]) for path in folder.parent.glob("checkpoint-*") if (match := _STEP.fullmatch(path.name))]
    if found := sorted(step for step in steps if ranks_with_state(folder.parent / f"checkpoint-{step}")):
        return f"found those of steps {listed(found)} beside it; resume from one of them, "
    return "found none beside it either; give the folder that has one, "


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            document = _StateUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError) as error:
        raise FormatError(f"{path}: found no data state ({error}), expected what bayplan saved: the file is damaged") from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise FormatError(f"{path}: found a {type(document).__name__}, expected a data state of bayplan")
    if document["version"] != _VERSION:
        raise UsageError(
            f"{path}: found version {document['version']}, expected {_VERSION}; resume with the release that saved it"
        )
    return document


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


class _StatePickler(pickle.Pickler):
    """Writes tensors, the random state of a loader worker among them, as arrays: torch's own way needs an unpickler that runs
    anything.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
            return _tensor, (value.numpy(),)
        return NotImplemented


class _StateUnpickler(pickle.Unpickler):
    """Of builtin values, arrays, tensors and Energon's states."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return _tensor
        root = module.partition(".")[0]
        if (root == "megatron" and name in _ENERGON) or (root == "numpy" and name in _NUMPY):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")
