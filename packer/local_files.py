"""Whole local files: the hot path of packing, plain os calls without file objects."""

from __future__ import annotations

import os
import stat

from packer.format.errors import RowError
from packer.refusals import empty, too_large, unreadable, with_row_errors

# Opening a FIFO or a terminal must not wait for its other end; for regular files O_NONBLOCK changes nothing.
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_file(path: str, max_bytes: int) -> bytes:
    """All bytes of a regular file.

    Raises:
        RowError: missing, unreadable, empty, too large, or not a regular file.
        StorageFault: when the file system kept failing.
    """
    try:
        return _read_once(path, max_bytes)
    except (OSError, ValueError):
        return with_row_errors(lambda: _read_once(path, max_bytes), path)


def open_regular(path: str) -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, and its stat. Errors as `read_file`; never waits on a FIFO or device."""
    return with_row_errors(lambda: _open_once(path), path)


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """`size` bytes at `offset`, fewer only at the end of the file; moves no shared position."""
    data = os.pread(descriptor, size, offset)
    while 0 < len(data) < size and (more := os.pread(descriptor, size - len(data), offset + len(data))):
        data += more
    return data


def _open_once(path: str) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(path, info)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, info


def _read_once(path: str, max_bytes: int) -> bytes:
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        info = os.fstat(descriptor)
        size = info.st_size
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(path, info)
        if size > max_bytes:
            raise too_large(path, size, max_bytes)
        data = os.read(descriptor, size + 1)
        while 0 < len(data) < size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise OSError(f"its size changed from {size} bytes while it was read")
    if not data:
        raise empty(path)
    return data


def _not_regular(path: str, info: os.stat_result) -> RowError:
    kind = next((name for test, name in _KINDS if test(info.st_mode)), "something else")
    return unreadable(path, f"found {kind}, expected a file")
