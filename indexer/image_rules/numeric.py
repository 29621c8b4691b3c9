"""Python's own integer and float steps on arrays of doubles: what `int`, `round` and `//` do to one number, for many."""

from __future__ import annotations

import numpy as np

from indexer.image_rules.core import Bools, Floats, Ints


def as_floats(values: Ints) -> Floats:
    """Doubles, exact for all sides and areas that `ImageSizes` lets through."""
    return values.astype(np.float64)


def as_ints(values: Floats) -> Ints:
    """`int(x)`: towards zero."""
    return values.astype(np.int64)


def ceil_div(values: Ints, divisor: int) -> Ints:
    """Whole divisors that cover a value."""
    return -(-values // divisor)


def round_up(values: Ints, factor: int) -> Ints:
    """The next multiple of `factor` from below."""
    return ceil_div(values, factor) * factor


def int_of_round7(values: Floats) -> Ints:
    """`int(round(x, 7))` for x >= 0: up to the next integer when less than half of 1e-7 is missing.

    Exact: the distance to the next integer has no rounding error, and no double lies half-way between two 7-digit decimals.
    """
    whole = np.floor(values)
    return as_ints(whole + ((whole + 1) - values < 5e-8))


def positions(mask: Bools) -> list[int]:
    """Where the mask is true."""
    return [int(position) for position in np.flatnonzero(mask)]
