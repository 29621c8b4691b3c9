"""Gemma-3: one fixed view; with pan-and-scan, crops along the longer side beside it.

Source: transformers 5.24 `models/gemma3/` (image processor `pan_and_scan`, processor texts). Its size function ignores the crops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints

_FILLER = len("Here is the original image  and here are some crops to help you see better ")
"""Characters of the text around the views; crops are set apart by a blank each, views stand between blank lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3:
    """256 tokens a view, each between a start and an end token and two blank lines."""

    size: int = 896
    patch_size: int = 14
    tokens_per_view: int = 256
    wrapper_tokens: int = 2
    pan_and_scan: bool = False
    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        crops = self._crops(sizes)
        views = crops + 1
        patches = (self.size // self.patch_size) ** 2
        is_wide = sizes.widths >= sizes.heights
        along = np.maximum(crops, 1)
        return image_counts(
            sizes,
            image_tokens=self.tokens_per_view * views,
            wrapper_tokens=self.wrapper_tokens * views,
            patches=patches * views,
            segments=views,
            squared_attention=patches**2 * views,
            grid=(np.where(is_wide, 1, along), np.where(is_wide, along, 1)),
            grid_unit="tiles",
            newline_runs=2 * views,
            text_chars=4 * views + np.where(crops > 0, _FILLER + crops - 1, 0),
        )

    def _crops(self, sizes: ImageSizes) -> Ints:
        """Number of crops beside the whole image; 0 when its ratio is near 1 or crops would be too small."""
        long, short = np.maximum(sizes.widths, sizes.heights), np.minimum(sizes.widths, sizes.heights)
        if not self.pan_and_scan:
            return np.zeros(len(sizes), np.int64)
        ratio = as_floats(long) / as_floats(short)
        fitting = np.minimum(long // self.min_crop_size, as_ints(np.floor(ratio + 0.5)))
        crops = np.minimum(self.max_num_crops, np.maximum(2, fitting))
        large_enough = np.minimum(-(-long // crops), short) >= self.min_crop_size
        return np.where((ratio >= self.min_ratio) & large_enough, crops, 0)
