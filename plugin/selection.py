"""Which rows of a table a split has, in a seventh of a byte a row. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BLOCK_ROWS = 512
"""A running count of 8 bytes each; a block without gaps is not looked into."""


class Selection:
    """The k-th of some rows, from one bit of memory a row and a running count a block."""

    def __init__(self, mask: npt.NDArray[np.bool_]) -> None:
        self._bits = np.packbits(mask, bitorder="little")
        starts = np.arange(0, len(mask), _BLOCK_ROWS)
        counts = np.add.reduceat(mask, starts, dtype=np.int64) if len(mask) else np.zeros(0, np.int64)
        self._before = np.concatenate([[0], np.cumsum(counts)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def row_at(self, position: int) -> int:
        """The row at a position, 0 <= position < len."""
        block = int(np.searchsorted(self._before, position, side="right")) - 1
        inside = position - int(self._before[block])
        if self._before[block + 1] - self._before[block] == _BLOCK_ROWS:
            return block * _BLOCK_ROWS + inside
        start = block * _BLOCK_ROWS // 8
        bits = np.unpackbits(self._bits[start : start + _BLOCK_ROWS // 8], bitorder="little")
        return block * _BLOCK_ROWS + int(np.flatnonzero(bits)[inside])
