"""What kind of file some bytes are, by their first bytes: a format we take, or a reason that names what it is."""

from __future__ import annotations

import re

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images.bmp import HEADER_SIZES as BMP_HEADER_SIZES
from packer.images.facts import truncated
from packer.images.png import MAGIC as PNG_MAGIC

_BY_START = {
    b"II*\x00": "tiff",
    b"MM\x00*": "tiff",
    b"II+\x00": "tiff",  # BigTIFF
    b"MM\x00+": "tiff",
    b"\x00\x00\x00\x0cjP  ": "jp2",
    b"\xff\x4f\xff\x51": "j2k",
    b"\x00\x00\x01\x00": "ico",
    b"qoif": "qoi",
    b"\x01\xda\x00\x01": "sgi",
    b"\x01\xda\x00\x02": "sgi",
    b"\x01\xda\x01\x01": "sgi",
    b"\x01\xda\x01\x02": "sgi",
}
_NETPBM = re.compile(rb"P[1-6][ \t\r\n]+(?:#[^\n]*\n\s*)*\d+\s")
_PCX = re.compile(rb"\x0a[\x00\x02\x03\x05]\x01[\x01\x02\x04\x08]", re.DOTALL)
_TGA_FOOTER = b"TRUEVISION-XFILE.\x00"
_UNSUPPORTED = {
    b"%PDF-": "PDF",
    b"%!PS": "PostScript",
    b"\xc5\xd0\xd3\xc6": "PostScript (EPS)",
    b"\x1aE\xdf\xa3": "WebM or Matroska video",
    b"\x00\x00\x01\xba": "MPEG video",
    b"\x00\x00\x01\xb3": "MPEG video",
    b"FLV\x01": "Flash video",
    b"OggS": "Ogg audio or video",
    b"ID3": "MP3 audio",
    b"8BPS": "Photoshop (PSD)",
    b"\xff\x0a": "JPEG XL",
    b"\x00\x00\x00\x0cJXL ": "JPEG XL",
    b"DDS ": "DirectDraw surface (DDS)",
    b"icns": "Apple icon (ICNS)",
    b"\x00\x00\x02\x00\x01\x00": "Windows cursor",
    b"gimp xcf": "GIMP (XCF)",
    b"\xd7\xcd\xc6\x9a": "Windows metafile (WMF)",
    b"\x8aMNG": "MNG animation",
    b"\x8bJNG": "JNG",
    b"AT&TFORM": "DjVu",
}
_RIFF_KINDS = {b"AVI ": "AVI video", b"WAVE": "WAV audio"}
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}
_TEXT_STARTS = {
    b"<!doctype html": "HTML",
    b"<html": "HTML",
    b"<head": "HTML",
    b"<body": "HTML",
    b"<script": "HTML",
    b"<?xml": "XML",
    b"{": "JSON",
    b"[": "JSON",
    b"version https://git-lfs": "a Git LFS pointer (the file itself was never fetched)",
}
_ARCHIVES = {b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "gzip data", b"(\xb5/\xfd": "zstandard data"}


def sniff(data: bytes) -> str:
    """The format's name as in `EXTENSIONS`.

    Raises:
        RowError: empty, not an image, or a known format that is not taken.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data.startswith(b"\x89PNG"):
        return "png"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "webp"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"BM") and int.from_bytes(data[14:18], "little") in BMP_HEADER_SIZES:
        return "bmp"
    return _sniff_rare(data)


def _sniff_rare(data: bytes) -> str:
    if not data:
        raise RowError(Reason.EMPTY_IMAGE, "0 bytes; fetch the file again")
    if data.startswith((b"II*\x00\x10\x00\x00\x00CR", b"IIRO", b"FUJIFILM")) or data[4:12] == b"ftypcrx ":
        raise _unsupported("camera raw")
    for start, kind in _BY_START.items():
        if data.startswith(start):
            return kind
    if data[4:8] == b"ftyp":
        return _sniff_boxes(data)
    if _NETPBM.match(data[:1024]):
        return "ppm"
    if _PCX.match(data):
        return "pcx"
    if data.endswith(_TGA_FOOTER):
        return "tga"
    for start, name in _UNSUPPORTED.items():
        if data.startswith(start):
            raise _unsupported(name)
    if data.startswith(b"RIFF") and data[8:12] in _RIFF_KINDS:
        raise _unsupported(_RIFF_KINDS[data[8:12]])
    raise _cut_signature(data) or _not_an_image(data)


def _sniff_boxes(data: bytes) -> str:
    """AVIF, HEIF and MP4 share a container; the brands in its first box tell them apart."""
    size = min(int.from_bytes(data[:4], "big"), 1024)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, size - 3, 4))}
    if brands & _AVIF_BRANDS:
        return "avif"
    if brands & _HEIF_BRANDS:
        raise _unsupported("HEIF/HEIC")
    raise _unsupported(f"MP4 or QuickTime video ({_printable(data[8:12])})")


def _unsupported(name: str) -> RowError:
    return RowError(Reason.UNSUPPORTED_IMAGE_FORMAT, f"{name}; expected a raster image, convert it beforehand")


def _cut_signature(data: bytes) -> RowError | None:
    """A file of a few bytes that begins like an image was an image before it was cut."""
    signatures = {"jpeg": b"\xff\xd8\xff", "png": PNG_MAGIC, "gif": b"GIF89a"}
    for kind, signature in signatures.items():
        if (data[0] >= 0x80 or len(data) >= 3) and signature.startswith(data):
            return truncated(kind, f"{len(data)} bytes in all")
    if data.startswith(b"RIFF") and b"WEBP".startswith(data[8:12]) and len(data) < 12:
        return truncated("webp", f"{len(data)} bytes in all")
    if data.startswith(b"BM") and data[6:10] == b"\x00\x00\x00\x00"[: len(data) - 6] and 6 < len(data) < 18:
        return truncated("bmp", f"{len(data)} bytes in all")
    return None


def _not_an_image(data: bytes) -> RowError:
    start = data[:512].removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = start.lower()
    if lower.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in data[:4096].lower():
        return _unsupported("SVG (vector graphics)")
    kind = next((name for text, name in _TEXT_STARTS.items() if lower.startswith(text)), None)
    kind = kind or next((name for magic, name in _ARCHIVES.items() if data.startswith(magic)), None)
    if kind is None and _is_text(start):
        kind = "plain text"
    if kind is None:
        return RowError(Reason.NOT_AN_IMAGE, f"unknown kind of file, begins with bytes {data[:12].hex(' ')}")
    return RowError(Reason.NOT_AN_IMAGE, f"looks like {kind}: {_printable(start[:80])}")


def _is_text(start: bytes) -> bool:
    """UTF-8 (the last character may be cut) without control characters."""
    text = start.decode("utf-8", errors="ignore")
    return len(text.encode()) >= len(start) - 3 and all(char.isprintable() or char in "\t\n\r" for char in text)


def _printable(start: bytes) -> str:
    text = start.decode("utf-8", errors="replace")
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
