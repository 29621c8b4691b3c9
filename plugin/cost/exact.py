"""Weighted sums of int64 columns, divided and rounded once, without a float and without overflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

Ints = npt.NDArray[np.int64]

_MOST = 2**63 - 1


def whole_numbers(name: str, values: npt.ArrayLike, most: int = _MOST) -> Ints:
    """A column as int64.

    Raises:
        UsageError: numbers that are not whole, below 0 or above `most`.
    """
    column = np.asarray(values)
    if column.size == 0:
        return column.astype(np.int64)
    if column.dtype.kind not in "iu":
        raise UsageError(f"found {name} as {column.dtype}, expected whole numbers")
    for place in (int(column.argmin()), int(column.argmax())):
        value = int(column.flat[place])
        if not 0 <= value <= most:
            raise UsageError(f"found {name} {value:,} in row {place:,}, expected 0 to {most:,}")
    return column.astype(np.int64, copy=False)


def weighted_sum(terms: Sequence[tuple[int, Ints]], *, per: int, most: int, names: Mapping[str, Ints]) -> Ints:
    """For each row the sum of weight * column, divided by `per` and rounded half up; exact.

    Args:
        terms: weights and columns, none negative.
        names: the columns to show when a row is refused.

    Raises:
        UsageError: a row above `most`, which is far below 2^63.
    """
    # In floats first, as the exact sum may not fit: those that pass are below twice `most`, and so is each part of the sum.
    if sum(weight * int(column.max(initial=0)) for weight, column in terms) > most * per:
        costs = np.sum([weight / per * column.astype(np.float64) for weight, column in terms], axis=0)
        _refuse(costs, 2 * most, most, names)
    # weight * x / per = (weight div per) * x + (weight mod per) * (x div per) + (weight mod per) * (x mod per) / per
    whole = np.zeros_like(terms[0][1])
    rest = np.full_like(terms[0][1], per // 2)
    for weight, column in terms:
        quotient, remainder = divmod(weight, per)
        if quotient:
            whole += quotient * column
        if remainder:
            column_quotient, column_remainder = np.divmod(column, per)
            whole += remainder * column_quotient
            rest += remainder * column_remainder
    result = np.asarray(whole + rest // per)
    _refuse(result, most, most, names)
    return result


def _refuse(costs: npt.NDArray[Any], limit: int, most: int, names: Mapping[str, Ints]) -> None:
    if costs.size and costs.max() > limit:
        place = int(costs.argmax())
        of_it = ", ".join(f"{name} {int(column.flat[place]):,}" for name, column in names.items())
        raise UsageError(
            f"row {place:,} with {of_it}: found a cost of {int(costs.flat[place]):,}, expected at most {most:,}, since the sums "
            "over all packs of a global batch must fit 64 bit; check the row, or the coefficients of the cost model"
        )


def sums_by_sample(values: Ints, lengths: Ints) -> Ints:
    """Sums of consecutive runs; a run may be empty. Sums may wrap on the way: a difference of two does not."""
    ends = np.cumsum(lengths)
    totals = np.concatenate((np.zeros(1, np.int64), np.cumsum(values)))
    sums: Ints = totals[ends] - totals[ends - lengths]
    return sums
