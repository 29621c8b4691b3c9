"""LLaVA-1.5, NeXT and OneVision, and HyperCLOVAX-SEED-Vision-3B: tiles of the best listed resolution, padding taken off again.

Sources: transformers 5.24 `models/llava_next/`, `models/llava_onevision/` (processing and image_processing_utils
`select_best_resolution`); HyperCLOVAX by a public port of the vendor's processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, int_of_round7
from indexer.image_rules.tiling import best_resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSize:
    """Every image is resized to one size."""

    num_image_tokens: int
    grid_side: int
    """Patches along each side."""
    wrapper_tokens: int = 0

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        return image_counts(
            sizes,
            image_tokens=self.num_image_tokens,
            wrapper_tokens=self.wrapper_tokens,
            patches=self.grid_side**2,
            grid=(self.grid_side, self.grid_side),
            grid_unit="patches",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyResolution:
    """Tiles of `tile` pixels beside a base view; each row of the image's own part ends with a newline embedding."""

    tile: int
    candidates: tuple[tuple[int, int], ...]
    """(height, width) in tiles, in the order the processor walks them."""
    tokens_per_side: int
    """Of one tile, before padding is taken off."""
    patches_per_tile: int
    rounds_unpadding: bool = True
    """`int(round(x, 7))` in transformers, `int(x)` in HyperCLOVAX."""
    max_tokens_in_tiles: int | None = None
    """OneVision (`anyres_max_9`): a larger feature map is shrunk to so many tiles' worth, with a tenth of slack."""
    single_view_in_multi_image: bool = False
    """OneVision: with several images in a sample each has its base view and one newline only."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        pixels = tuple((self.tile * rows, self.tile * columns) for rows, columns in self.candidates)
        height, width = best_resolution(sizes, pixels)
        rows, columns = height // self.tile, width // self.tile
        base = self.tokens_per_side**2
        kept = self._shrunk(*self._unpadded(sizes, rows * self.tokens_per_side, columns * self.tokens_per_side))
        image_tokens = kept[0] * kept[1] + kept[0] + base
        views = rows * columns + 1
        if self.single_view_in_multi_image:
            several = sizes.images_in_sample() > 1
            image_tokens, views = np.where(several, base + 1, image_tokens), np.where(several, 1, views)
            rows, columns = np.where(several, 1, rows), np.where(several, 1, columns)
        return image_counts(
            sizes,
            image_tokens=image_tokens,
            patches=self.patches_per_tile * views,
            segments=views,
            squared_attention=self.patches_per_tile**2 * views,
            grid=(rows, columns),
            grid_unit="tiles",
        )

    def _unpadded(self, sizes: ImageSizes, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        """Rows and columns of features without those that only see the padding."""
        width, height = as_floats(sizes.widths), as_floats(sizes.heights)
        is_wider = width / height > as_floats(columns) / as_floats(rows)
        to_int = int_of_round7 if self.rounds_unpadding else as_ints
        new_rows: Floats = height * (as_floats(columns) / width)
        new_columns: Floats = width * (as_floats(rows) / height)
        less_rows = rows - (rows - to_int(new_rows)) // 2 * 2
        less_columns = columns - (columns - to_int(new_columns)) // 2 * 2
        return np.where(is_wider, less_rows, rows), np.where(is_wider, columns, less_columns)

    def _shrunk(self, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        if self.max_tokens_in_tiles is None:
            return rows, columns
        ratio = np.sqrt(as_floats(rows * columns) / (self.max_tokens_in_tiles * self.tokens_per_side**2))
        divisor = np.where(ratio > 1.1, ratio, 1.0)
        return as_ints(as_floats(rows) // divisor), as_ints(as_floats(columns) // divisor)
