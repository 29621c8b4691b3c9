"""The headers of an uncompressed tar, read in one pass into a table of members. The standard library knows the dialects.

GNU long names, pax headers, hard and symbolic links inside the archive. Data is skipped, not read.
"""

from __future__ import annotations

import io
import posixpath
import tarfile

from isal import isal_zlib

from packer.archive_index import ArchiveFile, Kind, Member, TableBuilder
from packer.format.errors import BayplanError, RowError
from packer.refusals import unreadable

BLOCK = tarfile.BLOCKSIZE
_MAX_HEADER_BYTES = 16 << 20
_MAX_EMPTY_BYTES = 1 << 20


def build_tar(file: ArchiveFile, *, window: int) -> bytes:
    """The table of a tar's members. `window`: bytes per read; large where a request costs more than the bytes.

    Raises:
        RowError: when the archive is cut or damaged.
    """
    builder = TableBuilder()
    cursor = _Cursor(file, window)
    at = 0
    try:
        with tarfile.TarFile(fileobj=cursor, mode="r", encoding="utf-8", errors="surrogateescape") as tar:
            while (block := cursor.peek(at, BLOCK)) and block.count(0) < BLOCK:
                cursor.seek(at)
                info = tarfile.TarInfo.fromtarfile(tar)
                if info.size < 0 or tar.offset <= at:
                    raise _damaged(file, f"the header at byte {at} gives a wrong size")
                _add(builder, info, cursor)
                at = tar.offset
    except (BayplanError, OSError):
        raise
    except Exception as error:  # tarfile raises whatever comes on damaged headers
        raise _damaged(file, f"the header at byte {at} is broken ({type(error).__name__}: {error})") from error
    if at > file.size:
        raise _damaged(file, f"its last block should end at byte {at}, the file ends at {file.size}")
    return builder.rows()


def looks_like_tar(head: bytes, size: int) -> bool:
    """Whether a file's first block is a tar header, or the zeros of an empty tar (a large file of zeros is a failed copy)."""
    if len(head) < BLOCK:
        return False
    try:
        tarfile.TarInfo.frombuf(head[:BLOCK], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return head.count(0) == len(head) and size <= _MAX_EMPTY_BYTES
    return True


def header_crc(block: bytes) -> int:
    """Stands for a member's header, so that a changed archive is noticed when the member is read."""
    return int(isal_zlib.crc32(block))


def _data_size(info: tarfile.TarInfo) -> int:
    return info.size if info.isreg() and not info.issparse() else 0


def _add(builder: TableBuilder, info: tarfile.TarInfo, cursor: _Cursor) -> None:
    name = info.name.encode("utf-8", "surrogateescape")
    link = info.linkname.encode("utf-8", "surrogateescape")
    if info.islnk():
        builder.add_link(name, link)
    elif info.issym():
        builder.add_link(name, posixpath.join(posixpath.dirname(name), link))
    else:
        header = cursor.peek(info.offset_data - BLOCK, BLOCK) if info.isreg() else b""
        builder.add(
            name,
            Member(
                kind=_kind(info),
                offset=info.offset_data,
                stored_size=_data_size(info),
                size=_data_size(info),
                crc32=header_crc(header),
            ),
        )


def _kind(info: tarfile.TarInfo) -> Kind:
    if info.issparse():
        return Kind.SPARSE
    if info.isdir():
        return Kind.FOLDER
    return Kind.PLAIN if info.isreg() else Kind.SPECIAL


class _Cursor(io.RawIOBase):
    """Reads an archive through one window; what tarfile takes for a file."""

    def __init__(self, file: ArchiveFile, window: int) -> None:
        self._file = file
        self._window = window
        self._begin = 0
        self._data = b""
        self._at = 0

    def peek(self, offset: int, size: int) -> bytes:
        """Bytes at `offset`, wherever the cursor stands."""
        begin = offset - self._begin
        if begin < 0 or begin + size > len(self._data):
            self._begin, begin = offset, 0
            self._data = self._file.read_at(offset, max(size, self._window))
        return self._data[begin : begin + size]

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        data = self.peek(self._at, size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < 0:
            raise tarfile.ReadError(f"seek to byte {offset}")
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at


def _damaged(file: ArchiveFile, what: str) -> RowError:
    return unreadable(file.url, f"the tar archive is cut or damaged: {what}")
