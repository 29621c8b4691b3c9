"""Where every member of an archive stands: a sorted table of 52-byte rows, found by the hash of the member's name.

A million members take 52 MB, and the table needs no parsing, so a cache file of it can be mapped into memory. Here are the
table and the order it is built in; `zip_index` and `tar_index` read the archives.
"""

from __future__ import annotations

import bisect
import mmap
import posixpath
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Protocol

import blake3

KEY_BYTES = 16
_PLACED = struct.Struct(">BxHIQQQ")
_ORDER = struct.Struct(">I")
_HEAD_BYTES = KEY_BYTES + _ORDER.size
ROW_BYTES = _HEAD_BYTES + _PLACED.size


class Kind(IntEnum):
    """What a member is. Only the first two have bytes to read; the others say why not."""

    PLAIN = 0
    DEFLATED = 1
    FOLDER = 2
    ENCRYPTED = 3
    OTHER_METHOD = 4
    SPARSE = 5
    DEAD_LINK = 6
    SPECIAL = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member's place in its archive."""

    kind: Kind
    offset: int
    """Of the local header in a zip, of the data in a tar."""
    stored_size: int
    size: int
    crc32: int
    """Of the content in a zip, of the 512-byte header before the data in a tar."""
    method: int = 0
    """The zip compression method."""


class ArchiveFile(Protocol):
    """An open archive: positioned reads from any thread."""

    url: str
    size: int

    def read_at(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, fewer only at the end of the file."""


class Table:
    """Looks members up by name. `rows` is sorted, each name once."""

    def __init__(self, layout: bytes, rows: bytes | mmap.mmap, start: int = 0) -> None:
        self.layout = layout
        """`b"z"` for zip, `b"t"` for tar."""
        self._rows = rows
        self._start = start
        self._positions = range(start, len(rows), ROW_BYTES)

    def __len__(self) -> int:
        return len(self._positions)

    def find(self, name: str) -> Member | None:
        """The member of this name, as UTF-8 or as the DOS code page that `zipfile` shows unmarked names in."""
        try:
            return self._find(member_key(name.encode())) or self._find(member_key(name.encode("cp437")))
        except UnicodeEncodeError:
            return None

    def _find(self, key: bytes) -> Member | None:
        rows = self._rows
        index = bisect.bisect_left(self._positions, key, key=lambda at: rows[at : at + KEY_BYTES])
        if index == len(self._positions) or rows[(at := self._positions[index]) : at + KEY_BYTES] != key:
            return None
        kind, method, crc32, offset, stored_size, size = _PLACED.unpack_from(rows, at + _HEAD_BYTES)
        return Member(kind=Kind(kind), method=method, crc32=crc32, offset=offset, stored_size=stored_size, size=size)


def normal_name(name: bytes) -> bytes:
    """A member's name as it is compared: `./a//b/` and `/a/b` are `a/b`."""
    if name[:1] in b"./" or name[-1:] == b"/" or b"//" in name or b"/." in name:
        return posixpath.normpath(name).lstrip(b"/")
    return name


def member_key(name: bytes) -> bytes:
    """128 bits that stand for a member's name."""
    return blake3.blake3(normal_name(name)).digest(KEY_BYTES)


class TableBuilder:
    """Collects members in archive order. A name that comes again replaces the earlier one, as unpacking would."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._links: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, name: bytes, member: Member) -> None:
        """The next member."""
        placed = _PLACED.pack(member.kind, member.method, member.crc32, member.offset, member.stored_size, member.size)
        self._rows.append(member_key(name) + _ORDER.pack(len(self._rows)) + placed)

    def add_link(self, name: bytes, target: bytes) -> None:
        """A link to another member of the archive, which may come later or not at all."""
        self._links[len(self._rows)] = member_key(target)
        self.add(name, Member(kind=Kind.DEAD_LINK, offset=0, stored_size=0, size=0, crc32=0))

    def rows(self) -> bytes:
        """The finished table; the builder is used up."""
        self._rows.sort()
        kept = list(self._last_of_each_name())
        self._rows.clear()
        if self._links:
            kept = [self._followed(row, kept) for row in kept]
        return b"".join(kept)

    def _last_of_each_name(self) -> Iterator[bytes]:
        for row, following in pairwise([*self._rows, b""]):
            if row[:KEY_BYTES] != following[:KEY_BYTES]:
                yield row

    def _followed(self, row: bytes, rows: list[bytes]) -> bytes:
        found = row
        for _ in range(16):  # links to links; a circle stays dead
            target = self._links.get(_ORDER.unpack_from(found, KEY_BYTES)[0])
            if target is None:
                return row[:_HEAD_BYTES] + found[_HEAD_BYTES:]
            index = bisect.bisect_left(rows, target)
            if index == len(rows) or not rows[index].startswith(target):
                return row
            found = rows[index]
        return row
