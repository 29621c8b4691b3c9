"""The one place that changes an image's bytes, and only when a recipe asks for it.

The result is upright, 8 bits a channel (16-bit values are scaled, never clipped) and carries no metadata, colour
profile included. Same bytes for the same input per build of Pillow. Several frames are refused: one would be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images.decode import one_line, opened
from packer.images.facts import ImageFacts

if TYPE_CHECKING:
    from PIL.Image import Image

# Format -> Pillow's name of its writer.
_WRITERS = {
    "jpeg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "gif": "GIF",
    "bmp": "BMP",
    "tiff": "TIFF",
    "avif": "AVIF",
    "jp2": "JPEG2000",
    "ppm": "PPM",
}
_WITHOUT_ALPHA = frozenset({"jpeg", "bmp", "ppm"})
_LOSSY = frozenset({"jpeg", "webp", "avif"})
_DEFAULT_QUALITY = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What a recipe's `convert` asks for."""

    longest_side: int | None
    # Pixels; larger images are scaled down (Lanczos), smaller ones are left as they are.
    format: Literal["jpeg", "png", "webp"] | None
    # None keeps the format. Transparency is kept where the format has it, else laid on white (JPEG, BMP, PPM).
    quality: int | None
    # 1..100 for JPEG, WebP and AVIF; None is 90. A number re-encodes even what already fits.


def convert(data: bytes, facts: ImageFacts, conversion: Conversion) -> bytes | None:
    """The converted bytes; None when the image already is as asked.

    Raises:
        RowError: CONVERSION_FAILED.
    """
    kind = conversion.format or facts.format
    size = _target_size(facts, conversion.longest_side)
    is_upright = facts.orientation == 1 and size == (facts.width, facts.height)
    if is_upright and kind == facts.format and conversion.quality is None:
        return None
    if kind not in _WRITERS:
        raise _failed(f"{kind} cannot be written; name a `format` to convert to")
    if facts.frames > 1:
        raise _failed(f"{facts.format} with {facts.frames} frames, only one would be kept; leave it unconverted")
    try:
        with opened(data, facts.format) as image:
            return _encode(_converted(image, facts, size), kind, conversion.quality)
    except RowError as error:
        raise _failed(error.detail) from error
    except Exception as error:
        raise _failed(f"{facts.format} to {kind}: {one_line(error)}") from error


def _target_size(facts: ImageFacts, longest_side: int | None) -> tuple[int, int]:
    longest = max(facts.width, facts.height)
    if longest_side is None or longest <= longest_side:
        return facts.width, facts.height
    half = longest // 2
    return (
        max(1, (facts.width * longest_side + half) // longest),
        max(1, (facts.height * longest_side + half) // longest),
    )


def _converted(image: Image, facts: ImageFacts, size: tuple[int, int]) -> Image:
    """The upright picture of `size` in mode L, LA, RGB or RGBA."""
    from PIL.Image import Resampling

    image.load()
    is_turned = facts.format == "tiff"  # Pillow turns TIFFs upright on loading
    image = _eight_bit(image, facts)
    if not is_turned:
        image = upright(image, facts.orientation)
    return image if image.size == size else image.resize(size, Resampling.LANCZOS)


def _eight_bit(image: Image, facts: ImageFacts) -> Image:
    has_key = "transparency" in image.info
    if has_key and facts.mode.endswith(";16"):
        raise _failed("16 bits a channel with one transparent colour cannot be kept at 8; convert it beforehand")
    if facts.mode == "I;16":
        # Rounded 255/65535. Pillow's own conversion clips, so that all but black turns white.
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    if image.mode in ("I", "F"):
        raise _failed(f"mode {image.mode} has no range that 8 bits could stand for; convert it beforehand")
    if image.mode in ("1", "L", "LA"):
        return image.convert("LA" if has_key or image.mode == "LA" else "L")
    has_alpha = has_key or image.mode in ("PA", "La", "RGBA", "RGBa")
    return image.convert("RGBA" if has_alpha else "RGB")


def upright(image: Image, orientation: int) -> Image:
    """The picture turned as its EXIF orientation asks; itself when there is nothing to turn."""
    from PIL.Image import Transpose

    steps = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(steps[orientation]) if orientation in steps else image


def _encode(image: Image, kind: str, quality: int | None) -> bytes:
    if kind in _WITHOUT_ALPHA and image.mode in ("LA", "RGBA"):
        image = _on_white(image)
    image.info = {}  # writers would carry profiles and comments along
    options: dict[str, Any] = {"quality": quality or _DEFAULT_QUALITY} if kind in _LOSSY else {}
    if kind == "avif":
        options["max_threads"] = 1
    out = BytesIO()
    image.save(out, format=_WRITERS[kind], **options)
    return out.getvalue()


def _on_white(image: Image) -> Image:
    from PIL.Image import new

    mode = image.mode.removesuffix("A")
    white = new(mode, image.size, 255 if mode == "L" else (255, 255, 255))
    white.paste(image.convert(mode), mask=image.getchannel("A"))
    return white


def _failed(detail: str) -> RowError:
    return RowError(Reason.CONVERSION_FAILED, detail)
