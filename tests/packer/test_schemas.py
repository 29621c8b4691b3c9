import json
import sys

import pytest

from packer.format.errors import InputError, RowError
from packer.format.reasons import Reason
from packer.schemas import DEFAULT_FIELDS, SchemaConfig, sample_id, schema_of


def mapped(schema, row, **options):
    config = SchemaConfig(name=schema, fields=options.pop("fields", DEFAULT_FIELDS.get(schema, {})), **options)
    return schema_of(config)(row, config)


def refused(schema, row, **options):
    with pytest.raises(RowError) as caught:
        mapped(schema, row, **options)
    return caught.value.reason, caught.value.detail


def text(value):
    return {"type": "text", "text": value}


def image(index):
    return {"type": "image", "image": index}


def llava(*turns, **row):
    return {
        "conversations": [{"from": "human" if index % 2 == 0 else "gpt", "value": turn} for index, turn in enumerate(turns)],
        **row,
    }


def test_interleaved_keeps_reading_order_and_numbers_images():
    parts = [text("a"), {"type": "image", "image": "1.jpg"}, {"type": "image_url", "image_url": {"url": "2.jpg"}}, text("")]
    result = mapped("interleaved", {"content": parts})
    assert (result.body.kind, result.body.items) == ("content", [text("a"), image(0), image(1), text("")])
    assert (result.references, result.used_fields) == (["1.jpg", "2.jpg"], {"content"})


def test_chat_takes_text_and_parts_and_tells_that_messages_have_more_fields():
    messages = [
        {"role": "user", "content": [text("see"), {"type": "image_url", "image_url": "1.jpg"}]},
        {"role": "assistant", "content": "ok"},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    result = mapped("chat", {"messages": messages})
    assert [item["content"] for item in result.body.items] == [[text("see"), image(0)], [text("ok")], []]
    assert result.message_field == "messages"
    assert mapped("chat", {"messages": messages[:2]}).message_field is None


def test_llava_puts_each_image_at_its_placeholder_and_maps_roles():
    result = mapped("llava", llava("<image>\nwhat? <image>", "a cat", image=["1.jpg", "2.jpg"]))
    assert result.references == ["1.jpg", "2.jpg"]
    assert result.body.items == [
        {"role": "user", "content": [image(0), text("\nwhat? "), image(1)]},
        {"role": "assistant", "content": [text("a cat")]},
    ]


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        (llava("<image>", image=["1.jpg", "2.jpg"]), "found 1 '<image>' in the turns and 2 images"),
        (llava("<image> <image>", image="1.jpg"), "found 2 '<image>' in the turns and 1 images"),
        (llava("no placeholder", image="1.jpg"), "found 0 '<image>' in the turns and 1 images"),
        (llava("write an <image> tag", "use <image>"), "found 2 '<image>' in the turns and 0 images"),
    ],
    ids=["one placeholder, two images", "two placeholders, one image", "image without placeholder", "text about the placeholder"],
)
def test_placeholders_and_images_that_differ_in_number_are_refused_with_both_counts(row, counts):
    reason, detail = refused("llava", row)
    assert reason is Reason.PLACEHOLDER_MISMATCH
    assert counts in detail


def test_text_that_talks_about_the_placeholder_is_text_where_the_recipe_says_so():
    result = mapped("llava", llava("write an <image> tag", "use <image>"), literal_placeholders="text")
    assert [item["content"] for item in result.body.items] == [[text("write an <image> tag")], [text("use <image>")]]
    result = mapped("llava", llava("<image> why?", "the <image> tag", image="1.jpg"), literal_placeholders="text")
    assert [item["content"] for item in result.body.items] == [[image(0), text(" why?")], [text("the <image> tag")]]


def test_obelics_takes_the_one_that_is_set_at_each_place():
    result = mapped("obelics", {"texts": ["a", None, None, "b"], "images": [None, "1.jpg", None, None]})
    assert (result.body.items, result.references) == ([text("a"), image(0), text("b")], ["1.jpg"])


def test_caption_puts_its_images_before_the_text():
    assert mapped("caption", {"image_path": "1.jpg", "caption": "c"}).body.items == [image(0), text("c")]
    assert mapped("caption", {"image_path": ["1.jpg", "2.jpg"], "caption": None}).body.items == [image(0), image(1)]


def test_fields_of_other_names_are_found_by_the_recipe():
    result = mapped("text", {"body": "x", "text": 5}, fields={"text": "body"})
    assert (result.body.items, result.used_fields) == ([text("x")], {"body"})


@pytest.mark.parametrize(
    ("schema", "row", "message"),
    [
        ("text", {}, "field 'text' is missing, expected a string; the row has: none"),
        ("text", {"text": None}, "field 'text': found null, expected a string"),
        ("text", {"text": ["a"]}, "found list"),
        ("interleaved", {"content": "a"}, "expected a list of text and image parts"),
        ("interleaved", {"content": ["a"]}, "field 'content'[0]: found str 'a'"),
        ("interleaved", {"content": [{"type": "text"}]}, "'content'[0].text: found null"),
        ("interleaved", {"content": [{"type": "image"}]}, "found null, expected a non-empty string naming an image"),
        ("interleaved", {"content": [{"type": "image", "image": ""}]}, "expected a non-empty string"),
        ("interleaved", {"content": [{"type": "image_url", "image_url": {"url": 5}}]}, "found int '5'"),
        ("interleaved", {"content": [{"type": "table"}]}, "found str 'table', expected text, image or image_url"),
        ("chat", {"messages": [{"content": "a"}]}, "'messages'[0].role: found null"),
        ("chat", {"messages": [{"role": "user"}]}, "'messages'[0].content: found null"),
        ("chat", {"messages": [7]}, "expected a message with role and content"),
        ("llava", {"conversations": [{"from": "human"}]}, "'conversations'[0].value: found null"),
        ("llava", {"conversations": {}}, "expected a list of turns"),
        ("obelics", {"texts": ["a"], "images": []}, "found 1 items in 'texts' and 0 in 'images'"),
        ("obelics", {"texts": ["a"], "images": ["1.jpg"]}, "expected null, since 'images'[0] is set"),
        ("caption", {"image_path": "1.jpg"}, "field 'caption' is missing"),
        ("caption", {"image_path": None, "caption": "c"}, "found null"),
        ("caption", {"image_path": "1.jpg", "caption": 5}, "expected a caption or null"),
    ],
)
def test_a_row_of_another_shape_is_refused_with_field_found_and_expected(schema, row, message):
    reason, detail = refused(schema, row)
    assert reason is Reason.SCHEMA_MISMATCH
    assert message in detail


@pytest.mark.parametrize("kind", ["audio", "video", "input_audio", "video_url"])
def test_other_media_are_named_as_unsupported(kind):
    assert refused("interleaved", {"content": [{"type": kind}]})[0] is Reason.UNSUPPORTED_MEDIA


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "a"}, "a"),
        ({"id": 7}, "7"),
        ({"id": 2**64 - 1}, str(2**64 - 1)),
        ({"id": -1}, "-1"),
        ({}, None),
        ({"id": ""}, None),
    ]
    + [({"id": value}, None) for value in (None, True, 1.5, [1], {})],
)
def test_strings_and_exact_integers_are_ids(row, expected):
    assert sample_id(row, SchemaConfig(name="text", fields={})) == expected


@pytest.fixture
def own_schema(tmp_path, monkeypatch):
    """Make a module of the user's from its source; how to name its function `f`."""

    def make(code):
        (tmp_path / "own_schema_module.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_schema_module", raising=False)
        return "python:own_schema_module:f"

    return make


def test_a_python_schema_maps_rows(own_schema):
    name = own_schema("def f(row):\n    return {'content': [{'type': 'text', 'text': row['t']}], 'used': ['t']}\n")
    result = mapped(name, {"t": "x", "k": 1})
    assert (result.body.items, result.used_fields) == ([text("x")], {"t"})


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        ("raise KeyError('t')", Reason.SCHEMA_ERROR, "f raised KeyError: 't'"),
        ("raise RecursionError('x' * 1000)", Reason.SCHEMA_ERROR, "f raised RecursionError: xxx"),
        ("return None", Reason.SCHEMA_ERROR, "returned no dict with exactly one of content and messages"),
        ("return {'content': [], 'messages': []}", Reason.SCHEMA_ERROR, "exactly one of content and messages"),
        ("return {'content': 'x'}", Reason.SCHEMA_MISMATCH, "expected a list"),
        ("return {'content': [{'type': 'text', 'text': '\\ud83d'}]}", Reason.NOT_WRITABLE, "cannot be written as JSON"),
        ("return {'content': [{'type': 'image', 'image': '\\ud83d'}]}", Reason.NOT_WRITABLE, "cannot be written as JSON"),
    ],
)
def test_a_python_schema_that_fails_costs_that_row(own_schema, code, reason, message):
    found = refused(own_schema(f"def f(row):\n    {code}\n"), {"t": "x"})
    assert found[0] is reason
    assert message in found[1]


def test_a_python_schema_that_cannot_be_loaded_is_named(own_schema):
    own_schema("g = 1")
    for name in ("python:own_schema_module:f", "python:no_such_module_at_all:f"):
        with pytest.raises(InputError, match=f"schema {name} cannot be loaded: .*PYTHONPATH"):
            schema_of(SchemaConfig(name=name, fields={}))


def test_other_fields_of_a_llava_turn_are_carried(kit):
    turns = [{"from": "gpt", "value": "yo", "loss": False, "weight": 1.5}, {"from": "human", "value": "hi"}]
    (record,) = kit.records(kit.convert([{"conversations": turns}], kit.source("llava")))
    assert [message.get("extra") for message in record["messages"]] == [{"loss": False, "weight": 1.5}, None]


def test_a_llava_turn_with_both_spellings_loses_neither(kit):
    turns = [{"from": "human", "value": "hi", "role": "expert", "content": "orig"}]
    (record,) = kit.records(kit.convert([{"conversations": turns}], kit.source("llava")))
    (message,) = record["messages"]
    assert (message["role"], message["extra"]) == ("user", {"role": "expert", "content": "orig"})


def python_schema(tmp_path, monkeypatch, body):
    (tmp_path / "own_schema.py").write_text(f"import sys\ndef schema(row):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_schema", raising=False)
    return SchemaConfig(name="python:own_schema:schema", fields={})


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("sys.exit(3)", "schema raised SystemExit: 3"),
        ("return {'content': [], 'used': 'text'}", "returned `used` = 'text', expected a list of field names"),
        ("return {'content': [], 'used': 5}", "returned `used` = 5, expected a list of field names"),
    ],
)
def test_what_a_schema_of_the_users_does_wrong_costs_one_row(tmp_path, monkeypatch, body, detail):
    config = python_schema(tmp_path, monkeypatch, body)
    with pytest.raises(RowError) as refused:
        schema_of(config)({}, config)
    assert refused.value.reason is Reason.SCHEMA_ERROR
    assert detail in refused.value.detail


def test_messages_of_a_schema_of_the_users_keep_their_other_fields(tmp_path, monkeypatch):
    config = python_schema(tmp_path, monkeypatch, "return {'messages': [{'role': 'a', 'content': 'b', 'tool_calls': [1]}]}")
    assert schema_of(config)({}, config).body.items[0]["extra"] == {"tool_calls": [1]}


def test_a_schema_that_fails_on_import_is_an_error_of_its_source(tmp_path, monkeypatch):
    python_schema(tmp_path, monkeypatch, "return 1 +")
    config = SchemaConfig(name="python:own_schema:schema", fields={})
    with pytest.raises(InputError, match="cannot be loaded: SyntaxError"):
        schema_of(config)


@pytest.mark.parametrize("policy", [{}, {"drops_image": True}])
def test_other_fields_of_parts_are_carried_byte_for_byte(kit, policy):
    kit.image("a.png")
    parts = [
        {"type": "text", "text": "t", "lang": "ko"},
        {"type": "image_url", "image_url": {"url": "gone.png" if policy else "a.png", "detail": "high"}, "alt": "x"},
        {"type": "image", "image": "a.png", "bbox": [1, 2.50, 18446744073709551616]},
    ]
    content = json.dumps(parts).replace("2.5,", "2.50,")
    row = f'{{"messages":[{{"role":"user","content":{content}}}]}}'
    manifests = kit.convert(row.encode() + b"\n", kit.source("chat", images=policy))
    line = kit.file(manifests[0], ".jsonl").read_bytes()
    assert b'"extra":{"bbox":[1, 2.50, 18446744073709551616]}' in line
    assert b'"extra":{"lang":"ko"}' in line
    assert (b'"extra":{"alt":"x","image_url":{"detail":"high"}}' in line) == (not policy)
