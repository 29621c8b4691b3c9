import gzip
import io
import itertools
import pickle
import shutil
import subprocess
import tracemalloc
import zipfile
from unittest.mock import ANY

import orjson
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from packer import readahead
from packer.convert import Step, convert_range
from packer.format import layout
from packer.format.errors import InputError
from packer.format.layout import PartId, file_hash
from packer.format.manifest import total
from packer.guard import NoGuard
from packer.loading import inspect
from packer.sources import plan_ranges
from packer.storage import open_storage, stat_url
from packer.verify import verify_part

LONE_SURROGATE = b'{"id":"half","text":"\\ud83d"}'
REUSED_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def document(*parts, **fields):
    """A row whose parts are texts, or images where they end like a file."""
    content = [
        {"type": "image", "image": part} if part.endswith((".png", ".jpg")) else {"type": "text", "text": part} for part in parts
    ]
    return {"content": content, **fields}


def texts(rows):
    return [row["content"][0]["text"] for row in rows]


def reasons(parts):
    return total(parts).quarantined_by_reason


# The line itself


def test_a_bad_line_costs_itself_and_nothing_else(kit):
    lines = [
        b'{"id":1,"text":"a"}',
        LONE_SURROGATE,
        b'{"id":3,"text":"c"}',
        b'{"x":NaN,"text":"d"}',
        b"not json",
        b'{"text":"f"}',
    ]
    parts = kit.convert(lines, kit.source("text"))
    assert texts(kit.records(parts)) == ["a", "c", "f"]
    quarantined = kit.quarantine(parts)
    assert [row["reason"] for row in quarantined] == ["lone_surrogate", "non_finite_number", "invalid_json"]
    assert [row["line"].encode() for row in quarantined] == [lines[1], lines[3], lines[4]]
    data = (kit.inputs / "rows.jsonl").read_bytes()
    assert all(data[row["byte_offset"] :].startswith(row["line"].encode()) for row in quarantined)
    assert {row["file"] for row in quarantined} == {"rows.jsonl"}


def test_a_quarantined_row_is_named_by_its_own_id_or_by_file_and_place(kit):
    parts = kit.convert([b'{"id":"mine"}', b'{"id":18446744073709551616}', b'{"t":1}', b"junk"], kit.source("text"))
    own = file_hash("rows.jsonl")
    assert [row["id"] for row in kit.quarantine(parts)] == ["mine", "18446744073709551616", f"{own}:42", f"{own}:50"]


def test_non_finite_numbers_become_null_only_where_the_recipe_says_so_and_are_counted(kit):
    line = b'{"text":"a","scores":[NaN,1.50,-Infinity,1e400],"n":18446744073709551616}'
    [part] = kit.convert([line], kit.source("text", nulls_non_finite=True))
    assert (part.num_written, part.num_non_finite) == (1, 3)
    record = kit.file(part, layout.RECORDS_SUFFIX).read_bytes()
    assert record.endswith(b'"extra":{"scores":[null,1.50,null,null],"n":18446744073709551616}}\n')
    assert reasons(kit.convert([line], kit.source("text"), out="strict")) == {"non_finite_number": 1}


@pytest.mark.parametrize(
    ("number", "as_text"), [(b"18446744073709551616", "18446744073709551616"), (b"1.50", "1.50"), (b"-7", "-7")]
)
def test_a_number_that_a_parser_would_round_stays_exact_as_the_id(kit, number, as_text):
    parts = kit.convert([b'{"id":%s,"text":"a","other":%s}' % (number, number)], kit.source("text"))
    assert kit.records(parts)[0]["id"] == as_text
    assert kit.file(parts[0], layout.RECORDS_SUFFIX).read_bytes().endswith(b'"extra":{"other":%s}}\n' % number)


@pytest.mark.parametrize("value", [b"[1,2]", b"true", b'{"a":1}', b"null"])
def test_an_id_that_is_neither_text_nor_number_is_carried_and_not_lost(kit, value):
    [record] = kit.records(kit.convert([b'{"id":%s,"text":"a"}' % value], kit.source("text")))
    assert record["id"] == f"{file_hash('rows.jsonl')}:0"
    assert record["extra"] == {"id": orjson.loads(value)}


def test_deep_nesting_is_carried_as_it_is_or_quarantined_and_never_half_written(kit):
    deep = b"[" * 190 + b"1" + b"]" * 190
    lines = [b'{"text":"a","deep":%s}' % deep, b'{"text":"b","deep":%s}' % (b"[" * 600 + b"]" * 600)]
    [part] = kit.convert(lines, kit.source("text"))
    assert kit.file(part, layout.RECORDS_SUFFIX).read_bytes().endswith(b'"extra":{"deep":%s}}\n' % deep)
    assert reasons([part]) == {"nesting_too_deep": 1}


def test_carried_fields_are_byte_equal(kit):
    fields = [b'"a":1.10', b'"b": {"k" :[ 1,2 ]}', b'"c":"\\u00e9\\/\xc3\xa9"', b'"d":1E5', b'"e":null', b'"\\u0066":-0.0']
    [part] = kit.convert([b'{"text":"x",' + b",".join(fields) + b"}"], kit.source("text"))
    extra = kit.file(part, layout.RECORDS_SUFFIX).read_bytes().partition(b'"extra":')[2]
    assert extra == b'{"a":1.10,"b":{"k" :[ 1,2 ]},"c":"\\u00e9\\/\xc3\xa9","d":1E5,"e":null,"f":-0.0}}\n'


@pytest.mark.parametrize(("keep", "kept"), [(None, {"a": 1, "b": 2}), ((), {}), (("b", "text"), {"text": "x", "b": 2})])
def test_only_the_fields_the_recipe_keeps_are_carried(kit, keep, kept):
    [record] = kit.records(kit.convert([{"id": "i", "text": "x", "a": 1, "b": 2}], kit.source("text", keep=keep)))
    assert record["extra"] == kept


def test_other_fields_of_messages_are_carried_byte_equal(kit):
    line = b'{"messages":[{"role":"user","content":"hi","weight":0.50},{"role":"tool","content":null,"calls":[ {"n":1E2} ]}]}'
    [part] = kit.convert([line], kit.source("chat"))
    record = kit.file(part, layout.RECORDS_SUFFIX).read_bytes()
    assert b'"content":[{"type":"text","text":"hi"}],"extra":{"weight":0.50}}' in record
    assert b'"content":[],"extra":{"calls":[ {"n":1E2} ]}}' in record


def test_a_byte_order_mark_hides_no_row_and_offsets_count_it(kit):
    data = b'\xef\xbb\xbf{"text":"a"}\n{"text":"b"}\n{"text":"c"}\n'
    parts = kit.convert(data, kit.source("text"))
    assert texts(kit.records(parts)) == ["a", "b", "c"]
    assert [row["origin"]["byte_offset"] for row in kit.records(parts)] == [0, 16, 29]


def test_blank_lines_are_counted_and_cost_no_neighbour(kit):
    parts = kit.convert(b'{"text":"a"}\n\n  \r\n{"text":"b"}\r\n\n', kit.source("text"))
    assert texts(kit.records(parts)) == ["a", "b"]
    assert [(part.num_read, part.num_blank_lines) for part in parts] == [(2, 3)]


def test_an_empty_or_blank_file_gives_a_part_that_says_so(kit):
    [part] = kit.convert(b"\n\n", kit.source("text"))
    assert (part.num_read, part.num_blank_lines, part.is_last_of_range) == (0, 2, True)
    assert set(part.files) == {f"{part.part_id}.jsonl", f"{part.part_id}.jsonl.idx"}


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_cut_compressed_file_keeps_its_good_part_and_is_not_complete(kit, suffix, compress):
    rows = [orjson.dumps({"text": f"{number:04d}" * 20, "noise": hash(f"{number}") % 10**12}) + b"\n" for number in range(400)]
    packed = compress(b"".join(rows))
    [part] = kit.convert(packed[: len(packed) // 2], kit.source("text"), name=f"rows.jsonl{suffix}")
    records = kit.records([part])
    assert [orjson.loads(row)["text"] for row in rows[: len(records)]] == texts(records)
    assert not part.input.input_complete
    quarantined = kit.quarantine([part])
    assert [row["reason"] for row in quarantined] == ["truncated_input"] * len(quarantined)
    assert part.input.byte_end == sum(map(len, rows[: len(records)])) + sum(len(row["line"]) for row in quarantined)
    assert len(records) > 50 or suffix == ".zst"


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_a_compressed_file_of_many_members_is_read_whole(kit, suffix, compress):
    data = b"".join(compress(b'{"text":"%d"}\n' % number) for number in range(5))
    [part] = kit.convert(data, kit.source("text"), name=f"rows.jsonl{suffix}")
    assert texts(kit.records([part])) == list("01234")
    assert part.input.input_complete


def test_garbage_behind_the_last_member_is_reported_and_costs_no_row(kit):
    [part] = kit.convert(gzip.compress(b'{"text":"a"}\n') + b"garbage after the end", kit.source("text"), name="rows.jsonl.gz")
    assert (texts(kit.records([part])), part.num_quarantined, part.input.input_complete) == (["a"], 0, False)


def test_a_last_line_without_its_end_is_truncated_input_and_one_that_is_whole_is_a_row(kit):
    cut = kit.convert(b'{"text":"a"}\n{"text":"b', kit.source("text"))
    assert (texts(kit.records(cut)), reasons(cut)) == (["a"], {"truncated_input": 1})
    whole = kit.convert(b'{"text":"a"}\n{"text":"b"}', kit.source("text"), out="whole")
    assert (texts(kit.records(whole, out="whole")), reasons(whole)) == (["a", "b"], {})


def test_a_line_above_the_limit_is_quarantined_with_its_size(kit):
    parts = kit.convert([{"text": "a"}, {"text": "x" * 5000}, {"text": "b"}], kit.source("text", max_line_bytes=1000))
    assert texts(kit.records(parts)) == ["a", "b"]
    [row] = kit.quarantine(parts)
    assert (row["reason"], row["line_truncated"]) == ("line_too_long", True)
    assert "found 5012 bytes, the limit is 1000" in row["detail"]


def test_a_huge_line_between_normal_ones_is_refused_in_bounded_memory(kit):
    path = kit.inputs / "rows.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"text":"a"}\n{"text":"')
        for _ in range(100):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text":"b"}\n')
    tracemalloc.start()
    parts = kit.convert(path, kit.source("text"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts(kit.records(parts)) == ["a", "b"]
    assert "found 104857612 bytes" in kit.quarantine(parts)[0]["detail"]
    assert peak < 40 << 20


def test_many_large_lines_are_never_all_in_memory(kit, monkeypatch):
    monkeypatch.setattr(readahead, "MEMORY_BUDGET_BYTES", 4 << 20)
    path = kit.jsonl([b'{"text":"%s"}' % (b"x" * (2 << 20)) for _ in range(40)])
    tracemalloc.start()
    parts = kit.convert(path, kit.source("text", max_line_bytes=4 << 20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total(parts).num_written == 40
    assert peak < 50 << 20


JUNK_LINES = st.lists(
    st.binary(max_size=30)
    | st.sampled_from([b'{"text":"ok"}', b"", b" ", LONE_SURROGATE, b'{"text":NaN}', b'{"text":5}', b"[]", b"{"]),
    max_size=12,
)


@REUSED_FOLDER
@given(JUNK_LINES, st.sampled_from(["", ".gz", ".zst"]), st.integers(0, 40), st.integers(5, 60))
def test_whatever_a_file_holds_read_is_written_plus_quarantined(kit, lines, suffix, num_cut, limit):
    data = b"\n".join(lines)
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
    path = kit.jsonl(packed[: max(len(packed) - num_cut, 5)] if suffix else packed, f"junk.jsonl{suffix}")
    shutil.rmtree(kit.folder / "out", ignore_errors=True)
    try:
        parts = kit.convert(path, kit.source("text", max_line_bytes=limit))
    except InputError:
        assert data[:2] == b"\x1f\x8b" or data[:4] == b"\x28\xb5\x2f\xfd" or data[1:4] == b"\x2a\x4d\x18"
        return
    totals = total(parts)
    assert totals.num_read == totals.num_written + totals.num_quarantined
    assert (totals.num_written, totals.num_quarantined) == (len(kit.records(parts)), len(kit.quarantine(parts)))
    if not suffix:
        assert totals.num_read + totals.num_blank_lines == data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
        assert parts[-1].input.byte_end == len(data)


@settings(REUSED_FOLDER, max_examples=40)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=20), st.integers(1, 200))
def test_ranges_of_any_size_hold_every_row_once_and_in_order(kit, convert_all, values, range_bytes):
    path = kit.jsonl([{"text": value} for value in values])
    shutil.rmtree(kit.folder / "out", ignore_errors=True)
    task = kit.task(path)
    ranges = plan_ranges(stat_url(str(path)), "rows.jsonl", range_bytes)
    parts = [part for work in ranges for part in convert_all(type(task)(source=task.source, work=work), kit.storage())]
    assert texts(kit.records(parts)) == values
    assert [part.input.byte_start for part in parts] == [0, *(part.input.byte_end for part in parts[:-1])]


# Its images


def test_a_jpeg_is_stored_byte_for_byte(kit, make_image):
    data = kit.image("a.jpg", make_image(size=(64, 48), kind="JPEG", quality=80))
    [part] = kit.convert([document("a.jpg")], kit.source())
    [entry] = kit.records([part])[0]["images"]
    assert kit.stored(part, entry) == data
    assert (entry["format"], entry["width"], entry["height"]) == ("jpeg", 64, 48)
    assert (entry["ref"], entry["frames"], entry["orientation"]) == ("a.jpg", 1, 1)


def test_a_photo_on_its_side_is_stored_untouched_and_recorded_upright(kit, make_image):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = kit.image("a.jpg", make_image(size=(64, 48), kind="JPEG", exif=exif))
    [part] = kit.convert([document("a.jpg")], kit.source())
    [entry] = kit.records([part])[0]["images"]
    assert (entry["width"], entry["height"], entry["orientation"]) == (48, 64, 6)
    assert kit.stored(part, entry) == data


@pytest.mark.parametrize(("mode", "recorded"), [("I;16", "I;16"), ("RGBA", "RGBA"), ("LA", "LA"), ("P", "P"), ("1", "1")])
def test_depth_alpha_and_palette_are_recorded_and_the_bytes_stay(kit, mode, recorded):
    out = io.BytesIO()
    Image.new(mode, (5, 4)).save(out, "PNG")
    data = kit.image("a.png", out.getvalue())
    [part] = kit.convert([document("a.png")], kit.source())
    [entry] = kit.records([part])[0]["images"]
    assert (entry["mode"], kit.stored(part, entry)) == (recorded, data)


def test_work_in_progress_of_a_dead_process_is_neither_read_nor_in_the_way(kit, tree_digest):
    kit.convert([{"text": "a"}], kit.source("text"))
    before = tree_digest(kit.folder / "out")
    left = kit.folder / f"out/sources/web/.tmp-0123-{file_hash('rows.jsonl')}-r00000-p00000.zip"
    left.write_bytes(b"PK\x03\x04 half a member")
    kit.convert([{"text": "a"}], kit.source("text"))
    assert tree_digest(kit.folder / "out") == before | {str(left.relative_to(kit.folder / "out")): ANY}


def test_two_images_of_one_base_name_keep_their_own_bytes(kit):
    first, second = kit.image("x/a.png", number=1), kit.image("y/a.png", number=2)
    [part] = kit.convert([document("x/a.png", "y/a.png")], kit.source())
    assert [kit.stored(part, entry) for entry in kit.records([part])[0]["images"]] == [first, second]


def test_input_files_of_one_base_name_give_parts_of_different_names(kit):
    parts = [
        part
        for name in ("part0/0.jsonl", "part1/0.jsonl")
        for part in kit.convert([{"text": name}], kit.source("text"), name=name)
    ]
    assert len({part.part_id for part in parts}) == 2
    assert texts(kit.records(parts)) == ["part0/0.jsonl", "part1/0.jsonl"]


def test_equal_images_of_a_part_are_stored_once_under_any_name(kit):
    data = kit.image("a.png")
    kit.image("copy.png", data)
    [part] = kit.convert([document("a.png", "copy.png", "a.png"), document("copy.png")], kit.source())
    entries = [entry for record in kit.records([part]) for entry in record["images"]]
    assert (part.num_images, part.num_images_stored) == (4, 1)
    assert len({entry["offset"] for entry in entries}) == 1
    assert [entry["ref"] for entry in entries] == ["a.png", "copy.png", "a.png", "copy.png"]
    assert {kit.stored(part, entry) for entry in entries} == {data}


def test_every_bundle_passes_the_self_tests_of_zip_tools(kit):
    for number in range(8):
        kit.image(f"{number}.png", number=number)
    parts = kit.convert([document(f"{number}.png") for number in range(8)], kit.source(target_bundle_bytes=900))
    bundles = [kit.file(part, layout.BUNDLE_SUFFIX) for part in parts]
    assert len(bundles) > 2
    for bundle in bundles:
        with zipfile.ZipFile(bundle) as archive:
            assert archive.testzip() is None
        if shutil.which("unzip"):
            subprocess.run(["unzip", "-tqq", str(bundle)], check=True)


def test_a_missing_an_empty_and_a_broken_image_cost_their_sample_and_are_all_named(kit):
    good = kit.image("good.png")
    kit.image("empty.png", b"")
    kit.image("cut.png", good[:-20])
    kit.image("text.png", b"<html>not found</html>")
    rows = [document("good.png", name, "missing.png") for name in ("empty.png", "cut.png", "text.png")] + [document("good.png")]
    parts = kit.convert(rows, kit.source())
    assert total(parts).num_written == 1
    assert [row["reason"] for row in kit.quarantine(parts)] == ["empty_image", "truncated_image", "not_an_image"]
    for row, name in zip(kit.quarantine(parts), ("empty.png", "cut.png", "text.png"), strict=True):
        assert row["detail"].startswith("2 of 3 images: ")
        assert name in row["detail"]
        assert "missing.png: missing_image" in row["detail"]
    with zipfile.ZipFile(kit.file(parts[0], layout.BUNDLE_SUFFIX)) as archive:
        assert len(archive.namelist()) == 1


def test_references_start_at_the_declared_root_and_not_at_the_current_folder(kit, monkeypatch, tmp_path):
    kit.image("img/1.png")
    kit.image("../elsewhere/img/2.png")
    monkeypatch.chdir(tmp_path / "elsewhere")
    parts = kit.convert([document("img/1.png"), document("img/2.png"), document("img/1.jpg")], kit.source())
    assert total(parts).num_written == 1
    assert reasons(parts) == {"missing_image": 2}


def test_a_bad_image_is_left_out_where_the_recipe_says_so_and_counted_by_reason(kit):
    first, last = kit.image("1.png", number=1), kit.image("3.png", number=3)
    kit.image("2.png", b"")
    rows = [document("a", "1.png", "2.png", "none.png", "b", "3.png"), document("2.png"), document(" ", "2.png")]
    [part] = kit.convert(rows, kit.source(images={"drops_image": True}))
    [record] = kit.records([part])
    assert [part.get("text", part.get("image")) for part in record["content"]] == ["a", 0, "b", 1]
    assert [kit.stored(part, entry) for entry in record["images"]] == [first, last]
    assert record["num_images_dropped"] == 2
    assert part.images_dropped_by_reason == {"empty_image": 1, "missing_image": 1}
    assert reasons([part]) == {"empty_sample": 2}


def test_dropped_images_leave_their_turn_in_a_conversation(kit):
    kit.image("1.png")
    turns = [
        {"role": "user", "content": document("none.png", "what?")["content"]},
        {"role": "assistant", "content": document("1.png")["content"]},
    ]
    [record] = kit.records(kit.convert([{"messages": turns}], kit.source("chat", images={"drops_image": True})))
    assert [turn["content"] for turn in record["messages"]] == [
        [{"type": "text", "text": "what?"}],
        [{"type": "image", "image": 0}],
    ]


def test_too_many_images_cost_the_sample_or_its_last_images_by_policy(kit):
    images = [kit.image(f"{number}.png", number=number) for number in range(4)]
    rows = [document("0.png", "1.png", "text", "2.png", "3.png"), document("3.png", "2.png")]
    strict = kit.convert(rows, kit.source(images={"max_per_sample": 2}))
    assert (total(strict).num_written, reasons(strict)) == (1, {"too_many_images": 1})
    assert "found 4, the limit is 2" in kit.quarantine(strict)[0]["detail"]
    assert [kit.stored(strict[0], entry) for entry in kit.records(strict)[0]["images"]] == [images[3], images[2]]
    first = kit.convert(rows, kit.source(images={"max_per_sample": 2, "keeps_first": True}), out="first")
    refs = [[entry["ref"] for entry in row["images"]] for row in kit.records(first, out="first")]
    assert refs == [["0.png", "1.png"], ["3.png", "2.png"]]
    assert [part.images_dropped_by_reason for part in first] == [{"too_many_images": 2}]


def test_images_of_a_row_that_is_refused_anyway_are_not_read(kit):
    class Counting(NoGuard):
        images = 0

        def progress(self):
            self.images += 1

    kit.image("a.png")
    task = kit.task(kit.jsonl([document(*["a.png"] * 50), document("a.png")]), kit.source(images={"max_per_sample": 2}))
    guard = Counting()
    list(convert_range(task, kit.storage(), guard))
    assert guard.images == 1


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        (
            {"conversations": [{"from": "human", "value": "<image>"}], "image": ["1.png", "2.png"]},
            "found 1 '<image>' in the turns and 2",
        ),
        (
            {"conversations": [{"from": "human", "value": "<image><image>"}], "image": "1.png"},
            "found 2 '<image>' in the turns and 1",
        ),
        ({"conversations": [{"from": "human", "value": "what?"}], "image": "1.png"}, "found 0 '<image>' in the turns and 1"),
        ({"conversations": [{"from": "human", "value": "the <image> tag"}]}, "found 1 '<image>' in the turns and 0"),
    ],
)
def test_placeholders_that_do_not_match_the_images_are_quarantined_with_both_counts(kit, row, counts):
    kit.image("1.png")
    [quarantined] = kit.quarantine(kit.convert([row], kit.source("llava")))
    assert (quarantined["reason"], counts in quarantined["detail"]) == ("placeholder_mismatch", True)


def test_an_error_of_our_own_on_one_image_costs_its_sample_and_moves_no_other_image(kit, monkeypatch):
    images = [kit.image(f"{number}.png", number=number) for number in range(400)]

    def failing(data, *rest):
        if data == images[300]:
            raise ZeroDivisionError("a bug")
        return inspect(data, *rest)

    monkeypatch.setattr("packer.loading.inspect", failing)
    [part] = kit.convert([document(f"{number}.png", id=number) for number in range(400)], kit.source())
    assert reasons([part]) == {"internal_error": 1}
    records = kit.records([part])
    assert len(records) == 399
    assert all(kit.stored(part, row["images"][0]) == images[int(row["id"])] for row in records)


def test_a_python_schema_that_raises_costs_that_row_alone(kit, tmp_path, monkeypatch):
    code = "def f(row):\n    return {'content': [{'type': 'text', 'text': row['t'] + '!'}], 'used': ['t']}\n"
    (tmp_path / "own_schema_of_convert.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = kit.convert([{"t": "a"}, {"t": 5}, {"u": 1}, {"t": "b"}], kit.source("python:own_schema_of_convert:f"))
    assert texts(kit.records(parts)) == ["a!", "b!"]
    assert reasons(parts) == {"schema_error": 2}
    assert "KeyError: 't'" in kit.quarantine(parts)[1]["detail"]


def test_a_row_that_kills_its_worker_is_quarantined_unread_under_its_own_id(kit, convert_all):
    task = kit.task(kit.jsonl([{"text": "a"}, {"id": "bad", "text": "b"}]), condemned=frozenset({13}))
    parts = convert_all(task, kit.storage())
    assert (texts(kit.records(parts)), reasons(parts)) == (["a"], {"kills_worker": 1})
    assert kit.quarantine(parts)[0]["id"] == "bad"


# Parts


def images_and_rows(kit, count):
    for number in range(count):
        kit.image(f"{number}.png", number=number, size=(8 + number % 5, 6))
    return [
        document(f"text {number}", *[f"{(number + k) % count}.png" for k in range(number % 4)], id=number)
        for number in range(count)
    ]


def test_a_part_rolls_before_its_bundle_passes_the_target(kit):
    rows = images_and_rows(kit, 30)
    parts = kit.convert(rows, kit.source(target_bundle_bytes=1500))
    assert [part.identity for part in parts] == [PartId(file_hash("rows.jsonl"), 0, roll) for roll in range(len(parts))]
    assert [part.is_last_of_range for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [row["id"] for row in kit.records(parts)] == [str(number) for number in range(30)]
    for part in parts:
        bundles = {entry["bundle"] for row in kit.records([part]) for entry in row["images"]}
        assert bundles <= {f"{part.part_id}.zip"}
    for part, following in itertools.pairwise(parts):
        stored = {entry["digest"]: entry for row in kit.records([part]) for entry in row["images"]}
        end = max(entry["offset"] + entry["size"] for entry in stored.values())
        new = {entry["digest"]: entry["size"] for entry in kit.records([following])[0]["images"] if entry["digest"] not in stored}
        assert end - 3 * 66 <= 1500 < end + sum(new.values())  # a member's header has 66 bytes, a record 3 images at most


def test_a_sample_larger_than_the_target_gets_a_part_of_its_own(kit):
    big = kit.image("big.png", number=9, size=(60, 60))
    kit.image("a.png", number=1)
    parts = kit.convert([document("a.png"), document("big.png"), document("a.png")], kit.source(target_bundle_bytes=1000))
    assert [part.num_written for part in parts] == [1, 1, 1]
    assert kit.stored(parts[1], kit.records(parts[1:2])[0]["images"][0]) == big


def test_a_part_rolls_before_it_holds_more_images_than_a_zip_directory(kit, monkeypatch):
    monkeypatch.setattr("packer.part.MAX_IMAGES", 5)
    parts = kit.convert(images_and_rows(kit, 30), kit.source())
    assert total(parts).num_written == 30
    assert max(part.num_images_stored for part in parts) == 5
    assert len(parts) >= 6


def test_a_part_rolls_before_its_records_pass_their_limit(kit, monkeypatch):
    monkeypatch.setattr("packer.part.MAX_RECORD_BYTES", 300)
    parts = kit.convert([{"text": "x" * 40} for _ in range(9)], kit.source("text"))
    assert total(parts).num_written == 9
    sizes = [[len(line) for line in kit.file(part, layout.RECORDS_SUFFIX).read_bytes().splitlines(True)] for part in parts]
    assert all(sum(lines[:-1]) + len(b'{"text":""}') + 40 <= 300 for lines in sizes)
    assert len(parts) > 3


def test_a_record_larger_than_the_limit_of_records_leaves_no_empty_part(kit, monkeypatch):
    monkeypatch.setattr("packer.part.MAX_RECORD_BYTES", 50)
    parts = kit.convert([{"text": "x" * 100}, {"text": "y" * 100}], kit.source("text"))
    assert [part.num_written for part in parts] == [1, 1]


@pytest.mark.parametrize(("budget", "rows_ahead", "group"), [(1, 1, 1), (2000, 3, 2), (64 << 20, 512, 1 << 30)])
def test_parts_are_the_same_however_far_images_are_read_ahead(kit, tree_digest, monkeypatch, budget, rows_ahead, group):
    rows = images_and_rows(kit, 60)
    kit.convert(rows, kit.source(target_bundle_bytes=2500), out="usual")
    monkeypatch.setattr(readahead, "MEMORY_BUDGET_BYTES", budget)
    monkeypatch.setattr(readahead, "_MAX_ROWS_AHEAD", rows_ahead)
    monkeypatch.setattr(readahead, "_GROUP_IMAGES", group)
    kit.convert(rows, kit.source(target_bundle_bytes=2500), out="other")
    assert tree_digest(kit.folder / "other") == tree_digest(kit.folder / "usual")


def test_a_record_larger_than_the_memory_for_one_gives_the_same_part(kit, tree_digest, monkeypatch):
    rows = images_and_rows(kit, 20)
    kit.convert(rows, kit.source(), out="memory")
    monkeypatch.setattr("packer.samples.SPOOL_BYTES", 300)
    kit.convert(rows, kit.source(), out="spooled")
    assert tree_digest(kit.folder / "spooled") == tree_digest(kit.folder / "memory")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_going_on_behind_any_committed_part_gives_the_same_bytes(kit, convert_all, tree_digest, suffix):
    rows = images_and_rows(kit, 30)
    rows[3]["content"].append({"type": "image", "image": "none.png"})
    data = b"\n".join(map(orjson.dumps, rows)) + b"\n\n"
    path = kit.jsonl(gzip.compress(data) if suffix else data, f"rows.jsonl{suffix}")
    source = kit.source(target_bundle_bytes=1500)
    parts = kit.convert(path, source)
    assert len(parts) > 4
    for done in range(1, len(parts)):
        out = f"out{done}"
        for part in parts[:done]:
            for name in [*part.files, f"{part.part_id}.part.json"]:
                target = kit.folder / out / "sources/web" / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(kit.folder / "out/sources/web" / name, target)
        task = kit.task(path, source, next_roll=done, resume_at=parts[done - 1].input.byte_end)
        assert convert_all(task, kit.storage(out)) == parts[done:]
        assert tree_digest(kit.folder / out) == tree_digest(kit.folder / "out")


def test_a_conversion_that_stops_at_any_row_leaves_whole_parts_and_nothing_else(kit, convert_all, tree_digest):
    source = kit.source(target_bundle_bytes=1500)
    path = kit.jsonl(images_and_rows(kit, 20))
    parts = kit.convert(path, source)
    whole = tree_digest(kit.folder / "out")
    for stop in range(1, 20, 3):
        running = convert_range(kit.task(path, source), kit.storage(f"out{stop}"))
        found = [item for item, _ in zip(running, range(stop), strict=False) if not isinstance(item, Step)]
        running.close()
        left = tree_digest(kit.folder / f"out{stop}")
        committed = parts[: sum(name.endswith(".part.json") for name in left)]
        names = {f"sources/web/{name}" for part in committed for name in [*part.files, f"{part.part_id}.part.json"]}
        assert left == {name: whole[name] for name in names}
        assert found == committed[: len(found)]
        assert len(committed) - len(found) <= 1  # a part may be committed and not yet told


def test_converting_again_overwrites_with_the_same_bytes(kit, tree_digest):
    rows = images_and_rows(kit, 12)
    kit.convert(rows, kit.source())
    before = tree_digest(kit.folder)
    kit.convert(rows, kit.source())
    assert tree_digest(kit.folder) == before


def test_a_trial_stops_after_its_rows_and_blank_lines_do_not_count(kit, convert_all):
    task = kit.task(kit.jsonl(b'{"text":"a"}\n\n\n{"text":"b"}\n{"text":"c"}\n'), max_rows=2)
    [part] = convert_all(task, kit.storage())
    assert (texts(kit.records([part])), part.is_last_of_range) == (["a", "b"], True)


def test_image_bytes_never_travel_with_tasks_or_results(kit):
    kit.image("big.png", size=(200, 200))
    task = kit.task(kit.jsonl([document("big.png")]), kit.source())
    items = list(convert_range(task, kit.storage()))
    assert len(pickle.dumps(task)) < 3000
    assert len(pickle.dumps(items)) < 3000
    assert pickle.loads(pickle.dumps(task)) == task
    assert [(item.num_rows, item.num_quarantined) for item in items if isinstance(item, Step)] == [(1, 0)]


def test_steps_tell_bytes_rows_and_refusals_of_every_line(kit):
    task = kit.task(kit.jsonl(b'{"text":"a"}\n\nbad\n'))
    steps = [item for item in convert_range(task, kit.storage()) if isinstance(item, Step)]
    assert [(step.num_bytes, step.num_rows, step.num_quarantined) for step in steps] == [(13, 1, 0), (1, 0, 0), (4, 1, 1)]


def test_a_range_is_converted_to_an_object_store_with_the_same_digests_as_on_disk(kit, convert_all, s3):
    rows = images_and_rows(kit, 12)
    local = kit.convert(rows, kit.source(target_bundle_bytes=1500))
    remote = open_storage(f"{s3}/set")
    parts = convert_all(kit.task(kit.inputs / "rows.jsonl", kit.source(target_bundle_bytes=1500)), remote)
    assert parts == local
    assert [verify_part(remote, part, deep=True).problems for part in parts] == [[]] * len(parts)


def test_rows_and_images_are_read_from_an_object_store(kit, convert_all, s3):
    import dataclasses

    rows = images_and_rows(kit, 8)
    local = kit.convert(rows, kit.source())
    for path in kit.inputs.iterdir():
        open_storage(s3).publish_bytes(f"in/{path.name}", path.read_bytes())
    source = kit.source()
    source = dataclasses.replace(source, references=dataclasses.replace(source.references, image_root=f"{s3}/in"))
    work = dataclasses.replace(kit.whole(kit.inputs / "rows.jsonl"), url=f"{s3}/in/rows.jsonl")
    task = dataclasses.replace(kit.task(kit.inputs / "rows.jsonl", source), work=work)
    assert convert_all(task, kit.storage("from-s3")) == local
