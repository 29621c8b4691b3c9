"""What every image rule takes and gives: upright sizes in, counts out, refusals by the image's position.

One implementation for one image and for millions: a rule works on arrays, and one image is an array of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_SIDE = 2**24
"""Sides up to here keep every product below 2^53, so doubles hold it exactly (and float32 the sides)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSizes:
    """Upright sizes of the images of some samples, sample after sample."""

    widths: Ints
    heights: Ints
    sample_lengths: Ints
    """Number of images of each sample; zeros are allowed, the sum is the number of images."""

    def __post_init__(self) -> None:
        if self.widths.shape != self.heights.shape or self.widths.ndim != 1:
            raise UsageError(f"widths {self.widths.shape} and heights {self.heights.shape} must be flat and equally long")
        for name, sides in (("width", self.widths), ("height", self.heights)):
            wrong = sides[(sides < 1) | (sides > MAX_SIDE)]
            if wrong.size:
                raise UsageError(f"an image has {name} {wrong[0]}, expected 1 to {MAX_SIDE:,}")
        if self.sample_lengths.sum() != len(self) or (self.sample_lengths < 0).any():
            raise UsageError(f"the samples hold {self.sample_lengths.sum()} images, but {len(self)} sizes are given")

    def __len__(self) -> int:
        return len(self.widths)

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, int]], sample_lengths: Sequence[int] | None = None) -> ImageSizes:
        """From (width, height) pairs; without `sample_lengths` every image is a sample of its own."""
        pairs = np.array(list(sizes)).reshape(-1, 2)
        return cls.of_arrays(pairs[:, 0], pairs[:, 1], sample_lengths)

    @classmethod
    def of_arrays(cls, widths: npt.ArrayLike, heights: npt.ArrayLike, sample_lengths: npt.ArrayLike | None = None) -> ImageSizes:
        """From columns; without `sample_lengths` every image is a sample of its own."""
        lengths = np.ones(np.size(widths)) if sample_lengths is None else sample_lengths
        return cls(
            widths=_whole(widths, "widths"), heights=_whole(heights, "heights"), sample_lengths=np.asarray(lengths, np.int64)
        )

    def images_in_sample(self) -> Ints:
        """For each image, how many its sample holds."""
        return np.repeat(self.sample_lengths, self.sample_lengths)


def _whole(sides: npt.ArrayLike, name: str) -> Ints:
    """A column of sides; numbers that an integer does not hold are not cut but refused."""
    column = np.asarray(sides)
    if column.size and column.dtype.kind not in "iu":
        raise UsageError(f"{name} are {column.dtype}, expected whole numbers of 1 to {MAX_SIDE:,}")
    return np.ascontiguousarray(column, dtype=np.int64)


GridUnit = Literal["patches", "tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCount:
    """What one image takes; all zero where `refusal` says why the processor does not take it."""

    num_image_tokens: int
    num_wrapper_tokens: int
    num_patches: int
    num_padded_patches: int
    num_segments: int
    sum_squared_attention: int
    grid_rows: int
    grid_columns: int
    num_newline_runs: int
    num_text_chars: int
    num_overview_tokens: int = 0
    grid_unit: GridUnit
    refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCounts:
    """One value per image in every column."""

    num_image_tokens: Ints
    """Positions of the sequence that hold image features (learned newline and separator embeddings included)."""
    num_wrapper_tokens: Ints
    """Special tokens around and between them; no text."""
    num_patches: Ints
    """Inputs of the vision encoder, thumbnails included, class and register tokens not."""
    num_padded_patches: Ints
    """The same with what the processor pads one image to, whatever else is in its batch."""
    num_segments: Ints
    """Parts whose patches attend to each other only: windows, tiles with the thumbnail, or 1."""
    sum_squared_attention: Ints
    """Squared patches of each segment, summed; padding not counted."""
    grid_rows: Ints
    """Patches or tiles, as `grid_unit` says; a thumbnail is not in the grid."""
    grid_columns: Ints
    num_newline_runs: Ints
    """Runs of newlines the processor adds as text: the model's tokenizer says how many tokens each is."""
    num_text_chars: Ints
    """Characters of filler text (newlines included) the processor adds, 0 where only runs of newlines are known."""
    num_overview_tokens: Ints
    """Of `num_image_tokens`, those of the whole image where a slice takes another number; 0 where all views take the same."""
    grid_unit: GridUnit
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Image position -> the processor's reason; a refused image is zero in every column."""

    def __len__(self) -> int:
        return len(self.num_image_tokens)

    def at(self, position: int) -> ImageCount:
        """The counts of one image as plain integers."""
        values = {name: int(getattr(self, name)[position]) for name in _COLUMNS}
        return ImageCount(**values, grid_unit=self.grid_unit, refusal=self.refusals.get(position))

    def each(self) -> list[ImageCount]:
        """`at` of all positions, in half the time."""
        rows = zip(*(getattr(self, name).tolist() for name in _COLUMNS), strict=True)
        return [
            ImageCount(**dict(zip(_COLUMNS, row, strict=True)), grid_unit=self.grid_unit, refusal=self.refusals.get(position))
            for position, row in enumerate(rows)
        ]


class ImageRule(Protocol):
    """A pure function of sizes; a user's own is any function of this shape."""

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts: ...


_COLUMNS = tuple(item.name for item in fields(ImageCounts) if item.name not in ("grid_unit", "refusals"))


def image_counts(
    sizes: ImageSizes,
    *,
    image_tokens: Ints | int,
    patches: Ints | int,
    grid: tuple[Ints | int, Ints | int],
    grid_unit: GridUnit,
    wrapper_tokens: Ints | int = 0,
    padded_patches: Ints | int | None = None,
    segments: Ints | int = 1,
    squared_attention: Ints | int | None = None,
    newline_runs: Ints | int = 0,
    text_chars: Ints | int = 0,
    overview_tokens: Ints | int = 0,
    refusals: Mapping[int, str] | None = None,
) -> ImageCounts:
    """Counts from columns or constants; `grid` is (rows, columns), one segment attends in full unless it is said otherwise."""
    refusals = refusals or {}
    refused = list(refusals)

    def column(value: Ints | int) -> Ints:
        whole = np.empty(len(sizes), np.int64)
        whole[:] = value
        if refused:
            whole[refused] = 0
        return whole

    return ImageCounts(
        num_image_tokens=column(image_tokens),
        num_wrapper_tokens=column(wrapper_tokens),
        num_patches=column(patches),
        num_padded_patches=column(patches if padded_patches is None else padded_patches),
        num_segments=column(segments),
        sum_squared_attention=column(patches * patches if squared_attention is None else squared_attention),
        grid_rows=column(grid[0]),
        grid_columns=column(grid[1]),
        num_newline_runs=column(newline_runs),
        num_text_chars=column(text_chars),
        num_overview_tokens=column(overview_tokens),
        grid_unit=grid_unit,
        refusals=refusals,
    )


def count_one(rule: ImageRule, width: int, height: int) -> ImageCount:
    """The counts of one image that is alone in its sample."""
    return rule(ImageSizes.of([(width, height)])).at(0)


def count_sample(rule: ImageRule, sizes: Sequence[tuple[int, int]]) -> list[ImageCount]:
    """The counts of each image of one sample, given all its (width, height)."""
    return rule(ImageSizes.of(sizes, [len(sizes)])).each()
