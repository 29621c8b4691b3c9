import errno
import os
import pickle
import subprocess
import time

import fsspec
import pytest

from packer.format.digest import FileDigest
from packer.format.errors import FormatError, InputError, OutputError, RowError, StorageFault
from packer.format.layout import TEMPORARY_PREFIX
from packer.format.reasons import Reason
from packer.storage import (
    ByteRange,
    LocalStorage,
    ObjectStorage,
    RangeStore,
    TooLarge,
    join_url,
    list_matching,
    may_pass,
    objects,
    open_storage,
    open_url,
    read_url,
    same_as,
    stat_url,
    with_retries,
)

DAY = 24 * 3600


@pytest.fixture
def store(tmp_path):
    return LocalStorage(str(tmp_path / "out"))


def stage(store, name, data):
    staged = store.stage(name)
    with open(staged.path, "wb") as file:
        file.write(data)
    return staged


def holds(data):
    written = FileDigest()
    written.update(data)
    return same_as(written)


def files_of(store):
    return sorted(os.path.relpath(os.path.join(at, name), store.url) for at, _, names in os.walk(store.url) for name in names)


def test_a_published_file_is_there_whole_and_no_temporary_is_left(store):
    staged = stage(store, "sources/web/a.zip", b"data")
    assert files_of(store) != ["sources/web/a.zip"]
    assert store.stat("sources/web/a.zip") is None
    store.publish(staged, holds(b"data"))
    assert files_of(store) == ["sources/web/a.zip"]
    assert (store.stat("sources/web/a.zip").size, store.read_bytes("sources/web/a.zip")) == (4, b"data")


def test_publishing_syncs_the_file_before_its_name_appears_and_the_folder_after(tmp_path, monkeypatch):
    synced = []

    def note(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(("folder" if os.path.isdir(path) else "file", os.path.exists(tmp_path / "out/a")))

    monkeypatch.setattr(os, "fsync", note)
    store = LocalStorage(str(tmp_path / "out"))
    store.publish(stage(store, "a", b"data"), holds(b"data"))
    assert synced == [("file", False), ("folder", True)]
    fast = LocalStorage(str(tmp_path / "fast"), fsync=False)
    fast.publish(stage(fast, "a", b"data"), holds(b"data"))
    assert len(synced) == 2


def test_a_file_that_lost_bytes_while_it_was_written_does_not_appear(store):
    with pytest.raises(FormatError, match=r"read back 3 bytes, blake3 .*; wrote 4 bytes"):
        store.publish(stage(store, "a", b"dat"), holds(b"data"))
    assert store.stat("a") is None


def test_discarded_and_unpublished_files_are_never_listed(store):
    store.publish_bytes("d/b", b"1")
    staged = stage(store, "d/a", b"2")
    assert [file.name for file in store.list_dir("d")] == ["d/b"]
    store.discard(staged)
    store.discard(staged)
    assert files_of(store) == ["d/b"]


def test_a_folder_is_listed_in_order_and_a_missing_one_is_empty(store):
    for name in ("d/b", "d/a", "d/c/x", "d/10", "d/9"):
        store.publish_bytes(name, b"1")
    assert [file.name for file in store.list_dir("d")] == ["d/10", "d/9", "d/a", "d/b"]
    assert store.list_dirs("d") == ["c"]
    assert (store.list_dir("none"), store.list_dirs("none"), store.list_dir("d/a")) == ([], [], [])


def test_the_same_bytes_are_not_written_twice_and_other_bytes_replace_them(store):
    store.publish_bytes("a", b"one")
    before = os.stat(os.path.join(store.url, "a")).st_ino
    store.publish_bytes("a", b"one")
    assert os.stat(os.path.join(store.url, "a")).st_ino == before
    store.publish_bytes("a", b"two")
    assert store.read_bytes("a") == b"two"


def test_removing_twice_is_no_error_and_reading_what_is_gone_says_so(store):
    store.publish_bytes("a", b"1")
    store.remove("a")
    store.remove("a")
    with pytest.raises(FileNotFoundError):
        store.read_bytes("a")


@pytest.mark.parametrize(("age_seconds", "is_removed"), [(DAY + 60, True), (DAY - 60, False), (0, False)])
def test_temporaries_of_dead_processes_go_after_a_day_and_not_before(store, age_seconds, is_removed):
    store.publish_bytes("d/kept", b"1")
    staged = stage(store, "d/a.zip", b"half")
    for name in (staged.path, os.path.join(store.url, "d/kept")):
        os.utime(name, (time.time() - age_seconds,) * 2)
    assert store.remove_stale_temporaries("d") == int(is_removed)
    assert os.path.exists(staged.path) is not is_removed
    assert [file.name for file in store.list_dir("d")] == ["d/kept"]
    assert os.path.basename(staged.path).startswith(TEMPORARY_PREFIX)


@pytest.fixture
def mounted(tmp_path):
    """Mount a tiny file system in memory with the given options; its path."""
    paths = []

    def mount(options):
        path = tmp_path / f"mount{len(paths)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
        try:
            result = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if result.returncode:
            pytest.skip("mounting a tiny file system needs root")
        paths.append(path)
        return path

    yield mount
    for path in paths:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("text", [None, "x" * 200_000], ids=["full while images are written", "full while records are published"])
def test_a_full_disk_is_an_output_error_and_leaves_no_temporary(kit, convert_all, mounted, text):
    rows = [{"content": [{"type": "image", "image": f"{number}.png"}]} for number in range(30)]
    for number in range(30):
        kit.image(f"{number}.png", number=number, size=(40, 40))
    if text is not None:
        rows = [*rows[:4], {"content": [{"type": "text", "text": text}]}]
    full = mounted("size=64k")
    with pytest.raises(OutputError, match=f"cannot write to {full}/out: No space left on device: free space"):
        convert_all(kit.task(kit.jsonl(rows), kit.source()), LocalStorage(str(full / "out")))
    assert not list(full.rglob(f"{TEMPORARY_PREFIX}*"))
    assert not list(full.rglob("*.part.json"))


def test_a_full_scratch_disk_is_an_output_error_and_condemns_no_row(kit, mounted, monkeypatch):
    for number in range(5):
        kit.image(f"{number}.png", number=number, size=(60, 60))
    rows = [{"content": [{"type": "image", "image": f"{number}.png"} for number in range(5)]}]
    full = mounted("size=16k")
    monkeypatch.setattr("packer.samples.SPOOL_BYTES", 0)
    monkeypatch.setattr("tempfile.tempdir", str(full))
    with pytest.raises(OutputError, match=f"cannot write to {full}: No space left"):
        kit.convert(rows, kit.source())


def test_a_read_only_file_system_is_an_output_error(kit, convert_all, mounted):
    folder = mounted("size=64k,ro")
    with pytest.raises(OutputError, match=r"Read-only file system: free space or change permissions"):
        convert_all(kit.task(kit.jsonl([{"text": "x"}])), LocalStorage(str(folder / "out")))


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_an_output_error(kit, convert_all):
    (kit.folder / "out").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        convert_all(kit.task(kit.jsonl([{"text": "x"}])), kit.storage())


def of_module(name):
    return type("Fault", (Exception,), {"__module__": name})()


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), ConnectionResetError(), OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "i/o"), OSError("no number"),
     of_module("botocore.exceptions"), of_module("aiohttp.client"), of_module("gcsfs.retry")],
)  # fmt: skip
def test_faults_that_may_pass(error):
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(), PermissionError(), IsADirectoryError(), NotADirectoryError(), OSError(errno.ENOSPC, "full"),
     OSError(errno.EROFS, "read-only"), OSError(errno.ENAMETOOLONG, "long"), OSError(errno.ELOOP, "loop"),
     ValueError(), KeyError(), MemoryError(), OutputError("x"), InputError("x"), StorageFault("x"), TooLarge(5),
     RowError(Reason.EMPTY_IMAGE, "x")],
)  # fmt: skip
def test_faults_that_stay(error):
    assert not may_pass(error)


def failing(errors):
    """An operation that raises one error after the other and then works; and the list of what is still to come."""
    left = list(errors)

    def operation():
        if left:
            raise left.pop(0)
        return "done"

    return operation, left


def test_an_operation_is_tried_again_while_its_faults_may_pass(quick_retries):
    operation, left = failing([TimeoutError("1"), ConnectionError("2")])
    assert (with_retries(operation, "a.zip"), left) == ("done", [])


def test_a_fault_that_does_not_pass_is_named_after_the_last_try(quick_retries):
    operation, left = failing([TimeoutError(str(number)) for number in range(9)])
    with pytest.raises(StorageFault, match=r"a\.zip: TimeoutError: 2"):
        with_retries(operation, "a.zip")
    assert len(left) == 6


def test_an_error_that_stays_is_raised_at_once(quick_retries):
    operation, left = failing([PermissionError("no"), TimeoutError()])
    with pytest.raises(PermissionError):
        with_retries(operation, "a.zip")
    assert len(left) == 1


def test_files_are_read_within_a_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    assert read_url(str(tmp_path / "a")) == read_url(f"file://{tmp_path}/a", 5) == b"12345"
    with pytest.raises(TooLarge, match="5 bytes"):
        read_url(str(tmp_path / "a"), 4)
    with open_url(str(tmp_path / "a")) as file:
        file.seek(2)
        assert file.read() == b"345"


def test_a_stamp_changes_when_a_file_is_written_again(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    before = stat_url(str(tmp_path / "a"))
    os.utime(tmp_path / "a", ns=(0, 12345))
    after = stat_url(str(tmp_path / "a"))
    assert (before.size, after.size, after.stamp) == (5, 5, "12345")
    assert before.stamp != after.stamp
    with pytest.raises(IsADirectoryError):
        stat_url(str(tmp_path))


def test_globs_list_files_sorted_and_without_folders(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "d/c.jsonl", "x.txt", "e.jsonl/z"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"1")

    def names(pattern):
        return [os.path.relpath(file.name, tmp_path) for file in list_matching(f"{tmp_path}/{pattern}")]

    assert names("*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("**/*.jsonl") == ["a.jsonl", "b.jsonl", "d/c.jsonl"]
    assert names("[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names("b.jsonl") == ["b.jsonl"]
    assert names("none.jsonl") == names("none-*.jsonl") == []


@pytest.mark.parametrize(
    ("root", "expected"), [("/a", "/a/x"), ("/a/", "/a/x"), ("s3://b/p", "s3://b/p/x"), ("/", "/x"), ("", "x")]
)
def test_names_are_joined_with_one_slash(root, expected):
    assert join_url(root, "x") == join_url(root, "/x") == expected or root == ""


def test_an_object_is_published_listed_read_and_removed(s3):
    store = open_storage(f"{s3}/set/")
    assert isinstance(store, ObjectStorage)
    assert (store.stat("d/a"), store.list_dir("d"), store.list_dirs("")) == (None, [], [])
    for name in ("d/b", "d/a", "d/c/x"):
        store.publish_bytes(name, name.encode())
    assert [(file.name, file.size) for file in store.list_dir("d")] == [("d/a", 3), ("d/b", 3)]
    assert (store.list_dirs("d"), store.list_dirs("")) == (["c"], ["d"])
    assert store.read_bytes("d/a") == read_url(f"{s3}/set/d/a") == b"d/a"
    first = store.stat("d/a")
    store.publish_bytes("d/a", b"new bytes")
    assert (store.stat("d/a").size, store.stat("d/a").stamp != first.stamp) == (9, True)
    store.remove("d/a")
    store.remove("d/a")
    assert store.stat("d/a") is None
    assert os.listdir(store._scratch) == []


def test_an_object_without_a_checksum_we_know_is_read_back_when_it_was_sent(s3, monkeypatch):
    store = open_storage(f"{s3}/set")
    data = os.urandom(1 << 20) * 3
    monkeypatch.setattr(objects, "_md5", lambda path: "as of an upload in pieces")
    store.publish(stage(store, "big", data), holds(data))
    monkeypatch.setattr(store, "_stored", lambda key, path, digest: (3145728, "0" * 64))
    with pytest.raises(StorageFault, match=r"big: found 3145728 bytes, blake3 0+; sent"):
        store.publish(stage(store, "big", data), holds(data))


def test_objects_are_found_by_globs_and_read_in_ranges(s3):
    store = open_storage(s3)
    for name in ("in/b.jsonl", "in/a.jsonl", "in/d/c.jsonl"):
        store.publish_bytes(name, b"0123456789")
    assert [file.name for file in list_matching(f"{s3}/in/*.jsonl")] == [f"{s3}/in/a.jsonl", f"{s3}/in/b.jsonl"]
    assert list_matching(f"{s3}/in/none-*.jsonl") == list_matching(f"{s3}/in/none.jsonl") == []
    with open_url(f"{s3}/in/a.jsonl") as file:
        file.seek(7)
        assert file.read() == b"789"
    with pytest.raises(TooLarge):
        read_url(f"{s3}/in/a.jsonl", 4)
    with pytest.raises(FileNotFoundError):
        read_url(f"{s3}/in/none")


def test_ranges_of_objects_are_read_alone_and_many_at_once(s3):
    store = open_storage(f"{s3}/set")
    store.publish_bytes("d/a", b"0123456789")
    ranges = RangeStore(f"{s3}/set/")
    assert ranges.read(ByteRange("d/a", 2, 5)) == b"234"
    first, missing, cut = ranges.read_many([ByteRange("d/a", 0, 1), ByteRange("d/none", 0, 1), ByteRange("d/a", 8, 20)])
    assert (first, cut) == (b"0", b"89")
    assert isinstance(missing, FileNotFoundError)
    assert (ranges.size("d/a"), ranges.size("d/none")) == (10, None)
    store.publish_bytes("d/a", b"0123")
    assert pickle.loads(pickle.dumps(ranges)).size("d/a") == ranges.size("d/a") == 4


def test_a_bucket_that_is_not_there_is_an_output_error(s3, quick_retries):
    with pytest.raises(OutputError, match=r"cannot write to s3://no-such-bucket-here/a"):
        open_storage("s3://no-such-bucket-here").publish_bytes("a", b"1")


def test_a_store_that_does_not_answer_is_a_fault_that_may_pass(s3, quick_retries, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StorageFault, match=r"s3://bucket/in\.jsonl: "):
        read_url("s3://bucket/in.jsonl")
    fsspec.filesystem("s3").clear_instance_cache()
