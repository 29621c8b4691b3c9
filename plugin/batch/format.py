"""The flat buffer of a pack: version 1, little-endian, one header, fields at multiples of 64 bytes. Fields' meanings: `core`.

    offset  bytes  what
    0       8      magic "BAYPACK\\0"
    8       4      uint32, version
    12      4      uint32, crc32 of the rest of the header: bytes 16 to the first field
    16      4      uint32, number of fields
    20      4      uint32, crc32 of everything behind the header
    24      8      uint64, bytes in all, a multiple of 64
    32      72 each: name (24, zero-padded), numpy dtype (4), uint32 number of dimensions, 4 x uint64 shape, uint64 offset

Every field of `FIELDS` is there, in that order, each at the first multiple of 64 behind the one before; gaps are zero. So a
buffer has one layout for its shapes, and several buffers behind each other stay aligned.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from packer.format.errors import FormatError

MAGIC = b"BAYPACK\0"
VERSION = 1
ALIGNMENT_BYTES = 64
_HEAD = struct.Struct("<8sIIIIQ")
_CHECKED_FROM = 16
_DIMENSIONS = 4
_MOST = 1 << 48

FIELDS: Mapping[str, tuple[str, int]] = {
    "tokens": ("<i8", 1),
    "labels": ("<i8", 1),
    "position_ids": ("<i8", 1),
    "loss_mask": ("|b1", 1),
    "feature_mask": ("|b1", 1),
    "cu_seqlens": ("<i4", 1),
    "cu_seqlens_padded": ("<i4", 1),
    "sample_row": ("<i8", 1),
    "sample_source": ("<i4", 1),
    "sample_counts": ("<i8", 2),
    "sample_costs": ("<i8", 2),
    "sample_id_bytes": ("|u1", 1),
    "sample_id_offsets": ("<i8", 1),
    "source_name_bytes": ("|u1", 1),
    "source_name_offsets": ("<i8", 1),
    "image_sample": ("<i4", 1),
    "image_index": ("<i4", 1),
    "image_span": ("<i8", 2),
    "image_state": ("|u1", 1),
    "image_size": ("<i8", 2),
    "image_grid_thw": ("<i8", 2),
    "num_tiles": ("<i8", 1),
    "facts": ("<i8", 1),
    "fingerprint_bytes": ("|u1", 1),
    "pixels": ("|u1", 2),
    "tiles": ("|u1", 4),
}
"""Name -> dtype and number of dimensions."""
_ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype, _ in FIELDS.values()}
_ENTRY = "24s4sI5Q"
_ENTRIES = struct.Struct("<" + len(FIELDS) * _ENTRY)
_ENTRY_VALUES = len(struct.unpack("<" + _ENTRY, bytes(struct.calcsize("<" + _ENTRY))))
_ENTRY_NAMES = [
    (name.encode().ljust(24, b"\0"), dtype.encode().ljust(4, b"\0"), number) for name, (dtype, number) in FIELDS.items()
]

Buffer = npt.NDArray[np.uint8]
Views = dict[str, npt.NDArray[Any]]


class Field(NamedTuple):
    """Where a tensor lies in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def planned(shapes: Mapping[str, tuple[int, ...]]) -> tuple[tuple[Field, ...], int]:
    """The only layout for these shapes, and the bytes it takes."""
    fields = []
    offset = _header_bytes()
    for name, (dtype, _) in FIELDS.items():
        field = Field(name, dtype, shapes[name], offset)
        fields.append(field)
        offset = _aligned(offset + field.num_bytes)
    return tuple(fields), offset


def new_buffer(num_bytes: int) -> Buffer:
    """Zeros that start at a multiple of 64 in memory, so that every field does."""
    space = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -space.ctypes.data % ALIGNMENT_BYTES
    return space[start : start + num_bytes]


def views(buffer: Buffer, fields: tuple[Field, ...]) -> Views:
    """An array over each field; writable if the buffer is."""
    return {
        field.name: buffer[field.offset : field.offset + field.num_bytes].view(field.dtype).reshape(field.shape)
        for field in fields
    }


def seal(buffer: Buffer, fields: tuple[Field, ...]) -> None:
    """Write the header of a filled buffer."""
    start = _header_bytes()
    values: list[Any] = []
    for names, field in zip(_ENTRY_NAMES, fields, strict=True):
        values += (*names, *field.shape, *(0,) * (_DIMENSIONS - len(field.shape)), field.offset)
    _ENTRIES.pack_into(buffer.data, _HEAD.size, *values)
    payload = isal_zlib.crc32(buffer[start:])
    _HEAD.pack_into(buffer.data, 0, MAGIC, VERSION, 0, len(fields), payload, len(buffer))
    _HEAD.pack_into(buffer.data, 0, MAGIC, VERSION, _header_crc(buffer), len(fields), payload, len(buffer))


def read_fields(buffer: Buffer, *, check_payload: bool) -> tuple[Field, ...]:
    """Where everything lies.

    Raises:
        FormatError: a foreign, cut, damaged or newer buffer.
    """
    if len(buffer) < _HEAD.size:
        raise FormatError(f"pack: found {len(buffer)} bytes, expected a header of at least {_HEAD.size}: cut, or not a pack")
    magic, version, crc, num_fields, payload_crc, num_bytes = _HEAD.unpack_from(buffer.data)
    if magic != MAGIC:
        raise FormatError(f"pack: found {magic!r} at its start, expected {MAGIC!r}: not a pack")
    if version != VERSION:
        raise FormatError(f"pack: found format version {version}, expected {VERSION}: use the same bayplan on both sides")
    if num_bytes != len(buffer):
        raise FormatError(f"pack: found {len(buffer):,} bytes, expected {num_bytes:,} as its header says: cut, or not one pack")
    if num_fields != len(FIELDS) or num_bytes < _header_bytes():
        raise FormatError(f"pack: found {num_fields} fields in {num_bytes:,} bytes, expected {len(FIELDS)}: damaged")
    _refuse_other_crc("its header", _header_crc(buffer), crc)
    found = _entries(buffer)
    expected, total = planned({field.name: field.shape for field in found})
    if found != expected or total != num_bytes:
        wrong = next((pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]), (num_bytes, total))
        raise FormatError(f"pack: found {wrong[0]}, expected {wrong[1]}: its fields do not lie as format version {VERSION} says")
    if check_payload:
        _refuse_other_crc("its content", isal_zlib.crc32(buffer[_header_bytes() :]), payload_crc)
    return found


def _entries(buffer: Buffer) -> tuple[Field, ...]:
    found = []
    values = _ENTRIES.unpack_from(buffer.data, _HEAD.size)
    for place, ((name, (dtype, num_dimensions)), names) in enumerate(zip(FIELDS.items(), _ENTRY_NAMES, strict=True)):
        entry = values[place * _ENTRY_VALUES : (place + 1) * _ENTRY_VALUES]
        if entry[:3] != names:
            raise FormatError(f"pack: found {_stripped(entry)} as field {place}, expected {_stripped(names)}")
        shape = entry[3 : 3 + num_dimensions]
        # An empty field takes no bytes whatever its other dimensions say, and numpy takes none this large.
        if math.prod(max(size, 1) for size in shape) >= _MOST:
            raise FormatError(f"pack: found {name} of shape {shape}, expected fewer than {_MOST:,} elements")
        found.append(Field(name, dtype, shape, entry[-1]))
    return tuple(found)


def _stripped(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Name, dtype and number of dimensions, to be read."""
    return entry[0].rstrip(b"\0"), entry[1].rstrip(b"\0"), entry[2]


def _refuse_other_crc(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise FormatError(f"pack: found crc32 {found:08x} of {what}, expected {expected:08x}: damaged on its way")


def _header_crc(buffer: Buffer) -> int:
    return int(isal_zlib.crc32(buffer[_CHECKED_FROM : _header_bytes()]))


def _header_bytes() -> int:
    return _aligned(_HEAD.size + _ENTRIES.size)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
