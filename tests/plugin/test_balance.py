from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__

from packer.format.errors import UsageError
from plugin.balance import Mode, Plan, Topology, assign
from plugin.balance.owners import owned
from plugin.balance.refining import refined
from plugin.balance.repair import repaired

ROOT = Path(__file__).parents[2]
MODES = [Mode.EP, Mode.FSDP, Mode.DP, Mode.LOCAL]


class Batch:
    """Costs of one global batch and who runs it."""

    def __init__(self, encoder: list[list[int]], llm: list[list[int]], groups: list[int], nodes: list[int]) -> None:
        self.encoder, self.llm = np.array(encoder, np.int64), np.array(llm, np.int64)
        self.groups, self.nodes = groups, nodes
        self.shape = self.encoder.shape

    def __repr__(self) -> str:
        return f"Batch({self.encoder.tolist()}, {self.llm.tolist()}, {self.groups}, {self.nodes})"

    @property
    def topology(self) -> Topology:
        return Topology(num_ranks=self.shape[0], expert_group=self.groups, node=self.nodes)

    def plan(self, mode: Mode, **options: object) -> Plan:
        return assign(self.encoder, self.llm, self.topology, mode, **({"floor_per_mille": 0} | options))

    def meeting(self, mode: Mode) -> list[int]:
        """Labels of ranks that meet at each microbatch, by plain words."""
        if mode is Mode.LOCAL and len(set(self.groups)) in (1, self.shape[0]):
            return [0] * self.shape[0]
        labels = {Mode.FSDP: [0] * self.shape[0], Mode.DP: list(range(self.shape[0]))}
        return labels.get(mode, self.groups)


@st.composite
def batches(draw: st.DrawFn, most_ranks: int = 9, most_microbatches: int = 9) -> Batch:
    """Any costs: equal ones, zeros, one giant, huge ones; groups and nodes of any size, labels of any value."""
    num_ranks, num_microbatches = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_microbatches))
    number = num_ranks * num_microbatches
    most = draw(st.sampled_from([0, 1, 3, 100, 10**6, ((1 << 62) - 1) // number // 2]))

    def rows(largest: int) -> list[list[int]]:
        flat = draw(st.lists(st.integers(0, largest), min_size=number, max_size=number))
        return [flat[start : start + num_microbatches] for start in range(0, number, num_microbatches)]

    encoder, llm = rows(most), rows(draw(st.sampled_from([0, most])))
    if most == 100 and draw(st.booleans()):
        encoder[-1][0] = 10**12
    labels = st.lists(st.sampled_from([-7, 0, 3, 1000]), min_size=num_ranks, max_size=num_ranks)
    return Batch(encoder, llm, draw(labels), draw(labels))


def plain_cost(batch: Batch, taken: list[list[int]], meeting: list[int], *, encoder_only: bool = False) -> int:
    """Written down from the definition, in Python's integers."""
    encoder, llm = batch.encoder.reshape(-1).tolist(), batch.llm.reshape(-1).tolist()
    sums = []
    for label in set(meeting):
        ranks = [rank for rank, other in enumerate(meeting) if other == label]
        columns = list(zip(*(taken[rank] for rank in ranks), strict=True))
        sums.append(
            sum(max(encoder[pack] for pack in column) for column in columns)
            + (0 if encoder_only else sum(max(llm[pack] for pack in column) for column in columns))
        )
    return max(sums)


def arrival(batch: Batch) -> list[list[int]]:
    return np.arange(batch.encoder.size).reshape(batch.shape).tolist()


options = st.fixed_dictionaries(
    {"first_local": st.booleans(), "pipeline": st.booleans(), "floor_per_mille": st.sampled_from([0, 1, 50, 300, 1000])}
)


@given(batches(), st.sampled_from(MODES), options)
def test_every_pack_is_trained_once_and_found_again(batch: Batch, mode: Mode, options: dict[str, object]) -> None:
    plan = batch.plan(mode, **options)
    assert plan.mode is mode
    assert plan.taken.shape == batch.shape
    assert sorted(plan.taken.reshape(-1).tolist()) == list(range(batch.encoder.size))
    assert plan.taken.reshape(-1)[plan.inverse].tolist() == list(range(batch.encoder.size))
    assert plan.inverse[plan.taken.reshape(-1)].tolist() == list(range(batch.encoder.size))
    restored = batch.encoder.reshape(-1)[plan.taken].reshape(-1)[plan.inverse]
    np.testing.assert_array_equal(restored.reshape(batch.shape), batch.encoder)


@given(batches(), st.sampled_from(MODES), options)
def test_costs_are_what_they_say(batch: Batch, mode: Mode, options: dict[str, object]) -> None:
    plan = batch.plan(mode, **options)
    meeting = batch.meeting(mode)
    for found, taken in ((plan.before, arrival(batch)), (plan.after, plan.taken.tolist())):
        assert found.cost == plain_cost(batch, taken, meeting)
        assert found.encoder_cost == plain_cost(batch, taken, meeting, encoder_only=True)
        assert found.work == sum(batch.encoder.reshape(-1).tolist()) + sum(batch.llm.reshape(-1).tolist())
        assert plan.bound.cost <= found.cost
        assert plan.bound.encoder_cost <= found.encoder_cost
        assert found.ratio >= plan.bound.ratio >= 1
    gain = plan.before.cost - plan.after.cost
    assert plan.is_identity or (gain > 0 and gain * 1000 >= options["floor_per_mille"] * plan.before.cost)
    assert plan.is_identity == (plan.taken.tolist() == arrival(batch))


@given(batches(most_ranks=3, most_microbatches=2), st.sampled_from(MODES))
def test_no_assignment_beats_the_bound(batch: Batch, mode: Mode) -> None:
    bound, meeting = batch.plan(mode).bound, batch.meeting(mode)
    num_microbatches = batch.shape[1]
    best = best_encoder = None
    for order in permutations(range(batch.encoder.size)):
        taken = [list(order[start : start + num_microbatches]) for start in range(0, len(order), num_microbatches)]
        cost, encoder_cost = (plain_cost(batch, taken, meeting, encoder_only=only) for only in (False, True))
        best = cost if best is None else min(best, cost)
        best_encoder = encoder_cost if best_encoder is None else min(best_encoder, encoder_cost)
    assert bound.cost <= best
    assert bound.encoder_cost <= best_encoder


@given(batches(), st.sampled_from(MODES), options)
def test_moves_are_counted_and_both_sides_agree(batch: Batch, mode: Mode, options: dict[str, object]) -> None:
    num_bytes = np.arange(1, batch.encoder.size + 1).reshape(batch.shape)
    plan = batch.plan(mode, num_bytes=num_bytes, **options)
    num_ranks = batch.shape[0]
    moved = [pack for pack in range(batch.encoder.size) if pack // batch.shape[1] != plan.inverse[pack] // batch.shape[1]]
    off = [
        pack for pack in moved if batch.nodes[pack // batch.shape[1]] != batch.nodes[int(plan.inverse[pack]) // batch.shape[1]]
    ]
    assert (plan.num_moved, plan.num_moved_off_node) == (len(moved), len(off))
    assert (plan.moved_bytes, plan.moved_off_node_bytes) == (sum(pack + 1 for pack in moved), sum(pack + 1 for pack in off))
    sent, received = [], []
    for rank in range(num_ranks):
        sends, receives = plan.sends(rank), plan.receives(rank)
        assert sends.ranks.tolist() == sorted(sends.ranks.tolist())
        sent += [(rank, *row) for row in zip(sends.ranks, sends.positions, sends.microbatches, strict=True)]
        received += [
            (other, rank, *rest) for other, *rest in zip(receives.ranks, receives.positions, receives.microbatches, strict=True)
        ]
        for *_, other, position, microbatch in sent[len(sent) - len(sends) :]:
            assert plan.taken[other, microbatch] == rank * batch.shape[1] + position
    # Sorted by the pair alone: what is left is the order in which either side lists the packs of the pair.
    assert sorted(sent, key=lambda row: row[:2]) == sorted(received, key=lambda row: row[:2])
    assert len(sent) == plan.num_moved


@given(batches(), st.sampled_from(MODES), st.booleans())
def test_first_microbatch_is_local_and_local_moves_nothing(batch: Batch, mode: Mode, pipeline: bool) -> None:
    plan = batch.plan(mode, pipeline=pipeline)
    assert (plan.taken[:, 0] // batch.shape[1]).tolist() == list(range(batch.shape[0]))
    if mode is Mode.LOCAL:
        assert plan.num_moved == 0


@given(batches(), st.sampled_from([Mode.EP, Mode.FSDP]), st.booleans())
def test_own_pack_first_then_the_same_machine(batch: Batch, mode: Mode, first_local: bool) -> None:
    plan = batch.plan(mode, first_local=first_local)
    holder = plan.taken // batch.shape[1]
    nodes, total = np.array(batch.nodes), (batch.encoder + batch.llm).reshape(-1)
    for label in set(meeting := batch.meeting(mode)):
        ranks = np.flatnonzero(np.array(meeting) == label)
        if plan.is_identity:
            continue
        for microbatch in range(batch.shape[1]):
            held = holder[ranks, microbatch]
            packs = plan.taken[ranks, microbatch]
            for rank in set(held.tolist()) & set(ranks.tolist()):
                assert held[ranks == rank] == rank
                if microbatch or not first_local:
                    assert total[packs[ranks == rank]] == total[packs[held == rank]].max()
            for node in set(batch.nodes):
                comes = ((nodes[ranks] == node) & (nodes[held] != node)).any()
                goes = ((nodes[ranks] != node) & (nodes[held] == node)).any()
                assert not (comes and goes)


@given(batches(), st.sampled_from([Mode.EP, Mode.FSDP, Mode.LOCAL]))
def test_dearest_first_or_cheap_at_both_ends(batch: Batch, mode: Mode) -> None:
    for pipeline in (False, True):
        plan = batch.plan(mode, pipeline=pipeline)
        if plan.is_identity:
            continue
        meeting = np.array(batch.meeting(mode))
        for label in set(meeting.tolist()):
            of_group = plan.taken[meeting == label]
            prices = sum(costs.reshape(-1)[of_group].max(axis=0) for costs in (batch.encoder, batch.llm)).tolist()
            prices = prices if mode is Mode.LOCAL else prices[1:]
            top = prices.index(max(prices)) if prices else 0
            assert prices[top:] == sorted(prices[top:], reverse=True)
            assert prices[:top] == sorted(prices[:top])
            assert pipeline or top == 0


def test_pipeline_order() -> None:
    costs = np.array([[8, 1, 3, 2, 5], [4, 1, 6, 7, 2]])
    orders = [
        assign(costs, None, Topology(num_ranks=2), "fsdp", first_local=False, pipeline=flag).taken for flag in (False, True)
    ]
    prices = [costs.reshape(-1)[order].max(axis=0).tolist() for order in orders]
    assert prices == [[8, 6, 4, 2, 1], [2, 6, 8, 4, 1]]


@given(batches(), st.sampled_from(MODES))
def test_one_plan_whatever_holds_the_costs(batch: Batch, mode: Mode) -> None:
    expected = batch.plan(mode).taken
    labels = sorted(set(batch.groups))
    others = {
        "lists": assign(batch.encoder.tolist(), batch.llm.tolist(), batch.topology, mode, floor_per_mille=0),
        "columns": assign(np.asfortranarray(batch.encoder), batch.llm.T.copy().T, batch.topology, mode, floor_per_mille=0),
        "unsigned": assign(batch.encoder.astype(np.uint64), batch.llm.astype(">i8"), batch.topology, mode, floor_per_mille=0),
        "labels": assign(
            batch.encoder,
            batch.llm,
            Topology(num_ranks=batch.shape[0], expert_group=[labels.index(label) for label in batch.groups], node=batch.nodes),
            mode,
            floor_per_mille=0,
        ),
    }
    for name, plan in others.items():
        assert plan.taken.tolist() == expected.tolist(), name


PROGRAM = """
import hashlib
import numpy as np
from plugin.balance import Topology, assign
costs = np.random.PCG64(7).random_raw(2 * 48 * 40).reshape(2, 48, 40) % 1000
digest = hashlib.sha256()
for labels in ([rank // 8 for rank in range(48)], [rank % 5 for rank in range(48)]):
    topology = Topology(num_ranks=48, expert_group=labels, node=[rank // 4 for rank in range(48)])
    for mode in ("ep", "fsdp", "dp", "local"):
        digest.update(assign(costs[0], costs[1], topology, mode, floor_per_mille=0).taken.astype("<i4").tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}, {"NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__)}],
    ids=["seed 1", "seed 2", "other sorts"],
)
def test_other_processes_make_the_same_plan(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without the vector instructions numpy sorts by other algorithms."""
    exec(PROGRAM, {})
    here = capsys.readouterr().out
    there = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout == here
    assert len(here.strip()) == 2 * hashlib.sha256().digest_size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["drawn", "equal", "giant"])
def test_half_a_million_packs(mode: Mode, kind: str) -> None:
    num_ranks, num_microbatches = 4096, 128
    costs = np.random.default_rng(3).integers(0, 1 << 30, (2, num_ranks, num_microbatches))
    if kind != "drawn":
        costs[:] = 1000
    if kind == "giant":
        costs[0, 17, 5] = 1 << 40
    topology = Topology(num_ranks=num_ranks, expert_group=np.arange(num_ranks) // 8, node=np.arange(num_ranks) // 8)
    plan = assign(costs[0], costs[1], topology, mode)
    assert plan.is_identity == (kind != "drawn")
    assert plan.bound.cost <= plan.after.cost <= plan.before.cost
    assert (plan.taken[:, 0] // num_microbatches == np.arange(num_ranks)).all()


@pytest.mark.parametrize(
    ("groups", "synchronises", "expected"),
    [
        (None, "batch", Mode.DP),
        (None, "microbatch", Mode.FSDP),
        ([5, 5, 9, 9], "batch", Mode.EP),
        ([5, 9, 5, 5], "batch", Mode.EP),
        ([0, 1, 2, 3], "batch", Mode.EP),
        ([3, 3, 3, 3], "batch", Mode.FSDP),
        ([5, 5, 9, 9], "microbatch", Mode.FSDP),
    ],
)
def test_auto_goes_by_the_topology(groups: list[int] | None, synchronises: str, expected: Mode) -> None:
    topology = Topology(num_ranks=4, expert_group=groups, synchronises=synchronises)
    assert topology.resolve("auto") is expected
    costs = np.arange(40).reshape(4, 10)
    by_auto, by_name = (assign(costs, None, topology, mode) for mode in ("auto", expected))
    assert by_auto.mode is expected
    assert by_auto.taken.tolist() == by_name.taken.tolist()


def test_members_of_a_group_are_taken_as_given() -> None:
    """Groups of every second rank: ranks next to each other never meet, so nothing is exchanged for their sake."""
    encoder = np.array([[9, 1, 9, 1], [6, 4, 6, 4], [1, 9, 1, 9], [4, 6, 4, 6]])
    topology = Topology(num_ranks=4, expert_group=[0, 1, 0, 1])
    plan = assign(encoder, None, topology, "ep", first_local=False)
    assert plan.after.cost == plan.bound.cost == 20
    assert plan.num_moved == 0
    assert plan.num_moved_off_node is None


def test_no_gain_moves_nothing() -> None:
    rising = np.tile(np.arange(8), (4, 1))
    for mode in ("fsdp", "dp", "local"):
        assert assign(rising, rising, Topology(num_ranks=4), mode, floor_per_mille=0).is_identity
    assert assign([[7]], [[1]], Topology(num_ranks=1), "fsdp").is_identity
    assert assign([[7], [1]], [[1], [1]], Topology(num_ranks=2), "dp").is_identity


def test_floor_is_a_share_of_arrival() -> None:
    costs = np.array([[100, 900], [910, 90]])
    topology = Topology(num_ranks=2)
    gain = assign(costs, None, topology, "fsdp", floor_per_mille=0)
    assert (gain.before.cost, gain.after.cost) == (1810, 1010)
    assert not assign(costs, None, topology, "fsdp", floor_per_mille=441).is_identity
    assert assign(costs, None, topology, "fsdp", floor_per_mille=442).is_identity


def test_a_plan_cannot_be_changed() -> None:
    plan = assign([[1, 2], [9, 1]], None, Topology(num_ranks=2), "fsdp")
    for array in (plan.taken, plan.inverse):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(batches())
def test_repair_moves_no_pack_twice_and_never_makes_the_heaviest_heavier(batch: Batch) -> None:
    costs = batch.encoder.reshape(-1)
    pool = np.arange(costs.size).reshape(batch.shape)
    sizes, fixed = np.ones(batch.shape[0], np.int64), np.zeros(batch.shape[0], np.int64)
    (found,) = repaired([pool], costs, sizes, fixed, 10)
    assert sorted(found.reshape(-1).tolist()) == sorted(pool.reshape(-1).tolist())
    moved = np.argwhere(found != pool)
    for rank, place in moved:
        other, there = divmod(int(found[rank, place]), batch.shape[1])
        assert found[other, there] == pool[rank, place]
        assert other != rank
    assert costs[found].sum(axis=1).max() <= batch.encoder.sum(axis=1).max()


def test_repair_is_exact_where_one_swap_is_enough() -> None:
    pool = np.arange(8).reshape(2, 4)
    costs = np.array([10, 20, 30, 40, 10, 12, 14, 16])
    (found,) = repaired([pool], costs, np.array([1, 1]), np.array([0, 0]), 0)
    assert costs[found].sum(axis=1).tolist() == [76, 76]
    assert (found != pool).sum() == 2


def test_surplus_goes_to_whoever_has_done_least() -> None:
    """Ranks 0 to 2 hold nothing of the two slots but pack 5 of rank 2; the dearest goes to the least loaded."""
    costs, owner = np.array([30, 20, 10, 9, 8, 7]), np.array([3, 3, 3, 3, 3, 2])
    load = np.array([1, 0, 2, 0])
    members = np.array([[[0, 1, 2], [3, 4, 5]]])
    taken = owned(members, costs, owner, np.array([[0, 1, 2]]), None, load)
    assert taken.tolist() == [[[1, 0, 2], [3, 4, 5]]]
    assert load.tolist() == [30, 38, 19, 0]


@given(batches(most_ranks=4, most_microbatches=12))
def test_refining_makes_no_group_dearer(batch: Batch) -> None:
    num_slots = batch.shape[1]
    members = np.arange(batch.encoder.size).reshape(1, -1, num_slots).transpose(0, 2, 1)
    encoder, llm = batch.encoder.reshape(-1), batch.llm.reshape(-1)
    found = refined(members, encoder, llm)
    assert sorted(found.reshape(-1).tolist()) == list(range(batch.encoder.size))
    prices = [(encoder[slots].max(axis=2) + llm[slots].max(axis=2)).sum() for slots in (members, found)]
    assert prices[1] <= prices[0]


def test_refining_finds_the_box_between_two_cuts() -> None:
    """Packs that are dear in one cost belong to the pack that is dear in both: a cut by one cost leaves one of them behind."""
    encoder, llm = np.array([9, 8, 1, 2, 2, 2]), np.array([9, 1, 8, 2, 2, 2])
    found = refined(np.array([[[0, 1, 3], [2, 4, 5]]]), encoder, llm)
    assert sorted(map(sorted, found[0].tolist())) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("costs", "groups", "expected"),
    [
        ([[10, 1], [10, 1], [1, 10], [1, 10]], [0, 0, 1, 1], 11),
        ([[8, 1], [1, 1], [1, 1], [1, 1]], [0, 0, 1, 1], 9),
        ([[6, 6], [6, 6], [0, 0], [0, 0]], [0, 1, 2, 3], 6),
        ([[9, 1], [1, 1], [5, 5]], [0, 0, 1], 10),
    ],
    ids=["maxima", "dearest", "mean", "large slots first"],
)
def test_the_bound_is_reached_where_it_can_be(costs: list[list[int]], groups: list[int], expected: int) -> None:
    topology = Topology(num_ranks=len(costs), expert_group=groups)
    plan = assign(costs, None, topology, "ep", first_local=False, floor_per_mille=0)
    assert plan.bound.cost == plan.after.cost == expected


def test_local_order_where_no_ranks_meet_is_made_for_all() -> None:
    costs = [[1, 9], [9, 1]]
    for topology in (Topology(num_ranks=2), Topology(num_ranks=2, expert_group=[4, 7])):
        plan = assign(costs, None, topology, "local")
        assert plan.taken.tolist() == [[1, 0], [2, 3]]
        assert (plan.before.cost, plan.after.cost) == (18, 10)


FINE = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("encoder", "llm", "message"),
    [
        ([1, 2], None, r"encoder of shape \(2,\), expected \(2, number of microbatches\)"),
        ([[1, 2]], None, r"encoder of shape \(1, 2\)"),
        ([[], []], None, r"encoder of shape \(2, 0\)"),
        ([[1, 2], [3]], None, "differ in length"),
        (FINE, [[1], [2]], r"llm of shape \(2, 1\), expected the same shape"),
        ([[1, 2], [3, -4]], None, "encoder -4 at rank 1, position 1, expected 0 or more"),
        (FINE, [[1.0, 2.0], [3.0, 4.0]], "llm as float64, expected integers"),
        ([[True, False], [True, True]], None, "encoder as bool, expected integers"),
        ([[1 << 60, 1], [1, 1]], [[1, 1], [0, 0]], "expected less than 1,152,921,504,606,846,976"),
        (np.full((2, 2), 1 << 63, np.uint64), None, "expected less than 2\\^63"),
    ],
)
def test_costs_that_cannot_be_used(encoder: object, llm: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        assign(encoder, llm, Topology(num_ranks=2), "fsdp")


@pytest.mark.parametrize(
    ("topology", "options", "message"),
    [
        ({"num_ranks": 0}, {}, "num_ranks 0, expected a whole number of at least 1"),
        ({"num_ranks": 2, "expert_group": [0]}, {}, r"expert_group as int64 of shape \(1,\), expected integers of shape \(2,\)"),
        ({"num_ranks": 2, "node": ["a", "b"]}, {}, "node as <U1"),
        ({"num_ranks": 2, "synchronises": "never"}, {}, "expected 'microbatch' or 'batch'"),
        ({"num_ranks": 2}, {"mode": "ep"}, "without expert groups; give Topology"),
        ({"num_ranks": 2}, {"mode": "zero"}, "expected one of ep, fsdp, dp, local, auto"),
        ({"num_ranks": 2}, {"floor_per_mille": 0.5}, "floor_per_mille 0.5, expected a whole number"),
        ({"num_ranks": 2}, {"floor_per_mille": 1001}, "floor_per_mille 1001"),
        ({"num_ranks": 2}, {"num_bytes": [[1], [2]]}, r"num_bytes of shape \(2, 1\), expected \(2, 2\)"),
    ],
)
def test_settings_that_cannot_be_used(topology: dict[str, object], options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        assign(FINE, FINE, Topology(**topology), **options)
