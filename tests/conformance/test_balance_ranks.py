"""Real processes in Megatron's groups over gloo, with the provider's balanced stream: who gets which packs, and resuming."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from bridge_balance import NUM_AFTER, NUM_BEFORE, NUM_MICROBATCHES, BalancedSeen, balanced_streams
from bridge_ranks import Layout, Microbatch, run_job

FOUR = {
    "dp4": Layout(balance={}),
    "dp4, two workers": Layout(balance={"mode": "fsdp"}, num_workers=2),
    "ep2 dp4": Layout(expert=2, balance={}),
    "ep4 dp4": Layout(expert=4, balance={}),
    "tp2 dp2, sequence parallel": Layout(tensor=2, sequence_parallel=True, balance={}),
    "tp2 ep2 dp2, experts' tensors whole": Layout(tensor=2, expert=2, expert_tensor=1, balance={"mode": "dp"}),
    "cp2 ep2 dp2, one reader": Layout(context=2, expert=2, balance={"readers": "replica", "mode": "dp"}),
    "pp2 ep2 dp2": Layout(pipeline=2, expert=2, balance={}),
    "pp2 dp2, one reader": Layout(pipeline=2, balance={"readers": "replica"}),
}
EIGHT = {
    "tp2 ep4 dp4, experts' tensors whole": Layout(tensor=2, expert=4, expert_tensor=1, balance={}),
    "tp2 pp2 ep2 dp2": Layout(tensor=2, pipeline=2, expert=2, balance={"readers": "replica"}),
}
LAYOUTS = FOUR | EIGHT
EXPECTED = {
    "dp4": ("dp", None),
    "dp4, two workers": ("fsdp", None),
    "ep2 dp4": ("ep", (0, 0, 2, 2)),
    "ep4 dp4": ("fsdp", (0, 0, 0, 0)),
    "tp2 dp2, sequence parallel": ("dp", None),
    "tp2 ep2 dp2, experts' tensors whole": ("dp", None),
    "cp2 ep2 dp2, one reader": ("dp", None),
    "pp2 ep2 dp2": ("fsdp", (0, 0)),
    "pp2 dp2, one reader": ("dp", None),
    "tp2 ep4 dp4, experts' tensors whole": ("ep", (0, 0, 2, 2)),
    "tp2 pp2 ep2 dp2": ("fsdp", (0, 0)),
}


@pytest.fixture(scope="module")
def job(dataset: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[BalancedSeen]]:
    found: dict[str, list[BalancedSeen]] = {}
    for layouts, num_ranks in ((FOUR, 4), (EIGHT, 8)):
        folder: Path = tmp_path_factory.mktemp("job")
        seen = run_job(dataset, folder, list(layouts.values()), num_ranks=num_ranks, see=balanced_streams)
        found |= dict(zip(layouts, seen, strict=True))
    return found


def replicas(ranks: list[BalancedSeen]) -> dict[int, BalancedSeen]:
    """One rank of each, of the first stage."""
    return {rank.dp_rank: rank for rank in reversed(ranks) if rank.stage == 0}


def batches(packs: tuple[Microbatch, ...]) -> list[list[str]]:
    return [[one.tokens for one in packs[start : start + NUM_MICROBATCHES]] for start in range(0, len(packs), NUM_MICROBATCHES)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_peers_of_a_replica_get_the_same_packs(job: dict[str, list[BalancedSeen]], name: str) -> None:
    first = replicas(job[name])
    assert sorted(first) == list(range(len(first)))
    for rank in job[name]:
        given = first[rank.dp_rank]
        assert [(one.tokens, one.grids) for one in rank.before + rank.after] == [
            (one.tokens, one.grids) for one in given.before + given.after
        ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_global_batch_holds_the_packs_that_arrived(job: dict[str, list[BalancedSeen]], name: str) -> None:
    first = replicas(job[name]).values()
    dealt = [batches(rank.before + rank.after) for rank in first]
    arrived = [batches(rank.arrived) for rank in first]
    for step in range((NUM_BEFORE + NUM_AFTER) // NUM_MICROBATCHES):
        assert Counter(pack for one in dealt for pack in one[step]) == Counter(pack for one in arrived for pack in one[step])


def test_packs_do_move(job: dict[str, list[BalancedSeen]]) -> None:
    moved = [rank for ranks in job.values() for rank in ranks if set(rank.before + rank.after) != set(rank.arrived)]
    assert moved


@pytest.mark.parametrize("name", LAYOUTS)
def test_labels_are_those_of_the_real_groups(job: dict[str, list[BalancedSeen]], name: str) -> None:
    mode, labels = EXPECTED[name]
    assert {(rank.mode, rank.labels) for rank in job[name]} == {(mode, labels)}
    for rank in job[name]:
        for met in rank.met:
            assert len(met) == 1 or len({labels[one] for one in met}) == 1  # type: ignore[index]
    if labels is None:
        assert all(len(met) == 1 for rank in job[name] for met in rank.met)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_goes_on_in_the_middle_of_a_global_batch(job: dict[str, list[BalancedSeen]], name: str) -> None:
    for rank in job[name]:
        assert rank.resumed == rank.after
    size = len(replicas(job[name]))
    assert {rank.positions for rank in job[name]} == {((NUM_BEFORE + NUM_AFTER) * size,) * 3}


@pytest.mark.parametrize("name", LAYOUTS)
def test_as_many_read_as_were_asked_to(job: dict[str, list[BalancedSeen]], name: str) -> None:
    readers = sum(rank.reads for rank in job[name])
    balance = LAYOUTS[name].balance
    assert balance is not None
    assert readers == (len(replicas(job[name])) if balance.get("readers") == "replica" else len(job[name]))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if LAYOUTS[name].pipeline > 1])
def test_stages_above_the_first_get_grids_and_no_pixels(job: dict[str, list[BalancedSeen]], name: str) -> None:
    for rank in job[name]:
        with_images = [one for one in rank.before + rank.after if one.grids]
        assert with_images
        assert {one.has_pixels for one in with_images} == {rank.stage == 0}


def test_validation_is_never_balanced(job: dict[str, list[BalancedSeen]]) -> None:
    assert not any(rank.validates_balanced for ranks in job.values() for rank in ranks)
