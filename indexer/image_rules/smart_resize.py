"""Qwen2-VL to Qwen3-VL and GLM-4.1V to 4.6V: both sides to multiples of one factor, the area between two limits.

Sources: transformers 5.24 `models/qwen2_vl/image_processing_qwen2_vl.py`, `models/glm4v/image_processing_glm4v.py`;
qwen-vl-utils 0.0.14 `vision_process.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, positions

_MAX_RATIO = 200
_CHUNK = 16384
"""Images at a time: the temporaries of a step stay in the cache, a quarter to a half faster on millions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmartResize:
    """`smart_resize` of the processor, if asked for after the one of qwen-vl-utils, whose edge cases differ."""

    patch_size: int
    min_pixels: int
    max_pixels: int
    merge_size: int = 2
    frames: int = 1
    """How often the area is counted against the limits; GLM takes an image for a clip of two frames."""
    enlarge_small: bool = False
    """GLM: an image with a side below the factor is enlarged first, ratio kept."""
    fetch_image: bool = False
    """The image went through `qwen_vl_utils.fetch_image` before."""
    fetch_min_tokens: int = 4
    fetch_max_tokens: int = 16384
    window_patches: int | None = None
    """Side of an attention window in patches; None: full attention in every block."""
    wrapper_tokens: int = 2

    @property
    def factor(self) -> int:
        """Pixels of a side that make one image token."""
        return self.patch_size * self.merge_size

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = np.empty_like(sizes.heights), np.empty_like(sizes.widths)
        refusals: dict[int, str] = {}
        for start in range(0, len(sizes), _CHUNK):
            part = slice(start, start + _CHUNK)
            found = self._grid(as_floats(sizes.heights[part]), as_floats(sizes.widths[part]))
            rows[part], columns[part] = found[0], found[1]
            refusals |= {start + position: reason for position, reason in found[2].items()}
        patches = rows * columns
        segments, squared = self._attention(rows, columns)
        return image_counts(
            sizes,
            image_tokens=patches // self.merge_size**2,
            wrapper_tokens=self.wrapper_tokens,
            patches=patches,
            segments=segments,
            squared_attention=squared,
            grid=(rows, columns),
            grid_unit="patches",
            refusals=refusals,
        )

    def _grid(self, height: Floats, width: Floats) -> tuple[Floats, Floats, dict[int, str]]:
        """Rows and columns of patches, and refusals."""
        refusals: dict[int, str] = {}
        if self.fetch_image:
            refusals = _too_long(height, width)
            height, width = self._resize_of_utils(height, width)
        if self.enlarge_small:
            height, width = self._enlarged(height, width)
        refusals = _too_long(height, width) | refusals
        height, width = self._resize(height, width)
        return height / self.patch_size, width / self.patch_size, refusals

    def _enlarged(self, height: Floats, width: Floats) -> tuple[Floats, Floats]:
        scale = np.maximum(self.factor / height, self.factor / width)
        small = (height < self.factor) | (width < self.factor)
        return np.where(small, np.trunc(height * scale), height), np.where(small, np.trunc(width * scale), width)

    def _resize(self, height: Floats, width: Floats) -> tuple[Floats, Floats]:
        new = np.rint(height / self.factor) * self.factor, np.rint(width / self.factor) * self.factor
        limits = self.min_pixels, self.max_pixels
        return _to_limits((height, width), new, limits, factor=self.factor, frames=self.frames, least=self.factor)

    def _resize_of_utils(self, height: Floats, width: Floats) -> tuple[Floats, Floats]:
        """Rounded sides are at least one factor before the area is looked at; shrunk sides are not clamped."""
        sides = (np.maximum(np.rint(side / self.factor), 1) * self.factor for side in (height, width))
        limits = self.fetch_min_tokens * self.factor**2, self.fetch_max_tokens * self.factor**2
        return _to_limits((height, width), (next(sides), next(sides)), limits, factor=self.factor, frames=1, least=0)

    def _attention(self, rows: Ints, columns: Ints) -> tuple[Ints | int, Ints | None]:
        """Segments, and their squared lengths: windows are ragged at the right and at the bottom."""
        side = self.window_patches
        if side is None:
            return 1, None
        squares = [whole // side * side**2 + (whole % side) ** 2 for whole in (rows, columns)]
        return -(-rows // side) * -(-columns // side), squares[0] * squares[1]


def _to_limits(
    old: tuple[Floats, Floats],
    new: tuple[Floats, Floats],
    limits: tuple[int, int],
    *,
    factor: int,
    frames: int,
    least: int,
) -> tuple[Floats, Floats]:
    """`new` where its area is within limits, else `old` scaled and rounded down (at least `least`) or up to the factor."""
    area = frames * new[0] * new[1]
    too_large, too_small = np.flatnonzero(area > limits[1]), np.flatnonzero(area < limits[0])
    if too_large.size:
        shrink = np.sqrt(frames * old[0][too_large] * old[1][too_large] / limits[1])
        for before, after in zip(old, new, strict=True):
            after[too_large] = np.maximum(least, np.floor(before[too_large] / shrink / factor) * factor)
    if too_small.size:
        grow = np.sqrt(limits[0] / (frames * old[0][too_small] * old[1][too_small]))
        for before, after in zip(old, new, strict=True):
            after[too_small] = np.ceil(before[too_small] * grow / factor) * factor
    return new


def _too_long(height: Floats, width: Floats) -> dict[int, str]:
    ratio = np.maximum(height, width) / np.maximum(1, np.minimum(height, width))
    return {
        position: f"absolute aspect ratio must be smaller than {_MAX_RATIO}, got {float(ratio[position])}"
        for position in positions(ratio > _MAX_RATIO)
    }
