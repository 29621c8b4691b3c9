"""Lists of excluded ids: how they are read, what they match, what they cost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
from index_rows import FINGERPRINT, PROFILE, make_rows, write_parts

from indexer.exclusion import read_exclusions
from indexer.table import consolidate, open_index
from packer.format.errors import FormatError, UsageError
from packer.storage import LocalStorage


@pytest.fixture
def storage(tmp_path):
    """Two sources: `text` with ids a b c, `web` with ids a a d in two parts, its last row not usable."""
    store = LocalStorage(str(tmp_path / "set"), fsync=False)
    parts = {
        "web": [make_rows([1, 2], ids=["a", "a"]), make_rows([0], ids=["d"], unusable=[0])],
        "text": [make_rows([0, 0, 0], ids=["a", "b", "c"], seed=1)],
    }
    for source, pieces in parts.items():
        consolidate(store, PROFILE, source, write_parts(store, pieces, source), FINGERPRINT)
    return store


def put(storage, name, data):
    storage.publish_bytes(f"exclude/{name}", data)


def arrow(table, *, stream=False):
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def parquet(table):
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def test_no_lists_exclude_nothing(storage):
    table = open_index(storage.url, PROFILE)
    assert table.exclusion is not None
    assert (len(table.exclusion.rows), table.exclusion.lists) == (0, [])
    assert table.usable.tolist() == [True] * 5 + [False]


def test_a_list_excludes_every_row_with_its_ids(storage):
    put(storage, "bad.txt", b"\xef\xbb\xbfa\r\n\n  \nnone 1\nc\n" + b"".join(b"none %d\n" % n for n in range(2, 9)))
    table = open_index(storage.url, PROFILE)
    assert table.sources == ("text", "web")
    assert table.usable.tolist() == [False, True, False, False, False, False]
    report = table.exclusion
    assert report.rows.tolist() == [0, 2, 3, 4]
    (effect,) = report.lists
    assert (effect.name, effect.num_ids, effect.num_matched, effect.num_rows) == ("exclude/bad.txt", 10, 2, 4)
    assert effect.unmatched == [f"none {number}" for number in range(1, 6)]
    tokens = table.column("num_tokens").to_numpy()
    assert {name: (effect.num_rows, effect.num_tokens) for name, effect in report.sources.items()} == {
        "text": (2, tokens[0] + tokens[2]),
        "web": (2, tokens[3] + tokens[4]),
    }
    assert open_index(storage.url, PROFILE, exclude=False).usable.tolist() == [True] * 5 + [False]


@pytest.mark.parametrize("write", [arrow, lambda table: arrow(table, stream=True), parquet])
def test_a_table_may_name_sources(storage, write):
    table = pa.table({"n": [1, 2, 3], "id": ["a", "b", "d"], "source": ["web", "web", "web"]})
    put(storage, "some.parquet" if write is parquet else "some.arrow", write(table))
    report = open_index(storage.url, PROFILE).exclusion
    assert report.rows.tolist() == [3, 4, 5]
    assert (report.lists[0].num_matched, report.lists[0].unmatched) == (2, ["b"])
    assert report.sources["text"].num_rows == 0


def test_lists_add_up_and_change_the_fingerprint(storage):
    before = open_index(storage.url, PROFILE)
    put(storage, "1.txt", b"a\n")
    put(storage, "2.parquet", parquet(pa.table({"id": pa.array(["a", "b"], pa.large_string())})))
    after = open_index(storage.url, PROFILE)
    assert [(one.num_matched, one.num_rows) for one in after.exclusion.lists] == [(1, 3), (2, 4)]
    assert after.exclusion.rows.tolist() == [0, 1, 3, 4]
    assert before.fingerprint != after.fingerprint
    assert before.digests == after.digests
    before.exclude(read_exclusions(storage))
    assert before.fingerprint == after.fingerprint
    assert before.usable.tolist() == after.usable.tolist()


def test_lists_are_read_once_until_they_change(storage, monkeypatch):
    put(storage, "1.txt", b"a\n")
    reads = []
    monkeypatch.setattr(LocalStorage, "on_operation", lambda store, verb, name: reads.append(name) if verb == "read" else None)
    first = read_exclusions(storage)
    assert read_exclusions(LocalStorage(storage.url)) is first
    assert reads == ["exclude/1.txt"]
    put(storage, "2.txt", b"bb\n")
    second = read_exclusions(storage)
    assert [one.name for one in second.lists] == ["exclude/1.txt", "exclude/2.txt"]
    storage.remove("exclude/1.txt")
    assert [one.name for one in read_exclusions(storage).lists] == ["exclude/2.txt"]


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("ids.csv", b"a\n", UsageError, r"exclude/ids.csv: found a file ending in '.csv', expected a list ending in .txt"),
        ("ids.txt", b"a\nb\n\xff\n", FormatError, r"exclude/ids.txt: line 3: found bytes that are not UTF-8"),
        ("ids.arrow", arrow(pa.table({"id": ["a"]}))[:-20], FormatError, r"exclude/ids.arrow: cannot be read .*: it is cut"),
        ("ids.arrow", b"", FormatError, r"exclude/ids.arrow: cannot be read"),
        ("ids.parquet", b"PAR1", FormatError, r"exclude/ids.parquet: cannot be read"),
        ("ids.arrow", arrow(pa.table({"key": ["a"]})), UsageError, r"ids.arrow: found columns \['key'\], expected `id`"),
        ("ids.parquet", parquet(pa.table({"id": [1]})), UsageError, r"found column `id` of type int64, expected strings"),
        ("ids.parquet", parquet(pa.table({"id": ["a", None]})), UsageError, r"found 1 nulls in column `id`, expected none"),
    ],
)
def test_a_list_that_cannot_be_used_is_named(storage, name, data, error, message):
    put(storage, name, data)
    with pytest.raises(error, match=message):
        open_index(storage.url, PROFILE)
    with pytest.raises(error, match=message):
        read_exclusions(storage)


def test_many_ids_against_many_rows_match_a_set(tmp_path):
    store = LocalStorage(str(tmp_path), fsync=False)
    random = np.random.default_rng(1)
    names = [[f"id {number}" for number in random.integers(0, 3000, 700)] for _ in range(4)]
    manifests = write_parts(store, [make_rows([0] * 700, ids=ids) for ids in names])
    consolidate(store, PROFILE, "web", manifests, FINGERPRINT)
    excluded = [f"id {number}" for number in random.integers(0, 4000, 900)]
    put(store, "many.txt", "\n".join(excluded).encode())
    report = open_index(str(tmp_path), PROFILE).exclusion
    every = [name for ids in names for name in ids]
    assert report.rows.tolist() == [row for row, name in enumerate(every) if name in set(excluded)]
    assert report.lists[0].num_matched == sum(name in set(every) for name in excluded)


def test_what_is_no_list_is_refused_since_it_would_be_passed_over(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), fsync=False)
    (tmp_path / "exclude" / "more").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"exclude: found the folder 'more', expected lists only: move them up"):
        read_exclusions(storage)
    (tmp_path / "exclude" / "more").rmdir()
    (tmp_path / "exclude").rmdir()
    (tmp_path / "exclude").write_text("an id\n")
    with pytest.raises(UsageError, match=r"exclude: found a file, expected a folder of lists"):
        read_exclusions(storage)
