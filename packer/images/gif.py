"""GIF: blocks are walked to the trailer and pictures counted. Pixel data is not decompressed.

The size is the screen or, where it reaches further, the first picture, which is what Pillow shows.
"""

from __future__ import annotations

from struct import Struct

from packer.images.facts import ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

_SCREEN = Struct("<HHB")
_PICTURE = Struct("<HHHHB")  # left, top, width, height, flags
_PADDING, _EXTENSION, _IMAGE, _TRAILER = 0x00, 0x21, 0x2C, 0x3B
_BLOCKS = frozenset({_PADDING, _EXTENSION, _IMAGE, _TRAILER})  # zeros between blocks: seen in old files, skipped
_CONTROL = 0xF9


def read(data: bytes, limits: ImageLimits, strict: bool) -> ImageFacts:
    """Facts of a GIF; `strict` demands that the file is whole."""
    if len(data) < 13:
        raise truncated("gif", f"ends at byte {len(data)} inside its header")
    width, height, flags = _SCREEN.unpack_from(data, 6)
    position, has_alpha = _first_picture(data, 13 + _table_bytes(flags))
    if 0 <= position <= len(data) - 10:
        left, top, picture_width, picture_height, _ = _PICTURE.unpack_from(data, position + 1)
        width, height = max(width, left + picture_width), max(height, top + picture_height)
    elif strict:
        raise truncated("gif", f"ends at byte {len(data):,} before its first picture")
    check_limits("gif", width, height, limits)
    frames = max(1, _count_pictures(data, position, strict)) if position >= 0 else 1
    return upright_facts("gif", (width, height), "PA" if has_alpha else "P", frames=frames)


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _first_picture(data: bytes, position: int) -> tuple[int, bool]:
    """(position of the first image descriptor, whether a transparent colour was declared for it); -1 without one."""
    has_alpha = False
    while 0 <= position < len(data):
        block = data[position]
        if block == _IMAGE:
            return position, has_alpha
        if block not in _BLOCKS:
            raise corrupt("gif", f"byte {block:#04x} at {position} begins no block, expected 0x21, 0x2c or 0x3b")
        if block == _TRAILER:
            raise corrupt("gif", "no picture in it")
        if block == _EXTENSION and position + 3 < len(data) and data[position + 1] == _CONTROL:
            has_alpha = bool(data[position + 3] & 1)
        position = _after_block(data, position)
    return -1, has_alpha


def _count_pictures(data: bytes, position: int, strict: bool) -> int:
    pictures = 0
    while 0 <= position < len(data):
        block = data[position]
        if block == _TRAILER:
            return pictures
        if block not in _BLOCKS:
            if strict:
                raise corrupt("gif", f"byte {block:#04x} at {position} begins no block, expected 0x21, 0x2c or 0x3b")
            return pictures
        pictures += block == _IMAGE
        position = _after_block(data, position)
    if strict:
        raise truncated("gif", f"ends at byte {len(data):,} inside or after picture {pictures}, before its trailer")
    return pictures


def _after_block(data: bytes, position: int) -> int:
    """Position after the extension, picture or padding byte at `position`; -1 when the file ends inside it."""
    block = data[position]
    if block == _EXTENSION:
        return _after_chain(data, position + 2)
    if block == _PADDING:
        return position + 1
    if position + 10 > len(data):
        return -1
    return _after_chain(data, position + 11 + _table_bytes(data[position + 9]))


def _after_chain(data: bytes, position: int) -> int:
    """Position after a chain of sub-blocks (a length byte each, 0 ends it); -1 when cut."""
    size = len(data)
    while position < size:
        length = data[position]
        position += length + 1
        if not length:
            return position
    return -1
