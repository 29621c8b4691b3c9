"""Bounded summaries of millions of numbers: a distribution, and a grid of widths and heights. No files, no floats kept.

Counts, sums, smallest and largest are exact. Values are counted in buckets that keep their 9 leading binary digits: exact
below 512, within 1/256 above, at most 11,776 buckets whatever is put in (a part's token counts take some hundred). Buckets are
fixed, not fitted, so summaries merge without loss.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Self

import numpy as np
import numpy.typing as npt

from indexer.mergeable import Ints, Mergeable, check_sparse, exact_sum, sparse, sum_of_sparse
from packer.format.errors import UsageError

RELATIVE_ERROR = 1 / 256
"""Most that a quantile is off, as a share of the exact one; below `EXACT_BELOW` it is exact."""
MAX_VALUE = 2**53 - 1
"""Largest value taken: doubles, and readers of JSON in browsers, hold it exactly."""

_BITS = 9
_GRID_BITS = 3
_MAX_BINS = 60
_ROW = 256
"""Cells of a grid row; 3 leading digits give 208 buckets up to MAX_VALUE."""

EXACT_BELOW = 1 << _BITS


def bucket_of(values: Ints, bits: int) -> Ints:
    """The buckets of values from 0 to MAX_VALUE that differ in their `bits` leading binary digits; values rise with buckets.

    A double holds exponent and leading digits side by side, so both come from one shift.
    """
    exponent_and_digits = values.astype(np.float64).view(np.int64) >> (53 - bits)
    first = ((1023 + bits) << (bits - 1)) - (1 << bits)
    return np.where(values < 1 << bits, values, exponent_and_digits - first)


def bounds_of(buckets: Ints, bits: int) -> tuple[Ints, Ints]:
    """The half-open intervals [low, high) of values that fall into the buckets."""
    half = 1 << (bits - 1)
    above = np.maximum(buckets - 2 * half, 0)
    exact = buckets < 2 * half
    digits = np.where(exact, buckets, above % half + half)
    shift: Ints = np.where(exact, 0, above // half + 1)
    return digits << shift, (digits + 1) << shift


class Distribution(Mergeable, frozen=True, kw_only=True):
    """How non-negative integers are spread. A ratio is put in scaled, such as in thousandths."""

    count: int = 0
    sum: int = 0
    min: int | None = None
    max: int | None = None
    buckets: tuple[int, ...] = ()
    """Of 8 leading digits, rising."""
    counts: tuple[int, ...] = ()
    """Values in each of `buckets`."""

    def __post_init__(self) -> None:
        check_sparse(self.buckets, self.counts)
        if sum(self.counts) != self.count:
            raise ValueError(f"the buckets hold {sum(self.counts)} values, but count is {self.count}")
        if self.min is None or self.max is None:
            if self.count or self.sum or self.min is not None or self.max is not None:
                raise ValueError(f"{self.count} values with min {self.min} and max {self.max}")
        elif not (0 <= self.min <= self.max <= MAX_VALUE and self.count * self.min <= self.sum <= self.count * self.max):
            raise ValueError(f"{self.count} values with min {self.min} and max {self.max} cannot sum to {self.sum}")
        elif not self.count or [self.buckets[0], self.buckets[-1]] != bucket_of(np.array([self.min, self.max]), _BITS).tolist():
            raise ValueError(f"min {self.min} and max {self.max} are not in the outermost buckets")

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Self:
        """Of an array of integers from 0 to MAX_VALUE."""
        column = _checked(values)
        if not column.size:
            return cls()
        least, most = int(column.min()), int(column.max())
        buckets, counts = sparse(np.bincount(column if most < EXACT_BELOW else bucket_of(column, _BITS)))
        return cls(count=column.size, sum=exact_sum(column), min=least, max=most, buckets=buckets, counts=counts)

    @classmethod
    def _total(cls, items: list[Self]) -> Self:
        buckets, counts = sum_of_sparse((item.buckets, item.counts) for item in items)
        return cls(
            count=sum(item.count for item in items),
            sum=sum(item.sum for item in items),
            min=min((item.min for item in items if item.min is not None), default=None),
            max=max((item.max for item in items if item.max is not None), default=None),
            buckets=buckets,
            counts=counts,
        )

    @property
    def mean(self) -> float | None:
        """None when nothing was put in, as for `min`, `max` and `quantile`."""
        return self.sum / self.count if self.count else None

    @property
    def relative_error(self) -> float:
        """Most that a quantile may be off, as a share of the exact one."""
        return 0.0 if self.max is None or self.max < EXACT_BELOW else RELATIVE_ERROR

    def quantile(self, share: float) -> int | None:
        """The smallest value that at least this share of all values does not exceed (0: the smallest, 1: the largest).

        `share` is taken as the decimal it is written as, so 0.07 of 100 values are 7 of them.
        """
        if not 0 <= share <= 1:
            raise UsageError(f"found the quantile {share!r}, expected 0 to 1")
        if self.min is None or self.max is None:
            return None
        rank = max(1, math.ceil(self.count * Fraction(repr(float(share)))))
        if rank in (1, self.count):
            return self.min if rank == 1 else self.max
        at = int(np.searchsorted(np.cumsum(self.counts), rank))
        low, _ = bounds_of(np.array(self.buckets[at]), _BITS)
        return max(int(low), self.min)  # the low end: exact for multiples of the bucket's width, such as tokens of whole tiles

    def histogram(self) -> list[tuple[int, int, int]]:
        """At most 60 adjoining bins (low, high, count), half-open, from smallest to largest; empty ones between included.

        Bins are as fine as 60 allow and twice as wide from each power of two to the next: draw them on a logarithmic axis,
        or divide by their width. Counts are exact.
        """
        if self.min is None or self.max is None:
            return []
        ends = np.array([self.min, self.max])
        bits = next(bits for bits in range(_BITS, 0, -1) if np.ptp(bucket_of(ends, bits)) < _MAX_BINS)
        first, last = bucket_of(ends, bits).tolist()
        lows, _ = bounds_of(np.array(self.buckets), _BITS)
        counts = np.zeros(last - first + 1, np.int64)
        np.add.at(counts, bucket_of(lows, bits) - first, np.array(self.counts))
        low, high = bounds_of(np.arange(first, last + 1), bits)
        return list(zip(low.tolist(), high.tolist(), counts.tolist(), strict=True))


class SizeGrid(Mergeable, frozen=True, kw_only=True):
    """Images by width and height, in bins that split each octave into 4 equal steps (each number has its own below 8).

    Equal steps rather than equal ratios, so that every bound is a whole number of pixels: a step is 1.14 to 1.25 wide.
    """

    cells: tuple[int, ...] = ()
    """Width bin x 256 + height bin, rising."""
    counts: tuple[int, ...] = ()
    """Images in each of `cells`."""

    def __post_init__(self) -> None:
        check_sparse(self.cells, self.counts)
        if self.cells and self.cells[-1] >= _ROW * _ROW:
            raise ValueError(f"found the cell {self.cells[-1]}, expected less than {_ROW * _ROW}")

    @classmethod
    def of(cls, widths: npt.ArrayLike, heights: npt.ArrayLike) -> Self:
        """Of the images' widths and heights in pixels."""
        cells = bucket_of(_checked(widths), _GRID_BITS) * _ROW + bucket_of(_checked(heights), _GRID_BITS)
        keys, counts = sparse(np.bincount(cells))
        return cls(cells=keys, counts=counts)

    @classmethod
    def _total(cls, items: list[Self]) -> Self:
        cells, counts = sum_of_sparse((item.cells, item.counts) for item in items)
        return cls(cells=cells, counts=counts)

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """The cells that hold images: (width low, width high, height low, height high, count), half-open."""
        cells = np.array(self.cells, np.int64)
        columns = (*bounds_of(cells // _ROW, _GRID_BITS), *bounds_of(cells % _ROW, _GRID_BITS), np.array(self.counts, np.int64))
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _checked(values: npt.ArrayLike) -> Ints:
    column = np.asarray(values)
    if column.size == 0:
        return np.zeros(0, np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iu":
        raise UsageError(f"found {column.dtype} of shape {column.shape}, expected a flat array of whole numbers")
    if column.min() < 0 or column.max() > MAX_VALUE:
        raise UsageError(f"found {column.min()} to {column.max()}, expected whole numbers from 0 to {MAX_VALUE:,}")
    return column.astype(np.int64, copy=False)
