"""Nemotron-3-Nano-Omni: rounded to patches, brought between two numbers of patches, both sides even.

Source: transformers 5.24 `models/nemotron3_nano_omni/`. There every image has the whole budget; vLLM's own processor shares one
budget among the images and the text of a prompt, which is not reckoned here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Floats, ImageCounts, ImageSizes, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, positions


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronOmni:
    """Four patches give one token. A strip of more than `max_patches` patches by one cannot be scaled (inferred, not run)."""

    min_patches: int = 1024
    max_patches: int = 13312
    patch_size: int = 16
    merge_size: int = 2
    wrapper_tokens: int = 2

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = (np.rint(as_floats(side) / self.patch_size + 0.5) for side in (sizes.heights, sizes.widths))
        shrink = np.minimum(np.sqrt(self.max_patches / (rows * columns)), 1.0)
        rows, columns = np.floor(shrink * rows), np.floor(shrink * columns)
        vanished = positions(rows * columns == 0)
        rows, columns = self._grown(rows, columns)
        rows = self._even(rows, columns)
        columns = self._even(columns, rows)
        grid = as_ints(rows), as_ints(columns)
        return image_counts(
            sizes,
            image_tokens=grid[0] * grid[1] // self.merge_size**2,
            wrapper_tokens=self.wrapper_tokens,
            patches=grid[0] * grid[1],
            grid=grid,
            grid_unit="patches",
            refusals=dict.fromkeys(vanished, "division by zero: shrunk to a side of no patches"),
        )

    def _grown(self, rows: Floats, columns: Floats) -> tuple[Floats, Floats]:
        small = rows * columns < self.min_patches
        grow = np.sqrt(self.min_patches / np.maximum(rows * columns, 1))
        return np.where(small, np.ceil(grow * rows), rows), np.where(small, np.ceil(grow * columns), columns)

    def _even(self, side: Floats, other: Floats) -> Floats:
        """Up to an even number if the budget allows, else down."""
        remainder = side % self.merge_size
        up, down = side + self.merge_size - remainder, np.maximum(self.merge_size, side - remainder)
        return np.where(remainder == 0, side, np.where(up * other <= self.max_patches, up, down))
