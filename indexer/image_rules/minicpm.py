"""MiniCPM-V 2.6, 4.5 and 4.6: the whole image at its own ratio, and slices of it on a grid.

Sources: `image_processing_minicpmv.py` of MiniCPM-V-2_6; transformers 5.24 `models/minicpmv4_6/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from indexer.image_rules.core import Bools, Floats, ImageCounts, ImageSizes, Ints, image_counts
from indexer.image_rules.numeric import as_floats, as_ints, positions
from indexer.image_rules.tiling import Chosen, Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMV:
    """A pair of tokens around the image's number, and one around each view; digits and newlines are text."""

    multiple: int
    """Sides of a view are multiples of so many pixels."""
    tokens_per_view: int | None
    """Of the resampler (2.6 to 4.5); None: one for 16 patches (4.6)."""
    scale_resolution: int = 448
    patch_size: int = 14
    max_slices: int = 9
    refuses_flat: bool = False
    """The vendor's code takes an image of height 1 or 3 for one with channels first, and fails."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        rows, columns = self._grid(sizes)
        has_grid = rows > 0
        slices = rows * columns
        height, width = as_floats(sizes.heights), as_floats(sizes.widths)
        whole = self._fitted(height, width, ~has_grid)
        across, down = np.maximum(columns, 1), np.maximum(rows, 1)
        cut = self._fitted(_rounded(height, down) / down, _rounded(width, across) / across, np.ones_like(has_grid))
        area, slice_area = (as_ints(sides[0] * sides[1]) // self.patch_size**2 for sides in (whole, cut))
        patches = area + slices * slice_area
        flat = positions((sizes.heights == 1) | (sizes.heights == 3)) if self.refuses_flat else []
        return image_counts(
            sizes,
            image_tokens=patches // 16 if self.tokens_per_view is None else self.tokens_per_view * (1 + slices),
            wrapper_tokens=2 + 2 * (1 + slices),
            patches=patches,
            segments=1 + slices,
            squared_attention=area**2 + slices * slice_area**2,
            grid=(rows, columns),
            grid_unit="tiles",
            newline_runs=np.maximum(rows - 1, 0),
            overview_tokens=area // 16 if self.tokens_per_view is None else 0,
            refusals={at: f"mean must have {whole[0][at]:.0f} elements if it is an iterable, got 3" for at in flat},
        )

    def _grid(self, sizes: ImageSizes) -> Grid:
        """The grid of about the image's area with the nearest logarithm of the ratio; 0 x 0 when one view is enough."""
        area = as_floats(sizes.widths * sizes.heights) / self.scale_resolution**2
        wanted = np.minimum(as_ints(np.ceil(area)), self.max_slices)
        ratio = _log(as_floats(sizes.widths) / as_floats(sizes.heights))
        chosen, least = Chosen(len(sizes)), np.full(len(sizes), np.inf)
        for num in range(2, self.max_slices + 1):
            allowed = (wanted > 1) & (np.abs(wanted - num) <= 1)
            for columns in (divisor for divisor in range(1, num + 1) if num % divisor == 0):
                distance = np.abs(ratio - math.log(columns / (num // columns)))
                better = allowed & (distance < least)
                least = np.where(better, distance, least)
                chosen.set(better, num // columns, columns)
        return chosen.rows, chosen.columns

    def _fitted(self, height: Floats, width: Floats, enlarges: Bools) -> tuple[Floats, Floats]:
        """The sides at about `scale_resolution` squared, if they are above it or may be enlarged, in whole multiples."""
        scaled = (width * height > self.scale_resolution**2) | enlarges
        ratio = width / height
        new_height = np.trunc(self.scale_resolution / np.sqrt(ratio))
        new_width = np.trunc(new_height * ratio)
        height, width = np.where(scaled, new_height, height), np.where(scaled, new_width, width)
        return _rounded(height, self.multiple), _rounded(width, self.multiple)


def _rounded(side: Floats, multiple: Ints | int) -> Floats:
    """To a multiple, at least one."""
    return np.maximum(np.rint(side / multiple) * multiple, multiple)


def _log(values: Floats) -> Floats:
    """The C library's logarithm, as Python's: numpy's own may differ in the last bit, which decides ties."""
    return np.array([math.log(value) for value in values.tolist()], dtype=np.float64)
