"""EXIF orientation (tag 0x0112 of the first directory) and nothing else. Broken EXIF is 1, never an error."""

from __future__ import annotations

from struct import Struct

PREFIX = b"Exif\x00\x00"
_TAG = 0x0112
# Field types that hold a small whole number: where its bytes stand in the 4-byte value field.
_WIDTH_OF_TYPE = {1: 1, 3: 2, 4: 4}
_ORDERS = {
    b"II*\x00": ("little", Struct("<I"), Struct("<H"), Struct("<HHI4s")),
    b"MM\x00*": ("big", Struct(">I"), Struct(">H"), Struct(">HHI4s")),
}


def orientation(exif: bytes) -> int:
    """1 to 8 from an EXIF block, with or without its "Exif\\0\\0" prefix; 1 when absent, invalid or cut off."""
    if exif.startswith(PREFIX):
        exif = exif[len(PREFIX) :]
    order = _ORDERS.get(exif[:4])
    if order is None or len(exif) < 8:
        return 1
    name, offset_of, count_of, entry_of = order
    (start,) = offset_of.unpack_from(exif, 4)
    if start + 2 > len(exif):
        return 1
    (count,) = count_of.unpack_from(exif, start)
    for position in range(start + 2, min(start + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, num_values, value = entry_of.unpack_from(exif, position)
        if tag == _TAG:
            found = int.from_bytes(value[: _WIDTH_OF_TYPE.get(kind, 0)], "little" if name == "little" else "big")
            return found if num_values == 1 and 1 <= found <= 8 else 1
    return 1
