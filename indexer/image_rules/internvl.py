"""InternVL2 to 3, and the Nemotron Nano VL models with the same tiles: a grid of tiles, and a thumbnail if there are several.

Sources: transformers 5.24 `models/got_ocr2/image_processing_got_ocr2.py`; for Llama-3.1-Nemotron-Nano-VL-8B the grid choice in
vLLM's port of the vendor's code.
"""

from __future__ import annotations

from dataclasses import dataclass

from indexer.image_rules.core import ImageCounts, ImageSizes, image_counts
from indexer.image_rules.tiling import fill_ratio_grid, nearest_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVL:
    """Every tile gives the same number of tokens, whatever of the image is in it."""

    tile: int
    patch_size: int
    tokens_per_tile: int
    max_tiles: int
    min_tiles: int = 1
    fill_area: bool = False
    """Choose the grid by area covered times likeness of the ratio (Llama-3.1-Nemotron-Nano-VL-8B), not by the ratio alone."""
    crop_to_patches: bool = True
    """False: one tile for every image, as transformers' class and some published configs say."""
    wrapper_tokens: int = 2

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        max_tiles = self.max_tiles if self.crop_to_patches else 1
        if self.fill_area:
            rows, columns = fill_ratio_grid(sizes, self.tile, max_tiles)
        else:
            rows, columns = nearest_ratio(sizes, self.tile, max_tiles, min(self.min_tiles, max_tiles))
        views = rows * columns + (rows * columns > 1)
        patches = (self.tile // self.patch_size) ** 2
        return image_counts(
            sizes,
            image_tokens=self.tokens_per_tile * views,
            wrapper_tokens=self.wrapper_tokens,
            patches=patches * views,
            segments=views,
            squared_attention=patches**2 * views,
            grid=(rows, columns),
            grid_unit="tiles",
        )
