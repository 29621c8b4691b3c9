"""Windows and OS/2 bitmaps: the pixel rows (or the run-length data) must lie inside the file."""

from __future__ import annotations

from struct import Struct

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images.facts import ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

HEADER_SIZES = frozenset({12, 40, 52, 56, 64, 108, 124})
_START = Struct("<II")  # offset of the pixels, size of the header that follows
_CORE = Struct("<HHHH")  # width, height, planes, bits
_INFO = Struct("<iiHHII")  # width, height, planes, bits, compression, bytes of pixel data
_RAW, _RLE8, _RLE4, _BIT_FIELDS, _JPEG, _PNG = range(6)


def read(data: bytes, limits: ImageLimits, strict: bool) -> ImageFacts:
    """Facts of a BMP; `strict` demands that the file is whole."""
    if len(data) < 26:
        raise truncated("bmp", f"ends at byte {len(data)} inside its header")
    offset, header_size = _START.unpack_from(data, 10)
    if len(data) < 14 + header_size:
        raise truncated("bmp", f"ends at byte {len(data)} inside its header of {header_size} bytes")
    if header_size == 12:
        (width, height, _, bits), compression, data_bytes = _CORE.unpack_from(data, 18), _RAW, 0
    else:
        width, height, _, bits, compression, data_bytes = _INFO.unpack_from(data, 18)
        height = abs(height)  # negative: rows run from top to bottom
    if compression in (_JPEG, _PNG):
        raise RowError(Reason.UNSUPPORTED_IMAGE_FORMAT, "bmp that wraps a JPEG or PNG; unwrap it first")
    if bits not in (1, 4, 8, 16, 24, 32) or compression > _BIT_FIELDS:
        raise corrupt("bmp", f"{bits} bits a pixel with compression {compression}, which no decoder in use reads")
    if width < 0:
        raise corrupt("bmp", f"width is {width}")
    check_limits("bmp", width, height, limits)
    if strict:
        _check_pixels(data, max(offset, 14 + header_size), width * bits, height, compression, data_bytes)
    return upright_facts("bmp", (width, height), _mode(data, bits, compression, header_size))


def _check_pixels(data: bytes, offset: int, row_bits: int, height: int, compression: int, data_bytes: int) -> None:
    if compression in (_RLE8, _RLE4):
        needed = max(data_bytes, 2)
    else:  # rows are padded to 4 bytes; the padding of the last one is often left out
        needed = (row_bits + 31) // 32 * 4 * (height - 1) + (row_bits + 7) // 8
    if offset + needed > len(data):
        raise truncated("bmp", f"{len(data):,} bytes, its header needs {offset + needed:,}")


def _mode(data: bytes, bits: int, compression: int, header_size: int) -> str:
    if bits <= 8:
        return "P"
    has_alpha = bits == 32 and compression == _BIT_FIELDS and header_size >= 56 and any(data[66:70])
    return "RGBA" if has_alpha else "RGB"
