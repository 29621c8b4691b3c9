"""Images and records by position: the right bytes or an error that names the place, from any thread, process and store."""

import dataclasses
import errno
import itertools
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faulty_store as faults
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packed import open_bundles, read_in_children

from packer.format import layout
from packer.format.errors import BayplanError, FormatError, UsageError
from packer.format.record import ImageEntry
from packer.storage import open_storage
from plugin import BundleReader, FileChanged, FileCut, FileMissing, ReadError, StoreFailed
from plugin.pieces import image_piece
from plugin.spans import Piece, Span, coalesce, single

ROOT = Path(__file__).parents[2]
in_children = pytest.mark.parametrize("method", ["fork", "spawn"])
may_fork = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def copied(corpus, tmp_path):
    """The corpus in a folder of the test's own, to be damaged."""
    shutil.copytree(corpus.url, tmp_path / "copy")
    return dataclasses.replace(corpus, url=str(tmp_path / "copy"))


def bundle_path(packed, source, entry):
    return Path(packed.url, layout.source_dir(source), entry["bundle"])


def largest(packed):
    """(Source, entry, bytes) of the largest image."""
    return max(packed.entries, key=lambda item: item[1]["size"])


def check_all(reader, packed):
    """Every record and image, in every way there is to read them."""
    for row, record, images in zip(packed.rows, packed.records, packed.images, strict=True):
        sample = reader.read_sample(row)
        assert (sample.record, sample.images) == (record, images)
        assert reader.read_images(row.source, record["images"], sample_id=record["id"]) == images
    for source, entry, data in packed.entries:
        assert reader.read(source, entry["bundle"], entry) == data
    assert reader.read_records(packed.rows) == packed.records


def test_everything_is_read_from_a_folder(corpus):
    reader = BundleReader(corpus.url)
    check_all(reader, corpus)
    assert len(corpus.entries) > 400
    assert reader.num_retries == 0
    assert 0 < reader.num_open < 40
    reader.close()
    assert reader.num_open == 0
    assert reader.read_record(corpus.rows[0]) == corpus.records[0]


def test_everything_is_read_from_another_file_system(corpus, store):
    reader = BundleReader(store.url)
    check_all(reader, corpus)
    assert (reader.num_retries, reader.num_open) == (0, 0)


def test_neighbours_are_read_at_once_and_equal_images_too(corpus, store):
    reader = BundleReader(store.url)
    row, record, images = max(zip(corpus.rows, corpus.records, corpus.images, strict=True), key=lambda item: len(item[2]))
    assert len(images) > 20
    store.reads.clear()
    assert reader.read_images(row.source, record["images"] * 2) == images * 2
    assert len(store.reads) < len(images) / 2
    apart = BundleReader(store.url, gap_bytes=0, span_bytes=1)
    store.reads.clear()
    assert apart.read_images(row.source, record["images"]) == images
    assert len(store.reads) == len(images)


def test_an_entry_may_be_an_object_or_a_record_field(corpus):
    source, entry, data = largest(corpus)
    reader = BundleReader(corpus.url)
    assert reader.read(source, entry["bundle"], ImageEntry(**entry)) == data
    assert reader.read_images(source, [ImageEntry(**entry)]) == [data]
    assert reader.read_images(source, []) == []


@pytest.mark.parametrize("change", [{"offset": -1}, {"size": -5}, {"size": 0}, {"size": "9"}, {"offset": None}, {"crc32": None}])
def test_an_entry_that_is_none_is_named(corpus, change):
    source, entry, _ = largest(corpus)
    for check_crc in (True, False):
        reader = BundleReader(corpus.url, check_crc=check_crc)
        reader.read(source, entry["bundle"], entry)
        with pytest.raises(FormatError, match=r"source '.*' of sample 'a-1': found the image entry"):
            reader.read_images(source, [entry, {**entry, "offset": entry["offset"] + entry["size"], **change}], sample_id="a-1")
    with pytest.raises(FormatError, match=r"found the bundle name '\.\./x\.zip'"):
        BundleReader(corpus.url).read(source, "../x.zip", entry)


pieces_of_a_file = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 300), st.integers(1, 60)), max_size=25
)  # fmt: skip


@given(pieces_of_a_file, st.integers(0, 40), st.integers(1, 200))
@example([("a", 0, 5), ("a", 5, 5), ("a", 0, 60), ("a", 20, 3)], 0, 60)
def test_spans_hold_every_piece_once_within_their_limits(found, gap_bytes, span_bytes):
    pieces = [Piece(("web", name), offset, size, None, slot) for slot, (name, offset, size) in enumerate(found)]
    spans = coalesce(pieces, gap_bytes=gap_bytes, span_bytes=span_bytes)
    assert sorted(piece.slot for span in spans for piece in span.pieces) == list(range(len(pieces)))
    for span in spans:
        assert all(piece.file == span.file for piece in span.pieces)
        assert span.start == min(piece.offset for piece in span.pieces)
        assert span.end == max(piece.offset + piece.size for piece in span.pieces)
        reached = span.start
        for piece in span.pieces:
            assert piece.offset - reached <= gap_bytes
            reached = max(reached, piece.offset + piece.size)
        if span.end - span.start > span_bytes:
            assert len(span.pieces) == 1
    for one, two in itertools.pairwise(spans):
        first = two.pieces[0]
        if one.file == two.file and first.offset - one.end <= gap_bytes:
            assert max(one.end, first.offset + first.size) - one.start > span_bytes


@given(pieces_of_a_file, st.integers(0, 40), st.integers(1, 200), st.randoms(use_true_random=False))
def test_ranges_give_the_same_bytes_however_they_are_joined(found, gap_bytes, span_bytes, chance):
    data = {name: chance.randbytes(400) for name in "ab"}
    with tempfile.TemporaryDirectory() as folder:
        os.makedirs(f"{folder}/sources/web")
        for name, content in data.items():
            Path(folder, "sources/web", name).write_bytes(content)
        entries = [{"bundle": name, "offset": offset, "size": size, "crc32": 0} for name, offset, size in found]
        reader = BundleReader(folder, check_crc=False, gap_bytes=gap_bytes, span_bytes=span_bytes)
        expected = [data[name][offset : offset + size] for name, offset, size in found]
        assert reader.read_images("web", entries) == expected


# --- processes and threads ---


@may_fork
@in_children
def test_children_of_one_reader_read_every_byte_right(corpus, method):
    reader = BundleReader(corpus.url)
    check_all(reader, corpus)
    in_parent = reader.num_open
    found = read_in_children(method, reader, corpus, meanwhile=lambda: check_all(reader, corpus))
    assert found == [((0, 0), 0, in_parent)] * 4
    assert open_bundles() > 0
    assert reader.num_open == in_parent


def upload(packed, url):
    target, origin = open_storage(url), open_storage(packed.url)
    for source in {row.source for row in packed.rows}:
        for file in origin.list_dir(layout.source_dir(source)):
            target.publish_bytes(file.name, origin.read_bytes(file.name))


@pytest.fixture
def in_s3(corpus, s3):
    """Some hundred samples of the corpus in an S3 server."""
    kept = [number for number, row in enumerate(corpus.rows) if row.source in ("clipart", "photos")][:150]
    chosen = {name: [getattr(corpus, name)[number] for number in kept] for name in ("rows", "records", "images")}
    packed = dataclasses.replace(corpus, **chosen)
    upload(packed, f"{s3}/set")
    return dataclasses.replace(packed, url=f"{s3}/set")


def test_everything_is_read_from_an_object_store(in_s3):
    check_all(BundleReader(in_s3.url), in_s3)


@may_fork
@in_children
def test_children_read_an_object_store_that_their_parent_read_before(in_s3, method):
    reader = BundleReader(in_s3.url)
    source, entry, data = in_s3.entries[0]
    assert reader.read(source, entry["bundle"], entry) == data
    assert read_in_children(method, reader, in_s3) == [((0, 0), 0, 0)] * 4


def test_damage_in_an_object_store_is_named(in_s3, quick_retries):
    reader = BundleReader(in_s3.url)
    source, entry, _ = largest(in_s3)
    name = f"{layout.source_dir(source)}/{entry['bundle']}"
    target = open_storage(in_s3.url)
    whole = target.read_bytes(name)
    for content, error in [(whole[: entry["offset"] + 3], FileCut), (whole[:9], FileCut), (bytes(len(whole)), FileChanged)]:
        target.publish_bytes(name, content)
        with pytest.raises(error, match=f"{in_s3.url}/{name} at offset {entry['offset']}"):
            reader.read(source, entry["bundle"], entry)
    target.remove(name)
    with pytest.raises(FileMissing, match="found no file"):
        reader.read(source, entry["bundle"], entry)
    target.publish_bytes(name, whole)
    assert len(reader.read(source, entry["bundle"], entry)) == entry["size"]


def test_a_reader_is_pickled_without_its_descriptors(corpus):
    reader = BundleReader(corpus.url, check_crc=False, max_open=3)
    check_all(reader, corpus)
    twin = pickle.loads(pickle.dumps(reader))
    assert (twin.num_open, twin.check_crc, twin.dataset_url) == (0, False, corpus.url)
    check_all(twin, corpus)
    assert twin.num_open == 3


def test_threads_share_two_descriptors_over_many_bundles(corpus):
    """Every read may find its descriptor closed by another thread's."""
    reader = BundleReader(corpus.url, max_open=2)
    order = corpus.entries * 3
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: reader.read(item[0], item[1]["bundle"], item[1]) == item[2], order))
    assert all(found)
    assert reader.num_open <= 2


MANY_BUNDLES = """
import os, random, resource, sys, threading
from concurrent.futures import ThreadPoolExecutor
from plugin import BundleReader
folder, when = sys.argv[1:]
limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
if when == "before": limit()
reader = BundleReader(folder)
if when == "after": limit()
order = list(range(1500)) * 3
random.Random(2).shuffle(order)
def read(number):
    entry = {"offset": 3, "size": 8, "crc32": 0}
    return reader.read("web", f"{number}.zip", entry) == b"%08d" % number
reader.check_crc = False
with ThreadPoolExecutor(8) as pool:
    assert all(pool.map(read, order))
assert 1 <= reader.num_open < 64, reader.num_open
assert len(os.listdir("/proc/self/fd")) < 64
os.close(os.open(folder, os.O_RDONLY))
print("all right")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_thousands_of_bundles_are_read_under_a_low_limit_of_descriptors(tmp_path, when):
    folder = tmp_path / "sources" / "web"
    folder.mkdir(parents=True)
    for number in range(1500):
        (folder / f"{number}.zip").write_bytes(b"PK\3%08d" % number)
    command = [sys.executable, "-c", MANY_BUNDLES, str(tmp_path), when]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("all right\n", 0), done.stderr


# --- faults ---


def read_once(reader, packed, how):
    source, entry, data = largest(packed)
    if how == "read":
        return reader.read(source, entry["bundle"], entry, sample_id="a-17") == data
    return reader.read_images(source, [entry], sample_id="a-17") == [data]


each_way = pytest.mark.parametrize("how", ["read", "read_images"])


@each_way
@pytest.mark.parametrize("fault", [faults.short, faults.empty, faults.one_too_many, faults.wrong, faults.time_out, faults.lost])
def test_a_fault_that_passes_is_read_again(corpus, store, how, fault):
    reader = BundleReader(store.url)
    store.once.append(fault)
    assert read_once(reader, corpus, how)
    assert (reader.num_retries, len(store.reads)) == (1, 2)


@each_way
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (faults.short, StoreFailed, r"_WrongLength: \d+ bytes where \d+ were asked for"),
        (faults.one_too_many, StoreFailed, r"_WrongLength: \d+ bytes where \d+ were asked for"),
        (faults.wrong, FileChanged, r"found crc32 0x[0-9a-f]{8} \(read twice\), expected crc32 0x[0-9a-f]{8}: the file was"),
        (faults.time_out, StoreFailed, "TimeoutError: no answer in time"),
        (faults.lost, StoreFailed, "ConnectionResetError: the store hung up"),
    ],
)
def test_a_fault_that_stays_is_refused_by_name(corpus, store, how, fault, error, message):
    reader = BundleReader(store.url)
    source, entry, _ = largest(corpus)
    store.always = staticmethod(fault)
    with pytest.raises(error, match=message) as caught:
        read_once(reader, corpus, how)
    place = caught.value.place
    assert (place.dataset, place.source, place.file) == (store.url, source, entry["bundle"])
    assert (place.offset, place.size, place.sample_id) == (entry["offset"], entry["size"], "a-17")
    for part in (store.url, source, entry["bundle"], f"offset {entry['offset']}", "'a-17'", "expected"):
        assert part in str(caught.value)
    assert len(store.reads) <= 4


def test_a_wrong_image_in_a_joined_read_is_read_again_alone(corpus, store):
    row, record, images = max(zip(corpus.rows, corpus.records, corpus.images, strict=True), key=lambda item: len(item[2]))
    store.once.append(faults.wrong)
    store.reads.clear()
    reader = BundleReader(store.url, gap_bytes=1 << 20)
    assert reader.read_images(row.source, record["images"]) == images
    first = min(record["images"], key=lambda entry: entry["offset"])
    assert store.reads[-1] == (first["bundle"], first["offset"], first["offset"] + first["size"])


def random_fault(chance):
    return chance.choice([faults.right] * 6 + [faults.short, faults.one_too_many, faults.wrong, faults.time_out])


def test_no_fault_ever_becomes_a_wrong_image(corpus, store):
    chance = random.Random(5)
    store.always = staticmethod(lambda data: random_fault(chance)(data))
    reader = BundleReader(store.url)
    refused = 0
    for source, entry, data in corpus.entries:
        try:
            assert reader.read(source, entry["bundle"], entry) == data
        except ReadError:
            refused += 1
    assert reader.num_retries > 100
    assert refused < len(corpus.entries) / 4


def test_what_a_store_never_heard_of_is_an_error_of_ours(corpus, store):
    def strange(data):
        raise KeyError("internal")

    store.always = staticmethod(strange)
    with pytest.raises(StoreFailed, match=r"found KeyError: 'internal'"):
        read_once(BundleReader(store.url), corpus, "read")
    with pytest.raises(UsageError, match=r"nosuch://x: .*scheme 'nosuch'"):
        read_once(BundleReader("nosuch://x"), corpus, "read")


def test_a_cut_bundle_is_named_with_the_image_that_lies_beyond_its_end(copied):
    source, entry, data = largest(copied)
    path = bundle_path(copied, source, entry)
    os.truncate(path, entry["offset"] + 10)
    for reader in (BundleReader(copied.url), BundleReader(copied.url, check_crc=False)):
        with pytest.raises(FileCut, match=f"found a file of {entry['offset'] + 10} bytes, expected at least"):
            reader.read(source, entry["bundle"], entry)
        with pytest.raises(FileCut, match=f"{path} at offset {entry['offset']}, {len(data)} bytes .*`bayplan verify"):
            reader.read_images(source, [item for name, item, _ in copied.entries if name == source])


def test_a_missing_bundle_and_a_missing_dataset_are_named(copied, tmp_path):
    source, entry, _ = largest(copied)
    bundle_path(copied, source, entry).unlink()
    with pytest.raises(FileMissing, match=f"{entry['bundle']} .*found no file: was it moved or deleted, or is the dataset not"):
        BundleReader(copied.url).read(source, entry["bundle"], entry)
    with pytest.raises(FileMissing, match="found no file"):
        BundleReader(str(tmp_path / "nowhere")).read_record(copied.rows[0])


@each_way
@pytest.mark.parametrize("is_open", [False, True])
def test_a_bundle_that_was_swapped_is_refused_or_the_old_one_read_on(copied, how, is_open):
    """A new file under the name: who has the old one open reads it right, everybody else refuses the new one."""
    source, entry, _ = largest(copied)
    path = bundle_path(copied, source, entry)
    reader = BundleReader(copied.url)
    if is_open:
        assert read_once(reader, copied, how)
    other = path.with_suffix(".new")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.rename(path)
    if is_open:
        assert read_once(reader, copied, how)
        reader.close()
    with pytest.raises(FileChanged, match=r"sample 'a-17'\): found crc32"):
        read_once(reader, copied, how)


@each_way
def test_a_bundle_that_was_damaged_while_it_was_open_is_refused(copied, how):
    """The same file, other bytes: one image of neighbours that are read at once."""
    source, entry, _ = largest(copied)
    reader = BundleReader(copied.url)
    neighbours = [item for name, item, _ in copied.entries if (name, item["bundle"]) == (source, entry["bundle"])]
    reader.read_images(source, neighbours)
    with open(bundle_path(copied, source, entry), "r+b") as file:
        file.seek(entry["offset"] + entry["size"] - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(FileChanged, match=f"offset {entry['offset']}, "):
        read_once(reader, copied, how)
    with pytest.raises(FileChanged, match=f"offset {entry['offset']}, "):
        reader.read_images(source, neighbours)
    assert reader.num_retries == 2


def test_a_bundle_that_was_restored_is_read_by_a_reader_that_has_the_damaged_one_open(copied):
    source, entry, data = largest(copied)
    path = bundle_path(copied, source, entry)
    kept = path.read_bytes()
    path.write_bytes(bytes(len(kept)))
    reader = BundleReader(copied.url)
    with pytest.raises(FileChanged):
        reader.read(source, entry["bundle"], entry)
    other = path.with_suffix(".new")
    other.write_bytes(kept)
    other.rename(path)
    assert reader.read(source, entry["bundle"], entry) == data


def test_without_checksums_a_read_still_has_its_length(copied):
    source, entry, data = largest(copied)
    path = bundle_path(copied, source, entry)
    path.write_bytes(bytes(path.stat().st_size))
    assert BundleReader(copied.url, check_crc=False).read(source, entry["bundle"], entry) == bytes(len(data))


def test_a_record_that_is_not_the_indexed_one_is_refused(copied, store):
    row = next(row for row in copied.rows if row.num_images)
    other = next(other for other in copied.rows if other.source == row.source and other.id_hash != row.id_hash)
    reader = BundleReader(copied.url)
    stale = dataclasses.replace(row, record_offset=other.record_offset, record_size=other.record_size)
    with pytest.raises(FileChanged, match=r"found the record of sample '.*', expected the record that was indexed"):
        reader.read_record(stale)
    with pytest.raises(FileChanged, match=r"found .* images where the index counted 99"):
        reader.read_record(dataclasses.replace(row, num_images=99))
    with pytest.raises(FileChanged, match="bytes that are not one line"):
        reader.read_record(dataclasses.replace(row, record_size=row.record_size - 1))
    with pytest.raises(FileChanged, match="not a record line"):
        reader.read_record(dataclasses.replace(row, record_offset=row.record_offset + 1, record_size=row.record_size - 1))
    faulty = BundleReader(store.url)
    store.once.append(faults.wrong)
    assert faulty.read_record(row) == reader.read_record(row)
    assert faulty.num_retries == 1


def test_a_large_read_takes_several_calls(corpus, monkeypatch):
    source, entry, data = largest(corpus)
    monkeypatch.setattr("plugin.files._MOST_AT_ONCE", 1000)
    span = Span((source, entry["bundle"]), entry["offset"], entry["offset"] + entry["size"], ())
    assert BundleReader(corpus.url)._files.read(span) == data


def test_errors_survive_pickling_and_torch(corpus):
    from torch._utils import ExceptionWrapper

    source, entry, _ = largest(corpus)
    with pytest.raises(FileMissing) as caught:
        BundleReader(corpus.url).read(source, "none.zip", entry, sample_id="x")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (type(twin), str(twin), twin.place) == (FileMissing, str(caught.value), caught.value.place)
    assert isinstance(twin, BayplanError)
    wrapper = ExceptionWrapper((FileMissing, caught.value, None), where="in a worker")
    with pytest.raises(FileMissing, match=r"none\.zip"):
        wrapper.reraise()


def test_a_path_may_be_relative_and_the_process_may_move(corpus, monkeypatch, tmp_path):
    monkeypatch.chdir(Path(corpus.url).parent)
    reader = BundleReader("dataset")
    monkeypatch.chdir(tmp_path)
    assert reader.read_record(corpus.rows[0]) == corpus.records[0]
    assert BundleReader(f"file://{corpus.url}").read_record(corpus.rows[0]) == corpus.records[0]
    with pytest.raises(UsageError, match="max_open: found 0"):
        BundleReader("dataset", max_open=0)


MSC = """
import pickle, sys
from plugin import BundleReader
rows, records, entries = pickle.load(open(sys.argv[1], "rb"))
reader = BundleReader("msc://here/dataset")
assert reader.read_records(rows) == records
assert all(reader.read(source, entry["bundle"], entry) == data for source, entry, data in entries)
assert not {"torch", "megatron", "ray"} & {name.partition(".")[0] for name in sys.modules}
from megatron.energon.epathlib import EPath
source, entry, data = entries[0]
path = EPath("msc://here/dataset") / "sources" / source / entry["bundle"]
with path.open("rb") as file:
    file.seek(entry["offset"])
    assert file.read(entry["size"]) == data
print("all right")
"""


def test_paths_of_the_multi_storage_client_are_read_as_energon_reads_them(corpus, tmp_path):
    pytest.importorskip("multistorageclient")
    root = Path(corpus.url).parent
    config = f"profiles: {{here: {{storage_provider: {{type: file, options: {{base_path: {root}}}}}}}}}\n"
    (tmp_path / "msc.yaml").write_text(config)
    with open(tmp_path / "expected", "wb") as file:
        pickle.dump((corpus.rows[:20], corpus.records[:20], corpus.entries[:20]), file)
    env = os.environ | {"MSC_CONFIG": str(tmp_path / "msc.yaml")}
    command = [sys.executable, "-W", "ignore", "-c", MSC, str(tmp_path / "expected")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["all right"], 0), done.stderr


def test_a_descriptor_is_closed_after_its_last_user(corpus):
    """Who reads while its descriptor leaves the cache must not find another file under its number."""
    source, entry, data = largest(corpus)
    reader = BundleReader(corpus.url)
    reader.read(source, entry["bundle"], entry)
    handle = reader._handles[source, entry["bundle"]]
    closed = threading.Thread(target=reader.close)
    closed.start()
    closed.join()
    assert os.pread(handle.descriptor, entry["size"], entry["offset"]) == data
    descriptor = handle.descriptor
    del handle
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# --- what is in memory already ---


def tells_memory(folder):
    """Whether the system can say what of a file is in memory."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x")
        file.flush()
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False


def test_what_is_in_memory_is_read_without_waiting(corpus):
    if not tells_memory(corpus.url):
        pytest.skip("this filesystem does not tell what is in memory")
    reader = BundleReader(corpus.url)
    source, entry, data = largest(corpus)
    span = single(image_piece(source, entry))
    assert reader.read_span_now(span) is None  # opening a file may wait
    assert reader.read_span(span) == [data]
    assert reader.read_span_now(span) == [data]
    for other, entries in itertools.groupby(corpus.entries, key=lambda item: (item[0], item[1]["bundle"])):
        found = list(entries)
        reader.read(found[0][0], other[1], found[0][1])
        for joined in reader.plan([image_piece(other[0], entry, slot) for slot, (_, entry, _) in enumerate(found)]):
            assert reader.read_span_now(joined) == [found[piece.slot][2] for piece in joined.pieces]


def test_what_is_wrong_in_memory_is_left_to_a_read_that_says_so(copied):
    source, entry, data = largest(copied)
    reader, trusting = BundleReader(copied.url), BundleReader(copied.url, check_crc=False)
    span = single(image_piece(source, entry))
    assert reader.read_span(span) == trusting.read_span(span) == [data]
    path = bundle_path(copied, source, entry)
    with open(path, "r+b") as file:
        file.seek(entry["offset"])
        file.write(bytes(len(data)))
    assert reader.read_span_now(span) is None
    assert trusting.read_span_now(span) in (None, [bytes(len(data))])
    with pytest.raises(FileChanged):
        reader.read_span(span)
    trusting.read_span(span)
    os.truncate(path, entry["offset"] + 1)
    assert trusting.read_span_now(span) is None


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="a call of Linux")
@pytest.mark.parametrize(("number", "asks_again"), [(errno.EAGAIN, True), (errno.EIO, True), (errno.EOPNOTSUPP, False)])
def test_what_nobody_can_say_is_not_in_memory(corpus, monkeypatch, number, asks_again):
    source, entry, data = largest(corpus)
    reader = BundleReader(corpus.url)
    span = single(image_piece(source, entry))
    reader.read_span(span)
    asked = []

    def refused(descriptor, buffers, offset, flags):
        asked.append(flags)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.preadv", refused)
    assert [reader.read_span_now(span), reader.read_span_now(span)] == [None, None]
    assert asked == [os.RWF_NOWAIT] * (1 + asks_again)
    assert reader.read_span(span) == [data]


def test_a_store_has_nothing_in_memory(corpus, store):
    source, entry, _ = largest(corpus)
    assert BundleReader(store.url).read_span_now(single(image_piece(source, entry))) is None
    assert store.reads == []
