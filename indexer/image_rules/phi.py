"""Phi-4-multimodal and Phi-3-vision: crops on a grid that keeps the ratio, padded, with learned newlines and separators.

Sources: transformers 5.24 `models/phi4_multimodal/`; `image_processing_phi3_v.py` of Phi-3.5-vision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, ceil_div, positions
from indexer.image_rules.tiling import Grid, nearest_ratio

_LEAST_SIDE = 10
"""Phi-4 refuses an image that has a shorter side after scaling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4:
    """A global view beside the crops; features that see only padding are taken out, the others are merged two by two."""

    tile: int = 448
    patch_size: int = 14
    max_crops: int = 36

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = self._grid(sizes)
        height, width = self._fitted(sizes, rows, columns)
        side = self.tile // self.patch_size
        kept_rows = (side * rows - (self.tile * rows - height) // self.patch_size + 1) // 2
        kept_columns = (side * columns - (self.tile * columns - width) // self.patch_size + 1) // 2
        global_tokens = (side // 2) ** 2 + side // 2 + 1
        views = rows * columns + 1
        extreme = np.minimum(height, width) < _LEAST_SIDE
        refusals = {at: f"the aspect ratio is very extreme ({width[at]}, {height[at]})" for at in positions(extreme)}
        return image_counts(
            sizes,
            image_tokens=global_tokens + kept_rows * kept_columns + kept_rows,
            patches=side**2 * views,
            segments=views,
            squared_attention=side**4 * views,
            grid=(rows, columns),
            grid_unit="tiles",
            refusals=refusals,
        )

    def _grid(self, sizes: ImageSizes) -> Grid:
        rows, columns = ceil_div(sizes.heights, self.tile), ceil_div(sizes.widths, self.tile)
        over = np.flatnonzero(rows * columns > self.max_crops)
        if over.size:
            large = ImageSizes.of_arrays(sizes.widths[over], sizes.heights[over])
            rows[over], columns[over] = nearest_ratio(large, self.tile, self.max_crops)
        return rows, columns

    def _fitted(self, sizes: ImageSizes, rows: Ints, columns: Ints) -> Grid:
        """(height, width) inside the grid, the image's ratio kept."""
        width, height = as_floats(sizes.widths), as_floats(sizes.heights)
        to_width: Floats = self.tile * as_floats(columns) / width
        to_height: Floats = self.tile * as_floats(rows) / height
        fills_width = to_width < to_height
        new_height = np.where(fills_width, as_ints(height * to_width), self.tile * rows)
        new_width = np.where(fills_width, self.tile * columns, as_ints(width * to_height))
        return new_height, new_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3:
    """Only the ratio counts: every image is enlarged to the most crops. The encoder always runs on `num_crops` and one."""

    num_crops: int
    tile: int = 336
    patch_size: int = 14

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        long, short = np.maximum(sizes.widths, sizes.heights), np.minimum(sizes.widths, sizes.heights)
        ratio = as_floats(long) / as_floats(short)
        # Crops grow with every step, so the steps that fit are the first ones and their number is the largest.
        steps = range(1, self.num_crops + 1)
        along: Ints = np.sum([step * np.ceil(step / ratio) <= self.num_crops for step in steps], axis=0, dtype=np.int64)
        across = ceil_div(as_ints(as_floats(self.tile * along) / ratio), self.tile)
        is_wide = sizes.widths >= sizes.heights
        rows, columns = np.where(is_wide, across, along), np.where(is_wide, along, across)
        side = self.tile // self.patch_size
        per_crop, views = (side // 2) ** 2, rows * columns + 1
        return image_counts(
            sizes,
            image_tokens=views * per_crop + 1 + (rows + 1) * (side // 2),
            patches=side**2 * views,
            padded_patches=side**2 * (self.num_crops + 1),
            segments=views,
            squared_attention=side**4 * views,
            grid=(rows, columns),
            grid_unit="tiles",
            refusals=dict.fromkeys(positions(across == 0), "height and width must be > 0"),
        )
