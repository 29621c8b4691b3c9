"""The k-th row of a split, from bits: whatever rows there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugin.selection import Selection

BLOCK = 512
RUNS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]) | st.integers(1, 2000)),
    max_size=8,
)


@given(RUNS)
def test_every_position_is_the_row_it_counts_to(runs: list[tuple[bool, int]]) -> None:
    mask = np.concatenate([np.zeros(0, np.bool_), *(np.full(length, value) for value, length in runs)])
    rows = np.flatnonzero(mask)
    selection = Selection(mask)
    assert len(selection) == len(rows)
    assert [selection.row_at(position) for position in range(0, len(rows), 37)] == rows[::37].tolist()
    if len(rows):
        assert selection.row_at(len(rows) - 1) == rows[-1]


@pytest.mark.parametrize("number", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK])
@pytest.mark.parametrize("gap", [None, 0, -1])
def test_blocks_with_and_without_gaps(number: int, gap: int | None) -> None:
    mask = np.ones(number, np.bool_)
    if gap is not None:
        mask[gap] = False
    selection = Selection(mask)
    assert [selection.row_at(position) for position in range(len(selection))] == np.flatnonzero(mask).tolist()
