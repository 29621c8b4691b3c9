import contextlib
import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.rows import MAX_NESTING, null_non_finite, parse_row, raw_fields, raw_items


def nested(levels):
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"t":"\\ud83d"}', Reason.LONE_SURROGATE),
        (b'{"t":"\\ude00\\ud83d"}', Reason.LONE_SURROGATE),
        (b'{"\\udfff":1}', Reason.LONE_SURROGATE),
        (b'{"t":"\xed\xa0\xbd"}', Reason.INVALID_UTF8),
        (b'{"t":"\xff"}', Reason.INVALID_UTF8),
        (b'{"t":"\xc3', Reason.INVALID_UTF8),
        (b'{"score":NaN}', Reason.NON_FINITE_NUMBER),
        (b'{"score":[Infinity]}', Reason.NON_FINITE_NUMBER),
        (b'{"score":-Infinity}', Reason.NON_FINITE_NUMBER),
        (b'{"score":1e400}', Reason.NON_FINITE_NUMBER),
        (b'{"score":-1E+400}', Reason.NON_FINITE_NUMBER),
        (b'{"score":' + b"9" * 400 + b"}", Reason.NON_FINITE_NUMBER),
        (b'{"score":' + b"9" * 5000 + b"}", Reason.NON_FINITE_NUMBER),
        (nested(MAX_NESTING + 1), Reason.NESTING_TOO_DEEP),
        (nested(600), Reason.NESTING_TOO_DEEP),
        (nested(100_000), Reason.NESTING_TOO_DEEP),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, Reason.NESTING_TOO_DEEP),
        (b'{"a":1', Reason.INVALID_JSON),
        (b'{"a":1} {"b":2}', Reason.INVALID_JSON),
        (b'{"a":1,}', Reason.INVALID_JSON),
        (b"{'a':1}", Reason.INVALID_JSON),
        (b'{"a":"\t"}', Reason.INVALID_JSON),
        (b'{"a":nan}', Reason.INVALID_JSON),
        (b'\xef\xbb\xbf{"a":1}', Reason.INVALID_JSON),
        (b"<html>", Reason.INVALID_JSON),
        (b"[1]", Reason.INVALID_JSON),
        (b'"text"', Reason.INVALID_JSON),
        (b"null", Reason.INVALID_JSON),
    ],
)
def test_a_line_that_cannot_be_kept_is_refused_for_its_own_reason(text, reason):
    with pytest.raises(RowError) as caught:
        parse_row(text)
    assert caught.value.reason is reason
    assert len(caught.value.detail) < 200


def test_good_lines_are_read():
    assert parse_row(b' {"a": "\\ud83d\\ude00"} ') == {"a": "\N{GRINNING FACE}"}
    assert parse_row(nested(MAX_NESTING))
    assert parse_row(b'{"a":"' + b"[" * 1000 + b'"}') == {"a": "[" * 1000}


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode) | st.text('{}[]",:\\ud83dNaInfity0e19+-. ').map(str.encode))
def test_any_bytes_give_an_object_or_a_reason_and_never_another_error(text):
    with contextlib.suppress(RowError):
        assert parse_row(text).keys() == raw_fields(text).keys()


FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
def test_raw_fields_are_the_original_bytes(row, is_indented):
    parts = {name: orjson.dumps(value, option=orjson.OPT_INDENT_2 if is_indented else None) for name, value in row.items()}
    text = b"{" + b" , ".join(orjson.dumps(name) + b" : " + value for name, value in parts.items()) + b"}"
    assert raw_fields(text) == parts


@pytest.mark.parametrize(
    "raw", [b"18446744073709551616", b"-0.0", b"1.10", b"1E2", b'"\\u0041\\/"', b"[1,  2]", b"123456789012345678901234567890"]
)
def test_a_number_or_escape_that_a_parser_would_change_is_kept_as_written(raw):
    assert raw_fields(b'{"id":' + raw + b',"x":1}')["id"] == raw


def test_of_a_field_given_twice_the_last_counts_in_both_views():
    text = b'{"a":1,"a":2.0}'
    assert (parse_row(text)["a"], raw_fields(text)["a"]) == (2.0, b"2.0")


def test_other_fields_of_messages_are_kept_as_written():
    messages = b'[{"role":"user","content":"x","weight":0.50},{"role":"a","content":null,"calls":[ 1 ]},{"role":"b"}]'
    kept = [{name: value for name, value in item.items() if name not in ("role", "content")} for item in raw_items(messages)]
    assert kept == [{"weight": b"0.50"}, {"calls": b"[ 1 ]"}, {}]


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        (b'{"a":NaN}', b'{"a":null}', 1),
        (b'{"a":[-Infinity, Infinity ,1e400,-1e400]}', b'{"a":[null, null ,null,null]}', 4),
        (b'{"NaN":"NaN Infinity 1e400 \\" NaN","b":NaN}', b'{"NaN":"NaN Infinity 1e400 \\" NaN","b":null}', 1),
        (
            b'{"a":NaN,"id":18446744073709551616,"b":1.10,"c":"\\u0041"}',
            b'{"a":null,"id":18446744073709551616,"b":1.10,"c":"\\u0041"}',
            1,
        ),
        (b'{"a":NaN,"a":2}', b'{"a":null,"a":2}', 1),
        (b'{"a":' + b"9" * 5000 + b',"b":true}', b'{"a":null,"b":true}', 1),
        (b'{"a":1e-400,"b":[]}', b'{"a":1e-400,"b":[]}', 0),
    ],
)
def test_non_finite_numbers_become_null_and_nothing_else_changes(text, expected, count):
    assert null_non_finite(text) == (expected, count)


WITH_NON_FINITE = st.dictionaries(st.text(), st.lists(st.floats() | st.text() | st.integers()), max_size=4)


@given(WITH_NON_FINITE)
def test_nulling_agrees_with_a_json_writer_on_what_is_not_finite(row):
    import json

    text, count = null_non_finite(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    values = [value for items in row.values() for value in items]
    assert count == sum(isinstance(value, float) and not math.isfinite(value) for value in values)
    assert [value is None for items in parse_row(text).values() for value in items] == [
        isinstance(value, float) and not math.isfinite(value) for value in values
    ] or any("\\u" in json.dumps(value) for value in values)
