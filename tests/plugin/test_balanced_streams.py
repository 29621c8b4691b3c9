"""Balanced loaders over real streams, with the real planner, in real processes: same global batches, exact states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from balanced_streams import COST, MICROBATCHES, arrival, balanced, begins_to_balance
from loading import SETTINGS, opened, write_stream
from rank_processes import RankProcesses

from packer.format.errors import UsageError
from plugin.balance import Topology
from plugin.reorder import BalancedPackLoader, BalanceSettings

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
SIZE = 2
NUM_PACKS = 3 * MICROBATCHES
WITH_COSTS = replace(SETTINGS, cost=COST)


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
        assert "imbalance 0" not in one.value["balance"], "packs carry costs"
        assert one.value["num_packs"] == one.value["counters"]["packs"] == NUM_PACKS
        assert one.value["counters"]["tokens"] > 0
        assert one.value["counters"]["read_reads"] > 0
        assert f"{NUM_PACKS} packs" in one.value["line"]
        assert "dealt to" in one.value["line"]


def test_a_run_may_begin_to_balance_between_global_batches_and_leave_it_again(ranks: RankProcesses, url: str) -> None:
    found = ranks.run(begins_to_balance, url, MICROBATCHES)
    came = ranks.run(arrival, url, NUM_PACKS)
    packs = {key: sorted(pack for one in found for pack in one.value[key]) for key in ("dealt", "after")}
    for key, start in (("dealt", MICROBATCHES), ("after", 2 * MICROBATCHES)):
        assert packs[key] == sorted(pack for one in came for pack in one.value[start : start + MICROBATCHES])
    assert [(one.value["step"], one.value["num_packs"]) for one in found] == [(2, 2 * MICROBATCHES)] * SIZE


def test_a_state_without_balancing_in_the_middle_of_a_global_batch_is_refused(url: str) -> None:
    with alone(url) as loader:
        next(loader.loader)
        state = loader.loader.save_state()
    with (
        alone(url) as loader,
        pytest.raises(UsageError, match="after 1 packs of a rank, expected one between two global batches"),
    ):
        loader.restore_state(state)


def test_a_balanced_state_is_refused_without_balancing(url: str) -> None:
    with alone(url) as loader:
        next(loader)
        state = loader.save_state()
    with alone(url) as loader, pytest.raises(UsageError, match="found the state of a balanced loader"):
        loader.loader.restore_state(state)


def test_packs_need_costs_and_the_loader_the_ranks_own_place(url: str) -> None:
    with opened(url) as loader, pytest.raises(UsageError, match="packs without costs, expected PackSettings"):
        BalancedPackLoader(loader, num_microbatches=2)
    with opened(url, WITH_COSTS, rank=1, world_size=2) as loader:
        with pytest.raises(UsageError, match="a loader of rank 1 of 2, expected rank 0 of 1"):
            BalancedPackLoader(loader, num_microbatches=2)
    with opened(url, WITH_COSTS) as loader, pytest.raises(UsageError, match="a topology of 2 ranks, expected the 1"):
        BalancedPackLoader(loader, num_microbatches=2, topology=Topology(num_ranks=2))


@pytest.mark.parametrize(
    "wrong", [{"mode": "best"}, {"readers": "some"}, {"transport": "mpi"}, {"slice_bytes": 0}, {"timeout_seconds": -1.0}]
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"found {next(iter(wrong))} "):
        BalanceSettings(**wrong)


def alone(url: str) -> BalancedPackLoader:
    return BalancedPackLoader(opened(url, WITH_COSTS), num_microbatches=MICROBATCHES)
