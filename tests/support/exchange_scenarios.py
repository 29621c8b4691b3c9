"""What ranks do in tests of exchange and reordering: a source of packs, planners to stand in, and functions for each rank."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pack_samples import PATCHES, pack_sample, patch_image

from packer.format.errors import UsageError
from plugin.batch import build
from plugin.batch.torch_batch import TorchBatch
from plugin.exchange.errors import RankLost
from plugin.exchange.group import GlooGroup
from plugin.exchange.staged import StagedTransport
from plugin.exchange.transport import buffer
from plugin.reorder import BalancedLoader, Counters, Parallel

LENGTH = 96
PROFILE, COST = "p" * 32, "c" * 32


def made_pack(stream: int, number: int) -> TorchBatch:
    """Two samples, more or less images; every pack of every stream is another."""
    numbers = np.random.default_rng((stream, number))
    side = 2 * int(numbers.integers(1, 5))
    image = patch_image(side, side, seed=1000 * stream + number)
    first = pack_sample(
        [5, image, 3], f"{stream}/{number}/a", seed=number, encoder_cost=side**4, llm_cost=90, num_patches=side**2
    )
    second = pack_sample([int(numbers.integers(2, 30))], f"{stream}/{number}/b", seed=stream, llm_cost=int(numbers.integers(50)))
    batch = build(
        [replace(first, row=number), second], form=PATCHES, sequence_length=LENGTH, alignment=8, pad_id=0, fingerprint=PROFILE
    )
    return batch.to_torch()


class Source:
    """A stream that is made as it is read."""

    def __init__(
        self, stream: int, length: int, *, num_workers: int | None = None, fails_at: int = -1, slow_at: int = -1
    ) -> None:
        self.stream, self.length, self.num_workers = stream, length, num_workers
        self.fails_at, self.slow_at = fails_at, slow_at
        self.position = 0
        self.threads: set[str] = set()
        self.calls = 0

    def __next__(self) -> TorchBatch:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        if self.position == self.fails_at:
            raise OSError(f"disk of stream {self.stream} is gone")
        if self.position == self.slow_at:
            time.sleep(1.0)
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return made_pack(self.stream, self.position - 1)

    def save_state(self) -> Any:
        self.threads.add(threading.current_thread().name)
        return {"position": self.position}

    def restore_state(self, state: Any) -> None:
        assert self.calls == 0
        self.position = state["position"]


def plan_of(taken: np.ndarray) -> SimpleNamespace:
    inverse = np.empty(taken.size, np.int32)
    inverse[taken.reshape(-1)] = np.arange(taken.size)
    return SimpleNamespace(taken=taken.astype(np.int32), inverse=inverse, before="1.5", after="1.1", bound="1.0")


@dataclass
class Sorted:
    """The dearest packs first, one for each rank: nearly all move."""

    name: str = "sorted"

    def __call__(self, encoder: np.ndarray, llm: np.ndarray, num_bytes: np.ndarray) -> Any:
        cost = (encoder + llm).reshape(-1)
        return plan_of(np.lexsort((np.arange(cost.size), -cost)).reshape(encoder.shape[::-1]).T)


@dataclass
class Shifted:
    """The first microbatch is the rank's own, all others its neighbour's."""

    name: str = "shifted"

    def __call__(self, encoder: np.ndarray, llm: np.ndarray, num_bytes: np.ndarray) -> Any:
        taken = np.arange(encoder.size).reshape(encoder.shape)
        return plan_of(np.concatenate([taken[:, :1], np.roll(taken, 1, axis=0)[:, 1:]], axis=1))


@dataclass
class Local:
    """Each rank's own order."""

    name: str = "local"

    def __call__(self, encoder: np.ndarray, llm: np.ndarray, num_bytes: np.ndarray) -> Any:
        return plan_of(np.arange(encoder.size).reshape(encoder.shape))


def parallel(size: int) -> Parallel:
    """The first so many ranks, all data parallel."""
    return Parallel(rank=dist.get_rank() if size > 1 else 0, data_ranks=tuple(range(size)))


def balanced(source: Any, size: int, **changes: Any) -> BalancedLoader:
    arguments: dict[str, Any] = {
        "planner": Sorted(),
        "num_microbatches": 4,
        "profile": PROFILE,
        "cost": COST,
        "sequence_length": LENGTH,
        "slice_bytes": 20_000,
        "timeout_seconds": 30.0,
        "slow_seconds": 0.3,
    }
    changes.setdefault("parallel", parallel(size))
    return BalancedLoader(source, **(arguments | changes))


def seen(pack: TorchBatch) -> tuple[tuple[str, ...], str]:
    """Ids and the digest of every byte."""
    return pack.batch.sample_ids, hashlib.sha256(pack.tensor.numpy().tobytes()).hexdigest()


def train(size: int, lengths: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    """Take everything; by step, what was handed out."""
    source = Source(dist.get_rank(), lengths[dist.get_rank()])
    finished: list[Counters] = []
    loader = balanced(source, size, on_batch=finished.append, **changes)
    assert source.calls == 0
    steps: dict[int, list[Any]] = {}
    tokens = {}
    for pack in loader:
        steps.setdefault(loader.step, []).append(seen(pack))
        tokens[loader.step] = loader.num_loss_tokens
    assert list(loader) == []
    return {
        "steps": steps,
        "tokens": tokens,
        "dropped": loader.dropped,
        "counters": finished,
        "state": loader.save_state(),
        "threads": source.threads,
    }


def resume(size: int, length: int, num_workers: int | None, positions: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    """Everything, and the tails after states taken at some positions."""
    rank = dist.get_rank()
    source = Source(rank, length, num_workers=num_workers)
    loader = balanced(source, size, **changes)
    states = [loader.save_state()]
    whole = []
    for pack in loader:
        whole.append(seen(pack))
        states.append(loader.save_state())
    tails = {}
    for position in positions:
        again = balanced(Source(rank, length, num_workers=num_workers), size, **changes)
        again.restore_state(states[position])
        first = again.save_state()
        tails[position] = (first == states[position], [seen(pack) for pack in again])
    return {"whole": whole, "tails": tails, "states": states, "threads": source.threads}


def slow(size: int) -> int:
    """The last rank reads for a second."""
    rank = dist.get_rank()
    source = Source(rank, 8, slow_at=5 if rank == size - 1 else -1)
    return len(list(balanced(source, size)))


def differing(size: int, changes: list[dict[str, Any]]) -> None:
    """Each rank with other settings."""
    source = Source(dist.get_rank(), 8)
    loader = balanced(source, size, **changes[dist.get_rank()])
    try:
        next(loader)
    finally:
        assert source.calls == 0, "nothing is read before settings are compared"


def differing_later(size: int) -> int:
    """Rank 1 counts other microbatches from the second global batch on; packs that each rank takes before it hears of that."""
    other = int(dist.get_rank() == 1)
    loader = balanced(Source(dist.get_rank(), 40), size, num_microbatches=lambda step: 4 + step * other)
    taken = 0
    with suppress(UsageError):
        for _ in loader:
            taken += 1
    assert taken == 4
    next(loader)
    return taken


def failing(size: int, num_workers: int | None) -> dict[str, Any]:
    """Rank 1 fails in its second global batch; where each rank hears of it, and whether it is told so again."""
    rank = dist.get_rank()
    loader = balanced(Source(rank, 40, num_workers=num_workers, fails_at=6 if rank == 1 else -1), size)
    taken = 0
    errors = []
    try:
        for _ in loader:
            taken += 1
    except Exception as error:
        errors.append(error)
    state = loader.save_state()
    try:
        next(loader)
    except Exception as error:
        errors.append(error)
    return {"taken": taken, "errors": [f"{type(error).__name__}: {error}" for error in errors], "state": state}


def microbatches_by_step(step: int) -> int:
    return 2 + step


def replicas(readers: str, num_stages: int, other_stream: bool, num_steps: int) -> dict[str, Any]:
    """Data parallel 2, and each replica of two ranks: (0, 1) and (2, 3)."""
    rank = dist.get_rank()
    first = rank // 2 * 2
    where = Parallel(rank=rank, data_ranks=(rank % 2, 2 + rank % 2), replica_ranks=(first, first + 1), num_stages=num_stages)
    stream = 7 if other_stream and rank == 3 else rank // 2
    source = Source(stream, 4 * num_steps) if where.reads(readers) else None
    loader = balanced(source, 4, parallel=where, readers=readers)
    if num_stages == 2:
        # A later stage asks for its first pack when an earlier one has computed with it.
        if rank % 2:
            dist.recv(torch.zeros(1), rank - 1)
        packs = [next(loader)]
        if rank % 2 == 0:
            dist.send(torch.zeros(1), rank + 1)
    else:
        packs = []
    packs += loader
    return {"packs": [seen(pack) for pack in packs], "calls": source.calls if source else 0, "state": loader.save_state()}


class Dying(Source):
    """Dies as it begins with its second global batch, when the others have been waiting for it."""

    def __next__(self) -> TorchBatch:
        if self.position == 4:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__next__()


def killed_reading(size: int, victim: int) -> dict[str, Any]:
    """One rank dies while the others gather."""
    rank = dist.get_rank()
    source = (Dying if rank == victim else Source)(rank, 40)
    return _until_error(balanced(source, size))


def killed_exchanging(size: int, victim: int) -> dict[str, Any]:
    """One rank dies while the others are in the all-to-all of the second global batch."""
    rank = dist.get_rank()
    loader = balanced(Source(rank, 40), size)
    if rank == victim:
        transport = loader._transport
        exchange = transport.exchange

        def dying(job: Any) -> None:
            if job.step == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            exchange(job)

        transport.exchange = dying  # type: ignore[method-assign]
    return _until_error(loader)


def damaged(size: int) -> dict[str, Any]:
    """What rank 0 sends in the second global batch is not what it announced."""
    loader = balanced(Source(dist.get_rank(), 40), size, planner=Shifted())
    if dist.get_rank() == 0:
        transport = loader._transport
        exchange = transport.exchange

        def changing(job: Any) -> None:
            if job.step == 1:
                job.packs[2].tensor[-1] ^= 1
            exchange(job)

        transport.exchange = changing  # type: ignore[method-assign]
    return _until_error(loader)


def _until_error(loader: BalancedLoader) -> dict[str, Any]:
    """Train slowly, so that what happens in the background is heard of in the middle of a batch."""
    taken = 0
    started = time.monotonic()
    try:
        for _ in loader:
            taken += 1
            time.sleep(0.05)
    except Exception as error:
        return {"taken": taken, "error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - started}
    return {"taken": taken, "error": None}


def late(size: int) -> dict[str, Any]:
    """The last rank is later than the deadline."""
    rank = dist.get_rank()
    source = Source(rank, 40)
    loader = balanced(source, size, timeout_seconds=1.0)
    next(loader)
    if rank == size - 1:
        source.length = 40
        original = Source.__next__

        def sleeping(self: Source) -> TorchBatch:
            time.sleep(1.5)
            return original(self)

        Source.__next__ = sleeping  # type: ignore[method-assign]
    try:
        return _until_error(loader)
    finally:
        if rank == size - 1:
            Source.__next__ = original  # type: ignore[method-assign]


def leave_waiting(size: int) -> str:
    """Rank 0 begins a global batch the others never come to; it is left in the collective."""
    loader = balanced(Source(dist.get_rank(), 40), size)
    if dist.get_rank() == 0:
        threading.Thread(target=_next_of, args=(loader,), daemon=True).start()
        while loader._worker is None or loader._worker.stage != "comparing settings":
            time.sleep(0.01)
    kept.append(loader)
    return "left"


def _next_of(loader: BalancedLoader) -> None:
    with suppress(RankLost):  # What the thread ends with when the process leaves.
        next(loader)


kept: list[BalancedLoader] = []


class GlooDevice:
    """The device of the staged transport on this machine: a gloo group that the trainer's thread has to itself."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.group = GlooGroup(ranks, purpose="device", timeout_seconds=30.0)
        self.now: tuple[int, int] = (-1, -1)
        """(Step, microbatch) that the trainer is at."""
        self.launched: list[tuple[int, int, int]] = []
        """(Step, microbatch, number of bytes among all ranks) of each launch."""
        self.threads: set[str] = set()
        self.most_bytes = 0

    def host(self, num_bytes: int) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        self.most_bytes = max(self.most_bytes, num_bytes)
        return buffer(num_bytes)

    def launch(self, sent: torch.Tensor, received: torch.Tensor, received_bytes: list[int], sent_bytes: list[int]) -> Any:
        self.threads.add(threading.current_thread().name)
        total = self.group.gather(np.array([sum(sent_bytes)], np.int64).view(np.uint8)).view(np.int64).sum()
        self.launched.append((*self.now, int(total)))
        work = self.group._group.alltoall_base(received, sent, received_bytes, sent_bytes)
        return SimpleNamespace(is_done=work.is_completed, wait=work.wait, kept=(sent, received))


def staged(size: int, length: int, num_microbatches: int, num_workers: int | None, planner: Any) -> dict[str, Any]:
    """Train over the staged transport; what was launched when."""
    rank = dist.get_rank()
    device = GlooDevice(range(size))
    transport = StagedTransport(device, name="gloo for tests")
    source = Source(rank, length, num_workers=num_workers)
    loader = balanced(source, size, transport=transport, num_microbatches=num_microbatches, planner=planner, slice_bytes=12_000)
    packs = []
    for number in range(length // num_microbatches * num_microbatches + 1):
        device.now = divmod(number, num_microbatches)
        if (pack := next(loader, None)) is None:
            break
        packs.append(seen(pack))
    return {"packs": packs, "launched": device.launched, "threads": device.threads, "most_bytes": device.most_bytes}


def staged_pipeline(num_microbatches: int, num_steps: int) -> list[Any]:
    """Two stages, data parallel 2: a later stage asks for a pack when the earlier one has computed with it."""
    rank = dist.get_rank()
    first = rank // 2 * 2
    data_ranks = (rank % 2, 2 + rank % 2)
    where = Parallel(rank=rank, data_ranks=data_ranks, replica_ranks=(first, first + 1), num_stages=2)
    transport = StagedTransport(GlooDevice(data_ranks), name="gloo for tests")
    loader = balanced(
        Source(rank // 2, num_steps * num_microbatches),
        4,
        parallel=where,
        transport=transport,
        num_microbatches=num_microbatches,
        timeout_seconds=10.0,
    )
    packs = []
    for _ in range(num_steps * num_microbatches):
        if rank % 2:
            dist.recv(torch.zeros(1), rank - 1)
        packs.append(seen(next(loader)))
        if not rank % 2:
            dist.send(torch.zeros(1), rank + 1)
    return packs


def other_groups(size: int) -> int:
    """Only some ranks are in a group of the trainer's; then new groups have other names in its own numbering."""
    if dist.get_rank() == 0:
        kept_groups.append(dist.new_group([0], use_local_synchronization=True))
    return len(list(balanced(Source(dist.get_rank(), 4), size)))


kept_groups: list[Any] = []


def resume_after(size: int) -> list[str]:
    """Go on after the first pack of the second global batch."""
    rank = dist.get_rank()
    loader = balanced(Source(rank, 8), size, planner=Local())
    state = {**loader.save_state(), "snapshot": {"position": 4}, "step": 1, "yielded": 1}
    loader.restore_state(state)
    return [pack.batch.sample_ids[0] for pack in loader]


def close_unstarted(size: int) -> str:
    """Rank 0 closes its loader before its first pack, and goes on living; the others wait for that pack."""
    loader = balanced(Source(dist.get_rank(), 40), size)
    kept.append(loader)
    if dist.get_rank() == 0:
        loader.close()
        loader.close()
        return "closed"
    return str(_until_error(loader)["error"])


def close_in_child(size: int) -> int:
    """A process forked from rank 0 closes what it was forked with; how many packs the ranks then train on."""
    loader = balanced(Source(dist.get_rank(), 8), size)
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if child == 0:
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
    return len(list(loader))


def leave_middle(size: int) -> None:
    """All leave in the middle of a global batch, while the next is on its way."""
    loader = balanced(Source(dist.get_rank(), 400), size, num_microbatches=40)
    next(loader)
    kept.append(loader)


def overlapping(size: int) -> tuple[Any, list[Any]]:
    """The first pack, taken while nothing may travel yet, and the second batch, as it lies there before it is asked for."""
    loader = balanced(Source(dist.get_rank(), 8), size, planner=Shifted())
    transport, may_travel = loader._transport, threading.Event()
    exchange = transport.exchange

    def held(job: Any) -> None:
        assert may_travel.wait(60)
        exchange(job)

    transport.exchange = held  # type: ignore[method-assign]
    first = seen(next(loader))
    may_travel.set()
    coming = loader._next
    assert coming is not None
    while not all(coming.has(microbatch) for microbatch in range(4)):
        time.sleep(0.01)
    list(itertools.islice(loader, 3))
    return first, [seen(pack) for pack in loader]


def replica_resume(size: int) -> tuple[list[Any], list[Any]]:
    """Everything, and what follows a state of the reader's that all ranks of the replica got."""
    rank = dist.get_rank()
    first = rank // 2 * 2
    where = Parallel(rank=rank, data_ranks=(rank % 2, 2 + rank % 2), replica_ranks=(first, first + 1))

    def loader() -> BalancedLoader:
        source = Source(rank // 2, 12) if where.reads("replica") else None
        return balanced(source, size, parallel=where, readers="replica")

    one = loader()
    packs = [seen(next(one)) for _ in range(6)]
    states: list[Any] = [None] * size
    dist.all_gather_object(states, one.save_state())
    packs += [seen(pack) for pack in one]
    again = loader()
    again.restore_state(states[first])
    return packs, [seen(pack) for pack in again]


def forked(size: int) -> int:
    """A loader worker is forked after a loader was closed, and collects what is left of that; how it ends."""
    group = GlooGroup(range(size), purpose="forked", timeout_seconds=30.0)
    group.gather(np.zeros(8, np.uint8))
    group.close()
    child = os.fork()
    if not child:
        signal.alarm(10)
        del group._group
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def leave_early(size: int, peers: int) -> Any:
    """The last rank trains on one global batch and is done; the others hear of it before they take what is left of theirs.

    In replicas of several peers, some of the others are in no group with it.
    """
    rank = dist.get_rank()
    first = rank // peers * peers
    where = Parallel(
        rank=rank, data_ranks=tuple(range(rank % peers, size, peers)), replica_ranks=tuple(range(first, first + peers))
    )
    loader: BalancedLoader | None = balanced(Source(rank // peers, 40, slow_at=4), size, parallel=where)
    assert loader is not None
    if dist.get_rank() == size - 1:
        taken = len(list(itertools.islice(loader, 4)))
        loader = None
        return taken
    next(loader)
    coming = loader._next
    assert coming is not None
    while coming._error is None:
        time.sleep(0.01)
    taken = 1
    try:
        for _ in loader:
            taken += 1
    except Exception as error:
        return taken, f"{type(error).__name__}: {error}"
    return taken, None
