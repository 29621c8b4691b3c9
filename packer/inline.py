"""Images written into the row itself: `data:` URLs and bare base64. What counts as one, and its bytes.

Bare base64 is told from a path by what it decodes to: base64 of a JPEG begins with `/9j/`, like an absolute path.
"""

from __future__ import annotations

import binascii
import re
import struct
from urllib.parse import unquote, unquote_to_bytes

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.refusals import empty, too_large

MIN_BASE64_CHARS = 40
"""Shorter text is a path, whatever it decodes to; the smallest GIF in use has 48 characters."""
PATH_MAX_CHARS = 4096
"""No path of the operating system is longer, so longer text with an image's beginning is base64 even if damaged."""
_HEAD_CHARS = 40
# What base64 of a known image begins with: JPEG, PNG, GIF, RIFF (WebP), BMP, TIFF, ISO boxes (AVIF, HEIC, JP2), J2K.
_BEGINNINGS = ("/9j/", "_9j_", "iVBORw0KGgo", "R0lGOD", "UklGR", "Qk", "SUkqA", "TU0AK", "AAAA", "/0//UQ", "_0__UQ")
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\-\r\n]+={0,2}[\r\n]*", re.ASCII)
_TO_STANDARD = str.maketrans("-_", "+/")
_BMP_HEADER_SIZES = frozenset({12, 40, 52, 56, 64, 108, 124})
_MIME = re.compile(r"[A-Za-z0-9!#$&^_.+\-]{1,64}/[A-Za-z0-9!#$&^_.+\-]{1,64}", re.ASCII)


def is_data_url(ref: str) -> bool:
    """Whether `ref` is a `data:` URL."""
    return ref[:1] in "dD \t\r\n" and ref.lstrip()[:5].lower() == "data:"


def is_bare_base64(ref: str) -> bool:
    """Whether `ref` is an image as base64 text without a `data:` prefix."""
    if len(ref) < MIN_BASE64_CHARS:
        return False
    if not ref.startswith(_BEGINNINGS) and not ref[:1].isspace():
        return False
    text = ref.strip()
    try:
        head = _decode_base64("".join(text[: 2 * _HEAD_CHARS].split())[:_HEAD_CHARS])
    except ValueError:
        return False
    return _begins_like_an_image(head) and (len(text) > PATH_MAX_CHARS or _BASE64_TEXT.fullmatch(text) is not None)


def mime_type(data_url: str) -> str:
    """The media type of a `data:` URL in lower case, or nothing when it names none."""
    head = data_url[:200].strip()[5:].partition(",")[0].partition(";")[0].strip()
    return head.lower() if _MIME.fullmatch(head) else ""


def decode_data_url(ref: str, max_bytes: int) -> bytes:
    """The bytes of a `data:` URL, base64 or percent-encoded."""
    head, comma, body = ref.partition(",")
    if not comma:
        raise _invalid("data: URL", "found no comma, expected data:<mime>;base64,<data>")
    is_base64 = any(parameter.strip().lower() == "base64" for parameter in head.split(";")[1:])
    if is_base64:
        return _decode_image(unquote(body) if "%" in body else body, "data: URL", max_bytes)
    if len(body) // 3 > max_bytes:
        raise too_large("data: URL", len(body) // 3, max_bytes)
    try:
        data = unquote_to_bytes(body)
    except ValueError as error:
        raise _invalid("data: URL", f"{error}, expected base64 or percent-encoded bytes") from error
    if len(data) > max_bytes:
        raise too_large("data: URL", len(data), max_bytes)
    if not data:
        raise empty("data: URL")
    return data


def decode_bare_base64(ref: str, max_bytes: int) -> bytes:
    """The bytes of bare base64 text."""
    return _decode_image(ref, "base64 text", max_bytes)


def _decode_image(text: str, place: str, max_bytes: int) -> bytes:
    text = "".join(text.split()).rstrip("=")
    size = len(text) * 3 // 4
    if size > max_bytes:
        raise too_large(place, size, max_bytes)
    if not text:
        raise empty(place)
    try:
        return _decode_base64(text)
    except ValueError as error:
        raise _invalid(place, f"found {len(text)} characters that do not decode ({error}), expected base64") from error


def _decode_base64(text: str) -> bytes:
    if "-" in text or "_" in text:
        text = text.translate(_TO_STANDARD)
    return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)


def _begins_like_an_image(head: bytes) -> bool:
    if head[:3] == b"\xff\xd8\xff":
        return len(head) > 3 and head[3] >= 0xC0
    if head[:2] == b"BM":
        return len(head) >= 18 and struct.unpack_from("<I", head, 14)[0] in _BMP_HEADER_SIZES
    if head[:4] == b"RIFF":
        return head[8:12] == b"WEBP"
    return (
        head.startswith((b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*", b"\xff\x4f\xff\x51"))
        or head[4:8] == b"ftyp"
        or head[4:12] in (b"jP  \r\n\x87\n", b"JXL \r\n\x87\n")
    )


def _invalid(place: str, what: str) -> RowError:
    return RowError(Reason.INVALID_BASE64, f"{place}: {what}")
