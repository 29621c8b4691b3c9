"""Containers Pillow opens for us: whether their own tables reach past the end, and what icons claim before decoding."""

from __future__ import annotations

from struct import Struct, calcsize, error, unpack_from

from packer.images.facts import ImageLimits, check_limits, truncated
from packer.images.png import MAGIC as PNG_MAGIC

_ICON_ENTRY = Struct("<II")  # size, offset: the last 8 of an entry's 16 bytes
_OFFSETS_AND_COUNTS = {273: 279, 324: 325}  # strips, tiles
_TAGS = {*_OFFSETS_AND_COUNTS, *_OFFSETS_AND_COUNTS.values()}
_TYPE_CODES = {3: "H", 4: "I", 16: "Q"}


def is_cut(data: bytes, kind: str) -> bool:
    """Whether a TIFF, AVIF or JPEG 2000 file names bytes beyond its own end. Other kinds: False."""
    if kind == "tiff":
        try:
            return _tiff_end(data) > len(data)
        except (error, OverflowError):  # a table itself passes the end
            return True
    if kind in ("avif", "jp2"):
        return _boxes_end(data) > len(data)
    return kind == "j2k" and b"\xff\xd9" not in data[-16:]


def check_icon_sizes(data: bytes, limits: ImageLimits) -> None:
    """Check every picture of an ICO file against `limits`: its directory says at most 256 x 256, a PNG in it may lie."""
    for index in range(int.from_bytes(data[4:6], "little")):
        position = 6 + 16 * index
        if position + 16 > len(data):
            raise truncated("ico", f"ends at byte {len(data)} inside its directory")
        _, start = _ICON_ENTRY.unpack_from(data, position + 8)
        if start + 24 > len(data):
            raise truncated("ico", f"ends at byte {len(data)}, its picture {index} begins at byte {start:,}")
        if data.startswith(PNG_MAGIC, start):
            width, height = unpack_from(">II", data, start + 16)
        else:
            width, height = unpack_from("<ii", data, start + 4)
            height = abs(height) // 2  # colours and mask are stacked
        check_limits("ico", width, height, ImageLimits(max_pixels=limits.max_pixels))


def _boxes_end(data: bytes) -> int:
    """Where the last top-level box of an ISO container ends, as far as boxes follow one another."""
    end = 0
    while end + 8 <= len(data):
        size = int.from_bytes(data[end : end + 4], "big")
        if size == 1:
            size = int.from_bytes(data[end + 8 : end + 16], "big")
        if size < 8:  # 0: up to the end of the file
            break
        end += size
    return end


def _tiff_end(data: bytes) -> int:
    """The furthest byte that a TIFF's directories and its strips or tiles reach."""
    order = "<" if data.startswith(b"II") else ">"
    is_big = data[2:4] in (b"+\x00", b"\x00+")
    offset_code, count_code, entry = ("Q", "Q", order + "HHQ8s") if is_big else ("I", "H", order + "HHI4s")
    entry_size = calcsize(entry)
    (start,) = unpack_from(order + offset_code, data, 8 if is_big else 4)
    furthest, num_read, seen = 0, 0, set[int]()
    while start and start not in seen and num_read <= len(data):  # pages that share tables could go on for ever
        seen.add(start)
        (count,) = unpack_from(order + count_code, data, start)
        first = start + calcsize(order + count_code)
        end = first + count * entry_size
        (next_start,) = unpack_from(order + offset_code, data, end)
        entries = (unpack_from(entry, data, at) for at in range(first, end, entry_size))
        arrays = {tag: _array(data, order, kind, number, value) for tag, kind, number, value in entries if tag in _TAGS}
        num_read += sum(map(len, arrays.values()))
        for offsets, sizes in _OFFSETS_AND_COUNTS.items():
            pairs = zip(arrays.get(offsets, ()), arrays.get(sizes, ()), strict=False)
            furthest = max(furthest, end, *(offset + size for offset, size in pairs))
        start = next_start
    return furthest


def _array(data: bytes, order: str, kind: int, number: int, value: bytes) -> tuple[int, ...]:
    """The numbers of one directory entry: in its value field when they fit, else where that field points."""
    code = _TYPE_CODES.get(kind)
    if code is None or number > len(data):
        return ()
    layout = f"{order}{number}{code}"
    if calcsize(layout) <= len(value):
        return unpack_from(layout, value)
    (start,) = unpack_from(order + ("Q" if len(value) == 8 else "I"), value)
    return unpack_from(layout, data, start)
