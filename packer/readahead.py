"""Loads images ahead of the writer, in order, under a byte budget, in groups so that small images cost no hand-over each.

How far it runs ahead changes no output: outcomes come in the order of their references.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

from packer.loading import ImageLoader, LoadedImage, Outcome
from packer.samples import Row

MEMORY_BUDGET_BYTES = 64 << 20
"""Lines read ahead, and again images; a burst of images far above the mean can pass it by one image a thread."""
_GROUP_BYTES = 1 << 20
_GROUP_IMAGES = 32
_MAX_ROWS_AHEAD = 512


@dataclass(slots=True)
class _Deferred:
    """A reference whose group was full; loaded when its turn comes."""

    ref: str


class ReadAhead:
    """Yields rows in order, each with its outcomes in order, while later images are already being loaded."""

    def __init__(self, rows: Iterator[Row], loader: ImageLoader, *, on_image: Callable[[], None] = lambda: None) -> None:
        self._source = rows
        self._loader = loader
        self._on_image = on_image
        self._rows: deque[Row] = deque()
        self._rows_bytes = 0
        self._references: deque[str] = deque()
        self._groups: deque[Future[list[Outcome | _Deferred]]] = deque()
        self._ready: deque[Outcome | _Deferred] = deque()
        self._lock = Lock()
        self._held_bytes = self._num_loading = 0
        self._mean_bytes = float(_GROUP_BYTES)
        self._pool = ThreadPoolExecutor(loader.concurrency, thread_name_prefix="bayplan-image")

    def __iter__(self) -> Iterator[tuple[Row, Iterator[Outcome]]]:
        while True:
            self._top_up()
            if not self._rows:
                return
            row = self._rows.popleft()
            outcomes = self._take(len(row.references))
            yield row, outcomes
            deque(outcomes, maxlen=0)  # what the consumer left over must not reach the next row
            self._rows_bytes -= len(row.line.raw)

    def close(self) -> None:
        """Stop loading."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, count: int) -> Iterator[Outcome]:
        for _ in range(count):
            while not self._ready:
                if not self._groups:
                    self._submit()
                self._ready.extend(self._groups.popleft().result())
                self._top_up()
            outcome = self._ready.popleft()
            if isinstance(outcome, _Deferred):
                outcome = self._loader.load(outcome.ref)
            elif isinstance(outcome, LoadedImage):
                with self._lock:
                    self._held_bytes -= outcome.size
            self._on_image()
            yield outcome

    def _group_size(self) -> int:
        return max(1, min(_GROUP_IMAGES, int(_GROUP_BYTES / max(self._mean_bytes, 1.0))))

    def _top_up(self) -> None:
        while len(self._groups) < 2 * self._loader.concurrency:
            if len(self._references) >= self._group_size():
                self._submit()
            elif len(self._rows) < _MAX_ROWS_AHEAD and self._rows_bytes < MEMORY_BUDGET_BYTES and self._pull():
                continue
            elif self._references:
                self._submit()
            else:
                return

    def _pull(self) -> bool:
        row = next(self._source, None)
        if row is None:
            return False
        self._rows.append(row)
        self._rows_bytes += len(row.line.raw)
        self._references.extend(row.references)
        return True

    def _submit(self) -> None:
        group = [self._references.popleft() for _ in range(min(self._group_size(), len(self._references)))]
        self._groups.append(self._pool.submit(self._load_group, group))

    def _load_group(self, group: list[str]) -> list[Outcome | _Deferred]:
        """Load a group, as far as the budget goes; the rest is loaded when its turn comes."""
        return [self._load_within_budget(ref) for ref in group]

    def _load_within_budget(self, ref: str) -> Outcome | _Deferred:
        """The size of an image is known when it is there: until then it counts as the mean of those before."""
        with self._lock:
            if self._held_bytes + self._num_loading * self._mean_bytes > MEMORY_BUDGET_BYTES:
                return _Deferred(ref)
            self._num_loading += 1
        outcome: Outcome | None = None
        try:
            outcome = self._loader.load(ref)
        finally:
            with self._lock:
                self._num_loading -= 1
                if isinstance(outcome, LoadedImage):
                    self._held_bytes += outcome.size
                    self._mean_bytes += (outcome.size - self._mean_bytes) / 16
        return outcome
