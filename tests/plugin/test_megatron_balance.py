"""What balancing takes from a Megatron run, without Megatron: groups worked out by hand, and the microbatches of each step.

With Megatron's own groups and calculators: `tests/conformance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import UsageError
from plugin.adapters.megatron_balance import Microbatches, RunFacts, balance_settings, surroundings
from plugin.adapters.megatron_topology import Standing, expert_labels, parallel_of
from plugin.balance import Mode, Topology


def world_of(data: Sequence[int], experts: Sequence[Sequence[int]] = (), stages: Sequence[int] | None = None) -> list[Standing]:
    """Args:
    data: data-parallel coordinate of each global rank. experts: members of the groups that meet in expert layers.
    """
    return [
        Standing(
            data_rank=coordinate,
            stage=0 if stages is None else stages[rank],
            meets=tuple(min(group) for group in experts if rank in group),
        )
        for rank, coordinate in enumerate(data)
    ]


PAIRS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
"""Tensor parallel 2, data parallel 8: tensor peers side by side."""


@pytest.mark.parametrize(
    ("name", "world", "labels"),
    [
        # Experts' tensors are whole, so eight ranks of experts are four pairs of tensor peers.
        ("tp2 ep8 dp8, etp1", world_of(PAIRS, [range(8), range(8, 16)]), (0, 0, 0, 0, 4, 4, 4, 4)),
        # Experts' tensors are cut in two, so the experts are spread over every second rank.
        (
            "tp2 ep8 dp8, etp2",
            world_of(PAIRS, [range(0, 16, 2), range(1, 16, 2), *([n, n + 1] for n in range(0, 16, 2))]),
            (0,) * 8,
        ),
        ("tp2 ep2 dp8, etp1: tensor peers alone", world_of(PAIRS, [[n, n + 1] for n in range(0, 16, 2)]), None),
        ("tp2 ep4 dp2: more experts than data-parallel ranks", world_of([0, 0, 1, 1], [range(4)]), (0, 0)),
        ("ep1 dp4", world_of(range(4), [[rank] for rank in range(4)]), None),
        ("ep2 dp4", world_of(range(4), [[0, 1], [2, 3]]), (0, 0, 2, 2)),
        ("ep2 dp4, far apart", world_of(range(4), [[0, 2], [1, 3]]), (0, 1, 0, 1)),
        # Each context-parallel rank has experts with one of another replica: chains of groups join what they touch.
        ("cp2 ep2 dp4, a chain", world_of([0, 0, 1, 1, 2, 2, 3, 3], [[0, 2], [3, 4], [5, 6]]), (0, 0, 0, 0)),
        ("cp2 ep4 dp4", world_of([0, 0, 1, 1, 2, 2, 3, 3], [range(4), range(4, 8)]), (0, 0, 2, 2)),
        ("pp2 ep2 dp4", world_of([0, 1, 2, 3] * 2, [[0, 1], [2, 3], [4, 5], [6, 7]]), (0, 0, 2, 2)),
        # Tensors of experts over two replicas meet though the experts themselves do not.
        ("tp1 etp2 dp4", world_of(range(4), [[0], [1], [2], [3], [0, 1], [2, 3]]), (0, 0, 2, 2)),
        ("one rank", world_of([0], [[0]]), None),
    ],
)
def test_ranks_of_data_that_meet_in_expert_layers(name: str, world: list[Standing], labels: tuple[int, ...] | None) -> None:
    assert expert_labels(world) == labels


@given(meetings=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=4)))
def test_who_meets_is_who_can_be_reached(meetings: list[list[int]]) -> None:
    """Of 12 ranks, each a replica: in whatever groups, the lowest rank that is reached from one is its label."""
    reached = [{rank} for rank in range(12)]
    for _ in range(12):
        for meeting in meetings:
            together = set().union(*(reached[rank] for rank in meeting))
            for rank in meeting:
                reached[rank] |= together
    expected = tuple(min(others) for others in reached)
    assert expert_labels(world_of(range(12), meetings)) == (expected if len(set(expected)) < 12 else None)


@pytest.mark.parametrize(("labels", "mode"), [(None, Mode.DP), ((0, 0, 2, 2), Mode.EP), ((0, 0, 0, 0), Mode.FSDP)])
def test_the_mode_follows_from_who_meets(labels: tuple[int, ...] | None, mode: Mode) -> None:
    assert Topology(num_ranks=4, expert_group=labels).resolve("auto") is mode
    assert Topology(num_ranks=4, expert_group=labels, synchronises="microbatch").resolve("auto") is Mode.FSDP


def test_a_rank_among_tensor_and_pipeline_peers() -> None:
    world = world_of([0, 0, 1, 1] * 2, stages=[0] * 4 + [1] * 4)
    parallel = parallel_of(6, [4, 6], world)
    assert (parallel.rank, parallel.dp_rank, parallel.dp_size) == (6, 1, 2)
    assert (parallel.peers, parallel.num_stages) == ((2, 3, 6, 7), 2)
    assert parallel.reads("all")
    assert not parallel.reads("replica")
    assert parallel_of(2, [0, 2], world).reads("replica")


def test_peers_need_not_be_neighbours() -> None:
    assert parallel_of(1, [0, 1], world_of([0, 1, 0, 1])).peers == (1, 3)


def test_groups_that_are_not_of_one_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data-parallel group \[0, 1\] whose members stand at \[1, 0\], expected ascending"):
        parallel_of(0, [0, 1], world_of([1, 0]))
    with pytest.raises(UsageError, match=r"found \{0: 2, 1: 1\} ranks at data-parallel coordinates, expected as many at each"):
        parallel_of(0, [0, 1], world_of([0, 1, 0]))
    with pytest.raises(UsageError, match=r"found \{0: 1, 1: 1, 2: 1\} ranks"):
        parallel_of(0, [0, 1], world_of([0, 1, 2]))


def test_groups_that_do_not_say_who_meets_are_refused() -> None:
    with pytest.raises(UsageError, match="process groups without ep and expt_tp, expected them too"):
        surroundings(SimpleNamespace(dp=None, pp=None), "batch")
    assert surroundings(None, "batch")[0].dp_size == 1


class Calculator:
    """As Megatron's: it stands at what the trainer last told it."""

    def __init__(self, batch_size: Callable[[int], int], *, dp_size: int, micro_batch_size: int = 1) -> None:
        self.batch_size, self.ranks, self.micro_batch_size = batch_size, dp_size, micro_batch_size
        self.update(0, True)

    def update(self, consumed: int, check: bool) -> None:
        self.now = self.batch_size(consumed)

    def get(self) -> int:
        return self.now // (self.ranks * self.micro_batch_size)

    def get_current_running_global_batch_size(self) -> int:
        return self.now

    def get_micro_batch_size(self) -> int:
        return self.micro_batch_size


def ramp(consumed: int) -> int:
    return 8 if consumed < 20 else 16 if consumed < 100 else 32


def walked(calculator: Calculator, steps: int) -> tuple[list[int], list[int]]:
    """As the training loop comes by: microbatches of each step, and packs consumed before it."""
    numbers, consumed = [], [0]
    for _ in range(steps):
        calculator.update(consumed[-1], True)
        numbers.append(calculator.get())
        consumed.append(consumed[-1] + numbers[-1] * calculator.ranks)
    return numbers, consumed


def test_steps_ahead_are_those_that_the_training_comes_to() -> None:
    expected, _ = walked(Calculator(ramp, dp_size=4), 20)
    assert expected[:10] == [2, 2, 2, 4, 4, 4, 4, 4, 8, 8]
    live = Calculator(ramp, dp_size=4)
    live.update(1000, True)
    microbatches = Microbatches(live, dp_size=4)
    assert [microbatches(step) for step in (19, 0, 7, 8)] == [expected[step] for step in (19, 0, 7, 8)]
    assert [microbatches(step) for step in range(20)] == expected
    assert live.now == 32, "the trainer's own is left as it stands"


@given(begun=st.integers(0, 15), asked=st.lists(st.integers(0, 15), min_size=1))
def test_a_resumed_run_counts_on_from_what_was_consumed(begun: int, asked: list[int]) -> None:
    expected, consumed = walked(Calculator(ramp, dp_size=4), 32)
    microbatches = Microbatches(Calculator(ramp, dp_size=4), dp_size=4)
    microbatches.begin(begun, consumed[begun])
    assert [microbatches(begun + step) for step in asked] == [expected[begun + step] for step in asked]
    if begun:
        with pytest.raises(UsageError, match=rf"found step {begun - 1}, expected {begun} or a later one"):
            microbatches(begun - 1)


def test_microbatches_that_cannot_be_known_ahead_are_refused() -> None:
    with pytest.raises(UsageError, match=r"found a NoneType as Megatron's calculator.*init_num_microbatches_calculator"):
        Microbatches(None, dp_size=4)
    with pytest.raises(UsageError, match="found global batches of 8 in 1 microbatches of 2, expected microbatches of 1"):
        Microbatches(Calculator(ramp, dp_size=4, micro_batch_size=2), dp_size=4)
    with pytest.raises(UsageError, match=r"found global batches of 8 in 2 microbatches of 1, expected .* on 8 data-parallel"):
        Microbatches(Calculator(ramp, dp_size=4), dp_size=8)


def config(*, per_token: bool = False, strategy: str = "no_shard", **flags: bool) -> Any:
    dist = {"use_megatron_fsdp": False, "use_torch_fsdp2": False} | {key: flags[key] for key in flags if key != "ddp"}
    return SimpleNamespace(
        model=SimpleNamespace(calculate_per_token_loss=per_token),
        ddp=SimpleNamespace(use_megatron_fsdp=flags.get("ddp", False), data_parallel_sharding_strategy=strategy),
        dist=SimpleNamespace(**dist),
    )


@pytest.mark.parametrize(
    ("cfg", "per_token", "synchronises"),
    [
        (config(), False, "batch"),
        (config(per_token=True), True, "batch"),
        (config(use_torch_fsdp2=True), False, "microbatch"),
        (config(use_megatron_fsdp=True, strategy="optim_grads_params"), False, "microbatch"),
        (config(ddp=True, strategy="optim_grads"), False, "microbatch"),
        (config(ddp=True, strategy="optim"), False, "batch"),
    ],
)
def test_ranks_wait_at_each_microbatch_where_parameters_are_sharded(cfg: Any, per_token: bool, synchronises: str) -> None:
    assert RunFacts.of(cfg) == RunFacts(loss_per_token=per_token, synchronises=synchronises)  # type: ignore[arg-type]


def test_settings_of_balancing_are_refused_by_name() -> None:
    assert balance_settings({"mode": "dp"}, loss_per_token=True).loss_per_token
    with pytest.raises(UsageError, match=r"found balance loss_per_token, modes, expected of mode, .*calculate_per_token_loss"):
        balance_settings({"modes": "dp", "loss_per_token": True})
    with pytest.raises(UsageError, match="found mode 'fast', expected one of ep, fsdp"):
        balance_settings({"mode": "fast"})
