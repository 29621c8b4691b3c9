"""Summaries against the values themselves: error bound, merging in any order and grouping, JSON, damaged JSON."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.sketch import EXACT_BELOW, MAX_VALUE, RELATIVE_ERROR, Distribution, SizeGrid, bounds_of, bucket_of
from packer.format.errors import FormatError, UsageError

POWERS = sorted({min(max(2**k + d, 0), MAX_VALUE) for k in range(54) for d in (-1, 0, 1)})
VALUES = st.one_of(st.integers(0, 300), st.sampled_from(POWERS), st.integers(0, 2**18), st.integers(0, MAX_VALUE))
SIDES = st.integers(1, 2**24)
SHARES = st.one_of(st.sampled_from([0.0, 0.01, 0.07, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0]), st.floats(0, 1))


def exact_quantile(values, share):
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * Fraction(repr(share)))) - 1]


def as_bytes(item):
    return orjson.dumps(item.to_json())


def merged_at_random(items, seed):
    """Merges pairs picked at random until one is left: any order, any grouping."""
    chance, items = random.Random(seed), list(items)
    while len(items) > 1:
        chance.shuffle(items)
        items.append(items.pop().merge(items.pop()))
    return items[0]


@given(st.lists(VALUES, min_size=1), SHARES)
def test_exact_figures_and_the_bound_on_quantiles(values, share):
    summary = Distribution.of(values)
    assert (summary.count, summary.sum) == (len(values), sum(values))
    assert (summary.min, summary.max) == (min(values), max(values))
    assert summary.mean == sum(values) / len(values)
    exact, found = exact_quantile(values, share), summary.quantile(share)
    assert abs(found - exact) <= summary.relative_error * exact
    assert summary.relative_error == (RELATIVE_ERROR if max(values) >= EXACT_BELOW else 0)


def test_quantiles_of_many_values_of_a_real_shape():
    values = np.random.default_rng(3).lognormal(6, 1.5, 100_000).astype(np.int64)
    summary = Distribution.of(values)
    for share in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        exact = exact_quantile(values.tolist(), share)
        assert abs(summary.quantile(share) - exact) <= RELATIVE_ERROR * exact
    assert len(summary.buckets) < 2500


@given(st.lists(st.lists(VALUES, max_size=20), min_size=1, max_size=8), st.integers())
def test_merging_in_any_order_and_grouping_is_the_whole(parts, seed):
    whole = Distribution.of([value for part in parts for value in part])
    summaries = [Distribution.of(part) for part in parts]
    assert Distribution.merged(iter(summaries)) == whole
    assert as_bytes(merged_at_random(summaries, seed)) == as_bytes(whole)


def test_many_parts_are_merged_as_they_come():
    values = list(range(1000))
    assert Distribution.merged(Distribution.of([value]) for value in values) == Distribution.of(values)


@given(st.lists(VALUES))
def test_json_is_read_back_equal(values):
    summary = Distribution.of(values)
    assert Distribution.from_json(orjson.loads(as_bytes(summary)), "here") == summary


def test_a_sum_beyond_64_bits_is_exact_and_survives_json():
    summary = Distribution.merged([Distribution.of(np.full(5000, MAX_VALUE))] * 3)
    assert summary.sum == 15_000 * MAX_VALUE > 2**64
    assert Distribution.from_json(orjson.loads(as_bytes(summary)), "here") == summary


@given(st.lists(VALUES, min_size=1))
def test_histogram_bins_adjoin_and_hold_every_value_once(values):
    bins = Distribution.of(values).histogram()
    assert len(bins) <= 60
    assert all(before[1] == after[0] for before, after in pairwise(bins))
    assert bins[0][0] <= min(values) < bins[0][1]
    assert bins[-1][0] <= max(values) < bins[-1][1]
    assert [count for *_, count in bins] == [sum(low <= value < high for value in values) for low, high, _ in bins]


def test_a_few_small_numbers_have_a_bin_each():
    assert Distribution.of([0, 1, 1, 3]).histogram() == [(0, 1, 1), (1, 2, 2), (2, 3, 0), (3, 4, 1)]


def test_sixty_numbers_have_a_bin_each_and_sixty_one_do_not():
    assert len(Distribution.of(range(60)).histogram()) == 60
    assert len(Distribution.of(range(61)).histogram()) == 47  # 32 numbers and 15 pairs


def test_shares_are_decimals_and_the_ends_exact():
    assert Distribution.of(range(100)).quantile(0.07) == 6  # 7 values do not exceed it; 0.07 * 100 is above 7 in floats
    pair = Distribution.of([1000, 1003])  # of one bucket, whose middle is 1002
    assert [pair.quantile(0), pair.quantile(1)] == [1000, 1003]


@pytest.mark.parametrize("bits", range(1, 9))
def test_buckets_tile_the_numbers(bits):
    last = int(bucket_of(np.array([MAX_VALUE]), bits)[0])
    low, high = bounds_of(np.arange(last + 1), bits)
    assert low[0] == 0
    assert (low[1:] == high[:-1]).all()
    assert high[-1] == MAX_VALUE + 1
    assert (bucket_of(low, bits) == np.arange(last + 1)).all()
    assert (bucket_of(high - 1, bits) == np.arange(last + 1)).all()


def test_no_more_buckets_than_promised():
    assert int(bucket_of(np.array([MAX_VALUE]), 9)[0]) + 1 == 11776


def test_empty_and_single_and_huge():
    empty = Distribution.of([])
    assert empty == Distribution() == Distribution.merged([])
    assert (empty.min, empty.max, empty.mean, empty.quantile(0.5), empty.histogram()) == (None, None, None, None, [])
    huge = Distribution.of([2**40])
    assert [huge.quantile(share) for share in (0, 0.5, 1)] == [2**40] * 3
    assert [count for *_, count in huge.histogram()] == [1]
    assert empty.merge(huge) == huge == huge.merge(empty)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_column_is_counted_alike(dtype):
    values = [0, 5, 127, 100]
    assert Distribution.of(np.array(values, dtype)) == Distribution.of(values)


@pytest.mark.parametrize(
    "values", [[-1], [MAX_VALUE + 1], np.array([2**63], np.uint64), [0.5], [[1, 2]], [True]], ids=lambda values: repr(values)
)
def test_values_it_cannot_hold_are_refused(values):
    with pytest.raises(UsageError, match=r"found .*, expected"):
        Distribution.of(values)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_quantile_is_a_share(share):
    with pytest.raises(UsageError, match="expected 0 to 1"):
        Distribution.of([1]).quantile(share)


GOOD = Distribution.of([1, 1, 300]).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"count": 4},
        {"sum": 10_000},
        {"sum": 1},
        {"min": None},
        {"min": 2},
        {"max": 301_000},
        {"buckets": [1]},
        {"buckets": [278, 1]},
        {"counts": [3, 0]},
        {"counts": [1]},
        {"count": "many"},
        {"median": 1},
    ],
    ids=repr,
)
def test_a_damaged_summary_is_refused_by_name(change):
    assert Distribution.from_json(GOOD, "part a") == Distribution.of([1, 1, 300])
    with pytest.raises(FormatError, match="part a: not the JSON of Distribution"):
        Distribution.from_json(GOOD | change, "part a")


@given(st.lists(st.lists(st.tuples(SIDES, SIDES), max_size=10), min_size=1, max_size=6), st.integers())
def test_grid_holds_every_image_once_and_merges(parts, seed):
    sizes = [size for part in parts for size in part]
    grids = [SizeGrid.of([w for w, _ in part], [h for _, h in part]) for part in parts]
    grid = merged_at_random(grids, seed)
    assert grid == SizeGrid.of([w for w, _ in sizes], [h for _, h in sizes])
    assert SizeGrid.from_json(orjson.loads(as_bytes(grid)), "here") == grid
    rows = grid.rows()
    assert sum(count for *_, count in rows) == len(sizes)
    for w_low, w_high, h_low, h_high, count in rows:
        assert count == sum(w_low <= w < w_high and h_low <= h < h_high for w, h in sizes)


def test_grid_splits_an_octave_into_four():
    rows = SizeGrid.of([512, 639, 640, 768, 896, 1023], [7] * 6).rows()
    assert rows == [(512, 640, 7, 8, 2), (640, 768, 7, 8, 1), (768, 896, 7, 8, 1), (896, 1024, 7, 8, 2)]


def test_a_damaged_grid_is_refused():
    with pytest.raises(FormatError, match="cell 65536"):
        SizeGrid.from_json({"cells": [65536], "counts": [1]}, "part a")
