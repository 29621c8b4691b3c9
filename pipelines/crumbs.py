"""A breadcrumb per task: which rows are being worked on, readable after the worker is dead; and a watchdog for hung rows.

A small memory-mapped file on the worker's own disk costs nothing per row and survives the process. A node that dies takes
its crumbs along; then no row is suspected and the range simply runs again.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import struct
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from types import TracebackType

_LAYOUT = struct.Struct("<qqq")
_NOTHING = -1
_REARM_SHARE = 1 / 8
"""How stale the watchdog may be, as a share of the time limit: arming it for each row would cost more than the row."""


@dataclass(frozen=True, slots=True)
class Suspects:
    """Rows a dead worker had begun and not finished: those that start in [first, last]."""

    first: int
    last: int


class Crumb:
    """The guard of one task (see `packer.guard.Guard`). Ends the process when nothing moves for `timeout_seconds`."""

    def __init__(self, timeout_seconds: float) -> None:
        self.path = os.path.join(_directory(), f"{uuid.uuid4().hex}.crumb")
        self._timeout_seconds = timeout_seconds
        with open(self.path, "w+b") as file:
            file.write(_LAYOUT.pack(_NOTHING, _NOTHING, 0))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._armed_at = float("-inf")
        self._first = self._last = _NOTHING
        self._arm()

    def begin(self, byte_offset: int) -> None:
        if self._first == _NOTHING:
            self._first = byte_offset
        self._last = byte_offset
        self._write()
        self._arm()

    def progress(self) -> None:
        self._arm()

    def finish(self, next_offset: int) -> None:
        self._first = next_offset
        self._write()
        self._arm()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._map, 0, self._first, self._last, 1)

    def _arm(self) -> None:
        now = time.monotonic()
        if now - self._armed_at > self._timeout_seconds * _REARM_SHARE:
            faulthandler.dump_traceback_later(self._timeout_seconds, exit=True, file=sys.__stderr__ or 2)
            self._armed_at = now

    def __enter__(self) -> Crumb:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._map.close()
        os.unlink(self.path)


def take_crumb(path: str) -> Suspects | None:
    """Read and remove the crumb of a dead task on this machine; None when it had begun no row or left none."""
    try:
        with open(path, "rb") as file:
            first, last, _ = _LAYOUT.unpack(file.read(_LAYOUT.size))
        os.unlink(path)
    except (OSError, struct.error):
        return None
    return Suspects(first, last) if _NOTHING < first <= last else None


def _directory() -> str:
    path = os.path.join(tempfile.gettempdir(), f"bayplan-crumbs-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path
