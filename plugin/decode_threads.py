"""Images of one pack decoded at once. Pillow lets go of the interpreter while it decodes and resizes, so threads pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from plugin.forks import begins_anew_after_fork

Item = TypeVar("Item")
Found = TypeVar("Found")


class DecodeThreads:
    """`map` over threads of this process, which begin with the first call; with one there is no thread, the caller works."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._executor: ThreadPoolExecutor | None = None
        begins_anew_after_fork(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodeThreads, (self._num_threads,)

    def after_fork(self) -> None:
        self._executor = None  # its threads are the parent's

    def map(self, work: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
        """`work` on each, in their order; an error of it is raised."""
        if self._num_threads == 1:
            return list(map(work, items))
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix="bayplan-decode")
        return list(self._executor.map(work, items))

    def close(self) -> None:
        """End the threads; the next call begins others."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
