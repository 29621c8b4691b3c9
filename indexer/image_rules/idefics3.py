"""Idefics3 and SmolVLM: the longer side always to one length, whole tiles over it, and a global view.

Source: transformers 5.24 `models/idefics3/image_processing_idefics3.py`, `processing_idefics3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3:
    """Each view after a fake token and a place token, one more fake token at the end; each row of tiles ends with a newline.

    With a `longest_edge` of one tile there is the global view alone, and no grid.
    """

    longest_edge: int
    tile: int
    patch_size: int
    tokens_per_tile: int

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        height, width = self._resized(as_floats(sizes.heights), as_floats(sizes.widths))
        ratio, is_wide = width / height, width >= height
        long = np.ceil(np.where(is_wide, width, height) / self.tile) * self.tile
        other = ceil_div(as_ints(np.where(is_wide, long / ratio, long * ratio)), self.tile)
        along = as_ints(long) // self.tile
        rows, columns = np.where(is_wide, other, along), np.where(is_wide, along, other)
        is_split = rows * columns > 1
        rows, columns = np.where(is_split, rows, 0), np.where(is_split, columns, 0)
        views = rows * columns + 1
        patches = (self.tile // self.patch_size) ** 2
        return image_counts(
            sizes,
            image_tokens=self.tokens_per_tile * views,
            wrapper_tokens=2 * views + 1,
            patches=patches * views,
            segments=views,
            squared_attention=patches**2 * views,
            grid=(rows, columns),
            grid_unit="tiles",
            newline_runs=rows,
        )

    def _resized(self, height: Floats, width: Floats) -> tuple[Floats, Floats]:
        """The longer side at `longest_edge`, the other even and at least 1."""
        ratio, is_wide = width / height, width >= height
        other = np.trunc(np.where(is_wide, self.longest_edge / ratio, self.longest_edge * ratio))
        other = np.maximum(1, other + other % 2)
        return np.where(is_wide, other, self.longest_edge), np.where(is_wide, self.longest_edge, other)
