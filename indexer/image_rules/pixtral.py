"""Pixtral and Mistral-3: shrunk to a longest edge, one token per (merged) patch, one break token per row.

transformers and mistral-common shrink differently (359x2852 at 1024: 512 against 576 tokens): take the one of your trainer.
Sources: transformers 5.24 `models/pixtral/image_processing_pixtral.py`; mistral-common 1.13.1 `tokens/tokenizers/image.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import ImageCounts, ImageSizes, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, ceil_div, positions

_REASON = "Size must contain 'height' and 'width' keys, or 'max_height' and 'max_width', or 'shortest_edge' key. Got SizeDict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixtral:
    """One row of tokens ends with [IMG_BREAK], the last with [IMG_END]."""

    longest_edge: int
    patch_size: int
    merge_size: int
    rounds: bool
    """mistral-common rounds the shrunk sides, at least 1; transformers floors them and refuses 0."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        height, width = as_floats(sizes.heights), as_floats(sizes.widths)
        ratio = np.maximum(1.0, np.maximum(height / self.longest_edge, width / self.longest_edge))
        if self.rounds:
            height, width = np.maximum(1, np.rint(height / ratio)), np.maximum(1, np.rint(width / ratio))
        else:
            height, width = np.floor(height / ratio), np.floor(width / ratio)
        unit = self.patch_size * self.merge_size
        rows, columns = ceil_div(as_ints(height), unit), ceil_div(as_ints(width), unit)
        refusals = {
            position: f"{_REASON}(height={rows[position] * unit}, width={columns[position] * unit})"
            for position in positions((height < 1) | (width < 1))
        }
        return image_counts(
            sizes,
            image_tokens=rows * columns,
            wrapper_tokens=rows,
            patches=rows * columns * self.merge_size**2,
            grid=(rows * self.merge_size, columns * self.merge_size),
            grid_unit="patches",
            refusals=refusals,
        )
