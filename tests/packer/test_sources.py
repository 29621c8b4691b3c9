import gzip
import itertools
import os
import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from packer import sources
from packer.format.errors import InputError
from packer.sources import Compression, InputRange, LineReader, plan_ranges, span_digest
from packer.storage import stat_url

LIMIT = 1 << 20
JUNK_LINES = st.lists(st.sampled_from([b"\n", b"a", b"bb\n", b"\r\n", b" ", b"{}\n"])).map(b"".join)


def is_plain(data):
    """Whether the data does not begin like a compressed file, which a plain file's name would hide."""
    return data[:2] != b"\x1f\x8b" and data[:4] != b"\x28\xb5\x2f\xfd" and data[1:4] != b"\x2a\x4d\x18"


JUNK = (st.binary(max_size=400) | JUNK_LINES).filter(is_plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


def write(path, data):
    path.write_bytes(data)
    return str(path)


def ranges_of(path, range_bytes):
    return plan_ranges(stat_url(path), "rows", range_bytes)


def lines_of(work, limit=LIMIT, resume_at=None):
    with LineReader(work, max_line_bytes=limit, resume_at=resume_at) as reader:
        return list(reader), reader.fault


def whole(path):
    return InputRange(url=path, file="rows", file_size=os.path.getsize(path))


@given(JUNK, st.integers(1, 500))
def test_ranges_of_any_size_give_every_line_once_and_in_order(folder, data, range_bytes):
    path = write(folder / "rows.jsonl", data)
    lines = [line for work in ranges_of(path, range_bytes) for line in lines_of(work)[0]]
    assert [line.raw for line in lines] == data.splitlines(keepends=True) or data.count(b"\r") or data == b""
    assert b"".join(line.raw for line in lines) == data
    assert all(data[line.byte_offset : line.byte_end] == line.raw for line in lines)
    assert all(line.raw.count(b"\n") == 1 and line.raw.endswith(b"\n") for line in lines[:-1])


@given(JUNK, st.integers(1, 100), st.integers(1, 20))
def test_lines_above_the_limit_lose_no_place_and_no_neighbour(folder, data, range_bytes, limit):
    path = write(folder / "rows.jsonl", data)
    lines = [line for work in ranges_of(path, range_bytes) for line in lines_of(work, limit)[0]]
    edges = [0, *itertools.accumulate(len(line) for line in data.split(b"\n")[:-1] for line in [line + b"\n"])]
    assert [line.byte_offset for line in lines] == [edge for edge in edges if edge < len(data)]
    assert [line.byte_end for line in lines] == [line.byte_offset for line in lines[1:]] + [len(data)] * bool(lines)
    for line in lines:
        content = data[line.byte_offset : line.byte_end]
        assert line.too_long == (len(content.removesuffix(b"\n")) > limit)
        assert content.startswith(line.raw)


@given(JUNK, st.integers(1, 100), st.sampled_from(["", ".gz", ".zst"]))
def test_reading_goes_on_behind_any_line_as_if_it_had_not_stopped(folder, data, range_bytes, suffix):
    packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
    path = write(folder / f"rows.jsonl{suffix}", packed)
    for work in ranges_of(path, range_bytes):
        lines, _ = lines_of(work)
        for index in range(len(lines)):
            assert lines_of(work, resume_at=lines[index].byte_end)[0] == lines[index + 1 :]


@given(st.lists(JUNK, max_size=4), st.sampled_from([1, 2, 5, 64, 1 << 20]), st.sampled_from([".gz", ".zst"]))
def test_all_members_and_frames_are_read_whatever_the_size_of_a_step(folder, members, buffer_bytes, suffix):
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    path = write(folder / f"rows.jsonl{suffix}", b"".join(map(compress, members)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_BUFFER_BYTES", buffer_bytes)
        lines, fault = lines_of(whole(path))
    assert b"".join(line.raw for line in lines) == b"".join(members)
    assert fault is None


def test_skippable_zstd_frames_and_zero_padding_between_gzip_members_are_passed_over(folder):
    skippable = b"\x5f\x2a\x4d\x18\x04\0\0\0junk"
    data = skippable + zstandard.compress(b"1\n") + skippable + zstandard.compress(b"2\n") + skippable
    lines, fault = lines_of(whole(write(folder / "rows.zst", data)))
    assert ([line.raw for line in lines], fault) == ([b"1\n", b"2\n"], None)
    padded = gzip.compress(b"1\n") + b"\0" * 500 + gzip.compress(b"2\n") + b"\0" * 7
    lines, fault = lines_of(whole(write(folder / "rows.gz", padded)))
    assert ([line.raw for line in lines], fault) == ([b"1\n", b"2\n"], None)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_anywhere_keeps_its_good_lines_and_says_that_it_is_cut(folder, suffix):
    data = b"".join(b"%d %s\n" % (number, os.urandom(20).hex().encode()) for number in range(30))
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
    for length in range(5, len(packed), 17):
        lines, fault = lines_of(whole(write(folder / f"cut.jsonl{suffix}", packed[:length])))
        read = b"".join(line.raw for line in lines)
        assert data.startswith(read)
        assert fault is not None
        assert [line.cut for line in lines] == [False] * (len(lines) - 1) + [not read.endswith(b"\n")] * bool(lines)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_garbage_behind_or_inside_compressed_data_is_a_fault_and_no_crash(folder, suffix):
    data = b"0123456789\n" * 200
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
    lines, fault = lines_of(whole(write(folder / f"behind{suffix}", packed + b"garbage behind the end")))
    assert b"".join(line.raw for line in lines) == data
    assert "damaged compressed data" in fault
    for place in range(len(packed)):
        changed = bytearray(packed)
        changed[place] ^= 0x55
        try:
            lines, _ = lines_of(whole(write(folder / f"inside{suffix}", changed)))
        except InputError:
            assert place < 4  # no longer looks compressed
        else:
            assert sum(len(line.raw) for line in lines) <= 1 << 20


def test_a_byte_order_mark_counts_in_offsets_and_is_taken_off_the_first_line_alone(folder):
    mark = b"\xef\xbb\xbf"
    lines, _ = lines_of(whole(write(folder / "bom.jsonl", mark + b"{}\n" + mark + b"{}\n")))
    assert [(line.byte_offset, line.text) for line in lines] == [(0, b"{}"), (6, mark + b"{}")]
    [line], _ = lines_of(whole(write(folder / "only.jsonl", mark)))
    assert line.is_blank


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \t\n", b" " * 100 + b"\n"])
def test_blank_lines_are_lines_of_their_own(folder, blank):
    lines, _ = lines_of(whole(write(folder / "blank.jsonl", b"{}\n" + blank + b"{}")))
    assert [line.is_blank for line in lines] == [False, True, False]


def test_a_line_of_exactly_the_limit_is_read_and_one_byte_more_is_too_long(folder):
    path = write(folder / "limit.jsonl", b"x" * 10 + b"\n" + b"y" * 11 + b"\n" + b"z" * 10 + b"\n" + b"w" * 11)
    lines, _ = lines_of(whole(path), limit=10)
    assert [line.too_long for line in lines] == [False, True, False, True]


def test_a_huge_line_between_normal_ones_costs_no_memory(folder):
    with open(folder / "huge.jsonl", "wb") as file:
        file.write(b'{"a":1}\n')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b'\n{"b":2}\n')
    tracemalloc.start()
    lines, _ = lines_of(whole(str(folder / "huge.jsonl")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line.byte_end - line.byte_offset for line in lines] == [8, (64 << 20) + 1, 8]
    assert peak < 12 << 20


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_expands_a_thousandfold_costs_no_memory(folder, suffix):
    block = b"\0" * (1 << 20)
    opened = gzip.open(folder / "bomb.gz", "wb", 1) if suffix == ".gz" else zstandard.open(folder / "bomb.zst", "wb")
    with opened as file:
        for _ in range(200):
            file.write(block)
        file.write(b"\n{}\n")
    tracemalloc.start()
    lines, fault = lines_of(whole(str(folder / f"bomb{suffix}")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.too_long, line.byte_end - line.byte_offset) for line in lines] == [(True, (200 << 20) + 1), (False, 3)]
    assert fault is None
    assert peak < 160 << 20


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.jsonl", gzip.compress(b"{}\n"), "found gzip data, expected none by its name"),
        ("rows.jsonl", zstandard.compress(b"{}\n"), "found zstd data, expected none by its name"),
        ("rows.jsonl.gz", b'{"a":1}\n', "found none data, expected gzip by its name"),
        ("rows.jsonl.zst", gzip.compress(b"{}\n"), "found gzip data, expected zstd by its name"),
    ],
)
def test_a_name_that_hides_the_compression_is_refused(folder, name, data, message):
    with pytest.raises(InputError, match=message):
        lines_of(whole(write(folder / name, data)))


def test_a_file_that_is_gone_or_changed_its_size_is_refused(folder):
    work = whole(write(folder / "rows.jsonl", b"{}\n"))
    write(folder / "rows.jsonl", b"{}\n{}\n")
    with pytest.raises(InputError, match="found 6 bytes, expected 3: it changed during the run"):
        lines_of(work)
    os.unlink(folder / "rows.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        lines_of(work)


def test_only_plain_files_are_cut_into_ranges_and_empty_ones_have_none(folder):
    path = write(folder / "rows.jsonl", b"x" * 10)
    assert [(work.range_index, work.byte_start, work.byte_end) for work in ranges_of(path, 4)] == [
        (0, 0, 4),
        (1, 4, 8),
        (2, 8, 10),
    ]
    assert [(work.byte_start, work.byte_end) for work in ranges_of(write(folder / "r.gz", gzip.compress(b"x\n")), 4)] == [
        (0, None)
    ]
    assert ranges_of(write(folder / "empty.jsonl", b""), 4) == []


@pytest.mark.parametrize(
    ("name", "compression"),
    [("a.jsonl", "none"), ("a.jsonl.gz", "gzip"), ("A.GZIP", "gzip"), ("a.zst", "zstd"), ("a.ZSTD", "zstd"), ("gz", "none")],
)
def test_the_name_says_the_compression(name, compression):
    assert Compression.of(name) == compression


@settings(max_examples=50)
@given(JUNK, st.integers(1, 30), st.data())
def test_the_digest_of_a_span_is_that_of_its_lines_and_none_when_they_end_elsewhere(folder, data, limit, draw):
    path = write(folder / "span.jsonl", data)
    lines, _ = lines_of(whole(path), limit)
    first = draw.draw(st.integers(0, len(lines)))
    last = draw.draw(st.integers(first, len(lines)))
    start = lines[first].byte_offset if first < len(lines) else len(data)
    end = lines[last - 1].byte_end if last > first else start
    digest = span_digest(whole(path), start, end, limit)
    assert digest == span_digest(whole(write(folder / "copy.jsonl", data)), start, end, limit) is not None
    if end > start:
        if end + 1 not in [line.byte_end for line in lines]:
            assert span_digest(whole(path), start, end + 1, limit) is None
        changed = bytearray(data)
        changed[draw.draw(st.integers(start, end - 1))] ^= 0x40
        if bytes(changed).count(b"\n") == data.count(b"\n"):
            assert span_digest(whole(write(folder / "copy.jsonl", changed)), start, end, limit) != digest


def test_a_change_behind_the_limit_of_a_long_line_changes_the_digest(folder):
    path = write(folder / "long.jsonl", b"x" * 50 + b"\n{}\n")
    before = span_digest(whole(path), 0, 51, 10)
    assert before == span_digest(whole(path), 0, 51, 10)
    assert before != span_digest(whole(write(folder / "long.jsonl", b"x" * 49 + b"y\n{}\n")), 0, 51, 10)
