import math

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import FormatError
from packer.format.record import Body, ImageEntry, decode_record, encode_record, image_parts

ENTRY = ImageEntry(
    bundle="b.zip", offset=66, size=10, crc32=7, digest="0" * 32, width=8, height=6,
    format="png", mode="RGB", orientation=1, frames=1, ref="a.png",
)  # fmt: skip
CONTENT = [{"type": "text", "text": "see"}, {"type": "image", "image": 0}]


def encode(**changes):
    defaults = {
        "sample_id": "s1",
        "body": Body(kind="content", items=CONTENT),
        "images": [ENTRY],
        "origin_file": "rows.jsonl",
        "origin_offset": 12,
        "extra": {"score": b"1.50"},
    }
    return encode_record(**(defaults | changes))


def test_a_record_is_written_in_the_documented_order():
    assert encode() == (
        b'{"id":"s1","content":[{"type":"text","text":"see"},{"type":"image","image":0}],'
        b'"images":[{"bundle":"b.zip","offset":66,"size":10,"crc32":7,"digest":"00000000000000000000000000000000",'
        b'"width":8,"height":6,"format":"png","mode":"RGB","orientation":1,"frames":1,"ref":"a.png"}],'
        b'"origin":{"file":"rows.jsonl","byte_offset":12},"extra":{"score":1.50}}\n'
    )


def test_dropped_images_and_conversions_show_only_where_there_are_any():
    assert b"num_images_dropped" not in encode()
    assert orjson.loads(encode(num_images_dropped=2))["num_images_dropped"] == 2
    assert b"converted_from" not in encode()


@pytest.mark.parametrize(
    "raw", [b"18446744073709551616", b"1.10", b'"\\u00e9\\/"', b"[ 1 ,\t2 ]", b"-0.0", b"[" * 190 + b"]" * 190]
)
def test_carried_fields_keep_their_bytes(raw):
    line = encode(extra={"carried": raw})
    assert line.endswith(b'"extra":{"carried":' + raw + b"}}\n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text(), st.lists(st.text()), st.dictionaries(st.text(), JSON, max_size=4))
def test_any_text_and_any_extra_field_survive_a_round_trip(sample_id, texts, extra):
    body = Body(kind="content", items=[{"type": "text", "text": text} for text in texts])
    line = encode(sample_id=sample_id, body=body, images=[], extra={name: orjson.dumps(value) for name, value in extra.items()})
    record = decode_record(line, "here")
    assert line.count(b"\n") == 1
    assert (record["id"], [part["text"] for part in record["content"]]) == (sample_id, texts)
    assert record["extra"] == extra


def test_image_parts_are_listed_in_reading_order_for_documents_and_conversations():
    content = [{"type": "image", "image": 1}, {"type": "text", "text": ""}, {"type": "image", "image": 0}]
    assert image_parts({"content": content}) == [1, 0]
    assert image_parts({"messages": [{"role": "user", "content": content}, {"role": "user", "content": content}]}) == [1, 0] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id":"s1","content":[],"images":[],"ori', "not a record line"),
        (b"[]", "expected the keys id, images, origin, extra"),
        (b'{"id":"s1"}', "expected the keys id, images, origin, extra"),
        (b'{"id":"","images":[],"origin":{},"extra":{}}', "exactly one of content and messages"),
        (b'{"id":"","images":[],"origin":{},"extra":{},"content":[],"messages":[]}', "exactly one of content and messages"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(line, message):
    with pytest.raises(FormatError, match=f"p.jsonl line 3: .*{message}"):
        decode_record(line, "p.jsonl line 3")


def test_a_body_that_cannot_be_written_raises_and_is_never_half_written():
    with pytest.raises(TypeError):
        encode(body=Body(kind="content", items=[{"type": "text", "text": math}]))
