"""Ranks that die, come too late, or leave: one clear error on every other rank, soon, and never a hang."""

from pathlib import Path

import pytest
from exchange_scenarios import (
    close_in_child,
    close_unstarted,
    damaged,
    killed_exchanging,
    killed_reading,
    late,
    leave_early,
    leave_middle,
    leave_waiting,
    made_pack,
    resume_after,
)
from rank_processes import RankProcesses
from reorder_restarts import NUM_PACKS, SAVED_BEFORE, broken_thread, gone_on, killed, leave_exchanging

SOON_SECONDS = 20
"""Far below the deadline of 30 s, which would be the end if nobody were told."""


@pytest.fixture
def ranks():
    started = RankProcesses(4, forked=True)
    yield started
    started.close()


def refuse_late(outcomes, said):
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        assert outcome.value["error"].startswith("RankLost: ")
        assert said in outcome.value["error"]
        assert outcome.value["seconds"] < SOON_SECONDS


def test_a_rank_that_dies_is_named_on_all_others(ranks):
    """One world, in which one after another dies: while others gather, in the all-to-all, and the one that holds the store."""
    *others, dead = ranks.run(killed_reading, 4, 3)
    assert dead is None
    refuse_late(others, "waiting for other ranks to have read step 1: rank 3 of 4 gave no answer: killed")
    *others, dead = ranks.run(killed_exchanging, 3, 2, ranks=[0, 1, 2])
    assert dead is None
    refuse_late(others, "exchanging the packs of step 1: rank 2 of 3 gave no answer: killed")
    dead, *others = ranks.run(killed_exchanging, 2, 0, ranks=[0, 1])
    assert dead is None
    refuse_late(others, "the rank that holds the store of torch.distributed is gone")


def test_a_rank_that_fails_in_the_middle_or_is_late_stops_all(ranks):
    outcomes = ranks.run(damaged, 4)
    assert outcomes[1].value["error"].startswith("FormatError: pack: found crc32 ")
    for rank in (0, 2, 3):
        assert "rank 1 stopped: FormatError: pack: found crc32 " in outcomes[rank].value["error"]
        assert outcomes[rank].value["seconds"] < SOON_SECONDS
    refuse_late(ranks.run(late, 4), "a rank was later than the deadline of 1 s; rank 3 was heard of last")
    # And the processes are fit for another start, from a state of before.
    again = ranks.run(resume_after, 4)
    assert [outcome.value for outcome in again] == [[f"{rank}/{number}/a" for number in range(5, 8)] for rank in range(4)]


@pytest.mark.parametrize("where", ["all-gather", "all-to-all"])
def test_no_pack_is_lost_or_trained_twice_after_a_kill_and_a_restart(tmp_path: Path, where: str) -> None:
    """From the newest states that all ranks have saved, in a world of new processes."""
    first = RankProcesses(3, forked=True)
    try:
        *others, dead = first.run(killed, 3, 2, where, str(tmp_path))
    finally:
        first.close()
    assert dead is None
    for outcome in others:
        assert outcome.error is None, outcome.traceback
        assert outcome.value.startswith("RankLost: ")
        assert "rank 2 of 3 gave no answer: killed" in outcome.value
    again = RankProcesses(3, forked=True)
    try:
        found = again.run(gone_on, 3, str(tmp_path))
    finally:
        assert again.close() == [0] * 3
    assert [outcome.error for outcome in found] == [None] * 3, found[0].traceback
    assert all(len(outcome.value) == NUM_PACKS > SAVED_BEFORE for outcome in found)
    trained = sorted(sample for outcome in found for sample in outcome.value)
    assert trained == sorted(f"{rank}/{number}/a" for rank in range(3) for number in range(NUM_PACKS))


def test_an_error_in_the_background_thread_is_raised_and_told_to_all() -> None:
    three = RankProcesses(3, forked=True)
    try:
        found = [outcome.value for outcome in three.run(broken_thread, 3)]
    finally:
        assert three.close() == [0] * 3
    assert found[1]["errors"] == ["MemoryError: no room for the plan"] * 2, "and at every further attempt"
    for rank in (0, 2):
        assert len(found[rank]["errors"]) == 2
        assert all("rank 1 stopped: MemoryError: no room for the plan" in error for error in found[rank]["errors"])
    assert all(one["taken"] <= 4 for one in found)


@pytest.mark.parametrize(
    "scenario",
    [leave_waiting, leave_exchanging, leave_middle],
    ids=["in a gather", "in an all-to-all", "in the middle of a batch"],
)
def test_a_process_leaves_while_its_thread_is_in_a_collective(scenario):
    two = RankProcesses(2)
    try:
        outcomes = two.run(scenario, 2)
    finally:
        codes = two.close()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert codes == [0, 0]


@pytest.mark.parametrize("peers", [1, 2])
def test_a_rank_that_leaves_lets_the_others_finish_their_batch(ranks, peers):
    *others, left = ranks.run(leave_early, 4, peers)
    assert (left.error, left.value) == (None, 4)
    for outcome in others:
        taken, error = outcome.value
        assert taken == 4
        assert error.startswith("RankLeft: ")
        assert "stopped: its loader was closed: its training ended, or failed, as its own log says" in error
        assert "rank 3" in error or peers > 1
        assert not any(line.startswith("ERROR") for line in outcome.logs)


def test_a_loader_that_is_closed_before_its_first_pack_does_not_leave_the_others_waiting(ranks):
    first, *others = ranks.run(close_unstarted, 4)
    assert (first.error, first.value) == (None, "closed")
    for outcome in others:
        assert outcome.value.startswith(
            "RankLeft: comparing settings before the first step: rank 0 stopped: its loader was closed"
        )


def test_a_forked_child_that_closes_its_loader_leaves_the_connections_to_its_parent(ranks):
    outcomes = ranks.run(close_in_child, 4)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, 8)] * 4


def test_packs_of_the_scenarios_differ():
    assert made_pack(0, 1).batch.sample_ids != made_pack(1, 0).batch.sample_ids
