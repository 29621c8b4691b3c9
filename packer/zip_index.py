"""The central directory of a zip, ZIP64 and self-extracting files included, read into a table of members.

Our own reader, because the standard library keeps an object of about 700 bytes for every member. Format: PKWARE APPNOTE 6.3.10.
Offsets are of local headers: where the data begins only the local header can say, its extra field may be longer.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from packer.archive_index import ArchiveFile, Kind, Member, TableBuilder
from packer.format.errors import RowError
from packer.refusals import unreadable

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
LOCAL_MAGIC = b"PK\x03\x04"

_END = struct.Struct("<4s4H2LH")
_END_MAGIC = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_CENTRAL = struct.Struct("<4s4B4H3L5H2L")
_CENTRAL_MAGIC = b"PK\x01\x02"
_SIGNATURE_MAGIC = b"PK\x05\x05"
_MAX_COMMENT_BYTES = 0xFFFF
_ENCRYPTED_FLAGS = 0x2041
_UNIX = 3
_DOS = 0
_STORED, _DEFLATED = 0, 8
_UNKNOWN32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class _Directory:
    begin: int
    size: int
    count: int
    shift: int
    """Bytes before the archive proper, to be added to every offset it records."""


def build_zip(file: ArchiveFile) -> bytes:
    """The table of a zip's members.

    Raises:
        RowError: when the archive is cut or damaged.
    """
    builder = TableBuilder()
    directory = _find_directory(file)
    try:
        for name, member in _members(file, directory):
            builder.add(name, member)
    except struct.error as error:
        raise _damaged(file, f"its directory ends inside entry {len(builder)}") from error
    if (len(builder) - directory.count) & 0xFFFF:
        raise _damaged(file, f"its directory lists {len(builder)} members, its end record says {directory.count}")
    return builder.rows()


def has_zip_end(file: ArchiveFile) -> bool:
    """Whether the file ends like a zip, whatever it begins with."""
    return bool(_ends(_tail(file)[1]))


def _tail(file: ArchiveFile) -> tuple[int, bytes]:
    size = min(file.size, _MAX_COMMENT_BYTES + _END.size + _LOCATOR.size + _END64.size)
    return file.size - size, file.read_at(file.size - size, size)


def _ends(tail: bytes) -> list[int]:
    """Where end records may stand, those first whose comment ends with the file, the later before the earlier."""
    found = []
    at = tail.rfind(_END_MAGIC)
    while at >= 0:
        if at + _END.size <= len(tail):
            found.append((at + _END.size + _END.unpack_from(tail, at)[7] != len(tail), -at))
        at = tail.rfind(_END_MAGIC, 0, at)
    return [-negative for _, negative in sorted(found)]


def _find_directory(file: ArchiveFile) -> _Directory:
    tail_offset, tail = _tail(file)
    for at in _ends(tail):
        _, disk, _, _, count, size, start, _ = _END.unpack_from(tail, at)
        end = tail_offset + at
        if at >= _LOCATOR.size and tail[at - _LOCATOR.size :].startswith(_LOCATOR_MAGIC):
            wide = _find_end64(file, _LOCATOR.unpack_from(tail, at - _LOCATOR.size)[2], end - _LOCATOR.size)
            if wide is not None:
                end, disk, count, size, start = wide
        begin = end - size
        if disk == 0 and begin >= start and (size == 0 or file.read_at(begin, 4) in (_CENTRAL_MAGIC, _SIGNATURE_MAGIC)):
            if begin > start and file.read_at(0, 4) == LOCAL_MAGIC:
                raise _damaged(file, f"its directory stands {begin - start} bytes too late: it is that of an inner zip")
            return _Directory(begin=begin, size=size, count=count, shift=begin - start)
    raise _damaged(file, "no complete zip directory at its end (a cut upload?)")


def _find_end64(file: ArchiveFile, recorded: int, locator: int) -> tuple[int, int, int, int, int] | None:
    """The ZIP64 end record where it is said to be, or just before its locator when bytes were put before the archive."""
    for at in (recorded, locator - _END64.size):
        data = file.read_at(at, _END64.size) if 0 <= at <= file.size - _END64.size else b""
        if data.startswith(_END64_MAGIC):
            _, _, _, _, disk, _, _, count, size, start = _END64.unpack(data)
            return at, disk, count, size, start
    return None


def _members(file: ArchiveFile, directory: _Directory) -> Iterator[tuple[bytes, Member]]:
    data = file.read_at(directory.begin, directory.size)
    at = 0
    while at < len(data) and not data.startswith(_SIGNATURE_MAGIC, at):
        entry = _CENTRAL.unpack_from(data, at)
        magic, _, system, _, _, flags, method, _, _, crc32, stored_size, size, name_size, extra_size, comment_size = entry[:15]
        if magic != _CENTRAL_MAGIC:
            raise _damaged(file, f"its directory is broken at byte {directory.begin + at}")
        name_at = at + _CENTRAL.size
        name = data[name_at : name_at + name_size]
        extra_at = name_at + name_size
        offset = entry[18]
        if _UNKNOWN32 in (stored_size, size, offset):
            extra = data[extra_at : extra_at + extra_size]
            size, stored_size, offset = _wide(extra, size, stored_size, offset)
        if system == _DOS and b"/" not in name:
            name = name.replace(b"\\", b"/")
        yield (
            name,
            Member(
                kind=_kind(name, flags, method, system, entry[17]),
                method=method,
                crc32=crc32,
                offset=offset + directory.shift,
                stored_size=stored_size,
                size=size,
            ),
        )
        at = extra_at + extra_size + comment_size


def _wide(extra: bytes, *narrow: int) -> tuple[int, ...]:
    """Size, stored size and offset, those that do not fit 32 bits taken from the ZIP64 extra field in this order."""
    at = 0
    while at + 4 <= len(extra):
        field_id, length = struct.unpack_from("<HH", extra, at)
        if field_id == 1:
            values = iter(struct.unpack_from(f"<{min(length, 24) // 8}Q", extra, at + 4))
            return tuple(next(values, value) if value == _UNKNOWN32 else value for value in narrow)
        at += 4 + length
    return narrow


def _kind(name: bytes, flags: int, method: int, system: int, attributes: int) -> Kind:
    if name.endswith(b"/"):
        return Kind.FOLDER
    if flags & _ENCRYPTED_FLAGS:
        return Kind.ENCRYPTED
    if system == _UNIX and stat.S_ISLNK(attributes >> 16):
        return Kind.DEAD_LINK
    return {_STORED: Kind.PLAIN, _DEFLATED: Kind.DEFLATED}.get(method, Kind.OTHER_METHOD)


def _damaged(file: ArchiveFile, what: str) -> RowError:
    return unreadable(file.url, f"the zip archive is cut or damaged: {what}")
