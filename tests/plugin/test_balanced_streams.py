"""Balanced loaders over real streams, with the real planner, in real processes: same global batches, exact states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from balanced_streams import MICROBATCHES, arrival, balanced
from loading import write_stream
from rank_processes import RankProcesses

SIZE = 2
NUM_PACKS = 3 * MICROBATCHES


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("balanced") / "job")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    started = RankProcesses(SIZE, daemon=False)
    yield started
    assert started.close() == [0] * SIZE


@pytest.mark.parametrize(("num_workers", "mode", "saved_at"), [(0, "auto", 7), (2, "ep", 5), (0, "dp", 1)])
def test_global_batches_hold_the_same_packs_and_go_on_where_they_were_saved(
    ranks: RankProcesses, url: str, num_workers: int, mode: str, saved_at: int
) -> None:
    found = ranks.run(balanced, url, num_workers, mode, NUM_PACKS, saved_at)
    came = ranks.run(arrival, url, NUM_PACKS)
    for outcome in (*found, *came):
        assert outcome is not None
        assert outcome.error is None, outcome.traceback
    for start in range(0, NUM_PACKS, MICROBATCHES):
        batch = slice(start, start + MICROBATCHES)
        dealt = [pack for one in found for pack in one.value["whole"][batch]]
        if not num_workers:  # workers have streams of their own
            assert sorted(dealt) == sorted(pack for one in came for pack in one.value[batch])
        assert len(dealt) == SIZE * MICROBATCHES
    for one in found:
        assert one.value["tail"] == one.value["whole"][saved_at:]
        assert "imbalance" in one.value["counters"]
        assert "imbalance 0" not in one.value["counters"], "packs carry costs"
