"""Files of a dataset, read by position: descriptors kept open on a local disk, range requests to a store.

One try each: what comes back may be short, long or wrong. `reader` checks, retries and names what failed.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from packer.format import layout
from packer.format.errors import FormatError
from packer.storage import ByteRange, RangeStore
from plugin.forks import begins_anew_after_fork
from plugin.spans import FileKey, Span

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_NOT_TOLD = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""Of filesystems that do not say what is in memory."""
_ONLY_FROM_MEMORY: int | None = getattr(os, "RWF_NOWAIT", None)
"""Linux's, of `preadv`: fail where bytes would have to be waited for."""
_MOST_AT_ONCE = 1 << 30
"""Linux gives at most 2 GiB a call; a larger image takes several."""


class Files(Protocol):
    """Where bytes come from. Every method may be called from any thread."""

    gap_bytes: int
    """Reading so many bytes for nothing costs no more than another read."""
    span_bytes: int
    """Reads are joined up to this size."""

    def read(self, span: Span) -> bytes:
        """The bytes of a span, or fewer or more. Errors are those of the store."""

    def read_now(self, span: Span) -> bytes | None:
        """The bytes of a span if they are in this machine's memory; None where they are not, or nobody can say. Never waits."""

    def read_many(self, spans: Sequence[Span]) -> list[bytes | Exception]:
        """Many spans at once where the store can; an error stands in the place of its span."""

    def forget(self, file: FileKey) -> None:
        """The next read of this file begins anew, whatever was opened before."""

    def size(self, file: FileKey) -> int | None:
        """Bytes of a file as it is now; None when there is none."""

    def close(self) -> None:
        """Give all descriptors back; the next read opens again."""


def name_of(file: FileKey) -> str:
    """A file's name relative to the dataset.

    Raises:
        FormatError: for a name that leaves its source's folder.
    """
    source, name = file
    if "/" in name or name in ("", ".", ".."):
        raise FormatError(f"source {source!r}: found the bundle name {name!r}, expected a file in the source's own folder")
    return f"{layout.source_dir(source)}/{name}"


class Handle:
    """An open descriptor. It is closed when the last user lets go, so no other file can take its number during a read."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self, close: Callable[[int], None] = os.close) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    __del__ = close


class LocalFiles:
    """`pread` on an LRU of descriptors, opened in the process that reads."""

    gap_bytes = 4 << 10
    span_bytes = 128 << 10

    def __init__(self, root: str, max_open: int) -> None:
        self.root = root
        self.handles: OrderedDict[FileKey, Handle] = OrderedDict()
        """Least recently used first. Only this class adds or removes."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_open = max_open if soft_limit == resource.RLIM_INFINITY else max(1, min(max_open, soft_limit // 4))
        self._lock = threading.Lock()
        self._tells_memory = _ONLY_FROM_MEMORY is not None
        begins_anew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        for handle in self.handles.values():
            handle.close()
        self.handles.clear()

    def _path(self, file: FileKey) -> str:
        return os.path.join(self.root, name_of(file))

    def read(self, span: Span) -> bytes:
        handle = self._handle(span.file)
        data = os.pread(handle.descriptor, min(span.end - span.start, _MOST_AT_ONCE), span.start)
        if len(data) == span.end - span.start:
            return data
        blocks = [data]
        start = span.start
        while blocks[-1] and (start := start + len(blocks[-1])) < span.end:
            blocks.append(os.pread(handle.descriptor, min(span.end - start, _MOST_AT_ONCE), start))
        return b"".join(blocks)

    def read_now(self, span: Span) -> bytes | None:
        # A file that is not open yet is not opened here: a mount that hangs would hang the caller.
        handle = self._opened(span.file)
        if handle is None or _ONLY_FROM_MEMORY is None or not self._tells_memory:
            return None
        space = bytearray(span.end - span.start)
        try:
            number = os.preadv(handle.descriptor, [space], span.start, _ONLY_FROM_MEMORY)
        except OSError as error:
            self._tells_memory = error.errno not in _NOT_TOLD
            return None
        return bytes(space) if number == len(space) else None

    def read_many(self, spans: Sequence[Span]) -> list[bytes | Exception]:
        found: list[bytes | Exception] = []
        for span in spans:
            try:
                found.append(self.read(span))
            except Exception as error:
                found.append(error)
        return found

    def forget(self, file: FileKey) -> None:
        with self._lock:
            self.handles.pop(file, None)

    def size(self, file: FileKey) -> int | None:
        try:
            return os.stat(self._path(file)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def close(self) -> None:
        with self._lock:
            self.handles.clear()

    def _handle(self, file: FileKey) -> Handle:
        return self._opened(file) or self._open(file)

    def _opened(self, file: FileKey) -> Handle | None:
        handle = self.handles.get(file)
        if handle is not None:
            try:
                self.handles.move_to_end(file)
            except KeyError:
                pass  # another thread closed it; it stays open for us
        return handle

    def _open(self, file: FileKey) -> Handle:
        path = self._path(file)
        while True:
            try:
                handle = Handle(os.open(path, os.O_RDONLY))
                break
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS or not self._give_back():
                    raise
        with self._lock:
            known = self.handles.get(file)
            if known is not None:
                return known
            while len(self.handles) >= self._max_open:
                self.handles.popitem(last=False)
            self.handles[file] = handle
        return handle

    def _give_back(self) -> bool:
        """Close half of ours for good when the process has no descriptor left; whether there was one to close."""
        with self._lock:
            held = len(self.handles)
            self._max_open = max(1, min(self._max_open, held // 2))
            for _ in range(held - held // 2):
                self.handles.popitem(last=False)
        return held > 0


class RemoteFiles:
    """Range requests through `packer.storage`."""

    gap_bytes = 256 << 10
    span_bytes = 8 << 20

    def __init__(self, url: str) -> None:
        self._store = RangeStore(url)

    def read(self, span: Span) -> bytes:
        return self._store.read(_range_of(span))

    def read_now(self, span: Span) -> bytes | None:
        return None

    def read_many(self, spans: Sequence[Span]) -> list[bytes | Exception]:
        return self._store.read_many([_range_of(span) for span in spans])

    def forget(self, file: FileKey) -> None:
        """Every request is a fresh one."""

    def size(self, file: FileKey) -> int | None:
        return self._store.size(name_of(file))

    def close(self) -> None:
        """Nothing is held."""


def _range_of(span: Span) -> ByteRange:
    return ByteRange(name_of(span.file), span.start, span.end)
