"""JPEG: segments are walked up to the first scan, then an end marker must follow it. Pixel data is not decoded.

Inside pixel data a byte FF is always followed by 00 or a restart marker, so FF D9 after the scan header is the end
of the image. Bytes after it (a second MPO picture, a video, padding) are not looked at; MPO counts as one frame.
"""

from __future__ import annotations

import re
from struct import Struct

from packer.images.exif import PREFIX, orientation
from packer.images.facts import ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

_FRAME = Struct(">BHHB")  # precision, height, width, components
_FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ARITHMETIC = frozenset(range(0xC9, 0xD0))
_WITHOUT_LENGTH = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})
_SCAN, _END, _EXIF_SEGMENT = 0xDA, 0xD9, 0xE1
_DEPTH_SUFFIX = {8: "", 12: ";12", 16: ";16"}
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
# Huffman coding spends a bit or more on each block of 64 samples, and some component has a sample for every 4th pixel.
_MAX_PIXELS_PER_BYTE = 8 * 64 * 4
_NOT_FILL = re.compile(rb"[^\xff]")
# What a decoder needs besides the frame itself: the JFIF and Adobe segments say which colour space it is.
_METADATA = frozenset({*range(0xE1, 0xEE), 0xEF, 0xFE})


def read(data: bytes, limits: ImageLimits, strict: bool) -> ImageFacts:
    """Facts of a JPEG; `strict` demands that the file is whole."""
    frame: tuple[int, int, str] | None = None
    frame_marker, exif = 0, b""
    marker, position, end = _next_segment(data, 2)
    while marker not in (0, _SCAN):
        if marker in _FRAME_MARKERS:
            if frame is not None:
                raise corrupt("jpeg", f"second frame header at byte {position}, expected one")
            frame, frame_marker = _frame(data, position, end), marker
            check_limits("jpeg", frame[0], frame[1], limits)
        elif marker == _EXIF_SEGMENT and not exif and data.startswith(PREFIX, position):
            exif = data[position:end]
        marker, position, end = _next_segment(data, end)
    if frame is None:
        if marker == _SCAN:
            raise corrupt("jpeg", f"scan at byte {position} before any frame header, so no size")
        raise truncated("jpeg", f"ends at byte {len(data):,} before its frame header, so no size")
    if strict and (marker != _SCAN or data.rfind(b"\xff\xd9", end) < 0):
        raise truncated("jpeg", f"no end marker (FF D9) after the pixel data, {len(data):,} bytes in all")
    num_bytes, num_pixels = len(data) - end, frame[0] * frame[1]
    if strict and num_pixels > num_bytes * _MAX_PIXELS_PER_BYTE and frame_marker not in _ARITHMETIC:
        raise corrupt("jpeg", f"{num_bytes:,} bytes of pixel data cannot hold the {num_pixels:,} pixels it claims")
    return upright_facts("jpeg", frame[:2], frame[2], orientation(exif) if exif else 1)


def without_metadata(data: bytes) -> bytes:
    """The same picture without EXIF, colour profile, comments and the like, which decoders trip over."""
    kept = [data[:2]]
    start = 2
    marker, _, end = _next_segment(data, start)
    while marker not in (0, _SCAN):
        if marker not in _METADATA:
            kept.append(data[start:end])
        start = end
        marker, _, end = _next_segment(data, start)
    kept.append(data[start:])
    return b"".join(kept)


def _next_segment(data: bytes, position: int) -> tuple[int, int, int]:
    """(marker, start of payload, end of payload) of the segment at or after `position`; marker 0 when cut."""
    size = len(data)
    while position + 4 <= size:
        if data[position] != 0xFF:  # junk between segments: decoders skip it
            position = data.find(b"\xff", position)
            if position < 0:
                break
            continue
        marker = data[position + 1]
        if marker == 0xFF:  # fill bytes: any number of FF may stand before a marker
            found = _NOT_FILL.search(data, position)
            if found is None:
                break
            position = found.start() - 1
        elif marker in _WITHOUT_LENGTH:
            position += 2
        elif marker == _END:
            raise corrupt("jpeg", f"end marker at byte {position} before any pixel data")
        else:
            length = data[position + 2] << 8 | data[position + 3]
            if length < 2:
                raise corrupt("jpeg", f"segment FF {marker:02X} at byte {position} has length {length}, expected >= 2")
            end = position + 2 + length
            return (marker, position + 4, end) if end <= size else (0, size, size)
    return 0, size, size


def _frame(data: bytes, position: int, end: int) -> tuple[int, int, str]:
    if end - position < _FRAME.size:
        raise corrupt("jpeg", f"frame header at byte {position} has {end - position} bytes, expected at least 6")
    precision, height, width, components = _FRAME.unpack_from(data, position)
    if precision not in _DEPTH_SUFFIX:
        raise corrupt("jpeg", f"{precision} bits a sample, expected 8, 12 or 16")
    if components not in _MODES:
        raise corrupt("jpeg", f"{components} colour components, expected 1, 3 or 4")
    if height == 0:
        raise corrupt("jpeg", "height is 0 (left to a DNL marker, which no decoder in use reads)")
    return width, height, _MODES[components] + _DEPTH_SUFFIX[precision]
