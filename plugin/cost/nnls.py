"""Least squares with no negative coefficient, for a handful of columns and any number of rows.

The best solution is the plain least-squares solution on some set of independent columns that has no negative coefficient
there. Of seven columns there are 128 sets, each solved in some 20 microseconds on a triangle of eight rows: trying all of them is
exact and cannot cycle.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

Floats = npt.NDArray[np.float64]

MAX_COLUMNS = 10
_INDEPENDENT = 1e-10
"""Smallest singular value of independent columns of length 1."""
_BETTER = 1e-18
"""Of the squared target: what a larger set of columns must explain more, beyond rounding."""


def non_negative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 with the smallest |matrix x - target|; of equally good ones that with the fewest and first columns.

    Raises:
        UsageError: more than `MAX_COLUMNS` columns, or numbers that are not finite.
    """
    num_columns = matrix.shape[1]
    if num_columns > MAX_COLUMNS or not (np.isfinite(matrix).all() and np.isfinite(target).all()):
        raise UsageError(f"found {num_columns} columns, expected at most {MAX_COLUMNS} of finite numbers")
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    # The triangle of the matrix has the same solutions, without the squared condition of the normal equations.
    triangle: Any = np.linalg.qr(np.column_stack((scaled, target)), mode="r")  # numpy's types do not know the mode
    columns, goal = triangle[:, :-1], triangle[:, -1]
    best, smallest = np.zeros(num_columns), float(goal @ goal)
    enough = _BETTER * smallest
    for size in range(1, num_columns + 1):
        for chosen in map(list, combinations(np.flatnonzero(lengths).tolist(), size)):
            found, _, _, singular = np.linalg.lstsq(columns[:, chosen], goal, rcond=None)
            if (found < 0).any() or singular.min() < _INDEPENDENT:
                continue
            residual = goal - columns[:, chosen] @ found
            if (squared := float(residual @ residual)) < smallest - enough:
                best, smallest = np.zeros(num_columns), squared
                best[chosen] = found / lengths[chosen]
    return best
