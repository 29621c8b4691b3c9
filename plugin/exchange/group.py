"""A gloo group of our own, used by one background thread; never the trainer's, and never the default one.

It is built on torch's store under a name of ours, by its members alone, as `new_group` does with local synchronisation; but that
names a group after the number of groups a process has, and waits for ever where that differs, as between pipeline stages.

When a collective fails, the rank leaves a note in the store, hangs up (so that all others fail within moments, not at their
deadline), and reads the others' notes: who left none is the one that died.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
import torch.distributed as dist
from blake3 import blake3

from packer.format.errors import BayplanError, UsageError
from plugin.exchange.descriptors import make_room
from plugin.exchange.errors import RankLeft, RankLost
from plugin.exchange.settings import named
from plugin.forks import begins_anew_after_fork

NOTE_SECONDS = 5.0
"""How long a rank that failed waits for notes of the others."""
_HANG_UP_TAG = 0x62617970
_MAX_NOTE = 2000
_TIMED_OUT = "imed out"
_NUM_NOTES = "number"
_CLOSED = "its loader was closed: its training ended, or failed, as its own log says"

Bytes = npt.NDArray[np.uint8]
_c10d: Any = dist
"""The parts of torch.distributed that have no types."""
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
"""Groups of this process by purpose and ranks: members make them in the same order, so the number is part of the name."""
_stores: list[Any] = []
"""The default store, and our connection to it: connecting takes seconds now and then."""
_inherited: list[Any] = []
"""In a loader worker, groups of the process it was forked from."""


class GlooGroup:
    """Collectives among some ranks; alone, each is done at once and torch.distributed need not be there."""

    def __init__(self, ranks: Sequence[int], *, purpose: str, timeout_seconds: float) -> None:
        """Connects; all members must do so.

        Args:
            ranks: global ranks, ascending.
            purpose: part of the name; the same on all members.
            timeout_seconds: deadline of each collective.
        """
        self.ranks = tuple(ranks)
        self.size = len(ranks)
        self._rank = 0
        self._timeout_seconds = timeout_seconds
        self._is_closed = False
        self._has_told = False
        self._group: Any = None
        if self.size == 1:
            return
        if not dist.is_initialized():
            raise UsageError("found no torch.distributed, expected it for more than one rank: call init_process_group first")
        make_room(self.size - 1)
        self._rank = self.ranks.index(dist.get_rank())
        key = (purpose, self.ranks)
        _made[key] += 1
        name = f"bayplan/{purpose}/{blake3(repr(self.ranks).encode()).hexdigest(8)}/{_made[key]}"
        self._store = _c10d.PrefixStore(name, _default_store())
        deadline = timedelta(seconds=timeout_seconds)
        try:
            self._group = _c10d.ProcessGroupGloo(self._store, self._rank, self.size, deadline)
        except RuntimeError as error:
            raise RankLost(
                f"connecting {named(self.ranks)} to exchange packs: {error}; all of them must make their loaders"
            ) from error
        begins_anew_after_fork(self)

    def after_fork(self) -> None:
        """A child never lets go of the group: that would wait for threads it does not have, or crash."""
        _inherited.append(self._group)
        self._is_closed = True  # Nor does it close it: the connections are its parent's.

    def gather(self, row: Bytes) -> Bytes:
        """[ranks, bytes]: everybody's row."""
        return self.gather_later(row)()

    def gather_later(self, row: Bytes) -> Callable[[], Bytes]:
        """Begin to gather; the result waits for it."""
        if self._group is None:
            return lambda: row[None]
        found = torch.empty((self.size, len(row)), dtype=torch.uint8)
        work = self._group.allgather([list(found)], [torch.from_numpy(row.copy())])

        def wait() -> Bytes:
            work.wait()
            array: Bytes = found.numpy()
            return array

        return wait

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, received_bytes: list[int], sent_bytes: list[int]) -> None:
        """Parts of `sent` behind each other, one for each rank, become parts of `received`."""
        assert self._group is not None, "a rank alone moves nothing"
        self._group.alltoall_base(received, sent, received_bytes, sent_bytes).wait()

    def broadcast_later(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to copy the first rank's tensor to all others; the result waits for it."""
        if self._group is None:
            return lambda: None
        work = self._group.broadcast([tensor], _c10d.BroadcastOptions())

        def wait(kept: torch.Tensor = tensor) -> None:
            work.wait()

        return wait

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Collectives of one purpose: their failure becomes an error that says it, and which ranks are lost.

        Raises:
            RankLost: a rank died, stopped or was later than the deadline.
        """
        if self._is_closed:
            raise RankLeft(f"{what}: the loader was closed")
        try:
            yield
        except BayplanError:
            raise
        except RuntimeError as error:
            if self._is_closed:
                raise RankLeft(f"{what}: the loader was closed") from error
            self.leave_note(f"{what}: {error}", is_cause=False)
            raise self._why(what, error) from error

    def leave_note(self, text: str, *, is_cause: bool) -> None:
        """Tell the others why this rank stops, and make their collectives fail at once."""
        if self._group is None:
            return
        if not self._has_told:
            self._has_told = True
            with suppress(RuntimeError):  # The store may be gone with its rank.
                order = self._store.add(_NUM_NOTES, 1)
                note = {"rank": self.ranks[self._rank], "text": text[:_MAX_NOTE], "is_cause": is_cause, "order": order}
                self._store.set(str(order), orjson.dumps(note).decode())
        self._hang_up()

    def close(self) -> None:
        """By any thread: the one that is in a collective comes back, and the others are told that this rank has left."""
        if not self._is_closed:
            self._is_closed = True
            self.leave_note(_CLOSED, is_cause=True)

    def _hang_up(self) -> None:
        # Torch cannot abort a gloo group; but a wait that is too short closes every connection of it.
        assert self._group is not None
        with suppress(RuntimeError):
            work = self._group.recv([torch.empty(1, dtype=torch.uint8)], (self._rank + 1) % self.size, _HANG_UP_TAG)
            work.wait(timedelta(milliseconds=1))

    def _why(self, what: str, error: RuntimeError) -> RankLost:
        notes = self._notes()
        order = sorted(notes, key=lambda rank: int(notes[rank]["order"]))
        for rank in order:
            if notes[rank]["is_cause"]:
                kind = RankLeft if notes[rank]["text"] == _CLOSED else RankLost
                return kind(f"{what}: rank {rank} stopped: {notes[rank]['text']}")
        silent = [rank for rank in self.ranks if rank not in notes]
        if len(silent) == self.size:
            return RankLost(f"{what}: the rank that holds the store of torch.distributed is gone, and the connection: {error}")
        if silent:
            found = f"{named(silent)} of {self.size} gave no answer: killed, out of memory, or later than the deadline"
        elif any(_TIMED_OUT in notes[rank]["text"] for rank in order):
            found = f"a rank was later than the deadline of {self._timeout_seconds:g} s; rank {order[-1]} was heard of last"
        else:
            found = f"the connection broke, though all {self.size} ranks live: {error}"
        return RankLost(f"{what}: {found}. Restart all ranks from the last checkpoint")

    def _notes(self) -> dict[int, dict[str, Any]]:
        """By global rank; waits until all have left one or a cause is known."""
        deadline = time.monotonic() + NOTE_SECONDS
        found: dict[int, dict[str, Any]] = {}
        while True:
            try:
                missing = set(range(1, self._store.add(_NUM_NOTES, 0) + 1)) - {int(note["order"]) for note in found.values()}
                for note in self._read([str(order) for order in sorted(missing)]):
                    found.setdefault(note["rank"], note)
            except RuntimeError:
                return found  # The store is gone with its rank.
            is_known = any(note["is_cause"] for note in found.values())
            if len(found) == self.size or is_known or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def _read(self, keys: list[str]) -> list[dict[str, Any]]:
        """Notes there are; all of thousands of ranks read, so it takes few requests to the store."""
        if not keys:
            return []
        if hasattr(self._store, "multi_get") and self._store.has_extended_api() and self._store.check(keys):
            return [orjson.loads(text) for text in self._store.multi_get(keys)]
        return [orjson.loads(self._store.get(key)) for key in keys if self._store.check([key])]


def _default_store() -> Any:
    """A connection of our own where torch can make one: the trainer's thread may be waiting on its."""
    store = _c10d.distributed_c10d._get_default_store()
    if not hasattr(store, "clone"):
        return store
    if not _stores or _stores[0] is not store:
        _stores[:] = [store, store.clone()]
    return _stores[1]
