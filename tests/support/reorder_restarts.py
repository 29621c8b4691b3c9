"""What each rank does in tests of ranks that are killed and started again, and of errors in the background thread."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from exchange_scenarios import Shifted, Sorted, Source, balanced, kept

from plugin.batch.torch_batch import TorchBatch
from plugin.exchange import group
from plugin.reorder import BalancedLoader, LoaderCheckpoint

SAVED_BEFORE = 2
"""Packs of the first global batch that all ranks have saved a state behind before one of them dies."""
NUM_PACKS = 12


def killed(size: int, victim: int, where: str, folder: str) -> str:
    """Saves after every pack; one rank dies in the background, as it reads, or in the all-to-all, of the second global batch."""
    group.NOTE_SECONDS = 2.0  # The dead leave no note: nobody need wait the usual time for it.
    rank = dist.get_rank()
    source = (Dying if (rank, where) == (victim, "all-gather") else Source)(rank, NUM_PACKS)
    source.dies = lambda: _die(size, Path(folder))  # type: ignore[attr-defined]
    loader = balanced(source, size)
    if (rank, where) == (victim, "all-to-all"):
        exchange = loader._transport.exchange
        loader._transport.exchange = lambda job: source.dies() if job.step == 1 else exchange(job)  # type: ignore
    try:
        _train(loader, Path(folder), [], pause=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def gone_on(size: int, folder: str) -> list[str]:
    """From the newest state that all ranks have saved: everything this rank has trained on, before and after."""
    rank, path = dist.get_rank(), Path(folder)
    newest = max(number for number in range(NUM_PACKS) if all(_ids(path, number, one).exists() for one in range(size)))
    loader = balanced(Source(rank, NUM_PACKS), size)
    LoaderCheckpoint(rank).restore(path / str(newest), loader)
    return _train(loader, path, json.loads(_ids(path, newest, rank).read_text()), pause=False)


class Dying(Source):
    """Dies as it begins with its second global batch."""

    def __next__(self) -> TorchBatch:
        if self.position == 4:
            self.dies()  # type: ignore[attr-defined]
        return super().__next__()


def _train(loader: BalancedLoader, folder: Path, ids: list[str], *, pause: bool) -> list[str]:
    rank = dist.get_rank()
    for pack in loader:
        ids.append(pack.batch.sample_ids[0])
        LoaderCheckpoint(rank).save(folder / str(len(ids)), loader)
        file = _ids(folder, len(ids), rank)
        unfinished = file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(ids))
        unfinished.replace(file)
        if pause:
            time.sleep(0.1)  # So that it happens in the middle of a batch.
    return ids


def _ids(folder: Path, number: int, rank: int) -> Path:
    return folder / str(number) / f"trained-{rank}.json"


def _die(size: int, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not all(_ids(folder, SAVED_BEFORE, rank).exists() for rank in range(size)):
        assert time.monotonic() < deadline, "the others train"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_exchanging(size: int) -> str:
    """The thread of rank 0 is in an all-to-all that rank 1 does not come to before it leaves."""
    rank = dist.get_rank()
    loader = balanced(Source(rank, NUM_PACKS), size, planner=Shifted())
    if rank:
        exchange = loader._transport.exchange

        def held(job: Any) -> None:
            while loader._worker is not None and not loader._worker._is_closed:
                time.sleep(0.01)
            exchange(job)

        loader._transport.exchange = held  # type: ignore[method-assign]
    next(loader)
    worker = loader._worker
    while worker is not None and worker.stage != "exchanging packs":
        time.sleep(0.01)
    kept.append(loader)
    return "left"


class Breaking(Sorted):
    """Its second plan is not made."""

    def __call__(self, encoder: np.ndarray, llm: np.ndarray, num_bytes: np.ndarray) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            raise MemoryError("no room for the plan")
        return super().__call__(encoder, llm, num_bytes)


def broken_thread(size: int) -> dict[str, Any]:
    """Planning fails in the background thread of rank 1 alone."""
    rank = dist.get_rank()
    loader = balanced(Source(rank, NUM_PACKS), size, planner=Breaking() if rank == 1 else Sorted())
    taken, errors = 0, []
    for _ in range(2):
        try:
            for _ in loader:
                taken += 1
                time.sleep(0.05)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {"taken": taken, "errors": errors}
