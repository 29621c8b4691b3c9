"""Virtual pipelines: one loader for several chunks of a model, and its state in files, since trainers save none for lists."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from packer.format.errors import FormatError, UsageError
from plugin.batch.torch_batch import TorchBatch


class Stateful(Protocol):
    """A balanced loader, or another with its methods."""

    def save_state(self) -> Any: ...

    def restore_state(self, state: Any) -> None: ...


class LoaderCheckpoint:
    """Saves and restores a rank's loader in a checkpoint's folder: to be called by the trainer's callbacks, on every rank.

    Files are read back by pickle, since the source's own state may be anything: restore only from folders you trust.
    """

    def __init__(self, rank: int) -> None:
        """`rank`: the global one; each rank has a file."""
        self._rank = rank
        self._waiting: Sequence[deque[TorchBatch]] = ()

    def path(self, folder: str | os.PathLike[str]) -> Path:
        return Path(folder) / f"bayplan-loader-rank{self._rank:05d}.pt"

    def watch(self, waiting: Sequence[deque[TorchBatch]]) -> None:
        """Packs that some chunks have had and others have not."""
        self._waiting = waiting

    def save(self, folder: str | os.PathLike[str], loader: Stateful) -> None:
        """Whole or not at all.

        Raises:
            UsageError: in the middle of a step, when chunks have not had the same packs.
        """
        if any(self._waiting):
            behind = [len(queue) for queue in self._waiting]
            raise UsageError(f"virtual pipeline: found chunks {behind} packs behind, expected 0 each; save between steps")
        path = self.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        with open(unfinished, "wb") as file:
            torch.save(loader.save_state(), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def restore(self, folder: str | os.PathLike[str], loader: Stateful) -> None:
        """Raises:
        FormatError: there is no file for this rank.
        """
        path = self.path(folder)
        if not path.exists():
            raise FormatError(
                f"{path}: found no state of rank {self._rank}, expected one for each rank: the checkpoint is of fewer ranks, "
                "or was saved without this callback"
            )
        loader.restore_state(torch.load(path, weights_only=False))


def chunk_iterators(
    loader: Iterator[TorchBatch], *, num_chunks: int, checkpoint: LoaderCheckpoint | None
) -> list[Iterator[TorchBatch]]:
    """One iterator for each model chunk of this rank; all see every pack, which is kept until the last has.

    Args:
        checkpoint: what the trainer calls when it saves and restores: for lists of iterators it does neither by itself.

    Raises:
        UsageError: several chunks without it: a restart would train on the same packs again.
    """
    if num_chunks < 1:
        raise UsageError(f"virtual pipeline: found {num_chunks} chunks, expected at least 1")
    if num_chunks > 1 and checkpoint is None:
        raise UsageError(
            f"virtual pipeline: found {num_chunks} model chunks and no checkpoint, expected one: trainers neither save nor "
            "restore lists of iterators, so a restart would begin the data anew. Give a LoaderCheckpoint, and call it when "
            "saving and restoring"
        )
    if num_chunks == 1:
        return [loader]
    waiting: list[deque[TorchBatch]] = [deque() for _ in range(num_chunks)]
    if checkpoint is not None:
        checkpoint.watch(waiting)
    return [_Chunk(loader, waiting, number) for number in range(num_chunks)]


class _Chunk(Iterator[TorchBatch]):
    def __init__(self, loader: Iterator[TorchBatch], waiting: list[deque[TorchBatch]], number: int) -> None:
        self._loader, self._waiting, self._number = loader, waiting, number

    def __next__(self) -> TorchBatch:
        own = self._waiting[self._number]
        if not own:
            pack = next(self._loader)
            for queue in self._waiting:
                queue.append(pack)
        return own.popleft()
