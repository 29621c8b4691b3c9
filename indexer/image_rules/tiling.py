"""How tiled processors choose a grid: by the nearest aspect ratio (InternVL) or the best use of listed resolutions (LLaVA)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from indexer.image_rules.core import Bools, Floats, ImageSizes, Ints
from indexer.image_rules.numeric import as_floats, as_ints

Grid = tuple[Ints, Ints]


@lru_cache
def grids_up_to(max_tiles: int, min_tiles: int = 1) -> tuple[tuple[int, int], ...]:
    """All (columns, rows) of `min_tiles` to `max_tiles` tiles, by area, then by columns."""
    sides = range(1, max_tiles + 1)
    found = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(found, key=lambda grid: (grid[0] * grid[1], grid[0])))


def nearest_ratio(sizes: ImageSizes, tile: int, max_tiles: int, min_tiles: int = 1) -> Grid:
    """(rows, columns) of InternVL's `find_closest_aspect_ratio`.

    On an exact tie the later, larger grid wins if the image has more than half of its pixels.
    """
    width, height = as_floats(sizes.widths), as_floats(sizes.heights)
    ratio, area = width / height, width * height
    chosen = Chosen(len(sizes))
    least = np.full(len(sizes), np.inf)
    for columns, rows in grids_up_to(max_tiles, min_tiles):
        distance = np.abs(ratio - columns / rows)
        better = (distance < least) | ((distance == least) & (area > 0.5 * tile * tile * columns * rows))
        least = np.minimum(distance, least)
        chosen.set(better, rows, columns)
    return chosen.rows, chosen.columns


def best_resolution(sizes: ImageSizes, candidates: tuple[tuple[int, int], ...]) -> Grid:
    """LLaVA's `select_best_resolution` among (height, width) candidates: most pixels kept, then least wasted, then the first."""
    width, height = as_floats(sizes.widths), as_floats(sizes.heights)
    area = sizes.widths * sizes.heights
    chosen = Chosen(len(sizes))
    most, least = np.full(len(sizes), -1, np.int64), np.zeros(len(sizes), np.int64)
    for rows, columns in candidates:
        scale = np.minimum(columns / width, rows / height)
        kept = np.minimum(as_ints(width * scale) * as_ints(height * scale), area)
        wasted = rows * columns - kept
        better = (kept > most) | ((kept == most) & (wasted < least))
        most, least = np.where(better, kept, most), np.where(better, wasted, least)
        chosen.set(better, rows, columns)
    return chosen.rows, chosen.columns


def fill_ratio_grid(sizes: ImageSizes, tile: int, max_tiles: int, enough: float = 0.6) -> Grid:
    """(rows, columns) with the largest product of area covered (up to `enough`) and likeness of the ratio; the first wins."""
    width, height = as_floats(sizes.widths), as_floats(sizes.heights)
    ratio: Floats = width / height
    chosen, best = Chosen(len(sizes)), np.full(len(sizes), -np.inf)
    for columns, rows in grids_up_to(max_tiles):
        wanted = columns / rows
        value = np.minimum(columns * rows * tile * tile / (width * height), enough) * np.minimum(wanted / ratio, ratio / wanted)
        better = value > best
        best = np.maximum(value, best)
        chosen.set(better, rows, columns)
    return chosen.rows, chosen.columns


class Chosen:
    """The choice of every image so far, two numbers each."""

    __slots__ = ("columns", "rows")

    def __init__(self, num_images: int) -> None:
        self.rows, self.columns = np.zeros(num_images, np.int64), np.zeros(num_images, np.int64)

    def set(self, where: Bools, rows: int, columns: int) -> None:
        """Replace the choice of the images in `where`."""
        self.rows[where] = rows
        self.columns[where] = columns
