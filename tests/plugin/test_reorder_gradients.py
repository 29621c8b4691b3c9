"""Training on reordered packs in real processes over gloo: packs whole, and the loss and gradient of arrival order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from exchange_scenarios import LENGTH, PROFILE, Sorted
from pack_samples import PATCHES
from rank_processes import RankProcesses
from reordered_training import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    Permuted,
    four_samples,
    gradients,
    marked_pack,
    marked_sample,
    mixed_up,
    unequal_losses,
    unequal_streams,
)

from plugin.balance import Topology, assign
from plugin.batch import build
from plugin.cost import cost_model
from plugin.exchange import metadata
from plugin.packing import PackLimits, Samples, pack

RELATIVE = 1e-13
"""Of the largest component. Every pack gives the same terms to the bit wherever it is trained; only the order in which they are
summed differs. At most 32 packs: 32 roundings of 1.1e-16 of a partial sum, 4e-15, and partial sums up to 25 times the result,
where packs pull in opposite directions; 2e-16 was seen. Weighing tokens by rank changes a loss by more than 1e-3 (case 43)."""


@pytest.fixture(scope="module", params=[2, 4, 8])
def world(request: pytest.FixtureRequest) -> Iterator[tuple[RankProcesses, int]]:
    started = RankProcesses(request.param, forked=True)
    yield started, request.param
    assert started.close() == [0] * request.param


@pytest.fixture(scope="module")
def two() -> Iterator[RankProcesses]:
    started = RankProcesses(2, forked=True)
    yield started
    assert started.close() == [0, 0]


def values(outcomes: Any) -> list[Any]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes), outcomes[0].traceback
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(("mode", "micro_batch_size"), [("fsdp", 1), ("ep", 1), ("dp", 1), ("fsdp", 2)])
def test_loss_and_gradient_of_a_global_batch_are_those_of_arrival_order(
    world: tuple[RankProcesses, int], mode: str, micro_batch_size: int
) -> None:
    ranks, size = world
    found = values(ranks.run(gradients, mode, micro_batch_size))
    assert [one["mixed_up"] for one in found] == [[]] * size
    assert sum(found[0]["moved"]) > 0, "or nothing is tested"
    for step in range(NUM_STEPS):
        batch = slice(NUM_MICROBATCHES * step, NUM_MICROBATCHES * (step + 1))
        dealt, came = (sorted(chain.from_iterable(one["ids"][place][batch] for one in found)) for place in (0, 1))
        assert dealt == came
        assert len(set(dealt)) == size * NUM_MICROBATCHES
        # Gradients are reduced: all ranks have the same.
        loss, num_tokens, gradient = found[0]["balanced"][step]
        loss_came, num_came, gradient_came = found[0]["arrival"][step]
        assert num_tokens == num_came
        assert loss == pytest.approx(loss_came, rel=RELATIVE)
        largest = np.abs(gradient_came).max()
        assert largest > 0
        np.testing.assert_allclose(gradient, gradient_came, rtol=0, atol=RELATIVE * largest)
        assert {one["loss_tokens"][step] for one in found} == {num_came}, "what the loader says to divide by"


def test_a_mix_up_would_be_seen() -> None:
    one, other = marked_sample(3, side=4, num_text=5), marked_sample(7, side=4, num_text=5)
    assert mixed_up(marked_pack([3, 7])) == []
    for name in ("images", "encoded", "row"):
        wrong = replace(one, **{name: getattr(other, name)})
        made = build([wrong, other], form=PATCHES, sequence_length=LENGTH, alignment=8, pad_id=0, fingerprint=PROFILE)
        assert mixed_up(made.to_torch()) == ["sample 3"]


def test_case_40_ranks_with_other_numbers_of_microbatches_stop_before_the_first_step(two: RankProcesses) -> None:
    """verl-project/verl#6176, verl-project/verl#5511, hiyouga/EasyR1#11004: the first rank to finish leaves, the rest hang.

    Limit of 100 tokens, five samples of 95 on one rank, five of 20 on the other: five packs against one.
    """
    limits = PackLimits(sequence_length=100)
    lengths = tuple(len(pack(Samples.of(np.full(5, size)), limits, flush=True).packs) for size in (95, 20))
    assert lengths == (5, 1)
    for one in values(two.run(unequal_streams, lengths, lengths)):
        assert one["error"].startswith(
            "UsageError: settings of ranks that exchange packs: found num_microbatches 5 on rank 0 and 1"
        )
        assert one["read"] == 0, "before anything is read"
    # Where both want five, the rank that has one ends it for both, and what was read is named.
    found = values(two.run(unequal_streams, lengths, (5, 5)))
    assert [one["trained"] for one in found] == [[], []]
    assert [len(one["dropped"]) for one in found] == [5, 1]
    found = values(two.run(unequal_streams, lengths, (1, 1)))
    assert [len(one["trained"]) for one in found] == [1, 1]
    assert [len(one["dropped"]) for one in found] == [1, 0]


def test_case_42_images_stay_with_their_samples_and_arrival_order_can_be_restored(two: RankProcesses) -> None:
    """NovaSky-AI/SkyRL#1865, NVIDIA-NeMo/Megatron-Bridge#5525: after reordering an image lands in another sample.

    Four samples of distinct sizes on 2 ranks, each pixel filled with its sample's number.
    """
    trained = [pack for one in values(two.run(four_samples)) for pack in one]
    assert trained != sorted(trained), "or nothing is tested"
    assert sorted(trained) == [((f"sample {n}",), (n,), (2 * (n + 1)) ** 2, []) for n in range(4)]
    packs = [marked_pack([number], side=2 * (number + 1)).batch for number in range(4)]
    table = metadata.decode(metadata.encode(packs).reshape(2, 2, metadata.NUM_BYTES))
    inverse = Sorted()(table.encoder, table.llm, table.num_bytes).inverse
    assert [trained[place][0] for place in inverse] == [(f"sample {number}",) for number in range(4)]


def test_case_43_the_loss_is_that_of_any_permutation(two: RankProcesses) -> None:
    """pytorch/torchtitan#2206, PrimeIntellect-ai/prime-rl#1960: a mean per rank weighs tokens by the rank they are on.

    Two ranks whose packs have 5 and 1 loss tokens.
    """
    runs = [values(two.run(unequal_losses, Permuted(seed))) for seed in range(6)]
    assert {tuple(one["own"] for one in run) for run in runs} >= {(10, 2), (6, 6)}, "packs were moved"
    assert {one["tokens"] for run in runs for one in run} == {12}
    losses, means = ([one[name] for run in runs for one in run] for name in ("loss", "mean of means"))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=RELATIVE)
    assert np.ptp(means) > 1e-3 * np.mean(means), "which is what reordering would change"


def test_case_44_packs_of_equal_length_have_the_costs_of_what_they_hold() -> None:
    """ByteDance-Seed/VeOmni#1074, NVIDIA-NeMo/Megatron-Bridge#4609, NVIDIA-NeMo/Megatron-Bridge#3529, NVIDIA/Megatron-LM#2054.

    16,384 tokens each: one long text, 32 short texts, one large image, 100 small images. Averages over a pack make them equal.
    """
    model = cost_model("qwen2_5_vl_vit+qwen3_8b")
    found = []
    for tokens, patches in (([16_384], []), ([512] * 32, []), ([16_384], [65_520]), ([16_384], [655] * 100)):
        images = np.array(patches, np.int64)
        encoder = model.encoder_cost_of_images(images, images * 64, [len(images)])
        found.append((int(encoder.sum()), int(model.llm_cost(tokens).sum())))
    assert len({sum(pair) for pair in found}) == len(set(found)) == 4
    long, short, large, small = found
    assert long[1] > short[1], "attention grows with squares"
    assert large[0] > small[0], "and an image with its own patches"
    encoder, llm = np.array(found).T.reshape(2, 2, 2)
    before = assign(encoder, llm, Topology(num_ranks=2), "dp").before
    assert before.ratio > 1.2, "the waiting that counters and the forecast show, where equal lengths look like none"
