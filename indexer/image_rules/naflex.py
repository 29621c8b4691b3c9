"""SigLIP2 NaFlex: the largest scale whose patches fit, found by the processor's own bisection; there is no closed form.

Source: transformers 5.24 `models/siglip2/image_processing_siglip2.py` (`get_image_size_for_max_num_patches`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints

_LEAST, _MOST, _CLOSE = 1e-6, 100.0, 1e-5
"""Scales between which it looks, and how near they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NaFlex:
    """An encoder alone: one token a patch; the processor pads to `max_patches`."""

    max_patches: int
    patch_size: int = 16

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = self._grid(as_floats(sizes.heights), as_floats(sizes.widths))
        return image_counts(
            sizes,
            image_tokens=rows * columns,
            patches=rows * columns,
            padded_patches=self.max_patches,
            grid=(rows, columns),
            grid_unit="patches",
        )

    def _grid(self, height: Floats, width: Floats) -> tuple[Ints, Ints]:
        low, high = np.full_like(height, _LEAST), np.full_like(height, _MOST)
        while (going := high - low >= _CLOSE).any():
            scale = (low + high) / 2
            fits = self._patches(height, scale) * self._patches(width, scale) <= self.max_patches
            low, high = np.where(going & fits, scale, low), np.where(going & ~fits, scale, high)
        return as_ints(self._patches(height, low)), as_ints(self._patches(width, low))

    def _patches(self, side: Floats, scale: Floats) -> Floats:
        """Patches along a scaled side."""
        return np.maximum(1, np.ceil(side * scale / self.patch_size))
