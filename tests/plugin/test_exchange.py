"""The pure half of the exchange: what ranks know of each other's packs, what they agree on, and which packs travel when."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from exchange_scenarios import COST, PROFILE, made_pack
from hypothesis import given
from hypothesis import strategies as st
from pack_samples import pack_sample

from packer.format.errors import UsageError
from plugin.batch import build
from plugin.exchange import metadata, settings
from plugin.exchange.moves import launch_indices, moves_of, routes_of
from plugin.exchange.settings import Settings

SETTINGS = Settings(
    profile=PROFILE,
    cost=COST,
    planner="sorted",
    sequence_length=96,
    dp_size=4,
    num_microbatches=8,
    micro_batch_size=1,
    first_step=0,
    first_yielded=0,
    transport="gloo",
    slice_bytes=1 << 20,
    readers="all",
)


def one_cost(word):
    return (word >> 5) << (word & 31)


@given(st.integers(0, (1 << 58) - (1 << 30) - 1))
def test_a_cost_keeps_27_leading_bits(cost):
    found = one_cost(metadata.rounded(cost))
    assert abs(found - cost) << 27 <= max(cost, 0)
    assert found == cost or cost >= 1 << 27


@given(st.integers(0, 1 << 57), st.integers(0, 1 << 57))
def test_rounding_keeps_the_order_of_costs(one, other):
    one, other = sorted((one, other))
    assert one_cost(metadata.rounded(one)) <= one_cost(metadata.rounded(other))


@pytest.mark.parametrize(
    ("cost", "expected"),
    [((1 << 27) - 1, (1 << 27) - 1), ((1 << 28) - 1, 1 << 28), ((1 << 28) + 1, 1 << 28), ((1 << 28) + 2, (1 << 28) + 4)],
)
def test_rounding_is_half_up(cost, expected):
    assert one_cost(metadata.rounded(cost)) == expected


@pytest.mark.parametrize("cost", [-1, 1 << 58, (1 << 58) - 1])
def test_a_cost_that_does_not_fit_is_refused(cost):
    with pytest.raises(UsageError, match=r"expected at least 0 and less than 2\^58; count costs in a larger unit"):
        metadata.rounded(cost)


def test_all_of_a_pack_is_in_24_bytes():
    packs = [made_pack(2, number).batch for number in range(3)]
    rows = metadata.encode(packs)
    assert rows.shape == (3, 24)
    table = metadata.decode(rows[None])
    assert table.encoder.tolist() == [[pack.encoder_cost for pack in packs]]
    assert table.llm.tolist() == [[pack.llm_cost for pack in packs]]
    assert table.num_bytes.tolist() == [[len(pack.buffer) for pack in packs]]
    assert table.num_loss_tokens.tolist() == [[pack.num_loss_tokens for pack in packs]]
    assert table.num_patches.tolist() == [[pack.num_patches for pack in packs]]
    assert table.digest.tolist() == [[metadata.id_digest(pack) for pack in packs]]


def test_digests_tell_ids_rows_and_sources_apart():
    def pack(**changes):
        sample = replace(pack_sample([8], "ab"), **changes)
        return build([sample, pack_sample([3], "c")], form=None, sequence_length=16, pad_id=0)

    packs = [pack(), pack(sample_id="a"), pack(row=1), pack(source="other"), pack(sample_id="abc")]
    assert len({metadata.id_digest(one) for one in packs}) == 5
    assert metadata.pool_digest(packs[:2]) != metadata.pool_digest(packs[1::-1])


def test_costs_whose_sum_does_not_fit_are_refused():
    rows = np.zeros((4, 4096, 6), "<u4")
    rows[:, :, metadata.Column.LLM] = metadata.rounded(1 << 48)
    with pytest.raises(UsageError, match=r"found 16,384 packs of costs up to 281,474,976,710,656, expected a sum below 2\^62"):
        metadata.decode(rows.view(np.uint8))


def agree(*ranks):
    return settings.agree(
        np.stack([settings.encode(one, f"host{rank % 2}") for rank, one in enumerate(ranks)]), range(len(ranks))
    )


def test_equal_settings_give_the_hosts():
    assert agree(SETTINGS, SETTINGS, SETTINGS) == ("host0", "host1", "host0")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("profile", "q" * 32),
        ("cost", "other"),
        ("planner", "dp"),
        ("sequence_length", 97),
        ("dp_size", 5),
        ("version", 2),
        ("first_step", 3),
    ],
)
def test_the_first_differing_setting_is_named_with_its_ranks(field, value):
    with pytest.raises(UsageError) as caught:
        agree(SETTINGS, replace(SETTINGS, **{field: value}), SETTINGS)
    was = getattr(SETTINGS, field)
    assert f"found {field} {was!r} on ranks 0, 2 and {value!r} on rank 1, expected one value" in str(caught.value)


def test_settings_that_do_not_fit_in_a_row_are_refused():
    with pytest.raises(UsageError, match="use shorter fingerprints"):
        settings.encode(replace(SETTINGS, profile="p" * 5000), "host")


def test_many_ranks_are_named_shortly():
    assert settings.named([3]) == "rank 3"
    assert settings.named(list(range(64))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"


@st.composite
def plans(draw):
    num_ranks, num_microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    taken = np.array(draw(st.permutations(range(num_ranks * num_microbatches)))).reshape(num_ranks, num_microbatches)
    size = st.integers(1, 20).map(lambda units: 64 * units)
    sizes = draw(st.lists(size, min_size=taken.size, max_size=taken.size))
    return taken, np.array(sizes, np.int64).reshape(taken.shape), draw(st.integers(1, 4000))


@given(plans())
def test_every_pack_out_of_place_travels_once_and_no_other(drawn):
    taken, sizes, slice_bytes = drawn
    num_ranks, num_microbatches = taken.shape
    moves = moves_of(taken, sizes, slice_bytes=slice_bytes)
    trained = {(rank, microbatch): taken[rank, microbatch] for rank, microbatch in np.ndindex(taken.shape)}
    away = {place: pack for place, pack in trained.items() if pack // num_microbatches != place[0]}
    assert dict(zip(zip(moves.target.tolist(), moves.microbatch.tolist(), strict=True), moves.pack.tolist(), strict=True)) == away
    arrived = Counter()
    routes = [routes_of(moves, rank, num_ranks=num_ranks, num_microbatches=num_microbatches) for rank in range(num_ranks)]
    for number in range(moves.num_slices):
        # What lies in the senders' memory, in order, is what the receivers cut out of theirs.
        for receiver in range(num_ranks):
            route = routes[receiver][number]
            sent = []
            for sender in range(num_ranks):
                of_sender = routes[sender][number]
                ends = np.cumsum(of_sender.sent_bytes)
                places = np.cumsum([0, *sizes[sender, of_sender.sent].tolist()])
                part = (places[:-1] >= ends[receiver] - of_sender.sent_bytes[receiver]) & (places[:-1] < ends[receiver])
                sent += (of_sender.sent[part] + sender * num_microbatches).tolist()
                assert of_sender.sent_bytes[receiver] == route.received_bytes[sender]
            assert route.received.tolist() == sent
            arrived.update({(receiver, int(microbatch)): 1 for microbatch in route.microbatches})
    assert arrived == Counter(dict.fromkeys(away, 1))


@given(plans())
def test_slices_keep_to_the_budget_and_to_the_order_of_microbatches(drawn):
    taken, sizes, slice_bytes = drawn
    moves = moves_of(taken, sizes, slice_bytes=slice_bytes)
    of_microbatch = [moves.slice[moves.microbatch == microbatch] for microbatch in np.unique(moves.microbatch)]
    assert all(one.max() <= other.min() for one, other in pairwise(of_microbatch))
    for number in range(moves.num_slices):
        of_it = moves.slice == number
        for ends in (moves.source, moves.target):
            held = np.bincount(ends[of_it], weights=moves.num_bytes[of_it])
            largest = int(moves.num_bytes[of_it].max())
            assert held.max() <= max(slice_bytes, slice_bytes + largest if ends is moves.source else largest)


def test_a_rank_that_sends_all_of_one_microbatch_does_it_in_waves():
    """Four packs of the first rank are all trained at the first microbatch, each on another rank."""
    taken = np.array([[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]])
    moves = moves_of(taken, np.full((4, 4), 640), slice_bytes=1280)
    held = [np.bincount(moves.source[moves.slice == number], minlength=4).max() for number in range(moves.num_slices)]
    assert max(held) == 2
    assert sum(np.bincount(moves.slice)) == 12


@given(st.integers(1, 50), st.integers(1, 20))
def test_slices_are_launched_in_the_second_half(num_slices, num_microbatches):
    found = launch_indices(num_slices, num_microbatches)
    assert found == sorted(found)
    assert len(found) == num_slices
    assert num_microbatches // 2 <= found[0] <= found[-1] < num_microbatches
