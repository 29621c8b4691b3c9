"""Records and images fetched ahead within a byte budget: at once what is in memory, the rest by threads. A loader worker makes
its own pool; none is handed to it.

Follows Energon's `CachePool` where that fits: asking gives a lazy handle whose `get` returns the data, askers for the same key
share one read, what somebody waits for goes first whatever the budget, `close` ends it. It differs in keeping
images in memory, not on a disk, and in that a read cannot block for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from packer.format.errors import UsageError
from plugin.forks import begins_anew_after_fork
from plugin.prefetch_engine import Engine, Limits
from plugin.reader import BundleReader
from plugin.requests import Request, Result


class Prefetched:
    """What was submitted under a key. `get` may be called any number of times: after the first it reads again."""

    __slots__ = ("_pool", "key", "requests")

    def __init__(self, pool: PrefetchPool, key: Hashable, requests: tuple[Request, ...]) -> None:
        self._pool = pool
        self.key = key
        self.requests = requests

    def get(self) -> list[Result]:
        """One result per request, in their order. Errors as `PrefetchPool.get`."""
        return self._pool._engine().get(self.key, self.requests)

    def is_done(self) -> bool:
        """Whether `get` would return, or raise, at once."""
        return self._pool._engine().is_done(self.key)

    def cancel(self) -> bool:
        """As `PrefetchPool.cancel`."""
        return self._pool.cancel(self.key)


class PrefetchPool:
    """Reads what is submitted, in that order, while the budget allows.

    Threads begin with the first read of a process that is not in memory here (the page cache). A forked or unpickled pool begins
    empty, with threads of its own.

    Args:
        num_threads: reads at once. A store that answers after 20 ms gives 50 reads a second to each.
        max_bytes: read or being read, and not yet taken. What somebody waits for may pass it, and so may a single larger read.
        read_deadline_seconds: of one read with its retries. An overdue read is given up and made once more by another thread.
        max_abandoned: threads that may hang in reads that were given up before the pool refuses to go on; None is `num_threads`.
    """

    def __init__(
        self,
        reader: BundleReader,
        *,
        num_threads: int = 16,
        max_bytes: int = 256 << 20,
        read_deadline_seconds: float = 60.0,
        max_abandoned: int | None = None,
    ) -> None:
        max_abandoned = num_threads if max_abandoned is None else max_abandoned
        if num_threads < 1 or max_bytes < 1 or read_deadline_seconds <= 0 or max_abandoned < 0:
            raise UsageError(
                f"found num_threads {num_threads}, max_bytes {max_bytes}, read_deadline_seconds {read_deadline_seconds}, "
                f"max_abandoned {max_abandoned}; expected the first three above 0 and the last at least 0"
            )
        self.reader = reader
        self._limits = Limits(
            num_threads=num_threads,
            max_bytes=max_bytes,
            read_deadline_seconds=read_deadline_seconds,
            max_abandoned=max_abandoned,
        )
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._current: Engine | None = None
        self._closing: weakref.finalize[Any, Any] | None = None
        begins_anew_after_fork(self)

    def after_fork(self) -> None:
        if self._closing is not None:
            self._closing.detach()  # the threads to join are the parent's
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self.reader, "_limits": self._limits}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reader, self._limits = state["reader"], state["_limits"]
        self._begin()

    def __enter__(self) -> PrefetchPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _engine(self) -> Engine:
        with self._lock:
            if self._current is None:
                self._current = Engine(self.reader, self._limits)
                self._closing = weakref.finalize(self, _close_in, os.getpid(), self._current)
            return self._current

    def submit(self, key: Hashable, requests: Sequence[Request]) -> Prefetched:
        """Fetch what is asked for: at once what is in this machine's memory, the rest in the background; waits for nobody. A key
        that is there already is not read twice.

        Raises:
            UsageError: when the key is there with other requests.
        """
        asked = tuple(requests)
        self._engine().submit(key, asked)
        return Prefetched(self, key, asked)

    def get(self, key: Hashable) -> list[Result]:
        """What was submitted under a key, one result per request; waits for it, and it goes first from now on.

        After it the bytes are the caller's, and the key's share of the budget is free. Another get reads them again, for the last
        256 keys; those that wait at the same time share them.

        Raises:
            ReadError: naming the place that could not be read. UsageError: for a key that was not submitted in this process.
        """
        return self._engine().get(key)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Within it what is got keeps its share of the budget: for who holds all of it until something is made of it."""
        engine = self._engine()
        engine.keep()
        try:
            yield
        finally:
            engine.let_go()

    def cancel(self, key: Hashable) -> bool:
        """Forget a key: its reads not begun are not made, and who waits for it is told. Whether it was there."""
        return self._engine().cancel(key)

    def close(self) -> None:
        """End the threads; whoever waits gets a `ReadCancelled`. A pool cannot be used after it."""
        self._engine().close()

    def counters(self) -> dict[str, float]:
        """What was read in this process so far, by threads or at once.

        Sums: `hits` and `waits` (gets that found their data, and that did not), `wait_seconds`, `bytes` (of images handed out),
        `reads`, `stalls` (reads the budget held back), `retries`, `abandoned`, `errors`. As it is now: `held_bytes`, `keys`.
        """
        return self._engine().counters()


def _close_in(process: int, engine: Engine) -> None:
    if os.getpid() == process:
        engine.close()
