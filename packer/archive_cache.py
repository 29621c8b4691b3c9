"""Archive tables shared by the tasks of one machine: one file per archive in a folder of the user, mapped into memory.

A table is built by one process while the others wait for it. A file that is cut, foreign, of another user or whose digest
is wrong is built anew. The least recently used files go when all together pass a limit.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import blake3

from packer.archive_index import ROW_BYTES, Table

MAX_CACHE_BYTES = 4 << 30
_MAGIC = b"bayplan archive index 1\n"
_HEADER = struct.Struct(f">{len(_MAGIC)}s32s1sQ32s")
_TABLE, _LOCK, _TEMPORARY = ".idx", ".lock", ".tmp"
_OURS = re.compile(r"[0-9a-f]{64}\w*\.(?:idx|tmp)")
_STALE_SECONDS = 24 * 3600


def default_folder() -> str:
    """The folder used when the caller names none."""
    return os.path.join(tempfile.gettempdir(), f"bayplan-archives-{os.geteuid()}")


def load_or_build(folder: str | None, identity: str, build: Callable[[], tuple[bytes, bytes]]) -> Table:
    """The table of the archive with this identity (URL, size, version); `build` gives its layout and rows.

    Without a usable folder the table is built and kept in memory.
    """
    key = blake3.blake3(identity.encode("utf-8", "surrogateescape")).digest()
    usable = _usable(folder)
    if usable is None:
        return Table(*build())
    path = os.path.join(usable, key.hex())
    if (table := _load(path + _TABLE, key)) is not None:
        return table
    with _locked(path + _LOCK):
        if (table := _load(path + _TABLE, key)) is not None:
            return table
        layout, rows = build()
        if _publish(path, key, layout, rows):
            _trim(usable)
        return _load(path + _TABLE, key) or Table(layout, rows)


def _usable(folder: str | None) -> str | None:
    """The cache folder, made if need be. In the shared temporary folder only one that nobody else can write to."""
    path = folder or default_folder()
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        info = os.lstat(path)
    except OSError:
        return None
    is_private = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022
    return path if folder is not None or is_private else None


def _load(path: str, key: bytes) -> Table | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_size < _HEADER.size:
            return None
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        with suppress(OSError):
            os.utime(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    magic, found_key, layout, count, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC or found_key != key or len(data) != _HEADER.size + count * ROW_BYTES:
        return None
    with memoryview(data) as view:
        if digest != _digest(key, layout, view[_HEADER.size :]):
            return None
    return Table(layout, data, _HEADER.size)


def _digest(key: bytes, layout: bytes, rows: bytes | memoryview) -> bytes:
    return blake3.blake3(key + layout).update(rows).digest()


def _publish(path: str, key: bytes, layout: bytes, rows: bytes) -> bool:
    """Write the table under a temporary name, then rename. A full or read-only disk only costs the sharing."""
    header = _HEADER.pack(_MAGIC, key, layout, len(rows) // ROW_BYTES, _digest(key, layout, rows))
    try:
        descriptor, temporary = tempfile.mkstemp(suffix=_TEMPORARY, prefix=key.hex(), dir=os.path.dirname(path))
    except OSError:
        return False
    try:
        with open(descriptor, "wb") as file:
            file.write(header)
            file.write(rows)
        os.replace(temporary, path + _TABLE)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        return False
    return True


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the archive's lock; without one (a file system that has no locks) two may build the same table."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _trim(folder: str) -> None:
    """Remove the least recently used tables above the limit, and what killed writers left."""
    with suppress(OSError), os.scandir(folder) as entries:
        ours = [entry for entry in entries if _OURS.fullmatch(entry.name)]
        tables = [(entry.stat(), entry.path) for entry in ours if entry.name.endswith(_TABLE)]
        for entry in ours:
            if entry.name.endswith(_TEMPORARY) and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                os.unlink(entry.path)
        total = sum(info.st_size for info, _ in tables)
        for info, path in sorted(tables, key=lambda table: table[0].st_mtime):
            if total <= MAX_CACHE_BYTES:
                break
            os.unlink(path)
            total -= info.st_size
