"""Everything that needs Pillow to look: full decodes, and formats without a parser of ours.

Pillow's own limits, its tolerance of cut files and its warnings never decide: they are switched off while it works
for us, and every error it raises becomes TRUNCATED_IMAGE or CORRUPT_IMAGE by the rule in `_verdict`.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images import jpeg, png
from packer.images.containers import check_icon_sizes, is_cut
from packer.images.facts import CheckLevel, ImageFacts, ImageLimits, check_limits, corrupt, truncated, upright_facts

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

# Format -> (Pillow's name, its plugin, the feature a build may lack).
_PLUGINS = {
    "jpeg": ("JPEG", "JpegImagePlugin", "jpg"),
    "png": ("PNG", "PngImagePlugin", "zlib"),
    "webp": ("WEBP", "WebPImagePlugin", "webp"),
    "gif": ("GIF", "GifImagePlugin", None),
    "bmp": ("BMP", "BmpImagePlugin", None),
    "tiff": ("TIFF", "TiffImagePlugin", "libtiff"),
    "avif": ("AVIF", "AvifImagePlugin", "avif"),
    "jp2": ("JPEG2000", "Jpeg2KImagePlugin", "jpg_2000"),
    "j2k": ("JPEG2000", "Jpeg2KImagePlugin", "jpg_2000"),
    "ppm": ("PPM", "PpmImagePlugin", None),
    "ico": ("ICO", "IcoImagePlugin", None),
    "tga": ("TGA", "TgaImagePlugin", None),
    "qoi": ("QOI", "QoiImagePlugin", None),
    "pcx": ("PCX", "PcxImagePlugin", None),
    "sgi": ("SGI", "SgiImagePlugin", None),
}
_WITHOUT_METADATA = {"jpeg": jpeg.without_metadata, "png": png.without_metadata}
_ORIENTATION, _TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_BITS, _TIFF_COMPRESSION = 0x0112, 256, 257, 258, 259
# No picture shrinks further with TIFF's LZW, JPEG, deflate (two numbers) or PackBits. JPEG 2000 has no such bound, but
# takes 18 bytes of memory a pixel, so it is held to the same above the last number.
_MAX_EXPANSION = 4096
_BOUNDED_TIFFS = frozenset({5, 7, 8, 32946, 32773})
_ALWAYS_TRIED_PIXELS = 2**26
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")

_lock = threading.Lock()
_num_inside = 0
_on_leaving = ExitStack()


@contextmanager
def _own_rules() -> Iterator[None]:
    """Pillow without its limits and warnings; they are global, so the first thread in sets and the last one resets."""
    global _num_inside
    with _lock:
        if _num_inside == 0:
            _set_rules()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0:
                _on_leaving.close()


def _set_rules() -> None:
    from PIL import Image, ImageFile

    _on_leaving.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", module=r"PIL\b")
    _on_leaving.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    _on_leaving.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
    Image.MAX_IMAGE_PIXELS = None
    ImageFile.LOAD_TRUNCATED_IMAGES = False


@contextmanager
def opened(data: bytes, kind: str) -> Iterator[ImageFile]:
    """The image in Pillow, as `kind` and nothing else, without metadata that its decoder might trip over."""
    from PIL import Image, features

    name, plugin, feature = _PLUGINS[kind]
    import_module(f"PIL.{plugin}")
    if feature is not None and not features.check(feature):
        raise RowError(Reason.UNSUPPORTED_IMAGE_FORMAT, f"this build of Pillow has no decoder for {kind}; install its wheel")
    strip = _WITHOUT_METADATA.get(kind)
    with _own_rules(), Image.open(BytesIO(strip(data) if strip else data), formats=[name]) as image:
        yield image


def first_frame(data: bytes, facts: ImageFacts, limits: ImageLimits, *, draft_size: tuple[int, int] | None = None) -> ImageFile:
    """The first frame of an image whose header gave `facts`, decoded but not turned (Pillow itself turns TIFFs).

    With `draft_size` a JPEG may be decoded at a fraction of its size that still covers it: faster, other pixels.

    Raises:
        RowError: its pixels do not come out, or are not of the size that the header gave.
    """
    try:
        with opened(data, facts.format) as image:
            if draft_size is not None:
                image.draft(None, draft_size)
            expected = image.size if draft_size is not None else (facts.width, facts.height)
            _load_frames(image, facts.format, 1, len(data), limits)
    except RowError:
        raise
    except Exception as error:
        raise _verdict(data, facts.format, error) from error
    if sorted(image.size) != sorted(expected):
        found = f"{image.width} x {image.height}"
        raise corrupt(facts.format, f"its header says {facts.width} x {facts.height}, decoded {found}")
    return image


def check_decodes(data: bytes, facts: ImageFacts, limits: ImageLimits) -> None:
    """Decode an image of known structure; RowError when its pixels do not come out."""
    try:
        with opened(data, facts.format) as image:
            found = image.size
            _load_frames(image, facts.format, facts.frames, len(data), limits)
    except RowError:
        raise
    except Exception as error:
        if facts.format == "jpeg" and ";" in facts.mode:
            depth = f"jpeg of {facts.mode.partition(';')[2]} bits a sample, Pillow decodes 8"
            raise RowError(Reason.UNSUPPORTED_IMAGE_FORMAT, f"{depth}; convert it beforehand") from error
        raise corrupt(facts.format, f"its structure is whole but decoding fails ({one_line(error)})") from error
    if sorted(found) != sorted((facts.width, facts.height)):
        raise corrupt(facts.format, f"its header says {facts.width} x {facts.height}, decoded {found[0]} x {found[1]}")


def read_by_decoding(data: bytes, kind: str, limits: ImageLimits, check: CheckLevel) -> ImageFacts:
    """Facts of a format without a parser of ours; pixels are decoded unless only the header is asked for."""
    if kind == "ico":
        check_icon_sizes(data, limits)  # Pillow decodes icons while opening them
    try:
        with opened(data, kind) as image:
            orientation = _orientation(image, kind)
            size, mode = _stored_size(image, kind), _mode(image, kind)
            check_limits(kind, *size, limits)
            frames = getattr(image, "n_frames", 1) if kind in ("tiff", "avif") else 1
            if check is not CheckLevel.HEADER:
                _load_frames(image, kind, frames, len(data), limits)
    except RowError:
        raise
    except Exception as error:
        raise _verdict(data, kind, error) from error
    return upright_facts(kind, size, mode, orientation, frames)


def _check_plausible(image: ImageFile, kind: str, num_bytes: int) -> None:
    """Refuse a page of a size that so few bytes cannot hold, before memory for it is taken."""
    num_pixels = image.width * image.height
    most = num_bytes * _MAX_EXPANSION
    if kind in ("jp2", "j2k"):
        most = max(most, _ALWAYS_TRIED_PIXELS)
    elif kind == "tiff" and image.tag_v2.get(_TIFF_COMPRESSION) in _BOUNDED_TIFFS:  # type: ignore[attr-defined]
        most = most * 8 // _tiff_bits(image)
    else:
        return
    if num_pixels > most:
        raise corrupt(kind, f"{num_bytes:,} bytes cannot hold the {num_pixels:,} pixels it claims")


def _load_frames(image: ImageFile, kind: str, num_frames: int, num_bytes: int, limits: ImageLimits) -> None:
    """Decode the first frame, and further ones up to `max_pixels` in sum: a small file may hold years of them."""
    num_pixels = 0
    for index in range(num_frames):
        if index:
            image.seek(index)
        num_pixels += image.width * image.height
        if index and num_pixels > limits.max_pixels:
            return
        check_limits(kind, image.width, image.height, ImageLimits(max_pixels=limits.max_pixels))
        _check_plausible(image, kind, num_bytes)
        image.load()


def _verdict(data: bytes, kind: str, error: Exception) -> RowError:
    """Truncated where the container itself, or Pillow in so many words, says that bytes are missing; else corrupt."""
    from PIL import UnidentifiedImageError

    if is_cut(data, kind):
        return truncated(kind, f"ends at byte {len(data):,}, its own tables reach further")
    message = one_line(error)
    if kind == "tiff" and isinstance(error, UnidentifiedImageError):
        return RowError(Reason.UNSUPPORTED_IMAGE_FORMAT, "tiff of a pixel layout that Pillow cannot read; convert it")
    if "truncated" in message.lower():
        return truncated(kind, f"ends at byte {len(data):,} ({message})")
    return corrupt(kind, f"decoding fails ({message})")


def one_line(error: Exception) -> str:
    """An error of Pillow's in one line that is the same in every run."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "its header makes no sense to the decoder"
    return _ADDRESS.sub("0x", " ".join(f"{type(error).__name__}: {error}".split()))[:200]


def _stored_size(image: ImageFile, kind: str) -> tuple[int, int]:
    if kind == "tiff":  # Pillow turns TIFFs upright itself, some versions already on opening
        tags = image.tag_v2  # type: ignore[attr-defined]
        return int(tags[_TIFF_WIDTH]), int(tags[_TIFF_HEIGHT])
    return image.size


def _mode(image: ImageFile, kind: str) -> str:
    mode = image.mode
    if mode.startswith("I;16") or (kind == "ppm" and mode == "I"):
        return "I;16"
    if kind == "tiff" and mode in ("LA", "RGB", "RGBA", "CMYK"):
        return f"{mode};16" if _tiff_bits(image) == 16 else mode
    return mode


def _tiff_bits(image: ImageFile) -> int:
    """Bits of a sample; a TIFF that does not say has one."""
    bits: tuple[int, ...] = image.tag_v2.get(_TIFF_BITS, (1,))  # type: ignore[attr-defined]
    return max(1, *bits)


def _orientation(image: ImageFile, kind: str) -> int:
    if kind == "tiff":
        found = image.tag_v2.get(_ORIENTATION, 1)  # type: ignore[attr-defined]
    else:
        for key in ("xmp", "XML:com.adobe.xmp"):  # Pillow would look for an orientation there too
            image.info.pop(key, None)
        found = image.getexif().get(_ORIENTATION, 1)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1
