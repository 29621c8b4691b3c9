"""Rows of counts: what is refused, and the way to Arrow and back."""

from __future__ import annotations

import dataclasses

import blake3
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_rows import make_rows

from indexer.rows import EXPLANATIONS, SCHEMA, Rows, Status, id_hashes
from packer.format.digest import id_hash
from packer.format.errors import FormatError, UsageError

image_counts = st.lists(st.integers(0, 5), max_size=30)


def columns(rows: Rows) -> dict[str, list[int]]:
    return {field.name: getattr(rows, field.name).tolist() for field in dataclasses.fields(rows)}


@given(image_counts, st.integers(0, 3))
def test_rows_go_to_arrow_and_back(counts, seed):
    rows = make_rows(counts, seed=seed, unusable=range(0, len(counts), 7))
    batch = rows.to_batch()
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    assert columns(Rows.from_batch(batch, "x")) == columns(rows)


@given(image_counts, st.data())
def test_a_slice_is_the_rows_between(counts, data):
    rows = make_rows(counts)
    start = data.draw(st.integers(0, len(counts)))
    stop = data.draw(st.integers(start, len(counts)))
    whole = rows.to_batch().to_pylist()
    assert rows.slice(start, stop).to_batch().to_pylist() == whole[start:stop]
    assert columns(Rows.from_batch(rows.to_batch().slice(start, stop - start), "x")) == columns(rows.slice(start, stop))
    pieces = [rows.slice(0, start), rows.slice(start, stop), rows.slice(stop, len(rows))]
    assert columns(Rows.concatenate(pieces)) == columns(rows)


def test_no_pieces_are_no_rows():
    assert len(Rows.concatenate([])) == 0
    assert Rows.concatenate([]).to_batch().num_rows == 0


def test_arrow_shares_the_memory_of_the_columns():
    rows = make_rows([1, 2])
    read = Rows.from_batch(rows.to_batch(), "x")
    for name in ("num_tokens", "id_hash", "image_width"):
        assert np.shares_memory(getattr(read, name), getattr(rows, name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": np.zeros(3, np.int64)}, r"num_tokens: found int64 with 1 dimensions, expected int32"),
        ({"num_text_tokens": np.zeros(2, np.int32)}, r"num_text_tokens: found 2 values, expected 3"),
        ({"image_width": np.zeros(2, np.int32)}, r"image_width: found 2 values, expected 3"),
        ({"num_loss_tokens": np.array([0, -1, 0], np.int32)}, r"num_loss_tokens\[1\]: found -1, expected 0 or more"),
        ({"num_loss_tokens": np.array([0, 0, 9999], np.int32)}, r"num_loss_tokens\[2\]: found 9999, expected at most"),
        ({"num_tokens": np.array([0, 9999, 9999], np.int32)}, r"num_tokens\[0\]: found 0, expected at least num_text_tokens"),
        ({"image_num_tokens": np.ones(3, np.int32)}, r"num_image_tokens\[0\]: found \d+, expected the sum over the row's"),
        ({"image_num_patches": np.ones(3, np.int32)}, r"num_patches\[0\]: found \d+, expected the sum over the row's"),
        ({"status": np.array([0, 1, 0], np.uint8)}, r"num_tokens\[1\]: found \d+, expected 0 in a row that is not usable"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(changes, message):
    rows = make_rows([1, 0, 2])
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(rows, **changes)


def test_sums_past_32_bits_are_no_excuse():
    rows = make_rows([0])
    huge = np.full(1, 2**31 - 1, np.int32)
    with pytest.raises(UsageError, match="num_tokens"):
        dataclasses.replace(rows, num_text_tokens=huge, num_image_tokens=huge, num_tokens=huge)


def test_a_batch_of_other_columns_is_refused():
    batch = make_rows([1]).to_batch()
    with pytest.raises(FormatError, match=r"x: found column num_image_tokens \(int32\), expected num_text_tokens"):
        Rows.from_batch(batch.drop_columns(["num_text_tokens"]), "x")
    with pytest.raises(FormatError, match=r"x: found 12 columns, expected 11"):
        Rows.from_batch(batch.append_column("more", pa.array([1])), "x")
    with pytest.raises(FormatError, match=r"x: found column none, expected status"):
        Rows.from_batch(batch.drop_columns(["status"]), "x")


def test_lists_of_other_lengths_are_damage():
    batch = make_rows([1, 2]).to_batch()
    swapped = batch.set_column(4, SCHEMA.field("num_images"), pa.array([2, 1], pa.int32()))
    with pytest.raises(FormatError, match=r"x: num_images: not the lengths of the lists"):
        Rows.from_batch(swapped, "x")


def test_an_id_is_known_by_the_beginning_of_its_digest():
    expected = int.from_bytes(bytes.fromhex(blake3.blake3("naïve".encode()).hexdigest()[:16]), "little")
    assert id_hash("naïve") == expected
    assert id_hashes(["naïve", ""]).tolist() == [expected, id_hash("")]
    assert id_hashes([]).dtype == np.uint64


def test_every_status_is_explained():
    assert EXPLANATIONS.keys() == set(Status)
    assert [int(status) for status in Status] == [0, 1, 2, 3, 4, 5]
