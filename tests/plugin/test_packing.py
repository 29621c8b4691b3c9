from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import UsageError
from plugin.packing import Packing, PackLimits, Refusal, Samples, fewest_packs, lower_bound, pack, refusals, shuffled
from plugin.packing.core import Method
from plugin.packing.filling import Pool, exact_fill, first_fit_decreasing
from plugin.packing.limited import LimitedPool

ROOT = Path(__file__).parents[2]
LIMITS = PackLimits(sequence_length=4096)
WIDE = 10**9


@st.composite
def buffers(draw: st.DrawFn, most: int = 40) -> tuple[Samples, PackLimits]:
    """Samples, some too large for any pack, and limits that bind or do not."""
    alignment = draw(st.sampled_from([1, 1, 4, 16]))
    limits = PackLimits(
        sequence_length=alignment * draw(st.integers(1, 100 // alignment)),
        alignment=alignment,
        max_images=draw(st.none() | st.integers(1, 9)),
        max_patches=draw(st.none() | st.integers(1, 30)),
    )
    number = draw(st.integers(0, most))

    def column(most: int) -> list[int]:
        return draw(st.lists(st.integers(0, most), min_size=number, max_size=number))

    samples = Samples.of(
        column(limits.sequence_length + 2), num_images=column(5), num_patches=column(12), age=sorted(column(9), reverse=True)
    )
    return samples, limits


def padded(samples: Samples, limits: PackLimits) -> list[int]:
    return [-(-tokens // limits.alignment) * limits.alignment for tokens in samples.num_tokens.tolist()]


def needs(samples: Samples, limits: PackLimits) -> list[tuple[int, int, int]]:
    return list(zip(padded(samples, limits), samples.num_images.tolist(), samples.num_patches.tolist(), strict=True))


def room(limits: PackLimits) -> tuple[int, int, int]:
    return limits.sequence_length, limits.max_images or WIDE, limits.max_patches or WIDE


def plain_ffd(items: list[tuple[int, int, int]], most: tuple[int, int, int]) -> int:
    """The textbook's: each sample, largest first, to the first bin with room for it."""
    bins: list[list[int]] = []
    for item in sorted(items, key=lambda item: -item[0]):
        for left in bins:
            if all(size <= free for size, free in zip(item, left, strict=True)):
                break
        else:
            bins.append(left := list(most))
        left[:] = [free - size for size, free in zip(item, left, strict=True)]
    return len(bins)


def optimum(items: list[tuple[int, int, int]], most: tuple[int, int, int]) -> int:
    """Fewest bins, by trying every set of items as the last bin."""
    everything = (1 << len(items)) - 1

    def fits(chosen: int) -> bool:
        of_it = [item for index, item in enumerate(items) if chosen >> index & 1]
        return all(sum(sizes) <= limit for sizes, limit in zip(zip(*of_it, strict=True), most, strict=True))

    possible = [chosen for chosen in range(1, everything + 1) if fits(chosen)]

    @cache
    def bins(left: int) -> int:
        highest = 1 << left.bit_length() >> 1
        return 1 + min(bins(left & ~chosen) for chosen in possible if chosen & highest and chosen | left == left) if left else 0

    return bins(everything)


def stream(samples: Samples, limits: PackLimits, *, buffer: int, max_age: int) -> list[tuple[Packing, list[int]]]:
    """All calls over a source: the buffer is filled up before each call, and flushed once the source has ended.

    With each call, the numbers of the samples that were in the buffer.
    """
    calls: list[tuple[Packing, list[int]]] = []
    held, ages, next_sample = [], np.zeros(0, np.int64), 0
    while not calls or held or next_sample < len(samples):
        new = range(next_sample, min(next_sample + buffer - len(held), len(samples)))
        next_sample = new.stop
        held, ages = [*held, *new], np.concatenate([ages, np.zeros(len(new), np.int64)])
        here = Samples.of(
            samples.num_tokens[held], num_images=samples.num_images[held], num_patches=samples.num_patches[held], age=ages
        )
        packing = pack(here, limits, flush=next_sample == len(samples), max_age=max_age)
        calls.append((packing, held))
        held, ages = [held[index] for index in packing.leftovers], packing.leftover_age
    return calls


@given(buffers(), st.booleans(), st.integers(0, 10))
def test_every_sample_ends_once_and_no_pack_breaks_a_limit(case: tuple[Samples, PackLimits], flush: bool, max_age: int) -> None:
    samples, limits = case
    packing = pack(samples, limits, flush=flush, max_age=max_age)
    ends = [*packing.packs, packing.leftovers, packing.refused]
    assert sorted(np.concatenate(ends).tolist()) == list(range(len(samples)))
    assert all(np.all(np.diff(indices) > 0) for indices in ends)
    items, most = needs(samples, limits), room(limits)
    for indices in packing.packs:
        assert len(indices)
        assert all(sum(items[index][kind] for index in indices) <= most[kind] for kind in range(3))
    packed = [index for indices in packing.packs for index in indices]
    assert packing.num_tokens == samples.num_tokens[packed].sum()
    assert packing.filled_tokens == sum(items[index][0] for index in packed)
    assert packing.capacity_tokens == packing.num_tokens + packing.alignment_tokens + packing.unfilled_tokens
    assert packing.leftover_age.tolist() == (samples.age[packing.leftovers] + 1).tolist()
    if flush:
        assert not len(packing.leftovers)


@given(buffers())
def test_refused_are_those_that_fit_no_empty_pack(case: tuple[Samples, PackLimits]) -> None:
    samples, limits = case
    alone = [item[0] > 0 and all(map(int.__le__, item, room(limits))) for item in needs(samples, limits)]
    packing = pack(samples, limits, flush=True)
    assert packing.refused.tolist() == [index for index, fits in enumerate(alone) if not fits]
    assert packing.refusal.tolist() == refusals(samples, limits)[packing.refused].tolist()
    assert packing.over_long.tolist() == np.flatnonzero(samples.num_tokens > limits.sequence_length).tolist()


@given(buffers(most=80))
def test_never_more_packs_than_plain_first_fit_decreasing_nor_fewer_than_the_bound(case: tuple[Samples, PackLimits]) -> None:
    samples, limits = case
    packing = pack(samples, limits, flush=True)
    fits = [item for item, code in zip(needs(samples, limits), refusals(samples, limits), strict=True) if not code]
    assert fewest_packs(samples, limits) <= len(packing.packs) <= plain_ffd(fits, room(limits))


@given(buffers(most=8))
def test_bounds_and_plans_beside_the_optimum_of_small_buffers(case: tuple[Samples, PackLimits]) -> None:
    samples, limits = case
    fits = [item for item, code in zip(needs(samples, limits), refusals(samples, limits), strict=True) if not code]
    best = optimum(fits, room(limits))
    num_packs = len(pack(samples, limits, flush=True).packs)
    assert fewest_packs(samples, limits) <= best <= num_packs
    if limits.max_images is None and limits.max_patches is None:
        # Dósa 2007: first-fit decreasing needs at most 11/9 of the optimum and 6/9 of a bin.
        assert 9 * num_packs <= 11 * best + 6


@given(st.lists(st.integers(1, 60), max_size=60))
def test_the_first_plan_is_the_textbook_s(lengths: list[int]) -> None:
    sizes = np.sort(np.array(lengths, np.int64))[::-1]
    plan = first_fit_decreasing(Pool(sizes, 60), sizes.tolist(), 60)
    bins: list[list[int]] = []
    for size in sizes.tolist():
        place = next((place for place in bins if sum(place) + size <= 60), None)
        if place is None:
            bins.append(place := [])
        place.append(size)
    assert [sizes[ranks].tolist() for ranks in np.split(plan.order, plan.starts[1:]) if len(ranks)] == bins


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(50, 60))
def test_lower_bound_is_the_formula_s(lengths: list[int], capacity: int) -> None:
    def at(k: int) -> int:
        closed = [size for size in lengths if size > capacity - k]
        large = [size for size in lengths if capacity / 2 < size <= capacity - k]
        middle = [size for size in lengths if k <= size <= capacity / 2]
        more = sum(middle) - (len(large) * capacity - sum(large))
        return len(closed) + len(large) + max(0, -(-more // capacity))

    assert lower_bound(lengths, capacity) == max(at(k) for k in range(capacity // 2 + 1))
    assert lower_bound(lengths, capacity) >= -(-sum(lengths) // capacity)


@pytest.mark.parametrize(
    ("lengths", "capacity", "bound", "best", "method"),
    [
        ([], 10, 0, 0, Method.FIRST_FIT_DECREASING),
        ([10], 10, 1, 1, Method.FIRST_FIT_DECREASING),
        ([6, 6, 6, 6], 10, 4, 4, Method.FIRST_FIT_DECREASING),
        ([4, 4, 4, 4, 4, 4], 11, 3, 3, Method.FIRST_FIT_DECREASING),
        # First-fit decreasing: 5+4, 4+3+2, 2. Exactly: 5+3+2, 4+4+2.
        ([5, 4, 4, 3, 2, 2], 10, 2, 2, Method.EXACT_FILL),
        # First-fit decreasing: 9, 5+4, 3+3+3, 2. Exactly: 9, 5+3+2, 4+3+3.
        ([9, 5, 4, 3, 3, 3, 2], 10, 3, 3, Method.EXACT_FILL),
        # The sum alone would allow 4; nothing goes beside the sixes but the fours.
        ([6, 6, 6, 5, 5, 5], 10, 5, 5, Method.FIRST_FIT_DECREASING),
    ],
)
def test_small_examples(lengths: list[int], capacity: int, bound: int, best: int, method: Method) -> None:
    packing = pack(Samples.of(lengths), PackLimits(sequence_length=capacity), flush=True)
    assert (lower_bound(lengths, capacity), len(packing.packs), packing.method) == (bound, best, method)


@given(buffers(), st.integers(0, 10))
def test_the_same_buffer_gives_the_same_packs(case: tuple[Samples, PackLimits], max_age: int) -> None:
    samples, limits = case
    one, two = (pack(samples, limits, max_age=max_age) for _ in range(2))
    assert [indices.tolist() for indices in one.packs] == [indices.tolist() for indices in two.packs]
    assert (one.leftovers.tolist(), one.method) == (two.leftovers.tolist(), two.method)


def test_another_process_with_another_hash_seed_gives_the_same_packs() -> None:
    code = """
import numpy as np
from plugin.packing import *
lengths = (np.arange(1, 1500) * 7919) % 3001 + 1
samples = Samples.of(lengths, num_images=lengths % 5, num_patches=lengths % 997)
for limits in (PackLimits(sequence_length=4096), PackLimits(sequence_length=4096, max_images=7, max_patches=2000)):
    packing = pack(samples, limits)
    print([packs.tolist() for packs in shuffled(packing.packs, worker_seed=3, sample_index=17)])
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=env | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 1000


@given(buffers(), st.integers(1, 30), st.integers(0, 4))
def test_in_a_stream_nothing_is_lost_and_nothing_waits_longer_than_the_age(
    case: tuple[Samples, PackLimits], buffer: int, max_age: int
) -> None:
    samples, limits = case
    calls = stream(samples, limits, buffer=buffer, max_age=max_age)
    ended = [held[index] for packing, held in calls for ends in (*packing.packs, packing.refused) for index in ends]
    assert sorted(ended) == list(range(len(samples)))
    seen = Counter(number for _, held in calls for number in held)
    assert max(seen.values(), default=0) <= max_age + 1


@given(buffers(), st.integers(0, 10))
def test_each_call_lets_a_quarter_leave_and_all_that_must(case: tuple[Samples, PackLimits], max_age: int) -> None:
    samples, limits = case
    packing = pack(samples, limits, max_age=max_age)
    whole = pack(samples, limits, flush=True)
    assert whole.method == packing.method
    staying = len(whole.packs) - len(packing.packs)
    assert 4 * len(packing.packs) >= len(whole.packs)
    assert not len(packing.leftovers) or samples.age[packing.leftovers].max() < max_age
    emitted = {tuple(indices.tolist()) for indices in packing.packs}
    kept = [indices for indices in whole.packs if tuple(indices.tolist()) not in emitted]
    assert len(kept) == staying
    sizes = padded(samples, limits)
    assert all(1000 * sum(sizes[index] for index in indices) < 999 * limits.sequence_length for indices in kept)


def test_the_fullest_leave_first_and_full_ones_always() -> None:
    # Packs of 100, 90, 80, 70, 60: the first is full, and a quarter of five is two.
    packing = pack(Samples.of([60, 70, 80, 90, 100]), PackLimits(sequence_length=100))
    assert [indices.tolist() for indices in packing.packs] == [[4], [3]]
    assert packing.leftovers.tolist() == [0, 1, 2]


@pytest.mark.parametrize("fullest", [95, 100])
def test_the_eldest_leaves_whatever_its_pack_looks_like_and_counts_in_the_quarter(fullest: int) -> None:
    samples = Samples.of([60, 70, 80, 90, fullest], age=[5, 0, 0, 0, 0])
    packing = pack(samples, PackLimits(sequence_length=100), max_age=5)
    assert [indices.tolist() for indices in packing.packs] == [[4], [0]]
    assert packing.leftover_age.tolist() == [1, 1, 1]


def test_handing_back_fills_packs_that_fresh_buffers_leave_open() -> None:
    chance = np.random.default_rng(0)
    samples = Samples.of(np.minimum(chance.lognormal(6.9, 1, 12_000), 8192).astype(np.int64) + 1)
    shares = []
    for max_age in (0, 5):
        calls = stream(samples, PackLimits(sequence_length=8193), buffer=1000, max_age=max_age)
        tokens, slots = (sum(getattr(call, name) for call, _ in calls) for name in ("num_tokens", "capacity_tokens"))
        shares.append(tokens / slots)
    assert shares[1] > 0.999 > shares[0]


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 7])
@pytest.mark.parametrize("max_age", [0, 5])
def test_case_34_ids_in_are_ids_out_for_any_number_around_the_buffer(number: int, max_age: int) -> None:
    calls = stream(Samples.of([1500] * number), LIMITS, buffer=4, max_age=max_age)
    ids = [held[index] for packing, held in calls for indices in packing.packs for index in indices]
    assert sorted(ids) == list(range(number))
    assert calls[-1][0].leftovers.tolist() == []


def test_case_35_an_over_long_sample_is_refused_and_the_others_are_packed() -> None:
    samples = Samples.of([100, 9000, 100])
    packing = pack(samples, LIMITS, flush=True)
    assert [indices.tolist() for indices in packing.packs] == [[0, 2]]
    assert packing.over_long.tolist() == packing.refused.tolist() == [1]
    assert packing.num_tokens == 200
    detail = Refusal(packing.refusal[0]).detail(samples, 1, LIMITS)
    assert detail == "9000 tokens, 0 images, 0 patches: longer than a pack of 4096 tokens"


def test_case_35_refusals_of_a_whole_index_are_known_before_training() -> None:
    limits = PackLimits(sequence_length=4096, max_images=4, max_patches=1000)
    samples = Samples.of([4096, 4097, 0, 10, 10, 9000], num_images=[4, 0, 0, 5, 1, 9], num_patches=[1000, 0, 0, 0, 1001, 9999])
    codes = [Refusal(code).name for code in refusals(samples, limits)]
    assert codes == ["NONE", "OVER_LONG", "EMPTY", "TOO_MANY_IMAGES", "TOO_MANY_PATCHES", "OVER_LONG"]


def test_case_36_two_images_that_do_not_fit_are_refused_whole_never_cut() -> None:
    packing = pack(Samples.of([720], num_images=[2], num_patches=[2880]), PackLimits(sequence_length=500), flush=True)
    assert (packing.packs, packing.over_long.tolist(), packing.num_tokens) == ((), [0], 0)


def test_case_38_samples_are_whole_and_each_starts_on_its_alignment() -> None:
    samples = Samples.of([13, 7, 8, 1])
    packing = pack(samples, PackLimits(sequence_length=48, alignment=8), flush=True)
    assert [indices.tolist() for indices in packing.packs] == [[0, 1, 2, 3]]
    assert (packing.num_tokens, packing.alignment_tokens, packing.unfilled_tokens) == (29, 11, 8)
    assert packing.efficiency == 29 / 48


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"sequence_length": 8192}, "sequence_length 8192 instead of 4096"),
        ({"sequence_length": 4096, "alignment": 16}, "alignment 16 instead of 1"),
        ({"sequence_length": 4096, "max_patches": 9}, "max_patches 9 instead of None"),
    ],
)
def test_case_39_a_plan_made_with_other_limits_is_refused_by_the_field_that_differs(other: dict[str, int], shown: str) -> None:
    LIMITS.refuse_other(LIMITS.state())
    with pytest.raises(UsageError, match=f"found {shown};"):
        LIMITS.refuse_other(PackLimits(**other).state())
    with pytest.raises(UsageError, match="algorithm 0 instead of 1"):
        LIMITS.refuse_other(LIMITS.state() | {"algorithm": 0})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sequence_length": 0}, "sequence_length 0"),
        ({"sequence_length": 8192.0}, r"sequence_length 8192\.0"),
        ({"sequence_length": 8192, "alignment": 0}, "alignment 0"),
        ({"sequence_length": 100, "alignment": 8}, "the last 4 tokens .* take 96"),
        ({"sequence_length": 4, "alignment": 8}, "take 8"),
        ({"sequence_length": 8192, "max_images": 0}, "max_images 0"),
        ({"sequence_length": 8192, "max_patches": -1}, "max_patches -1"),
        ({"sequence_length": None}, "sequence_length None"),
    ],
)
def test_wrong_limits_are_refused_with_the_value(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PackLimits(**wrong)


def test_wrong_samples_are_refused_with_the_column() -> None:
    with pytest.raises(UsageError, match="num_tokens -1 at 1"):
        Samples.of([3, -1])
    with pytest.raises(UsageError, match="num_tokens as float64"):
        Samples.of([3.5])
    with pytest.raises(UsageError, match=r"age as int64 of shape \(1,\), expected int64 of shape \(2,\)"):
        Samples.of([3, 4], age=[0])
    with pytest.raises(UsageError, match="max_age -1"):
        pack(Samples.of([3]), LIMITS, max_age=-1)
    with pytest.raises(UsageError, match="lengths from 3 to 11, expected 0 to the capacity 10"):
        lower_bound([3, 11], 10)


def test_text_goes_beside_images_where_patches_are_what_limits_packs() -> None:
    # By length alone: 6 with the 3 without patches, and then the 9 and the 3 patches do not share a pack.
    samples, limits = Samples.of([3, 6, 3, 3], num_patches=[0, 1, 9, 3]), PackLimits(sequence_length=10, max_patches=10)
    packing = pack(samples, limits, flush=True)
    assert packing.method == Method.BALANCED_FILL
    assert [indices.tolist() for indices in packing.packs] == [[1, 2], [0, 3]]


def test_a_pair_given_up_for_its_patches_takes_no_room() -> None:
    sizes, patches = np.array([5, 3, 2]), np.array([0, 6, 9])
    plan = exact_fill(LimitedPool(sizes, 10, (patches,), (10,)), sizes.tolist(), 10)
    assert [ranks.tolist() for ranks in np.split(plan.order, plan.starts[1:])] == [[0, 1], [2]]


def test_buffers_larger_than_a_slice_of_balanced_fill_stay_whole() -> None:
    lengths = np.arange(1, 5001) % 97 + 1
    samples = Samples.of(lengths, num_images=lengths % 3, num_patches=lengths * 7 % 101)
    limits = PackLimits(sequence_length=128, max_images=3, max_patches=128)
    packing = pack(samples, limits, flush=True)
    assert packing.method == Method.BALANCED_FILL
    assert sorted(np.concatenate(packing.packs).tolist()) == list(range(5000))
    assert all(samples.num_patches[indices].sum() <= 128 and samples.num_images[indices].sum() <= 3 for indices in packing.packs)


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 50))
def test_shuffling_keeps_every_pack_and_depends_on_both_numbers_alone(seed: int, index: int, number: int) -> None:
    packs = [np.array([place]) for place in range(number)]
    one, two = (shuffled(packs, worker_seed=seed, sample_index=index) for _ in range(2))
    assert [pack_.item() for pack_ in one] == [pack_.item() for pack_ in two]
    assert sorted(pack_.item() for pack_ in one) == list(range(number))


def test_shuffling_is_the_same_in_every_release_and_differs_between_calls() -> None:
    packs = [np.array([place]) for place in range(10)]
    orders = [
        [pack_.item() for pack_ in shuffled(packs, worker_seed=seed, sample_index=index)]
        for seed, index in ((1, 0), (1, 1), (2, 0), (0, 1))
    ]
    assert orders[0] == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert all(one != two for one, two in pairwise(orders))


def test_importing_the_packer_loads_numpy_and_no_trainer() -> None:
    code = "import sys, plugin.packing; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert loaded.isdisjoint({"torch", "megatron", "ray", "pipelines", "pyarrow", "fsspec", "PIL", "pydantic"})
