"""Members of zip and uncompressed tar archives, by name, from many threads. Each archive is opened and indexed once.

Every read is positioned, so nothing is shared but descriptors; at most 64 archives are open at once. Contents are proven:
a zip member by its checksum, a tar member by the header that stands before it.
"""

from __future__ import annotations

import io
import os
import threading
import weakref
import zlib
from collections import OrderedDict, deque
from typing import BinaryIO

import blake3

from packer import storage
from packer.archive_cache import load_or_build
from packer.archive_index import ArchiveFile, Kind, Member, Table
from packer.format.bundle import crc32
from packer.format.errors import RowError
from packer.local_files import open_regular, read_at
from packer.redact import safe_place
from packer.refusals import empty, missing, too_large, unreadable, unsupported, with_row_errors
from packer.tar_index import BLOCK, build_tar, header_crc, looks_like_tar
from packer.zip_index import LOCAL_HEADER, LOCAL_MAGIC, build_zip, has_zip_end

MAX_OPEN_ARCHIVES = 64
_LOCAL_WINDOW, _REMOTE_WINDOW = 4 << 10, 8 << 20
_STAMP_BYTES = 64 << 10
_LOCAL_HEADER_GUESS = 512
"""Read together with a zip member: its local header with name and extra field is rarely longer."""
_ZIP, _TAR = b"z", b"t"
_COMPRESSED_ENDINGS = tuple(".gz .tgz .taz .bz2 .tbz .tbz2 .xz .txz .zst .tzst .lz4 .lz .lzma .tar.z .7z .rar".split())
_COMPRESSED_MAGICS = (b"\x1f\x8b", b"\x1f\x9d", b"BZh", b"\xfd7zXZ\0", b"(\xb5/\xfd", b"7z\xbc\xaf", b"Rar!", b"\x04\x22\x4d\x18")
_WAY_OUT = "unpack it, or pack it again as .zip or uncompressed .tar"
_METHODS = {9: "deflate64", 12: "bzip2", 14: "lzma", 93: "zstd", 95: "xz", 99: "AES"}


class ArchivePool:
    """Open archives of one task, the least recently used closed first. Thread-safe, and usable again after a fork."""

    def __init__(self, *, cache_dir: str | None = None, max_open: int = MAX_OPEN_ARCHIVES) -> None:
        self._cache_dir = cache_dir
        self._max_open = max_open
        self._reset()

    def read(self, url: str, name: str, max_bytes: int) -> bytes:
        """The bytes of one member.

        Raises:
            RowError: no such archive or member, unreadable, empty, too large, or of a kind that is not supported.
            StorageFault: when the store kept failing.
        """
        if os.getpid() != self._pid:
            self._reset()  # a lock may be held for ever by a thread that the fork did not copy
        with self._lock:
            slot = self._slots.setdefault(url, _Slot())
            self._slots.move_to_end(url)
            while len(self._slots) > self._max_open:
                self._slots.popitem(last=False)
        return slot.archive(url, self._cache_dir).read(name, max_bytes)

    def close(self) -> None:
        """Close every descriptor that no read is using; a later read opens again."""
        with self._lock:
            self._slots.clear()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()


class _Slot:
    """One archive of the pool: opened by whoever comes first, and a bad one examined only once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._archive: _Archive | None = None
        self._refusal: RowError | None = None

    def archive(self, url: str, cache_dir: str | None) -> _Archive:
        with self._lock:
            if self._refusal is not None:
                raise RowError(self._refusal.reason, self._refusal.detail)
            if self._archive is None:
                try:
                    self._archive = _open_archive(url, cache_dir)
                except RowError as error:
                    self._refusal = error
                    raise
            return self._archive


class _LocalFile:
    """A local archive. Its descriptor closes with the last reference, so a read in flight keeps it."""

    def __init__(self, path: str) -> None:
        self.url = path
        self._descriptor, info = open_regular(path)
        weakref.finalize(self, os.close, self._descriptor)
        self.size = info.st_size
        self.version = str(info.st_mtime_ns)

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        try:
            return read_at(self._descriptor, offset, size)
        except OSError:
            return with_row_errors(lambda: read_at(self._descriptor, offset, size), self.url)


class _RemoteFile:
    """An archive in a store: as many handles as threads read at once, each used by one at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._free: deque[BinaryIO] = deque()
        weakref.finalize(self, _close_all, self._free)
        self.size = with_row_errors(self._measure, url)
        # The store's time stamp is out of reach here; its ends change with nearly every rewrite, and reads prove the rest.
        ends = blake3.blake3(self.read_at(0, _STAMP_BYTES))
        self.version = ends.update(self.read_at(max(0, self.size - _STAMP_BYTES), _STAMP_BYTES)).hexdigest()

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(0, min(size, self.size - offset))
        return with_row_errors(lambda: self._read_once(offset, size), self.url) if size else b""

    def _measure(self) -> int:
        handle = storage.open_url(self.url)
        size = handle.seek(0, io.SEEK_END)
        self._free.append(handle)
        return size

    def _read_once(self, offset: int, size: int) -> bytes:
        try:
            handle = self._free.pop()
        except IndexError:
            handle = storage.open_url(self.url)
        try:
            handle.seek(offset)
            data = handle.read(size)
            while 0 < len(data) < size and (more := handle.read(size - len(data))):
                data += more
        except BaseException:
            handle.close()
            raise
        self._free.append(handle)
        return data


class _Archive:
    """An open archive and the table of its members."""

    def __init__(self, file: ArchiveFile, table: Table) -> None:
        self._file = file
        self._table = table

    def read(self, name: str, max_bytes: int) -> bytes:
        url = self._file.url
        member = self._table.find(name)
        if member is None:
            raise missing(url, f"found {len(self._table)} members, none called {name[:500]!r}")
        place = f"{url}!/{name}"
        if member.kind not in (Kind.PLAIN, Kind.DEFLATED):
            raise _refusal(place, member)
        if member.size > max_bytes:
            raise too_large(place, member.size, max_bytes)
        if member.size == 0:
            raise empty(place)
        return _read_zip(self._file, member, place) if self._table.layout == _ZIP else _read_tar(self._file, member, place)


def _open_archive(url: str, cache_dir: str | None) -> _Archive:
    if url.lower().partition("?")[0].endswith(_COMPRESSED_ENDINGS):
        raise _compressed(url)
    file = _LocalFile(storage.local_path(url)) if storage.is_local(url) else _RemoteFile(url)
    identity = f"{url}\0{file.size}\0{file.version}"
    return _Archive(file, load_or_build(cache_dir, identity, lambda: _build(file)))


def _build(file: _LocalFile | _RemoteFile) -> tuple[bytes, bytes]:
    """Layout and rows of an archive, told by its content: names of archives vary."""
    head = file.read_at(0, BLOCK)
    if not head:
        raise unreadable(file.url, "the archive has 0 bytes, expected a zip or a tar")
    if looks_like_tar(head, file.size):
        return _TAR, build_tar(file, window=_LOCAL_WINDOW if isinstance(file, _LocalFile) else _REMOTE_WINDOW)
    if head.startswith(_COMPRESSED_MAGICS):
        raise _compressed(file.url)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")) or file.url.lower().endswith(".zip") or has_zip_end(file):
        return _ZIP, build_zip(file)
    raise unreadable(file.url, f"found neither a zip nor a tar in its {file.size} bytes: not an archive, or cut or damaged")


def _read_zip(file: ArchiveFile, member: Member, place: str) -> bytes:
    if member.stored_size > 2 * member.size + _LOCAL_HEADER_GUESS:
        raise unreadable(place, f"found {member.stored_size} packed bytes for {member.size}: the zip archive is damaged")
    block = file.read_at(member.offset, _LOCAL_HEADER_GUESS + member.stored_size)
    if len(block) < LOCAL_HEADER.size or not block.startswith(LOCAL_MAGIC):
        raise unreadable(place, f"no local header at byte {member.offset}: the zip archive is cut, damaged or was changed")
    fields = LOCAL_HEADER.unpack_from(block)
    begin = LOCAL_HEADER.size + fields[-2] + fields[-1]
    data = block[begin : begin + member.stored_size]
    if len(data) < member.stored_size:
        data = file.read_at(member.offset + begin, member.stored_size)
    if member.kind is Kind.DEFLATED:
        data = _inflated(data, member.size, place)
    if len(data) != member.size or crc32(data) != member.crc32:
        raise unreadable(place, "its checksum or size is not what the zip directory says: the archive is damaged or was changed")
    return data


def _inflated(data: bytes, size: int, place: str) -> bytes:
    """At most one byte more than the directory promises, so that a bomb shows without being inflated."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error as error:
        raise unreadable(place, f"cannot be inflated ({error}): the zip archive is damaged") from error


def _read_tar(file: ArchiveFile, member: Member, place: str) -> bytes:
    block = file.read_at(member.offset - BLOCK, BLOCK + member.size)
    if len(block) != BLOCK + member.size or header_crc(block[:BLOCK]) != member.crc32:
        raise unreadable(place, f"its header is not where the index says, byte {member.offset - BLOCK}: the tar was changed")
    return block[BLOCK:]


def _refusal(place: str, member: Member) -> RowError:
    if member.kind is Kind.FOLDER:
        return unreadable(place, "found a folder, expected a file")
    if member.kind is Kind.DEAD_LINK:
        return missing(place, "found a link that leads to no file in the archive")
    if member.kind is Kind.SPECIAL:
        return unreadable(place, "found a device or FIFO, expected a file")
    if member.kind is Kind.ENCRYPTED:
        return unsupported(f"{safe_place(place)}: the member is encrypted; pack it again without a password")
    if member.kind is Kind.SPARSE:
        return unsupported(f"{safe_place(place)}: a sparse member of a tar is not read; pack it again without --sparse")
    method = _METHODS.get(member.method, str(member.method))
    return unsupported(f"{safe_place(place)}: found zip method {method}, expected stored or deflate; {_WAY_OUT}")


def _compressed(url: str) -> RowError:
    return unsupported(f"{safe_place(url)}: found a compressed archive, in which members have no place of their own; {_WAY_OUT}")


def _close_all(handles: deque[BinaryIO]) -> None:
    while handles:
        handles.pop().close()
