"""Llama-4: the canvas of up to 16 tiles that enlarges least, or else shrinks least; in float32, as its processor reckons.

Source: transformers 5.24 `models/llama4/image_processing_llama4_fast.py` (`get_best_fit`), `processing_llama4.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import ImageCounts, ImageSizes, image_counts
from indexer.image_rules.tiling import Chosen, Grid, grids_up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4:
    """Start, image and end token; several tiles have one separator each and a global view beside them."""

    tile: int = 336
    patch_size: int = 14
    max_tiles: int = 16
    tokens_per_tile: int = 144

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = self._grid(sizes)
        tiles = rows * columns
        views = tiles + (tiles > 1)
        patches = (self.tile // self.patch_size) ** 2
        return image_counts(
            sizes,
            image_tokens=self.tokens_per_tile * views,
            wrapper_tokens=3 + np.where(tiles > 1, tiles, 0),
            patches=patches * views,
            segments=views,
            squared_attention=patches**2 * views,
            grid=(rows, columns),
            grid_unit="tiles",
        )

    def _grid(self, sizes: ImageSizes) -> Grid:
        """Walked by area, so that among equal scales the smallest canvas stays."""
        width, height = sizes.widths.astype(np.float32), sizes.heights.astype(np.float32)
        chosen = Chosen(len(sizes))
        best = np.zeros(len(sizes), np.float32)
        for columns, rows in grids_up_to(self.max_tiles):
            scale = np.minimum(np.float32(rows * self.tile) / height, np.float32(columns * self.tile) / width)
            better = np.where(best < 1, scale > best, (scale >= 1) & (scale < best))
            best = np.where(better, scale, best)
            chosen.set(better, rows, columns)
        return chosen.rows, chosen.columns
