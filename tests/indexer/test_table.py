"""The index on disk: parts, the table of a source, its sorted ids, and all sources opened as one table."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from index_rows import FINGERPRINT, PROFILE, make_manifest, make_rows, write_one, write_parts

from indexer.rows import Rows
from indexer.table import (
    PartState,
    batching,
    consolidate,
    is_consolidated,
    local_copy,
    open_index,
    part_state,
    part_states,
    read_part,
    read_stats,
    sorted_ids,
)
from indexer.table import files as index_files
from indexer.table.files import damage
from packer.format import layout
from packer.format.errors import FormatError, StorageFault, UsageError
from packer.format.manifest import decode_part_keys, encode_document, encode_source, part_keys
from packer.storage import LocalStorage, open_storage

SHAPES = [
    [],
    [[]],
    [[], []],
    [[0], [], [], [0, 0], []],
    [[0, 0, 0]],
    [[1, 0, 2], [], [4], [0, 0, 0, 0, 3]],
    [[0, 500, 0], [1]],
    [[1]] * 23,
]


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(str(tmp_path / "set"), fsync=False)


@pytest.fixture
def small_batches(monkeypatch):
    """Limits that a few rows reach."""
    monkeypatch.setattr(batching, "BATCH_ROWS", 4)
    monkeypatch.setattr(batching, "BATCH_IMAGES", 6)
    monkeypatch.setattr(sorted_ids, "BUCKET_ROWS", 3)


def pieces_of(shape, **options):
    return [make_rows(counts, seed=number, **options) for number, counts in enumerate(shape)]


def build(storage, shape, source="web", **options):
    """Write and consolidate a source; its rows as Python values, and its manifests."""
    pieces = pieces_of(shape, **options)
    manifests = write_parts(storage, pieces, source)
    consolidate(storage, PROFILE, source, manifests, FINGERPRINT)
    return Rows.concatenate(pieces).to_batch().to_pylist(), manifests


def table_path(storage, source="web", *, ids=False):
    name = layout.index_ids_file(PROFILE, source) if ids else layout.index_table_file(PROFILE, source)
    return Path(storage.url, name)


def part_path(storage, manifest):
    return Path(storage.url, layout.index_part_file(PROFILE, manifest.source, manifest.part_id))


def bytes_below(storage):
    return {str(path): path.read_bytes() for path in Path(storage.url, "index").rglob("*") if path.is_file()}


# Parts


def test_a_part_reads_back_as_written(storage, small_batches):
    rows = make_rows([1, 0, 3, 0, 0, 2, 9, 1], unusable=[3])
    (manifest,) = write_parts(storage, [rows])
    read, stats = read_part(storage, PROFILE, manifest, profile_fingerprint=FINGERPRINT)
    assert read.to_batch().to_pylist() == rows.to_batch().to_pylist()
    assert stats == manifest.part_id.encode()
    with pa.memory_map(str(part_path(storage, manifest))) as mapped:
        reader = pa.ipc.open_file(mapped)
        assert [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)] == [4, 2, 1, 1]
        assert {key.decode(): value.decode() for key, value in reader.schema.metadata.items()} == {
            "format": "bayplan",
            "format_version": "1",
            "kind": "index_part",
            "profile": PROFILE,
            "profile_fingerprint": FINGERPRINT,
            "source": "web",
            "num_rows": "8",
            "part_id": manifest.part_id,
            "part_fingerprint": manifest.fingerprint,
            "stats_version": "1",
            "stats": manifest.part_id,
        }


@given(st.lists(st.integers(0, 9), max_size=25))
def test_equal_rows_are_equal_bytes_whatever_memory_they_lie_in(counts):
    """A slice of a larger column must not leak its neighbours into the padding."""
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(folder, fsync=False)
        rows = make_rows(counts)
        manifest = make_manifest(1, len(rows))
        write_one(storage, manifest, rows)
        first = part_path(storage, manifest).read_bytes()
        around = Rows.concatenate([make_rows([3, 3], seed=7), rows, make_rows([2, 2, 2], seed=8)])
        write_one(storage, manifest, around.slice(2, 2 + len(rows)))
        assert part_path(storage, manifest).read_bytes() == first


def test_every_state_of_a_part_is_told_apart(storage):
    manifests = write_parts(storage, pieces_of([[1, 0], [2]]))

    def state(manifest, fingerprint=FINGERPRINT):
        one = part_state(storage, PROFILE, manifest, profile_fingerprint=fingerprint)
        same = part_states(storage, PROFILE, "web", [manifest], profile_fingerprint=fingerprint)
        assert [one] == list(same)
        if one.state is not PartState.DONE:
            with pytest.raises(FormatError):
                read_part(storage, PROFILE, manifest, profile_fingerprint=fingerprint)
        return one.state, one.message

    assert state(manifests[0]) == (PartState.DONE, "")
    path = part_path(storage, manifests[0])
    where = str(path)
    never = make_manifest(9, 1)
    assert state(never) == (
        PartState.MISSING,
        f"{part_path(storage, never)}: found no file: part {never.part_id} is not counted; index again",
    )
    repacked = make_manifest(0, 2, version=1)
    assert state(repacked) == (
        PartState.STALE,
        f"{where}: found counts of part fingerprint {manifests[0].fingerprint}, expected {repacked.fingerprint}: the part was "
        "packed again; index again",
    )
    assert state(manifests[0], "d" * 32) == (
        PartState.FOREIGN,
        f"{where}: found counts of profile fingerprint {FINGERPRINT}, expected {'d' * 32}: the profile changed; index again",
    )
    whole = path.read_bytes()
    shutil.copy(part_path(storage, manifests[1]), path)
    found, message = state(manifests[0])
    assert found is PartState.FOREIGN
    assert f"{where}: found profile, source, part ('small', 'web', '{manifests[1].part_id}')" in message
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], whole[:100], b"x" * 500, whole + b"x", b"\0" * len(whole)):
        path.write_bytes(damaged)
        found, message = state(manifests[0])
        assert found is PartState.DAMAGED
        assert message.startswith(f"{where}: not a whole Arrow file (")
    path.write_bytes(foreign_file({"format": "other"}))
    assert state(manifests[0]) == (
        PartState.DAMAGED,
        f"{where}: found format 'other', expected 'bayplan': not a bayplan file",
    )
    path.write_bytes(foreign_file({"format": "bayplan", "format_version": "2"}))
    assert "found format version 2, this release reads 1" in state(manifests[0])[1]
    path.write_bytes(foreign_file({"format": "bayplan", "format_version": "1", "kind": "index_ids"}))
    assert "found kind 'index_ids', expected 'index_part'" in state(manifests[0])[1]
    path.write_bytes(foreign_file({"format": "bayplan", "format_version": "1", "kind": "index_part", "profile": "p"}))
    assert "metadata without a usable 'profile_fingerprint'" in state(manifests[0])[1]


def foreign_file(metadata):
    sink = pa.BufferOutputStream()
    pa.ipc.new_file(sink, pa.schema([("a", pa.int8())], metadata=metadata)).close()
    return sink.getvalue().to_pybytes()


def test_no_flipped_byte_of_a_part_breaks_reading_it(storage):
    """No byte of a file can make reading it crash or hang, or change how many rows it has."""
    rows = make_rows([1, 0, 3])
    (manifest,) = write_parts(storage, [rows])
    path = part_path(storage, manifest)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            read, _ = read_part(storage, PROFILE, manifest, profile_fingerprint=FINGERPRINT)
        except FormatError:
            refused += 1
        else:
            assert len(read) == 3
    assert refused > len(whole) // 3 // 4


def test_statistics_of_another_release_make_parts_and_tables_stale(storage, monkeypatch):
    _, manifests = build(storage, [[1], [0]])
    table = open_index(storage.url, PROFILE)
    monkeypatch.setattr(index_files, "STATS_VERSION", 2)
    says = "found statistics of version 1, expected 2: counted by another release; index again"
    check = part_state(storage, PROFILE, manifests[0], profile_fingerprint=FINGERPRINT)
    assert (check.state, check.message) == (PartState.STALE, f"{part_path(storage, manifests[0])}: {says}")
    assert not is_consolidated(storage, PROFILE, "web", manifests, FINGERPRINT)
    for read in (lambda: read_stats(storage, PROFILE, "web"), lambda: table.stats("web")):
        with pytest.raises(FormatError, match=says):
            read()
    with pytest.raises(UsageError, match=says):
        consolidate(storage, PROFILE, "web", manifests, FINGERPRINT)
    assert open_index(storage.url, PROFILE).row(0) == table.row(0)
    write_parts(storage, pieces_of([[1], [0]]))
    assert consolidate(storage, PROFILE, "web", manifests, FINGERPRINT).written


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError("read past the end"), FormatError),
        (ValueError("bad"), FormatError),
        (OSError(errno.EIO, "disk"), StorageFault),
        (TimeoutError(), StorageFault),
        (PermissionError(errno.EACCES, "no"), PermissionError),
        (FileNotFoundError("gone"), FileNotFoundError),
    ],
)
def test_damage_and_faults_that_may_pass_are_told_apart(raised, expected):
    with pytest.raises(expected), damage("x"):
        raise raised


def test_old_work_of_dead_processes_is_removed(storage):
    manifests = write_parts(storage, pieces_of([[1]]))
    left = [Path(storage.url, "index", PROFILE, folder, ".tmp-0-x.arrow") for folder in ("", "parts/web")]
    for path in left:
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    consolidate(storage, PROFILE, "web", manifests, FINGERPRINT)
    assert not any(path.exists() for path in left)


# Consolidating


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("small", [False, True])
def test_a_table_is_its_parts_one_after_the_other(storage, shape, small, request):
    if small:
        request.getfixturevalue("small_batches")
    expected, manifests = build(storage, shape)
    table = open_index(storage.url, PROFILE)
    assert table.to_arrow().to_pylist() == expected
    assert table.num_rows == len(table) == len(expected)
    places = [(part.part_id, line) for part in manifests for line in range(part.num_written)]
    assert [table.locate(row) for row in range(len(table))] == [("web", *place) for place in places]
    assert [table.row_of("web", *place) for place in places] == list(range(len(table)))
    assert all(table.find(name) == [row] for row, name in enumerate(names_of(shape)))
    for row, (values, (part_id, line)) in enumerate(zip(expected, places, strict=True)):
        found = table.row(row)
        assert (found.source, found.part_id, found.line) == ("web", part_id, line)
        assert found.record_file == f"sources/web/{part_id}.jsonl"
        for name, value in values.items():
            if name != "images":
                assert getattr(found, name) == value
        assert [{name: getattr(image, name) for name in image.__slots__} for image in found.images] == values["images"]
        assert table.images_of(row) == found.images


def names_of(shape):
    return [f"sample-{seed}-{number}" for seed, counts in enumerate(shape) for number in range(len(counts))]


@given(st.lists(st.lists(st.integers(0, 4), max_size=6), max_size=6), st.integers(1, 5), st.integers(1, 9), st.randoms())
def test_batches_follow_from_the_rows_alone(shape, max_rows, max_images, chance):
    """However the rows come in pieces, batches end at the same rows, and none is larger than allowed or needed."""
    whole = Rows.concatenate(pieces_of(shape))
    cuts = sorted(chance.choices(range(len(whole) + 1), k=3))
    pieces = [whole.slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    batches = [batch.to_batch() for batch in batching.rebatch(pieces, max_rows, max_images)]
    assert batches == [batch.to_batch() for batch in batching.rebatch([whole], max_rows, max_images)]
    assert [row for batch in batches for row in batch.to_pylist()] == whole.to_batch().to_pylist()
    counts = [batch.column("num_images").to_pylist() for batch in batches]
    assert all(len(batch) <= max_rows and (sum(batch) <= max_images or len(batch) == 1) for batch in counts)
    for batch, following in itertools.pairwise(counts):
        assert len(batch) == max_rows or sum(batch) + following[0] > max_images


def test_how_the_parts_were_cut_does_not_change_the_batches(storage, small_batches, tmp_path):
    pieces = pieces_of([[1, 0, 2], [3, 1, 1, 0], [5], [0] * 9])
    other = LocalStorage(str(tmp_path / "other"), fsync=False)
    for store, parts in ((storage, pieces), (other, [Rows.concatenate(pieces)])):
        consolidate(store, PROFILE, "web", write_parts(store, parts), FINGERPRINT)
    first, second = (list(open_index(store.url, PROFILE).batches()) for store in (storage, other))
    assert first == second
    assert len(first) > 3


def test_stats_of_the_parts_become_one_blob_in_part_order(storage):
    manifests = write_parts(storage, pieces_of([[1], [0], [2]]))
    consolidate(storage, PROFILE, "web", manifests[::-1], FINGERPRINT, merge_stats=b"|".join)
    expected = b"|".join(manifest.part_id.encode() for manifest in manifests)
    assert read_stats(storage, PROFILE, "web") == expected == open_index(storage.url, PROFILE).stats("web")
    with pytest.raises(UsageError, match=r"none.arrow: found no file, expected the index of source 'none'"):
        read_stats(storage, PROFILE, "none")


def test_consolidating_again_writes_nothing_unless_parts_changed(storage):
    _, manifests = build(storage, [[1, 2], [0]])
    before = {path: path.stat().st_ino for path in Path(storage.url).rglob("*.arrow")}
    assert not consolidate(storage, PROFILE, "web", manifests, FINGERPRINT).written
    assert before == {path: path.stat().st_ino for path in Path(storage.url).rglob("*.arrow")}
    more = make_manifest(7, 1)
    write_one(storage, more, make_rows([1], seed=7))
    done = consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT)
    assert (done.written, done.num_parts, done.num_rows) == (True, 3, 4)
    for damaged in (table_path(storage), table_path(storage, ids=True)):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-5])
        assert consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT).written
        assert damaged.read_bytes() == whole
        damaged.unlink()
        assert consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT).written
        assert damaged.read_bytes() == whole


def test_parts_that_cannot_be_used_are_listed_and_nothing_is_written(storage):
    manifests = write_parts(storage, pieces_of([[1]] * 15))
    part_path(storage, manifests[1]).unlink()
    part_path(storage, manifests[2]).write_bytes(b"ARROW1")
    wanted = [*manifests[:3], *(make_manifest(number, 1, version=1) for number in range(3, 15))]
    with pytest.raises(UsageError) as caught:
        consolidate(storage, PROFILE, "web", wanted, FINGERPRINT, merge_stats=b"".join)
    lines = str(caught.value).splitlines()
    assert lines[0] == "index 'small' of source 'web': 14 of 15 parts cannot be used; count them first"
    assert lines[1].startswith(f"  part {manifests[1].part_id} is missing: ")
    assert lines[2].startswith(f"  part {manifests[2].part_id} is damaged: ")
    assert lines[3].startswith(f"  part {manifests[3].part_id} is stale: ")
    assert lines[11:] == ["  and 4 more"]
    assert not table_path(storage).exists()
    assert not table_path(storage, ids=True).exists()


def test_damaged_statistics_name_their_part(storage):
    manifests = write_parts(storage, pieces_of([[1]] * 3))

    def merge(blobs):
        for number, _ in enumerate(blobs):
            if number == 1:
                raise FormatError("not the JSON of Stats")
        return b""

    with pytest.raises(FormatError, match=rf"{manifests[1].part_id}.arrow: its statistics are damaged; .*: not the JSON of"):
        consolidate(storage, PROFILE, "web", manifests, FINGERPRINT, merge_stats=merge)


def test_whoever_waits_hears_of_every_part_batch_and_block(storage, monkeypatch, small_batches):
    manifests = write_parts(storage, pieces_of([[0, 0]] * 6))
    heard, seen = [0], []

    def hear():
        heard[0] += 1

    operations = LocalStorage.on_operation
    monkeypatch.setattr(index_files, "_BLOCK_BYTES", 256)
    monkeypatch.setattr(LocalStorage, "on_operation", lambda store, verb, name: seen.append((verb, name, heard[0])))
    consolidate(storage, PROFILE, "web", manifests, FINGERPRINT, on_batch=hear)
    monkeypatch.setattr(LocalStorage, "on_operation", operations)
    reads = [count for verb, name, count in seen if verb == "read" and "/parts/" in name]
    assert reads[:6] == list(range(6))
    assert len(reads) == 12
    assert all(later > count for count, later in itertools.pairwise(reads))
    renames = [count for verb, _, count in seen if verb == "rename"]
    blocks = [path.stat().st_size // 256 for path in (table_path(storage, ids=True), table_path(storage))]
    assert renames[0] - reads[-1] > blocks[0]
    assert renames[1] - renames[0] > blocks[1]
    assert heard[0] > renames[1]


def test_a_damaged_body_stops_consolidating_and_leaves_no_work_behind(storage):
    manifests = write_parts(storage, pieces_of([[1, 2, 3], [0]]))
    path = part_path(storage, manifests[0])
    whole = bytearray(path.read_bytes())
    counts = np.array([1, 2, 3], "<i4").tobytes()
    whole[whole.index(counts)] = 9
    path.write_bytes(whole)
    with pytest.raises(FormatError, match=rf"{manifests[0].part_id}.arrow: num_images: not the lengths .* damaged"):
        consolidate(storage, PROFILE, "web", manifests, FINGERPRINT)
    assert sorted(entry.name for entry in Path(storage.url, "index", PROFILE).iterdir()) == ["parts", "profile.json"]


# Sorted ids


@pytest.mark.parametrize("distinct", [1, 2, 40, 10_000])
@pytest.mark.parametrize("limit", [1, 7, 1 << 22])
def test_ids_are_sorted_in_bounded_pieces(tmp_path, monkeypatch, distinct, limit):
    monkeypatch.setattr(sorted_ids, "BUCKET_ROWS", limit)
    random = np.random.default_rng(distinct)
    values = random.integers(0, 2**64, distinct, np.uint64)[random.integers(0, distinct, 1000)]
    values[:3] = [0, 2**64 - 1, 2**63]
    sorter = sorted_ids.IdSorter(1000, str(tmp_path))
    for start in range(0, 1000, 90):
        sorter.add(values[start : start + 90], np.arange(start, min(start + 90, 1000)))
    pieces = list(sorter.sorted())
    sorter.close()
    assert max(len(hashes) for hashes, _ in pieces) <= max(limit, 90)
    order = np.lexsort((np.arange(1000), values))
    assert np.concatenate([hashes for hashes, _ in pieces]).tolist() == values[order].tolist()
    assert np.concatenate([rows for _, rows in pieces]).tolist() == order.tolist()
    batches = [pa.record_batch([*map(pa.array, piece)], schema=sorted_ids.ids_schema(1000)) for piece in pieces]
    ids = sorted_ids.SortedIds(batches)
    for value in [*values[:50].tolist(), 5]:
        assert ids.find(value) == np.flatnonzero(values == value).tolist()
    wanted = np.sort(np.concatenate((values[:100], random.integers(0, 2**64, 100, np.uint64))))
    positions, rows = ids.find_many(wanted)
    assert sorted(zip(positions.tolist(), rows.tolist(), strict=True)) == [
        (position, row) for position, value in enumerate(wanted) for row in np.flatnonzero(values == value).tolist()
    ]


def test_rows_are_numbered_in_as_few_bits_as_fit():
    assert (sorted_ids.row_type(1 << 32), sorted_ids.row_type((1 << 32) + 1)) == (np.uint32, np.uint64)


def test_ids_that_repeat_name_all_their_rows(storage, small_batches):
    build(storage, [[0, 1], [0, 0]], "a", ids=["x", "y"])
    build(storage, [[0] * 3], "b", ids=["y", "y", "y"])
    table = open_index(storage.url, PROFILE)
    assert table.sources == ("a", "b")
    assert (table.find("x"), table.find("y"), table.find("z")) == ([0, 2], [1, 3, 4, 5, 6], [])
    assert (table.find("y", "a"), table.find("y", source="b"), table.find("x", "b")) == ([1, 3], [4, 5, 6], [])
    assert table.rows_of_source("b") == range(4, 7)


# Opening


def test_sources_follow_each_other_by_name(storage):
    second, _ = build(storage, [[1, 0]], "web")
    first, _ = build(storage, [[2], [0, 3]], "books")
    build(storage, [[]], "empty")
    table = open_index(storage.url, PROFILE)
    assert table.sources == ("books", "empty", "web")
    assert table.to_arrow().to_pylist() == first + second
    assert table.column("num_tokens").to_pylist() == [row["num_tokens"] for row in first + second]
    assert table.column("images").to_pylist() == [row["images"] for row in first + second]
    assert table.locate(3)[0] == "web"
    only = open_index(storage.url, PROFILE, sources=["web"])
    assert only.to_arrow().to_pylist() == second


def test_columns_are_those_of_the_mapped_file(storage):
    build(storage, [[1, 0, 2]])
    table = open_index(storage.url, PROFILE)
    mapped = {line.split()[-1]: line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if ".arrow" in line}
    start, end = (int(side, 16) for side in mapped[str(table_path(storage))].split("-"))
    for name in ("num_tokens", "id_hash"):
        (chunk,) = table.column(name).chunks
        assert start <= chunk.buffers()[1].address < end


def test_other_programs_read_the_same_sums(storage):
    build(storage, [[1, 0, 2], [4, 0, 1, 0]], "a", unusable=[1])
    build(storage, [[0, 3]], "b")
    table = open_index(storage.url, PROFILE)
    files = {name: pa.ipc.open_file(str(table_path(storage, name))).read_all() for name in ("a", "b")}
    rows = duckdb.from_arrow(files["a"]).union(duckdb.from_arrow(files["b"]))  # noqa: F841 - the query names it
    query = """
        select count(*), sum(num_tokens), sum(num_images), sum(len(images)),
               (select sum(image.width) from (select unnest(images) as image from rows)),
               sum(record_size), count(*) filter (status = 0), bit_xor(id_hash)
        from rows
    """
    (sums,) = duckdb.query(query).fetchall()
    images = [image for row in range(len(table)) for image in table.images_of(row)]
    columns = {name: table.column(name).to_numpy() for name in ("num_tokens", "num_images", "record_size", "id_hash")}
    assert sums == (
        len(table),
        columns["num_tokens"].sum(),
        columns["num_images"].sum(),
        len(images),
        sum(image.width for image in images),
        columns["record_size"].sum(),
        table.usable.sum(),
        np.bitwise_xor.reduce(columns["id_hash"]),
    )


@pytest.mark.parametrize("call", [lambda t: t.row(3), lambda t: t.row(-1), lambda t: t.locate(3), lambda t: t.images_of(99)])
def test_a_row_that_is_not_there_is_refused(storage, call):
    build(storage, [[1, 0, 2]])
    with pytest.raises(UsageError, match=r"found row -?\d+, expected one of the index's 3, from 0"):
        call(open_index(storage.url, PROFILE))


def test_what_binary_search_would_get_wrong_is_refused(storage):
    build(storage, [[0, 0]], "a")
    build(storage, [[0, 0, 0]], "b")
    table = open_index(storage.url, PROFILE)
    tokens = table.column("num_tokens").to_pylist()
    assert table.take("num_tokens", np.array([2, 4, 4]), "b").tolist() == [tokens[2], tokens[4], tokens[4]]
    for rows in ([1, 2], [4, 5]):
        with pytest.raises(UsageError, match=rf"found rows {rows[0]} to {rows[1]}, expected some of source 'b': range\(2, 5\)"):
            table.take("num_tokens", np.array(rows), "b")
    with pytest.raises(UsageError, match="rows to take: found 2 after 3 at 1, expected them sorted"):
        table.take("num_tokens", np.array([3, 2]), "b")
    with pytest.raises(UsageError, match="hashes to find: found 1 after 5 at 2, expected them sorted"):
        table.find_many(np.array([0, 5, 1], np.uint64), "b")


def test_a_selection_is_usable_and_wanted_and_not_kept(storage, small_batches):
    build(storage, [[0] * 9], unusable=[2])
    storage.publish_bytes("exclude/bad.txt", b"sample-0-4\n")
    table = open_index(storage.url, PROFILE)
    even = table.select(lambda batch: batch.column("id_hash").to_numpy() % 2 == 0)
    assert "usable" not in vars(table)
    hashes = table.column("id_hash").to_numpy()
    assert even.tolist() == (table.usable & (hashes % 2 == 0)).tolist()
    assert np.flatnonzero(~table.usable).tolist() == [2, 4]


def test_names_that_are_not_there_are_refused(storage):
    _, manifests = build(storage, [[1, 0, 2]])
    table = open_index(storage.url, PROFILE)
    part_id = manifests[0].part_id
    for call, message in (
        (lambda: table.column("tokens"), "found no column 'tokens' in the index, expected one of: num_text_tokens, "),
        (lambda: table.find("a", "books"), "found no source 'books' in the index, expected one of: web"),
        (lambda: table.row_of("web", "none", 0), "source 'web': found no part 'none' in its index"),
        (lambda: table.row_of("web", part_id, 3), f"part {part_id} of source 'web': line 3 of 3"),
        (lambda: table.row_of("web", part_id, -1), f"part {part_id} of source 'web': line -1 of 3"),
        (lambda: open_index(storage.url, "other"), r"other/profile.json: found no file, .* \(this dataset has: small\)"),
        (lambda: open_index(storage.url, PROFILE, sources=["a"]), "found no source 'a', expected some of: web"),
    ):
        with pytest.raises(UsageError, match=message):
            call()


def test_tables_behind_their_source_are_refused_with_names(storage):
    _, manifests = build(storage, [[1], [2], [0]])
    build(storage, [[0]], "fine")
    repacked = [manifests[0], make_manifest(1, 1, version=1), make_manifest(8, 5)]
    storage.publish_bytes(layout.source_file("web"), encode_source("web", repacked))
    Path(storage.url, layout.source_dir("late")).mkdir()
    with pytest.raises(FormatError) as caught:
        open_index(storage.url, PROFILE)
    message = str(caught.value)
    assert "index/small/late.arrow: found no file, but the dataset has source 'late'" in message
    assert f"'web': 1 parts are missing (packed, not counted): {repacked[2].part_id}" in message
    assert f"'web': 1 parts are foreign (counted, not in the source): {manifests[2].part_id}" in message
    assert f"'web': 1 parts are stale (packed again after they were counted): {manifests[1].part_id}" in message
    assert "fine" not in message
    assert open_index(storage.url, PROFILE, check=False).sources == ("fine", "web")
    assert open_index(storage.url, PROFILE, sources=["fine"]).num_rows == 1
    os.unlink(Path(storage.url, layout.source_file("web")))
    with pytest.raises(FormatError, match=r"source.json: found no file, but source 'web' has an index"):
        open_index(storage.url, PROFILE, sources=["web"])


def test_a_table_of_another_profile_is_refused(storage):
    build(storage, [[1]])
    storage.publish_bytes(layout.profile_file(PROFILE), encode_document("profile", {"fingerprint": "e" * 32}))
    with pytest.raises(FormatError, match=rf"web.arrow: found counts of profile fingerprint {FINGERPRINT}, expected e+"):
        open_index(storage.url, PROFILE, check=False)
    shutil.copytree(Path(storage.url, "index", PROFILE), Path(storage.url, "index", "copy"))
    with pytest.raises(FormatError, match=r"found profile, source \('small', 'web'\), expected \('copy', 'web'\)"):
        open_index(storage.url, "copy")
    storage.publish_bytes(layout.profile_file(PROFILE), encode_document("profile", {}))
    with pytest.raises(FormatError, match=r"profile.json: found fingerprint None, expected text"):
        open_index(storage.url, PROFILE)


@pytest.mark.parametrize("ids", [False, True])
def test_a_cut_table_is_refused(storage, ids):
    build(storage, [[1, 0, 2]])
    path = table_path(storage, ids=ids)
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=rf"{path.name}: not a whole Arrow file"):
            open_index(storage.url, PROFILE)
    path.unlink()
    with pytest.raises(FormatError, match=r"web.*\.arrow: found no file"):
        open_index(storage.url, PROFILE)


def test_ids_of_another_table_are_refused(storage):
    _, manifests = build(storage, [[1], [0]])
    old = table_path(storage, ids=True).read_bytes()
    write_one(storage, more := make_manifest(5, 1), make_rows([0], seed=5))
    consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT)
    table_path(storage, ids=True).write_bytes(old)
    with pytest.raises(FormatError, match=r"web.arrow: its .ids.arrow is of other parts: indexing is at work or was interr"):
        open_index(storage.url, PROFILE, check=False)


def test_a_table_that_is_open_stays_as_it_was(storage):
    expected, manifests = build(storage, [[1], [0]])
    table = open_index(storage.url, PROFILE)
    write_one(storage, more := make_manifest(5, 1), make_rows([0], seed=5))
    consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT)
    assert table.to_arrow().to_pylist() == expected


def test_the_index_moves_with_its_dataset(storage, tmp_path):
    expected, _ = build(storage, [[1, 2], [0]])
    moved = tmp_path / "elsewhere" / "set"
    shutil.move(storage.url, tmp_path / "elsewhere" / "set")
    assert open_index(str(moved), PROFILE).to_arrow().to_pylist() == expected
    for path in Path(moved, "index").rglob("*.arrow"):
        assert str(tmp_path).encode() not in path.read_bytes()


def test_part_keys_are_those_of_the_manifests(storage):
    _, manifests = build(storage, [[1, 2], [], [0]])
    data = Path(storage.url, layout.source_file("web")).read_bytes()
    assert decode_part_keys(data, "x") == part_keys(manifests[::-1])
    for wrong, message in (
        (data[:-9], "x: found .* bytes that are not JSON"),
        (data.replace(b'"format_version": 1', b'"format_version": 2'), "x: found format version 2"),
        (data.replace(b'"kind": "source"', b'"kind": "part"'), "x: found kind 'part', expected 'source'"),
        (data.replace(b'"num_written"', b'"num_read_"'), "x: Object missing required field `num_written`"),
    ):
        with pytest.raises(FormatError, match=message):
            decode_part_keys(wrong, "x")


# Processes


def test_a_pickled_table_opens_again_elsewhere(storage, tmp_path, monkeypatch):
    build(storage, [[1, 2], [0]], ids=None)
    storage.publish_bytes("exclude/bad.txt", b"sample-0-1\n")
    monkeypatch.chdir(storage.url)
    table = open_index(".", PROFILE)
    data = pickle.dumps(table)
    Path(storage.url, "exclude", "bad.txt").write_bytes(b"sample-0-0\n")
    code = "import pickle, sys; t = pickle.load(sys.stdin.buffer); print(t.usable.tolist(), t.fingerprint, t.find('sample-1-0'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=data, cwd=tmp_path, capture_output=True, check=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert done.stdout.decode().strip() == f"[True, False, True] {table.fingerprint} [2]"


ROOT = str(Path(__file__).parents[2])


def test_a_pickled_table_that_was_indexed_again_is_refused(storage):
    _, manifests = build(storage, [[1], [0]])
    data = pickle.dumps(open_index(storage.url, PROFILE))
    write_one(storage, more := make_manifest(5, 1), make_rows([0], seed=5))
    consolidate(storage, PROFILE, "web", [*manifests, more], FINGERPRINT)
    with pytest.raises(FormatError, match=r"sources web were indexed again since this process's parent opened it"):
        pickle.loads(data)


def _in_child(table, rows, answers):
    answers.put([(table.row(row), table.find(f"sample-0-{row}"), bool(table.usable[row])) for row in rows])


def test_forked_workers_read_the_same_rows(storage):
    build(storage, [[1, 0, 3, 2]], unusable=[1])
    table = open_index(storage.url, PROFILE)
    expected = [(table.row(row), [row], row != 1) for row in range(4)]
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    children = [fork.Process(target=_in_child, args=(table, range(4), answers)) for _ in range(3)]
    for child in children:
        child.start()
    assert [answers.get(timeout=60) for _ in children] == [expected] * 3
    for child in children:
        child.join(60)
        assert child.exitcode == 0


# Ending anywhere


class ProcessEnds(BaseException):
    """Stands for SIGKILL."""


class Fuse:
    """Lets `length` storage operations happen and no more."""

    def __init__(self, monkeypatch):
        self.count, self.length = 0, None
        monkeypatch.setattr(LocalStorage, "on_operation", lambda storage, verb, name: self.burn())

    def burn(self):
        if self.length is not None and self.count >= self.length:
            raise ProcessEnds
        self.count += 1

    def run(self, work, length):
        self.count, self.length = 0, length
        try:
            work()
        except ProcessEnds:
            return False
        finally:
            self.length = None
        return True


def test_ends_anywhere_and_again_in_the_rerun(storage, monkeypatch, small_batches):
    pieces = pieces_of([[1, 0, 2], [], [4, 1]])
    manifests = [make_manifest(number, len(rows)) for number, rows in enumerate(pieces)]
    write_parts(storage, [])

    def work():
        for manifest, rows in zip(manifests, pieces, strict=True):
            if part_state(storage, PROFILE, manifest, profile_fingerprint=FINGERPRINT).state is not PartState.DONE:
                write_one(storage, manifest, rows)
        consolidate(storage, PROFILE, "web", manifests, FINGERPRINT, merge_stats=b"".join)

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    storage._fsync = True
    storage.publish_bytes(layout.source_file("web"), encode_source("web", manifests))
    clean = bytes_below(storage)
    fuse = Fuse(monkeypatch)
    assert fuse.run(work, None)
    whole, expected = fuse.count, bytes_below(storage)
    assert len(expected) == 6
    for length in range(whole):
        _reset(storage, clean)
        assert not fuse.run(work, length), f"operation {length} of {whole} was never reached"
        fuse.run(work, random.Random(length).randrange(whole))
        _whole_or_absent(storage, expected)
        assert fuse.run(work, None)
        assert published(storage) == expected, f"ended before operation {length}"
        assert open_index(storage.url, PROFILE).num_rows == 5


def _reset(storage, clean):
    for path in bytes_below(storage):
        if path not in clean:
            os.unlink(path)


def published(storage):
    return {path: data for path, data in bytes_below(storage).items() if layout.TEMPORARY_PREFIX not in path}


def _whole_or_absent(storage, expected):
    assert published(storage).items() <= expected.items()
    if table_path(storage).exists():
        assert open_index(storage.url, PROFILE).num_rows == 5


# Object stores


def test_an_index_in_an_object_store(s3, tmp_path, monkeypatch, small_batches):
    store = open_storage(f"{s3}/set")
    expected, manifests = build(store, [[1, 0, 2], [3], []])
    cache = tmp_path / "cache"
    table = open_index(store.url, PROFILE, cache_dir=str(cache))
    assert table.to_arrow().to_pylist() == expected
    assert sorted(path.name.partition("-")[2].partition("-")[2] for path in cache.glob("*.arrow")) == [
        "web.arrow",
        "web.ids.arrow",
    ]
    copies = {path: path.stat().st_ino for path in cache.iterdir()}
    again = pickle.loads(pickle.dumps(table))
    assert (again.find("sample-1-0"), again.digests) == ([3], table.digests)
    assert copies == {path: path.stat().st_ino for path in cache.iterdir()}
    write_one(store, more := make_manifest(5, 1), make_rows([0], seed=5))
    manifests.append(more)
    store.publish_bytes(layout.source_file("web"), encode_source("web", manifests))
    with pytest.raises(FormatError, match=rf"1 parts are missing \(packed, not counted\): {more.part_id}"):
        open_index(store.url, PROFILE, cache_dir=str(cache))
    assert consolidate(store, PROFILE, "web", manifests, FINGERPRINT).written
    assert not consolidate(store, PROFILE, "web", manifests, FINGERPRINT).written
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert open_index(store.url, PROFILE, cache_dir=str(cache)).num_rows == 5
    assert len(list(cache.glob("*.arrow"))) == 2
    assert table.to_arrow().to_pylist() == expected
    assert open_index(store.url, PROFILE).num_rows == 5
    assert len(list((tmp_path / "home" / "bayplan").glob("*.arrow"))) == 2


def test_large_remote_files_are_read_in_ranges(s3, monkeypatch, small_batches):
    from indexer.table import files

    monkeypatch.setattr(files, "_WHOLE_BYTES", 10)
    store = open_storage(f"{s3}/set")
    rows = pieces_of([[1, 0, 2, 5, 0, 0], [3]])
    manifests = write_parts(store, rows)
    assert consolidate(store, PROFILE, "web", manifests, FINGERPRINT, merge_stats=b"".join).num_rows == 7
    part_id = manifests[0].part_id
    assert read_stats(store, PROFILE, "web").startswith(part_id.encode())
    states = part_states(store, PROFILE, "web", [*manifests, make_manifest(7, 1)], profile_fingerprint=FINGERPRINT)
    assert [check.state for check in states] == ["done", "done", "missing"]


class Counting:
    """A remote file that counts the bytes asked of it."""

    def __init__(self, file, counts):
        self._file, self._counts = file, counts

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def seek(self, *where):
        return self._file.seek(*where)

    def read(self, size=-1):
        data = self._file.read(size)
        self._counts.append(len(data))
        return data


@pytest.mark.parametrize("tail", [40, 4096])
def test_of_remote_parts_only_the_end_is_looked_at(s3, monkeypatch, tail):
    """Also where the footer is longer than what is read first."""
    monkeypatch.setattr(index_files, "_TAIL_BYTES", tail)
    store = open_storage(f"{s3}/set")
    manifests = write_parts(store, pieces_of([[0] * 5000, [1]]))
    size = store.stat(layout.index_part_file(PROFILE, "web", manifests[0].part_id)).size
    counts = []
    opened = store.open_read
    monkeypatch.setattr(store, "open_read", lambda name: Counting(opened(name), counts))
    assert part_state(store, PROFILE, manifests[0], profile_fingerprint=FINGERPRINT).stats == manifests[0].part_id.encode()
    states = part_states(store, PROFILE, "web", manifests, profile_fingerprint=FINGERPRINT)
    assert [check.state for check in states] == ["done", "done"]
    assert tail <= sum(counts) < 3 * 4096 + 1 < size
    store.publish_bytes(layout.index_part_file(PROFILE, "web", manifests[0].part_id), b"ARROW1" * 9)
    assert part_state(store, PROFILE, manifests[0], profile_fingerprint=FINGERPRINT).state is PartState.DAMAGED


@pytest.mark.parametrize("ids", [False, True])
def test_a_damaged_copy_is_made_anew(s3, tmp_path, ids):
    store = open_storage(f"{s3}/set")
    expected, _ = build(store, [[1, 0, 2], [3]])
    open_index(store.url, PROFILE, cache_dir=str(tmp_path))
    (copy,) = (path for path in tmp_path.glob("*.arrow") if path.name.endswith(".ids.arrow") is ids)
    whole = copy.read_bytes()
    copy.write_bytes(b"\0" * len(whole))
    assert open_index(store.url, PROFILE, cache_dir=str(tmp_path)).to_arrow().to_pylist() == expected
    assert copy.read_bytes() == whole


def test_a_copy_of_a_damaged_table_names_both(s3, tmp_path):
    store = open_storage(f"{s3}/set")
    build(store, [[1, 0, 2]])
    store.publish_bytes(layout.index_table_file(PROFILE, "web"), b"\0" * 100)
    with pytest.raises(FormatError, match=rf"{store.url}/.*web.arrow: not a whole .* made anew and is no better: {tmp_path}/"):
        open_index(store.url, PROFILE, cache_dir=str(tmp_path))


def _open_copy(url, cache, answers):
    answers.put(open_index(url, PROFILE, cache_dir=cache).num_rows)


def test_processes_that_start_together_share_one_copy(s3, tmp_path):
    store = open_storage(f"{s3}/set")
    build(store, [[1] * 50, [0] * 30])
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    cache = str(tmp_path / "cache")
    children = [spawn.Process(target=_open_copy, args=(store.url, cache, answers)) for _ in range(3)]
    for child in children:
        child.start()
    assert [answers.get(timeout=120) for _ in children] == [80] * 3
    for child in children:
        child.join(60)
    names = sorted(os.listdir(cache))
    assert len([name for name in names if name.endswith(".arrow")]) == 2
    assert not [name for name in names if name.startswith(layout.TEMPORARY_PREFIX)]


def test_a_copy_cut_on_the_way_is_not_published(s3, tmp_path, monkeypatch, quick_retries):
    store = open_storage(f"{s3}/set")
    build(store, [[1, 0, 2]])
    monkeypatch.setattr(local_copy.shutil, "copyfileobj", lambda remote, file, size: file.write(remote.read()[:-1]))
    with pytest.raises(FormatError, match=r"web.arrow: read .* bytes, expected .*: it was written again meanwhile"):
        open_index(store.url, PROFILE, cache_dir=str(tmp_path))
    assert not list(tmp_path.glob("*.arrow"))
