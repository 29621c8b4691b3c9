import io
import os
import random
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer import archive_cache, storage
from packer.archives import ArchivePool
from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.references import ReferenceReader, ReferenceRules

IMAGE = random.Random(7).randbytes(3000)


LONG = "/".join(["목록-" + "n" * 60] * 5) + ".jpg"


FILES = {
    "a.jpg": IMAGE,
    "d/b.jpg": b"b" * 5000,
    "사진/é.jpg": b"utf-8 name",
    LONG: b"long name",
    "dots/../x.jpg": b"x",
    "e.jpg": b"",
}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(archive_cache.tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))


def make_zip(path, files=FILES, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return str(path)


def make_tar(path, files=FILES, tar_format=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


BUILDERS = {
    "stored.zip": make_zip,
    "deflated.zip": lambda path: make_zip(path, method=zipfile.ZIP_DEFLATED),
    "pax.tar": make_tar,
    "gnu.tar": lambda path: make_tar(path, tar_format=tarfile.GNU_FORMAT),
}


@pytest.fixture(params=BUILDERS)
def archive(request, tmp_path):
    return BUILDERS[request.param](tmp_path / request.param)


def refusal(path, name="a.jpg", max_bytes=10_000):
    with pytest.raises(RowError) as caught:
        ArchivePool().read(str(path), name, max_bytes)
    return caught.value.reason, caught.value.detail


def damaged(path, change):
    data = bytearray(Path(path).read_bytes())
    path = f"{path}.damaged"
    with open(path, "wb") as file:
        file.write(change(data) or data)
    return path


def test_every_member_is_read_by_name(archive):
    pool = ArchivePool()
    expected = {name: data for name, data in FILES.items() if data}
    assert {name: pool.read(archive, name, 10_000) for name in expected} == expected
    assert [pool.read(archive, name, 10_000) for name in ("./d//b.jpg", "/d/b.jpg", "d/./b.jpg", "x.jpg")] == [
        b"b" * 5000
    ] * 3 + [b"x"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("e.jpg", Reason.EMPTY_IMAGE),
        ("no.jpg", Reason.MISSING_IMAGE),
        ("", Reason.MISSING_IMAGE),
        ("\ud83d", Reason.MISSING_IMAGE),
    ],
)
def test_what_is_no_image_is_refused_naming_archive_and_member(archive, name, reason):
    found, detail = refusal(archive, name)
    assert found is reason
    assert archive in detail
    assert detail.isprintable()


def test_the_limit_is_checked_before_reading(archive):
    reason, detail = refusal(archive, "d/b.jpg", 4999)
    assert reason is Reason.IMAGE_TOO_LARGE
    assert "5000 bytes, expected at most 4999" in detail
    assert len(ArchivePool().read(archive, "d/b.jpg", 5000)) == 5000


def test_references_name_members_with_a_mark_or_by_the_source(archive, tmp_path):
    rules = ReferenceRules(image_root=str(tmp_path), archive=archive, allow_hosts=(), max_bytes=10_000)
    (tmp_path / "plain.jpg").write_bytes(b"plain")
    with ReferenceReader(rules) as reader:
        marked = f"{os.path.basename(archive)}!/d/b.jpg"
        refs = ["d/b.jpg", marked, f"{archive}!/d/b.jpg", f"file://{archive}!//d/b.jpg", f"{tmp_path}/plain.jpg"]
        assert [reader.read(ref) for ref in refs] == [b"b" * 5000] * 4 + [b"plain"]
        for ref in ["../a.jpg", "d/../../a.jpg", f"../{marked}", f"{archive}!/../a.jpg"]:
            with pytest.raises(RowError, match="climbs out"):
                reader.read(ref)


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.TAR.ZST", "a.tar.bz2", "a.txz", "a.7z", "a.rar", "a.tar.lz4"])
def test_compressed_archives_are_refused_with_the_way_out(name, tmp_path):
    reader = ReferenceReader(ReferenceRules(image_root=str(tmp_path), archive=None, allow_hosts=(), max_bytes=10))
    with pytest.raises(RowError, match=r"unpack it, or pack it again as \.zip or uncompressed \.tar") as caught:
        reader.read(f"{name}!/b.jpg")
    assert caught.value.reason is Reason.UNSUPPORTED_REFERENCE


def test_a_compressed_tar_under_another_name_is_refused_too(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jpg"))
    assert refusal(tmp_path / "a.tar")[0] is Reason.UNSUPPORTED_REFERENCE


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, Reason.MISSING_IMAGE),
        (b"", Reason.UNREADABLE_IMAGE),
        (b"not an archive" * 99, Reason.UNREADABLE_IMAGE),
        (bytes(2 << 20), Reason.UNREADABLE_IMAGE),
    ],
)
@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_a_file_that_is_no_archive_is_refused(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found, detail = refusal(tmp_path / name)
    assert found is reason
    assert name in detail


def test_an_archive_that_is_a_folder_or_fifo_is_refused(tmp_path):
    (tmp_path / "folder.zip").mkdir()
    os.mkfifo(tmp_path / "fifo.zip")
    assert [refusal(tmp_path / name)[0] for name in ("folder.zip", "fifo.zip")] == [Reason.UNREADABLE_IMAGE] * 2


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_cut_archive_is_unreadable(archive, kept):
    path = damaged(archive, lambda data: data[: int(len(data.rstrip(b"\0")) * kept) // 512 * 512 + 700])
    reason, detail = refusal(path)
    assert reason is Reason.UNREADABLE_IMAGE
    assert "cut" in detail


@given(st.data())
def test_a_damaged_archive_gives_the_right_bytes_or_a_refusal(tmp_path_factory, data):
    path = BUILDERS[data.draw(st.sampled_from(sorted(BUILDERS)))](tmp_path_factory.mktemp("damaged") / "a")
    content = bytearray(Path(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    Path(path).write_bytes(content)
    is_zip = content[:2] == b"PK"
    pool = ArchivePool()
    for name, expected in FILES.items():
        try:
            found = pool.read(path, name, 10_000)
        except RowError:
            continue
        assert found == expected or not is_zip  # a tar has no checksum of contents


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_of_two_members_with_one_name_the_last_is_read(tmp_path, kind):
    path = str(tmp_path / f"a.{kind}")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.jpg", b"first")
            archive.writestr("./a.jpg", b"last")
    else:
        make_tar(path, {"a.jpg": b"first", "./a.jpg": b"last"})
    assert ArchivePool().read(path, "a.jpg", 10) == b"last"


def test_folders_devices_and_zip_links_are_no_images(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, kind in [("folder", tarfile.DIRTYPE), ("fifo", tarfile.FIFOTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.mkdir("folder")
        link = zipfile.ZipInfo("link")
        link.create_system, link.external_attr = 3, 0o120777 << 16
        archive.writestr(link, "folder")
    assert {refusal(tmp_path / name, "folder")[0] for name in ("a.tar", "a.zip")} == {Reason.UNREADABLE_IMAGE}
    assert refusal(tmp_path / "a.tar", "fifo")[0] is Reason.UNREADABLE_IMAGE
    assert refusal(tmp_path / "a.zip", "link")[0] is Reason.MISSING_IMAGE


def test_many_threads_read_the_right_members(archive):
    pool = ArchivePool()
    names = [name for name, data in FILES.items() if data] * 60
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda name: pool.read(archive, name, 10_000), names))
    assert found == [FILES[name] for name in names]


def test_remote_archives_are_read_by_many_threads_through_few_handles(archive):
    url = f"memory://archives-test/{os.path.basename(archive)}"
    fsspec.filesystem("memory").pipe(url, Path(archive).read_bytes())
    pool = ArchivePool()
    names = [name for name, data in FILES.items() if data] * 20
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda name: pool.read(url, name, 10_000), names))
    assert found == [FILES[name] for name in names]
    pool.close()
    assert pool.read(url, "a.jpg", 10_000) == IMAGE
    assert refusal("memory://archives-test/no.zip")[0] is Reason.MISSING_IMAGE


def test_a_pool_opened_before_a_fork_reads_right_in_every_child(archive):
    pool = ArchivePool()
    pool.read(archive, "a.jpg", 10_000)
    children = []
    for child in range(4):
        if (pid := os.fork()) == 0:
            name = ("a.jpg", "d/b.jpg")[child % 2]
            os._exit(0 if all(pool.read(archive, name, 10_000) == FILES[name] for _ in range(200)) else 1)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4


def open_descriptors(folder):
    """Of files in it: other tests may have left theirs to the garbage collector."""
    return sum(
        os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/")
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    )


def test_few_archives_stay_open_and_close_leaves_none(tmp_path):
    paths = [make_zip(tmp_path / f"{index}-a.zip", {"a.jpg": b"%d" % index}) for index in range(9)]
    pool = ArchivePool(max_open=3)
    for _ in range(2):
        assert [pool.read(path, "a.jpg", 10) for path in paths] == [b"%d" % index for index in range(9)]
    assert open_descriptors(tmp_path) == 3
    pool.close()
    assert open_descriptors(tmp_path) == 0


def test_a_bad_archive_is_examined_once(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"junk" * 1000)
    pool = ArchivePool()
    messages = set()
    for content in (b"junk" * 1000, Path(make_tar(tmp_path / "good.tar")).read_bytes()):
        path.write_bytes(content)
        with pytest.raises(RowError) as caught:
            pool.read(str(path), "a.jpg", 10_000)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_an_archive_rewritten_under_an_open_pool_is_noticed(archive):
    pool = ArchivePool()
    pool.read(archive, "a.jpg", 10_000)
    content = Path(archive).read_bytes()
    with open(archive, "r+b") as file:
        file.write(bytes(1000) + content[:-1000])
    with pytest.raises(RowError, match="changed"):
        pool.read(archive, "d/b.jpg", 10_000)
