"""WebP: the RIFF size must lie inside the file, its chunks are walked, frames counted. Pixel data is not decoded."""

from __future__ import annotations

from struct import Struct

from packer.images.exif import orientation
from packer.images.facts import ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

_CHUNK = Struct("<4sI")
_LOSSY = Struct("<3s3sHH")  # frame tag, start code, width and height with a scaling hint in the two top bits
_ANIMATION, _EXIF, _ALPHA = 0x02, 0x08, 0x10
_FIRST_CHUNKS = (b"VP8 ", b"VP8L", b"VP8X")


def read(data: bytes, limits: ImageLimits, strict: bool) -> ImageFacts:
    """Facts of a WebP; `strict` demands that the file is whole."""
    if len(data) < 30:
        raise truncated("webp", f"ends at byte {len(data)} inside its header")
    kind = data[12:16]
    if kind not in _FIRST_CHUNKS:
        raise corrupt("webp", f"first chunk is {kind!r}, expected one of VP8, VP8L, VP8X")
    flags = data[20] if kind == b"VP8X" else 0
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
        has_alpha = bool(flags & _ALPHA)
    else:
        width, height, has_alpha = _picture(data, 12)
    check_limits("webp", width, height, limits)
    exif, frames, picture = _walk(data, strict)
    if flags & _EXIF and not exif and int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise truncated("webp", f"ends at byte {len(data):,} before the EXIF chunk it announces, so no orientation")
    if strict and flags & _ANIMATION and frames == 0:
        raise corrupt("webp", "animation without a frame (ANMF chunk)")
    if strict and not flags & _ANIMATION:
        if picture < 0:
            raise corrupt("webp", "no picture (VP8 or VP8L chunk) in it")
        if (found := _picture(data, picture)[:2]) != (width, height):
            raise corrupt("webp", f"canvas is {width} x {height} but its picture is {found[0]} x {found[1]}")
    rotation = orientation(exif) if flags & _EXIF else 1
    count = max(1, frames) if flags & _ANIMATION else 1
    return upright_facts("webp", (width, height), "RGBA" if has_alpha else "RGB", rotation, count)


def _walk(data: bytes, strict: bool) -> tuple[bytes, int, int]:
    """(EXIF block, ANMF chunks, position of the still picture's chunk or -1)."""
    declared = int.from_bytes(data[4:8], "little") + 8
    if strict and declared > len(data):
        raise truncated("webp", f"{len(data):,} bytes, its RIFF header says {declared:,}")
    size = min(declared, len(data))
    exif, frames, picture, position = b"", 0, -1, 12
    while position + 8 <= size:
        kind, length = _CHUNK.unpack_from(data, position)
        end = position + 8 + length
        if end > size:
            if strict:
                raise corrupt("webp", f"chunk {kind!r} at byte {position} passes the RIFF end by {end - size:,} bytes")
            break
        if kind == b"ANMF":
            frames += 1
        elif kind == b"EXIF" and not exif:
            exif = data[position + 8 : end]
        elif picture < 0 and kind in (b"VP8 ", b"VP8L"):
            picture = position
        position = end + (length & 1)
    return exif, frames, picture


def _picture(data: bytes, position: int) -> tuple[int, int, bool]:
    """(width, height, has alpha) of the VP8 or VP8L chunk at `position`."""
    start = position + 8
    if data.startswith(b"VP8L", position):
        bits = int.from_bytes(data[start + 1 : start + 5], "little")
        if data[start : start + 1] != b"\x2f" or bits >> 29:
            raise corrupt("webp", "lossless picture without its signature or of an unknown version")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)
    if len(data) < start + _LOSSY.size:
        raise truncated("webp", f"ends at byte {len(data):,} inside its picture header")
    tag, code, width, height = _LOSSY.unpack_from(data, start)
    if tag[0] & 1 or code != b"\x9d\x01\x2a":
        raise corrupt("webp", "lossy picture is not a key frame")
    return width & 0x3FFF, height & 0x3FFF, False
