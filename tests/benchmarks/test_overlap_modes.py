"""What the overlap benchmark compares is the same work: both ways of exchanging move the same packs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import RankProcesses

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def overlap() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import overlap

        yield overlap
    del sys.modules["overlap"]


def test_packs_moved_in_line_are_those_moved_behind_compute(overlap: Any) -> None:
    ranks = RankProcesses(2, forked=True)
    setting = overlap.Setting(microbatches=3, steps=2, compute_seconds=0.001)
    try:
        found = {mode: ranks.run(overlap.measure, mode, "waits", setting, 1000.0) for mode in overlap.MODES}
    finally:
        assert ranks.close() == [0, 0]
    assert [outcome.error for runs in found.values() for outcome in runs] == [None] * 2 * len(overlap.MODES)
    for all_moved in ("", "all moved, "):
        pair = (found[all_moved + mode] for mode in ("behind compute", "in line"))
        behind, in_line = ([outcome.value.moved_bytes for outcome in runs] for runs in pair)
        assert behind == in_line
        assert all(sum(moved) > 0 for moved in behind)
    table = overlap.table("", {("waits", mode): [[outcome.value for outcome in runs]] for mode, runs in found.items()})
    assert table.row_count == len(overlap.MODES)
