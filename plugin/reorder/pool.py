"""One global batch as one rank holds it: filled by the background thread, emptied by the trainer's."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from plugin.batch.torch_batch import TorchBatch
from plugin.reorder.counters import Counters

_log = logging.getLogger(__name__)


class Pool:
    """Slots, one for each microbatch; every wait ends when the pool fails."""

    def __init__(self, step: int, num_microbatches: int, *, stage: Callable[[], str], slow_seconds: float) -> None:
        """Args:
        stage: what the background thread is doing, for warnings.
        slow_seconds: how long to wait between warnings.
        """
        self.step = step
        self.num_microbatches = num_microbatches
        self.counters = Counters(step=step)
        self.before: Any = None
        self.after: Any = None
        """States of the source around it."""
        self.is_ended = False
        """The streams end before it is full."""
        self.dropped: tuple[tuple[str, ...], ...] = ()
        """Sample ids of this rank's packs that are then not trained on."""
        self.num_dropped = 0
        """Packs of all ranks."""
        self.max_pack_bytes = 0
        """Over all ranks."""
        self._slots: list[TorchBatch | None] = [None] * num_microbatches
        self._is_known = False
        self._error: BaseException | None = None
        self._is_shared = False
        self._changed = threading.Condition()
        self._stage = stage
        self._slow_seconds = slow_seconds

    def deliver(self, microbatch: int, pack: TorchBatch) -> None:
        """By whoever brought it."""
        with self._changed:
            self._slots[microbatch] = pack
            self._changed.notify_all()

    def know(self) -> None:
        """The plan is made, or the end is found."""
        with self._changed:
            self._is_known = True
            self._changed.notify_all()

    def fail(self, error: BaseException, *, is_shared: bool) -> None:
        """`is_shared`: all ranks of the group fail alike, so they can stop together, before this global batch."""
        with self._changed:
            self._error, self._is_shared = error, is_shared
            self._changed.notify_all()

    def refuse_lost(self) -> None:
        """Raise now what happened to some ranks only: the others would wait for them in the middle of the batch before."""
        if self._error is not None and not self._is_shared:
            raise self._error

    def has(self, microbatch: int) -> bool:
        return self._slots[microbatch] is not None

    @property
    def is_known(self) -> bool:
        """Whether the plan is made, or the end found."""
        return self._is_known

    def wait_known(self) -> None:
        """Until the plan is made."""
        self._wait(lambda: self._is_known, "the plan")

    def take(self, microbatch: int) -> TorchBatch:
        """The pack, which now belongs to the caller."""
        self._wait(lambda: self._slots[microbatch] is not None, f"microbatch {microbatch}")
        pack, self._slots[microbatch] = self._slots[microbatch], None
        assert pack is not None, "waited for it"
        return pack

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        with self._changed:
            while not is_there():
                if self._error is not None:
                    raise self._error
                if not self._changed.wait(self._slow_seconds) and not is_there():
                    _log.warning(
                        "step %d: waited %.1f s for %s; the background thread is %s",
                        self.step,
                        time.monotonic() - started,
                        what,
                        self._stage(),
                    )
