"""Mixtures worked by hand, and what holds for every mixture: sums, wanted shares met, order of sources without effect."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.mixture import EPOCH_TOKENS, SourceTokens, mixture_of
from packer.format.errors import UsageError


def source(name, num_samples, num_tokens, **wanted):
    return SourceTokens(name=name, num_samples=num_samples, num_tokens=num_tokens, **wanted)


def column(mixture, name):
    return [getattr(row, name) for row in mixture.rows]


def test_equal_weights_give_tokens_by_length():
    # 10 samples of 100 tokens and 10 of 900: every other sample is from each, so 100 of 1,000 tokens are a's.
    mixture = mixture_of([source("a", 10, 1000), source("b", 10, 9000)])
    assert column(mixture, "weight") == [0.5, 0.5]
    assert column(mixture, "expected_token_share") == [0.1, 0.9]
    assert column(mixture, "share_of_tokens") == [0.1, 0.9]
    assert mixture.notes == ()


def test_weights_do_not_depend_on_size():
    # a has 100 times the samples of b, but the next sample is b's 3 times out of 4.
    mixture = mixture_of([source("a", 1000, 2000, weight=1), source("b", 10, 20, weight=3)])
    assert column(mixture, "weight") == [0.25, 0.75]
    assert column(mixture, "expected_token_share") == [0.25, 0.75]
    assert column(mixture, "share_of_tokens") == [round(100 / 101, 12), float(f"{1 / 101:.12g}")]
    # of 10^9 tokens 250 million are a's, of which there are 2,000; 750 million are b's, of which there are 20
    assert column(mixture, "epochs_per_billion_tokens") == [125_000, 37_500_000]


def test_token_shares_become_weights_by_mean_length():
    # 0.5/100 to 0.5/900 is 9 to 1
    mixture = mixture_of([source("a", 10, 1000, token_share=0.5), source("b", 30, 27_000, token_share=0.5)])
    assert column(mixture, "weight") == [0.9, 0.1]
    assert column(mixture, "expected_token_share") == [0.5, 0.5]
    assert column(mixture, "token_share") == [0.5, 0.5]


def test_val_takes_data_but_changes_no_weight():
    plain = mixture_of([source("a", 10, 1000, token_share=0.5), source("b", 10, 9000, token_share=0.5)])
    held = mixture_of([source("a", 10, 1000, token_share=0.5, val=0.5), source("b", 10, 9000, token_share=0.5)])
    assert column(plain, "weight") == column(held, "weight")
    assert held.rows[0].epochs_per_billion_tokens == 2 * plain.rows[0].epochs_per_billion_tokens
    assert held.rows[0].share_of_tokens == float(f"{500 / 9500:.12g}")


@pytest.mark.parametrize(
    ("empty", "says"),
    [
        ((0, 0), "source 'b' has no usable sample: its weight 2 cannot be met and goes to the other sources in proportion"),
        ((7, 0), "source 'b' has 7 usable samples without a single token: its weight 2"),
    ],
)
def test_a_source_without_data_is_left_out_and_said(empty, says):
    mixture = mixture_of([source("a", 1, 10), source("b", *empty, weight=2), source("c", 1, 10, weight=3)])
    assert column(mixture, "weight") == [0.25, 0, 0.75]
    assert column(mixture, "expected_token_share") == [0.25, 0, 0.75]
    assert len(mixture.notes) == 1
    assert mixture.notes[0].startswith(says)


def test_the_token_share_of_an_empty_source_goes_to_the_others():
    mixture = mixture_of(
        [source("a", 1, 10, token_share=0.2), source("b", 0, 0, token_share=0.5), source("c", 1, 10, token_share=0.3)]
    )
    assert column(mixture, "expected_token_share") == [0.4, 0, 0.6]
    assert "its token_share 0.5 cannot be met" in mixture.notes[0]


@pytest.mark.parametrize("sources", [[], [source("a", 0, 0)], [source("a", 0, 0), source("b", 3, 0)]], ids=len)
def test_nothing_to_mix_is_refused(sources):
    with pytest.raises(UsageError, match=f"none of the {len(sources)} sources has a usable sample"):
        mixture_of(sources)


@pytest.mark.parametrize(
    "sources",
    [
        [source("a", 1, 1, token_share=0.5), source("b", 1, 1)],
        [source("a", 1, 1, token_share=0.5), source("b", 1, 1, weight=1)],
        [source("a", 1, 1, token_share=1, weight=1)],
    ],
)
def test_one_kind_of_wish_in_a_recipe(sources):
    with pytest.raises(UsageError, match="give token_share to all sources or to none"):
        mixture_of(sources)


def test_names_are_used_once():
    with pytest.raises(UsageError, match="same name"):
        mixture_of([source("a", 1, 1), source("a", 1, 1)])


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0}, {"weight": -1}, {"weight": math.inf}, {"token_share": math.nan}, {"val": 1.0}, {"val": -0.1}],
    ids=repr,
)
def test_wrong_wishes_are_refused(wrong):
    with pytest.raises(UsageError, match=f"source 'a': found {next(iter(wrong))} "):
        source("a", 1, 1, **wrong)
    with pytest.raises(UsageError, match="found -1 samples"):
        source("a", -1, 1)


SIZES = st.tuples(st.integers(1, 10**9), st.integers(1, 10**12), st.floats(1e-6, 1e6), st.floats(0, 0.5))


@given(st.lists(SIZES, min_size=1, max_size=20), st.booleans(), st.randoms())
def test_what_holds_for_every_mixture(sizes, by_tokens, chance):
    wish = "token_share" if by_tokens else "weight"
    sources = [source(f"s{k}", n, t, val=val, **{wish: w}) for k, (n, t, w, val) in enumerate(sizes)]
    rows = mixture_of(sources).rows
    wanted = math.fsum(w for *_, w, _ in sizes)
    for name in ("weight", "share_of_tokens", "expected_token_share"):
        assert math.fsum(getattr(row, name) for row in rows) == pytest.approx(1, abs=1e-9)
    for row, (_, num_tokens, w, val) in zip(rows, sizes, strict=True):
        met = row.expected_token_share if by_tokens else row.weight
        assert met == pytest.approx(w / wanted, rel=1e-9)
        drawn = row.expected_token_share * EPOCH_TOKENS
        assert row.epochs_per_billion_tokens * num_tokens * (1 - val) == pytest.approx(drawn, rel=1e-9)
    order = list(range(len(sources)))
    chance.shuffle(order)
    assert [rows[k] for k in order] == list(mixture_of([sources[k] for k in order]).rows)


def test_huge_weights_stay_finite():
    assert column(mixture_of([source("a", 1, 1, weight=1e308), source("b", 1, 1, weight=1e308)]), "weight") == [0.5, 0.5]
