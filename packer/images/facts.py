"""What is known of an image, the limits it must meet, and how the format readers say what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from packer.format.errors import RowError
from packer.format.reasons import Reason


class CheckLevel(StrEnum):
    """How much of an image is read before it is believed."""

    HEADER = "header"
    STRUCTURE = "structure"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """One image as its own bytes describe it; the same at every check level for a whole file."""

    width: int
    # Upright: after the EXIF orientation. So is height.
    height: int
    format: str
    # "jpeg", "png", "webp", "gif", "bmp", "tiff", ...: the keys of `EXTENSIONS`.
    mode: str
    # Stored pixel layout: 1, L, LA, P, PA, RGB, RGBA, CMYK, with ";12" or ";16" for more than 8 bits a channel
    # ("I;16" is 16-bit grey). A transparent colour counts as alpha. GIF and palette BMP are always P or PA.
    # Formats read through Pillow carry Pillow's name.
    orientation: int
    # EXIF orientation 1..8; 1 when absent or invalid. XMP is not looked at.
    frames: int
    # 1 for stills; animation frames (GIF, WebP, APNG by its acTL chunk, AVIF) or pages (TIFF).


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """What a source accepts; checked on the header, before anything is walked or decoded."""

    min_side: int = 1
    max_pixels: int = 2**28
    max_aspect_ratio: float | None = None


def check_limits(kind: str, width: int, height: int, limits: ImageLimits) -> None:
    """Refuse a size outside `limits`; both sides may be swapped, nothing here depends on which is which."""
    short, long = (width, height) if width < height else (height, width)
    if short < 1:
        raise corrupt(kind, f"size is {width} x {height}, expected at least 1 x 1")
    if short * long > limits.max_pixels:
        found = f"{kind} of {width} x {height} = {short * long:,} pixels"
        raise RowError(Reason.TOO_MANY_PIXELS, f"{found}, limit is {limits.max_pixels:,}; raise `max_pixels` if it is wanted")
    if short < limits.min_side:
        found = f"{kind} of {width} x {height}"
        raise RowError(Reason.IMAGE_TOO_SMALL, f"{found}, limit is {limits.min_side} a side; lower `min_side` if it is wanted")
    ratio = limits.max_aspect_ratio
    if ratio is not None and long > ratio * short:
        found = f"{kind} of {width} x {height} is {long / short:.4g} : 1"
        raise RowError(Reason.ASPECT_RATIO, f"{found}, limit is {ratio:g}; raise `max_aspect_ratio` if it is wanted")


def upright_facts(kind: str, stored_size: tuple[int, int], mode: str, orientation: int = 1, frames: int = 1) -> ImageFacts:
    """Facts from the stored size; orientations 5 to 8 lie on their side."""
    width, height = stored_size
    if orientation >= 5:
        width, height = height, width
    return ImageFacts(width=width, height=height, format=kind, mode=mode, orientation=orientation, frames=frames)


def truncated(kind: str, detail: str) -> RowError:
    """The verdict on a file that ends too early."""
    return RowError(Reason.TRUNCATED_IMAGE, f"{kind}: {detail}; fetch the file again")


def corrupt(kind: str, detail: str) -> RowError:
    """The verdict on a file that contradicts itself."""
    return RowError(Reason.CORRUPT_IMAGE, f"{kind}: {detail}; replace the file or drop the row")
