"""Orders without ties: cost in the high bits of an integer, the place of the pack in the low bits.

Unique keys have one order only, whatever sorts them, so that every rank and every version of numpy comes to the same plan. They
also sort several times faster than a stable sort of the costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.signedinteger[Any]]
IdArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


def cost_order(costs: IntArray) -> IdArray:
    """Indices into the flat costs: each row (last axis) dearest first, of equal costs the one that stands first.

    `Costs` are below 2^62 / packs, and the place takes fewer bits than 2 * packs, so keys stay below 2^63.
    """
    size = costs.shape[-1]
    bits = max(1, (size - 1).bit_length())
    keys: npt.NDArray[np.int64] = (costs.max(initial=0) - costs) << bits
    keys |= np.arange(size)
    keys.sort(axis=-1)
    keys &= (1 << bits) - 1
    keys += np.arange(0, costs.size, size).reshape(*costs.shape[:-1], 1)
    return keys.astype(np.int32)
