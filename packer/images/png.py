"""PNG and APNG: every chunk up to IEND is whole and its CRC right. Pixel data is not inflated, only its size weighed."""

from __future__ import annotations

from struct import Struct

from isal.isal_zlib import crc32

from packer.images.exif import orientation
from packer.images.facts import ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

MAGIC = b"\x89PNG\r\n\x1a\n"
_HEADER = Struct(">I4sIIBBBBB")  # length, IHDR, width, height, depth, colour, compression, filter, interlace
_CHUNK = Struct(">I4s")
_NUMBER = Struct(">I")
# (colour type, bit depth): mode, mode with a tRNS chunk, bits a pixel
_LAYOUTS = {
    (0, 1): ("1", "LA", 1),
    (0, 2): ("L", "LA", 2),
    (0, 4): ("L", "LA", 4),
    (0, 8): ("L", "LA", 8),
    (0, 16): ("I;16", "LA;16", 16),
    (2, 8): ("RGB", "RGBA", 24),
    (2, 16): ("RGB;16", "RGBA;16", 48),
    (3, 1): ("P", "PA", 1),
    (3, 2): ("P", "PA", 2),
    (3, 4): ("P", "PA", 4),
    (3, 8): ("P", "PA", 8),
    (4, 8): ("LA", "LA", 16),
    (4, 16): ("LA;16", "LA;16", 32),
    (6, 8): ("RGBA", "RGBA", 32),
    (6, 16): ("RGBA;16", "RGBA;16", 64),
}
_DEFLATE_MAX_RATIO = 1032  # 258 bytes from 2 bits; zlib.net/zlib_tech.html, "Maximum Compression Factor"
_FOR_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", b"acTL", b"fcTL", b"fdAT"})


def read(data: bytes, limits: ImageLimits, strict: bool) -> ImageFacts:
    """Facts of a PNG; `strict` demands that the file is whole."""
    if not data.startswith(MAGIC):
        raise corrupt("png", "signature is damaged (line ends were translated on the way?)")
    if len(data) < len(MAGIC) + _HEADER.size:
        raise truncated("png", f"ends at byte {len(data)} inside its header")
    length, kind, width, height, depth, colour, compression, filtering, interlace = _HEADER.unpack_from(data, 8)
    if kind == b"CgBI":
        raise corrupt("png", "Apple's CgBI variant, which no standard decoder reads; convert it with pngcrush first")
    if kind != b"IHDR" or length != 13:
        raise corrupt("png", f"first chunk is {kind!r} of {length} bytes, expected b'IHDR' of 13")
    layout = _LAYOUTS.get((colour, depth))
    if layout is None or compression or filtering or interlace > 1:
        found = f"colour {colour}, depth {depth}, compression {compression}, filter {filtering}, interlace {interlace}"
        raise corrupt("png", f"header says {found}, which no PNG may have")
    check_limits("png", width, height, limits)
    has_palette, has_alpha, exif, frames, pixel_bytes = _walk(data, strict)
    if strict:
        if colour == 3 and not has_palette:
            raise corrupt("png", "palette image without a PLTE chunk before its pixels")
        if pixel_bytes * _DEFLATE_MAX_RATIO < width * height * layout[2] // 8:
            found = f"{pixel_bytes:,} bytes of pixel data"
            raise corrupt("png", f"{found} cannot hold the {width * height:,} pixels it claims")
    mode = layout[1] if has_alpha else layout[0]
    return upright_facts("png", (width, height), mode, orientation(exif) if exif else 1, frames)


def without_metadata(data: bytes) -> bytes:
    """The same picture without text, profiles and the like: a 2 KB text chunk may inflate to gigabytes."""
    kept = [MAGIC]
    position, size = 8, len(data)
    while position + 12 <= size:
        length, kind = _CHUNK.unpack_from(data, position)
        end = position + length + 12
        if kind in _FOR_PIXELS:
            kept.append(data[position:end])
        if kind == b"IEND":
            break
        position = end
    return b"".join(kept)


def _walk(data: bytes, strict: bool) -> tuple[bool, bool, bytes, int, int]:
    """(palette before pixels, tRNS before pixels, EXIF block, animation frames, bytes in IDAT chunks)."""
    view = memoryview(data)
    has_palette = has_alpha = False
    exif, pixel_bytes, end, size = b"", 0, 8, len(data)
    declared = frames = 0
    kind = b""
    while kind != b"IEND":
        start = end
        if start + 12 > size:
            if strict:
                raise truncated("png", f"ends at byte {size:,} after chunk {kind!r}, expected chunks up to IEND")
            break
        length, kind = _CHUNK.unpack_from(data, start)
        end = start + length + 12
        if end > size:
            if strict:
                raise truncated("png", f"ends at byte {size:,} inside chunk {kind!r}, {end - size:,} bytes short")
            break
        if strict and crc32(view[start + 4 : end - 4]) != _NUMBER.unpack_from(data, end - 4)[0]:
            raise corrupt("png", f"checksum of chunk {kind!r} at byte {start} does not match its bytes")
        if kind == b"IDAT":
            pixel_bytes += length
        elif kind == b"fcTL":
            frames += 1
        elif kind == b"eXIf" and not exif:
            exif = data[start + 8 : end - 4]
        elif not pixel_bytes:
            if kind == b"PLTE":
                has_palette = True
            elif kind == b"tRNS":
                has_alpha = True
            elif kind == b"acTL" and length == 8:
                (declared,) = _NUMBER.unpack_from(data, start + 8)
    # An animation that contradicts itself is shown as a still picture, as browsers do.
    return has_palette, has_alpha, exif, frames if frames and frames == declared else 1, pixel_bytes
