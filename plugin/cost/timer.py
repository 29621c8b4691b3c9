"""`StepTimer`: measures microbatches of a trainer into a file per rank, one JSON line each. Costs nothing while it is off.

On CUDA it records events and reads them when they are done, so the trainer never waits for it. Loads no torch of its own.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from packer.format.errors import UsageError
from plugin.cost.timings import Features, features_of, timing_line

if TYPE_CHECKING:
    from plugin.batch.core import PackedBatch

logger = logging.getLogger(__name__)

Part = Literal["encoder", "llm"]

_PENDING = 64
"""Microbatches whose events are waited for at most; then the oldest is waited for in earnest."""
_FIRST_STEPS = 5
"""Not written: kernels are chosen and memory is taken in them."""


class Span(Protocol):
    def stop(self) -> None: ...
    def seconds(self, wait: bool) -> float | None:
        """None: not known yet, and `wait` was not asked for."""


class _HostSpan:
    def __init__(self) -> None:
        self._start, self._end = time.perf_counter(), 0.0

    def stop(self) -> None:
        self._end = time.perf_counter()

    def seconds(self, wait: bool) -> float | None:
        return self._end - self._start


class _CudaSpan:
    def __init__(self) -> None:
        import torch

        event: Any = torch.cuda.Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self, wait: bool) -> float | None:
        if wait:
            self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 if self._end.query() else None


class _Measured:
    """A microbatch and its spans."""

    def __init__(self, step: int, features: Features) -> None:
        self.step, self.features = step, features
        self.spans: list[tuple[str, Span]] = []

    def seconds(self, wait: bool) -> dict[str, float] | None:
        """Spans of one name added up; None while one is not done."""
        found: dict[str, float] = {}
        for name, span in self.spans:
            seconds = span.seconds(wait)
            if seconds is None:
                return None
            found[name] = found.get(name, 0.0) + seconds
        return found


class StepTimer:
    """Writes `timings-rank00000.jsonl` into a folder. Not safe for use from several threads.

    A microbatch that ends with an exception is not written. A disk that takes no more ends the measuring, not the training.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        window_patches: int | None = None,
        patches_per_tile: int | None = None,
        clock: Literal["auto", "cuda", "host"] = "auto",
        skip: int = _FIRST_STEPS,
        enabled: bool = True,
    ) -> None:
        """Nothing is opened before the first line.

        Args:
            window_patches: side of the encoder's attention windows in patches, where it has some (8 for Qwen2.5-VL).
            patches_per_tile: for images as tiles (1024 for InternVL at 448 pixels).
            clock: "auto" is "cuda" once the trainer uses it.
            skip: microbatches to leave out at the start.
        """
        for name, value, least in (("skip", skip, 0), ("window_patches", window_patches, 1), ("rank", rank, 0)):
            if value is not None and value < least:
                raise UsageError(f"found {name} {value}, expected at least {least}")
        if clock not in ("auto", "cuda", "host"):
            raise UsageError(f"found clock {clock!r}, expected auto, cuda or host")
        self.path = Path(folder) / f"timings-rank{rank:05d}.jsonl"
        self._rank, self._window, self._per_tile = rank, window_patches, patches_per_tile
        self._clock, self._skip, self._enabled = clock, skip, enabled
        self._step = 0
        self._current: _Measured | None = None
        self._pending: deque[_Measured] = deque()
        self._descriptor: int | None = None

    @contextmanager
    def microbatch(self, *batches: PackedBatch) -> Iterator[None]:
        """Around all of one microbatch: forward and backward, where the trainer does them behind each other.

        Args:
            batches: its packs; of a `TorchBatch`, its `batch`.
        """
        self._step += 1
        if not self._enabled or self._step <= self._skip:
            yield
            return
        if self._current is not None:
            raise UsageError("found a microbatch within a microbatch, expected one after the other")
        features = features_of(batches, window_patches=self._window, patches_per_tile=self._per_tile)
        self._current = measured = _Measured(self._step, features)
        try:
            span = self._start()
            yield
            span.stop()
            measured.spans.append(("seconds", span))
            self._pending.append(measured)
        finally:
            self._current = None
        self._write_done()

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Around a part of the current microbatch; may be entered several times. Outside of a microbatch it does nothing."""
        self._refuse_part(part)
        measured = self._current
        if measured is None:
            yield
            return
        span = self._start()
        yield
        span.stop()
        measured.spans.append((f"{part}_seconds", span))

    def watch(self, module: Any, part: Part) -> list[Any]:
        """Times every forward of a torch module as a part; gives the handles that take the hooks off again (`remove`)."""
        self._refuse_part(part)
        started: list[Span | None] = []

        def before(*_: Any) -> None:
            started.append(self._start() if self._current is not None else None)

        def after(*_: Any) -> None:
            span = started.pop()
            if span is not None and self._current is not None:
                span.stop()
                self._current.spans.append((f"{part}_seconds", span))

        # A forward that raises calls no plain hook: its start must not be taken for that of the next.
        return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]

    def close(self) -> None:
        """Writes what is not written yet."""
        self._write_done(wait=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_part(self, part: str) -> None:
        if part not in ("encoder", "llm"):
            raise UsageError(f"found the part {part!r}, expected encoder or llm")

    def _start(self) -> Span:
        return _CudaSpan() if self._on_cuda() else _HostSpan()

    def _on_cuda(self) -> bool:
        if self._clock != "auto":
            return self._clock == "cuda"
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def _write_done(self, *, wait: bool = False) -> None:
        while self._pending:
            oldest = self._pending[0]
            seconds = oldest.seconds(wait or len(self._pending) > _PENDING)
            if seconds is None:
                return
            self._pending.popleft()
            self._write(timing_line(oldest.features, seconds, rank=self._rank, step=oldest.step))

    def _write(self, line: bytes) -> None:
        if not self._enabled:
            return
        try:
            if self._descriptor is None:
                self._descriptor = _opened(self.path)
            if os.write(self._descriptor, line) != len(line):  # one write a line: a kill leaves whole lines
                raise OSError(f"the last line of {self.path} was cut")
        except OSError as error:
            logger.warning("timings of rank %d end here, training goes on: %s", self._rank, error)
            self._enabled = False


def _opened(path: Path) -> int:
    """For appending; a line that an earlier run left unfinished is ended first, so that it costs itself only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor
