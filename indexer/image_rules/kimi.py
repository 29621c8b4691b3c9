"""Kimi-VL and Kimi-K2.5 (MoonViT): shrunk to a number of patches, then padded to whole merged patches, so the cap is soft.

Sources: Kimi-VL's `image_processing_kimi_vl.py` (by way of a port); transformers 5.24 `models/kimi_k25/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, positions, round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiVL:
    """Refuses a side of `max_side_patches` patches and more: the position embedding ends there."""

    max_patches: int
    patch_size: int = 14
    merge_size: int = 2
    max_side_patches: int = 512
    wrapper_tokens: int = 4
    """Three special tokens and the word "image"."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        patch = self.patch_size
        num = (sizes.widths // patch) * (sizes.heights // patch)
        scale = np.sqrt(self.max_patches / as_floats(np.maximum(num, 1)))
        scale[num <= self.max_patches] = 1.0
        grid = [
            round_up(as_ints(as_floats(side) * scale), patch * self.merge_size) // patch for side in (sizes.heights, sizes.widths)
        ]
        too_long = (grid[0] >= self.max_side_patches) | (grid[1] >= self.max_side_patches)
        refusals = dict.fromkeys(positions(too_long), "Exceed pos emb")
        return _counts(self, sizes, grid[0], grid[1], refusals)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK25:
    """Shrinks long sides too, and refuses nothing."""

    max_patches: int
    patch_size: int = 14
    merge_size: int = 2
    max_side_patches: int = 512
    wrapper_tokens: int = 4
    """Three special tokens and the word "image"."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        patch, longest = self.patch_size, self.max_side_patches * self.patch_size
        num = np.maximum(1, sizes.heights // patch) * np.maximum(1, sizes.widths // patch)
        height, width = as_floats(sizes.heights), as_floats(sizes.widths)
        scale = np.minimum(np.minimum(1.0, np.sqrt(self.max_patches / as_floats(num))), longest / height)
        scale = np.minimum(scale, longest / width)
        sides = (np.minimum(np.maximum(1, as_ints(side * scale)), longest) for side in (height, width))
        rows, columns = (round_up(side, patch * self.merge_size) // patch for side in sides)
        return _counts(self, sizes, rows, columns, {})


def _counts(rule: KimiVL | KimiK25, sizes: ImageSizes, rows: Ints, columns: Ints, refusals: dict[int, str]) -> ImageCounts:
    return image_counts(
        sizes,
        image_tokens=rows * columns // rule.merge_size**2,
        wrapper_tokens=rule.wrapper_tokens,
        patches=rows * columns,
        grid=(rows, columns),
        grid_unit="patches",
        refusals=refusals,
    )
