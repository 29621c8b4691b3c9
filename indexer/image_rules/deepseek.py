"""DeepSeek-VL2: tiles of the best candidate resolution beside a global view; with many images in a sample, no tiles.

Source: `processing_deepseek_vl_v2.py` of deepseek-ai/DeepSeek-VL2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import ImageCounts, ImageSizes, image_counts
from indexer.image_rules.tiling import best_resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSeekVL2:
    """Each row of features ends with a newline embedding, one separator stands between the global view and the tiles."""

    candidates: tuple[tuple[int, int], ...]
    """(height, width) in tiles."""
    tile: int = 384
    tokens_per_side: int = 14
    patches_per_tile: int = 729
    max_images_with_tiles: int = 2
    """With more images in the sample cropping is off: one tile and the global view each."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        pixels = tuple((self.tile * rows, self.tile * columns) for rows, columns in self.candidates)
        height, width = best_resolution(sizes, pixels)
        many = sizes.images_in_sample() > self.max_images_with_tiles
        rows, columns = np.where(many, 1, height // self.tile), np.where(many, 1, width // self.tile)
        side = self.tokens_per_side
        views = rows * columns + 1
        return image_counts(
            sizes,
            image_tokens=side * (side + 1) + 1 + side * rows * (side * columns + 1),
            patches=self.patches_per_tile * views,
            segments=views,
            squared_attention=self.patches_per_tile**2 * views,
            grid=(rows, columns),
            grid_unit="tiles",
        )
