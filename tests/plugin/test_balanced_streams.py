"""Balanced loaders over real streams, with the real planner, in real processes: same global batches, exact states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from balanced_streams import COST, MICROBATCHES, arrival, balanced, begins_to_balance, other_seed, saved_by_all, with_a_late_peer
from loading import SETTINGS, opened, write_stream
from rank_processes import RankProcesses

from packer.format.errors import UsageError
from plugin.balance import Topology
from plugin.reorder import BalancedPackLoader, BalanceSettings

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
WITH_COSTS = replace(SETTINGS, cost=COST)
NUM_PACKS = 3 * MICROBATCHES
FIRST, MIDDLE, LAST = MICROBATCHES + 1, MICROBATCHES + 3, 2 * MICROBATCHES
"""Packs handed out after the first, a middle and the last microbatch of the second global batch."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("balanced") / "job")


def started(size: int) -> Iterator[RankProcesses]:
    ranks = RankProcesses(size, daemon=False, forked=True)
    yield ranks
    assert ranks.close() == [0] * size


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    yield from started(2)


@pytest.fixture
def four() -> Iterator[RankProcesses]:
    yield from started(4)


@pytest.mark.parametrize(
    ("num_workers", "mode", "saved_at"),
    [(0, "auto", (0, FIRST, MIDDLE, LAST)), (2, "ep", (FIRST, MIDDLE, LAST)), (0, "dp", (1,))],
)
def test_global_batches_hold_the_same_packs_and_go_on_where_they_were_saved(
    two: RankProcesses, url: str, num_workers: int, mode: str, saved_at: Sequence[int]
) -> None:
    """With prefetching loader workers, and with none; workers have streams of their own."""
    check(two, 2, url, num_workers, mode, saved_at, 1)


def test_a_reader_that_closes_lets_a_late_peer_have_its_packs(four: RankProcesses, url: str) -> None:
    """As at the end of training."""
    found = four.run(with_a_late_peer, url, MICROBATCHES)
    assert [outcome.error for outcome in found if outcome is not None] == [None] * 4
    packs = [outcome.value for outcome in found if outcome is not None]
    assert packs[0] == packs[1]
    assert packs[2] == packs[3]


def test_replicas_of_one_reader_are_dealt_real_packs_and_go_on_from_its_state(four: RankProcesses, url: str) -> None:
    found = check(four, 4, url, 0, "auto", (MIDDLE,), 2)
    assert found[0] == found[1] != found[2] == found[3]


def test_ranks_that_do_not_read_leave_their_readers_state_as_it_is(four: RankProcesses, url: str, tmp_path: Path) -> None:
    """Ranks of a replica write one file, in whatever order; only the reader's says what comes next."""
    for outcome in four.run(saved_by_all, url, str(tmp_path)):
        assert outcome is not None
        assert outcome.error is None, outcome.traceback
        following, after = outcome.value
        assert after == following


def check(
    ranks: RankProcesses, size: int, url: str, num_workers: int, mode: str, saved_at: Sequence[int], peers: int
) -> list[list[str]]:
    """What each rank trained on."""
    found = ranks.run(balanced, url, num_workers, mode, NUM_PACKS, saved_at, peers)
    came = ranks.run(arrival, url, NUM_PACKS, peers)
    for outcome in (*found, *came):
        assert outcome is not None
        assert outcome.error is None, outcome.traceback
    for start in range(0, NUM_PACKS, MICROBATCHES):
        batch = slice(start, start + MICROBATCHES)
        dealt = [pack for one in found[::peers] for pack in one.value["whole"][batch]]
        if not num_workers:
            assert sorted(dealt) == sorted(pack for one in came[::peers] for pack in one.value[batch])
        assert len(dealt) == size // peers * MICROBATCHES
    for one in found:
        for position in saved_at:
            assert one.value["tails"][position] == one.value["whole"][position:], position
        assert "imbalance 0" not in one.value["balance"], "packs carry costs"
        assert one.value["num_packs"] == one.value["counters"]["packs"] == NUM_PACKS
        assert f"{NUM_PACKS} packs" in one.value["line"]
        assert "dealt to" in one.value["line"]
    assert all(one.value["counters"]["read_reads"] > 0 for one in found[::peers])
    return [one.value["whole"] for one in found]


def test_a_run_may_begin_to_balance_between_global_batches_and_leave_it_again(two: RankProcesses, url: str) -> None:
    found = two.run(begins_to_balance, url, MICROBATCHES)
    came = two.run(arrival, url, NUM_PACKS)
    packs = {key: sorted(pack for one in found for pack in one.value[key]) for key in ("dealt", "after")}
    for key, start in (("dealt", MICROBATCHES), ("after", 2 * MICROBATCHES)):
        assert packs[key] == sorted(pack for one in came for pack in one.value[start : start + MICROBATCHES])
    assert [(one.value["step"], one.value["num_packs"]) for one in found] == [(2, 2 * MICROBATCHES)] * 2


def test_ranks_whose_streams_would_overlap_are_told_before_the_first_step(two: RankProcesses, url: str) -> None:
    for outcome in two.run(other_seed, url):
        assert outcome is not None
        assert re.search(
            r"UsageError: .*found stream 'seed 0, 0 workers, .*' on rank 0 and 'seed 1, .*' on rank 1", str(outcome.error)
        )


def test_a_state_without_balancing_in_the_middle_of_a_global_batch_is_refused(url: str) -> None:
    with alone(url) as loader:
        next(loader.loader)
        state = loader.loader.save_state()
    with (
        alone(url) as loader,
        pytest.raises(UsageError, match="after 1 packs of a rank, expected one between two global batches"),
    ):
        loader.restore_state(state)


def test_a_step_without_microbatches_is_refused_where_a_state_without_balancing_is_taken_up(url: str) -> None:
    with alone(url) as loader:
        next(loader.loader)
        state = loader.loader.save_state()
    with BalancedPackLoader(opened(url, WITH_COSTS), num_microbatches=lambda step: 0) as loader:
        with pytest.raises(UsageError, match="found 0 microbatches at step 0, expected an integer of at least 1"):
            loader.restore_state(state)


def test_a_state_without_a_number_of_packs_is_refused(url: str) -> None:
    with alone(url) as loader:
        state = loader.save_state()
        del state["num_packs"]
        with pytest.raises(UsageError, match="found no num_packs in the state"):
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
    "wrong",
    [
        {"mode": "best"},
        {"readers": "some"},
        {"transport": "mpi"},
        {"slice_bytes": 0},
        {"timeout_seconds": -1.0},
        {"slow_seconds": 1e10},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"found {next(iter(wrong))} "):
        BalanceSettings(**wrong)


def alone(url: str) -> BalancedPackLoader:
    return BalancedPackLoader(opened(url, WITH_COSTS), num_microbatches=MICROBATCHES)
