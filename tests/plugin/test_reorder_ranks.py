"""Balanced loaders of real processes over gloo: packs whole, batches unchanged, states exact, ends clear."""

from collections import Counter

import numpy as np
import pytest
from exchange_scenarios import (
    PROFILE,
    Local,
    Shifted,
    Sorted,
    differing,
    differing_later,
    failing,
    forked,
    made_pack,
    microbatches_by_step,
    other_groups,
    overlapping,
    replica_resume,
    replicas,
    resume,
    seen,
    slow,
    staged,
    staged_pipeline,
    train,
)
from rank_processes import RankProcesses

from plugin.exchange import metadata

SIZE = 4


@pytest.fixture(scope="module")
def ranks():
    started = RankProcesses(SIZE)
    yield started
    assert started.close() == [0] * SIZE


def values(outcomes):
    """What each rank returned; none may have failed."""
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes), outcomes[0].traceback
    return [outcome.value for outcome in outcomes]


def dealt(planner, first, number, size=SIZE):
    """What each rank must train on in a global batch that begins at that pack of every stream."""
    packs = [made_pack(stream, first + place) for stream in range(size) for place in range(number)]
    rows = metadata.encode([pack.batch for pack in packs]).reshape(size, number, metadata.NUM_BYTES)
    table = metadata.decode(rows)
    taken = planner(table.encoder, table.llm, table.num_bytes).taken
    return [[seen(packs[pack]) for pack in row] for row in taken], packs


def test_a_pack_is_trained_on_at_once_while_others_still_travel(ranks):
    """The first microbatch is the rank's own; and the next batch arrives before anybody asks for it."""
    first, second = dealt(Shifted(), 0, 4)[0], dealt(Shifted(), 4, 4)[0]
    for rank, (early, later) in enumerate(values(ranks.run(overlapping, SIZE))):
        assert early == first[rank][0]
        assert later == second[rank]


def test_the_inverse_of_the_plan_restores_arrival_order(ranks):
    found = values(ranks.run(train, SIZE, [4] * SIZE, {}))
    trained = [pack for one in found for pack in one["steps"][0]]
    _, packs = dealt(Sorted(), 0, 4)
    table = metadata.decode(metadata.encode([pack.batch for pack in packs]).reshape(SIZE, 4, metadata.NUM_BYTES))
    inverse = Sorted()(table.encoder, table.llm, table.num_bytes).inverse
    assert [trained[place] for place in inverse] == [seen(pack) for pack in packs]


def test_a_replica_resumes_from_its_readers_state(ranks):
    """Trainers save the state of the first rank of a replica, and give it to all."""
    for whole, tail in values(ranks.run(replica_resume, SIZE)):
        assert len(whole) == 12
        assert tail == whole[6:]


@pytest.mark.parametrize("planner", [Sorted(), Shifted(), Local()], ids=lambda planner: planner.name)
@pytest.mark.parametrize("slice_bytes", [1, 256 << 20])
def test_every_pack_arrives_whole_where_the_plan_says(ranks, planner, slice_bytes):
    """Sample ids, text and pixels of a pack are one buffer: every byte of it is compared."""
    found = values(ranks.run(train, SIZE, [12] * SIZE, {"planner": planner, "slice_bytes": slice_bytes}))
    for step in range(3):
        expected, packs = dealt(planner, 4 * step, 4)
        assert [one["steps"][step] for one in found] == expected
        trained = Counter(pack for one in found for pack in one["steps"][step])
        assert trained == Counter(seen(pack) for pack in packs)
        assert {one["tokens"][step] for one in found} == {sum(pack.batch.num_loss_tokens for pack in packs)}
    assert all(set(one["steps"]) == {0, 1, 2} and one["dropped"] == () for one in found)


def test_eight_ranks():
    eight = RankProcesses(8, forked=True)
    try:
        found = values(eight.run(train, 8, [6] * 8, {"num_microbatches": 3}))
        for step in range(2):
            assert [one["steps"][step] for one in found] == dealt(Sorted(), 3 * step, 3, size=8)[0]
    finally:
        codes = eight.close()
    assert codes == [0] * 8


def test_the_loss_of_a_global_batch_is_that_of_arrival_order(ranks):
    """A stand-in for a loss per token: any function of a pack, over the global number of loss tokens."""

    def loss(packs, num_tokens):
        return sum(sum(ord(char) for sample in ids for char in sample) ** 0.5 for ids, _ in packs) / num_tokens

    reordered = values(ranks.run(train, SIZE, [8] * SIZE, {"planner": Sorted()}))
    arrival = values(ranks.run(train, SIZE, [8] * SIZE, {"planner": Local()}))
    for step in range(2):
        totals = [sum(loss(one["steps"][step], one["tokens"][step]) for one in run) for run in (reordered, arrival)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-12)


def test_counters_say_what_moved(ranks):
    found = values(ranks.run(train, SIZE, [8] * SIZE, {"planner": Shifted()}))
    _, packs = dealt(Shifted(), 4, 4)
    moved = [len(pack.tensor) for place, pack in enumerate(packs) if place % 4]
    for one in found:
        assert [counters.step for counters in one["counters"]] == [0, 1]
        last = one["counters"][1]
        assert (last.num_packs, last.num_moved, last.moved_bytes) == (16, 12, sum(moved))
        assert (last.num_off_node, last.off_node_bytes) == (0, 0), "all ranks are on this machine"


@pytest.mark.parametrize("changes", [{}, {"num_microbatches": microbatches_by_step}], ids=["constant", "growing"])
@pytest.mark.parametrize("num_workers", [None, 2, 0])
def test_states_of_every_position_give_the_identical_tail(ranks, num_workers, changes):
    positions = list(range(10))
    for rank, one in enumerate(values(ranks.run(resume, SIZE, 9 if changes else 12, num_workers, positions, changes))):
        assert len(one["whole"]) == (9 if changes else 12)
        for position in positions:
            assert one["tails"][position] == (True, one["whole"][position:]), (rank, position)
        assert (one["threads"] == {"MainThread"}) == (num_workers == 0)


def test_all_ranks_stop_before_a_batch_that_one_cannot_fill(ranks):
    outcomes = ranks.run(train, SIZE, [13, 12, 10, 15], {})
    found = values(outcomes)
    assert [sum(map(len, one["steps"].values())) for one in found] == [8] * SIZE
    assert [[pack[0].split("/")[1] for pack in one["dropped"]] for one in found] == [
        ["8", "9", "10", "11"],
        ["8", "9", "10", "11"],
        ["8", "9"],
        ["8", "9", "10", "11"],
    ]
    assert [one["state"]["snapshot"] for one in found] == [{"position": 8}] * SIZE
    for outcome in outcomes:
        assert any("rank 2 had fewer than 4 packs. All ranks stop: 14 packs are not trained on" in line for line in outcome.logs)


def test_a_slow_rank_is_waited_for_with_a_warning_that_names_it(ranks):
    outcomes = ranks.run(slow, SIZE)
    assert values(outcomes) == [8] * SIZE
    for outcome in outcomes:
        said = "\n".join(outcome.logs)
        assert "WARNING: step 1: waited" in said
    assert all("rank 3 read for 1." in "\n".join(outcome.logs) for outcome in outcomes[:3])
    assert "the background thread is reading packs" in "\n".join(outcomes[3].logs)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("profile", {"profile": "other"}),
        ("cost", {"cost": "other"}),
        ("sequence_length", {"sequence_length": 128}),
        ("planner", {"planner": Local()}),
        ("num_microbatches", {"num_microbatches": 8}),
        ("slice_bytes", {"slice_bytes": 1}),
    ],
)
def test_other_settings_on_one_rank_are_named_before_the_first_step(ranks, field, change):
    outcomes = ranks.run(differing, SIZE, [{}, {}, change, {}])
    for outcome in outcomes:
        assert outcome.error.startswith(f"UsageError: settings of ranks that exchange packs: found {field} ")
        assert " on ranks 0, 1, 3 and " in outcome.error
        assert " on rank 2, expected one value" in outcome.error


@pytest.mark.parametrize("num_workers", [None, 0])
def test_an_error_on_one_rank_comes_up_on_all_at_the_same_step(ranks, num_workers):
    found = values(ranks.run(failing, SIZE, num_workers))
    assert [one["taken"] for one in found] == [4] * SIZE
    assert [one["state"]["snapshot"] for one in found] == [{"position": 4}] * SIZE
    assert found[1]["errors"] == ["OSError: disk of stream 1 is gone"] * 2
    for rank in (0, 2, 3):
        assert len(found[rank]["errors"]) == 2
        assert all("failed on another rank, so all stop; rank 1: OSError: disk" in error for error in found[rank]["errors"])


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("readers", ["all", "replica"])
def test_peers_of_a_replica_train_on_the_same_packs(ranks, readers, num_stages):
    found = values(ranks.run(replicas, readers, num_stages, False, 3))
    assert len(found[0]["packs"]) == 12
    assert found[0]["packs"] == found[1]["packs"]
    assert found[2]["packs"] == found[3]["packs"]
    for step in range(3):
        expected, _ = dealt(Sorted(), 4 * step, 4, size=2)
        assert [found[0]["packs"][4 * step : 4 * step + 4], found[2]["packs"][4 * step : 4 * step + 4]] == expected
    reads = [one["calls"] > 0 for one in found]
    assert reads == ([True] * 4 if readers == "all" else [True, False, True, False])
    assert [one["state"]["has_snapshot"] for one in found] == reads


@pytest.mark.parametrize("num_stages", [1, 2])
def test_peers_that_read_different_streams_are_told(ranks, num_stages):
    outcomes = ranks.run(replicas, "all", num_stages, True, 3)
    for rank in (2, 3):
        assert "replica of ranks 2, 3: found other packs on rank 3 than on rank 2 at step 0" in outcomes[rank].error
    for rank in (0, 1):
        assert "replica of ranks 2, 3: found other packs" in outcomes[rank].error


def test_groups_connect_where_ranks_have_other_groups_besides(ranks):
    """Ranks of a replica belong to different numbers of groups of the trainer."""
    assert values(ranks.run(other_groups, SIZE)) == [4] * SIZE


def test_a_forked_loader_worker_lets_go_of_a_closed_group_unharmed(ranks):
    """Groups have threads, which a child does not: without a word about forks it waits for them for ever, or crashes."""
    assert values(ranks.run(forked, SIZE)) == [0] * SIZE


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.parametrize(("num_microbatches", "planner"), [(4, Sorted()), (5, Shifted()), (1, Sorted())])
def test_slices_over_a_device_are_launched_alike_on_all_ranks(ranks, num_microbatches, planner, num_workers):
    length = 3 * num_microbatches
    found = values(ranks.run(staged, SIZE, length, num_microbatches, num_workers, planner))
    for step in range(3):
        expected, _ = dealt(planner, num_microbatches * step, num_microbatches)
        part = slice(num_microbatches * step, num_microbatches * (step + 1))
        assert [one["packs"][part] for one in found] == expected
    launched = found[0]["launched"]
    assert all(one["launched"] == launched for one in found)
    assert all(one["threads"] == {"MainThread"} for one in found), "one thread touches the device"
    # The first batch at once, every other in the second half of the one before.
    assert {step for step, _, _ in launched} == {0, 1}
    assert all(place >= num_microbatches // 2 for step, place, _ in launched if step == 1)
    largest = max(len(made_pack(stream, number).tensor) for stream in range(SIZE) for number in range(length))
    assert max(one["most_bytes"] for one in found) <= 12_000 + largest


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_slices_over_a_device_wait_for_no_later_stage(ranks, num_microbatches):
    """With one microbatch the first stage would ask for the batch after before the last one has asked for any."""
    found = values(ranks.run(staged_pipeline, num_microbatches, 3))
    for step in range(3):
        expected, _ = dealt(Sorted(), num_microbatches * step, num_microbatches, size=2)
        part = slice(num_microbatches * step, num_microbatches * (step + 1))
        assert [one[part] for one in found] == [expected[0], expected[0], expected[1], expected[1]]


def test_other_numbers_of_microbatches_at_a_later_step_are_named_with_their_ranks(ranks):
    said = "step 1: found number of microbatches 4 on ranks 0, 2, 3 and 5 on rank 1, expected the same on all ranks"
    assert [outcome.error for outcome in ranks.run(differing_later, SIZE)] == [f"UsageError: {said}"] * SIZE


def test_profile_is_compared_as_packs_have_it():
    assert made_pack(0, 0).batch.fingerprint == PROFILE
    assert np.unique([seen(made_pack(stream, number))[1] for stream in range(4) for number in range(9)]).size == 36
