import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from packer import archive_cache, storage
from packer.archives import ArchivePool

IMAGE = random.Random(7).randbytes(3000)
FILES = {"a.jpg": IMAGE, "d/b.jpg": b"b" * 5000}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(archive_cache.tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))


def make_zip(path, files=FILES):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return str(path)


def make_tar(path, files=FILES):
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


BUILDERS = {"a.zip": make_zip, "a.tar": make_tar}


@pytest.fixture(params=BUILDERS)
def archive(request, tmp_path):
    return BUILDERS[request.param](tmp_path / request.param)


def cache_files(folder):
    return sorted(name for name in os.listdir(folder) if name.endswith(".idx"))


def test_the_index_is_kept_in_the_folder_and_used_again(archive, tmp_path):
    folder = str(tmp_path / "cache")
    assert ArchivePool(cache_dir=folder).read(archive, "a.jpg", 10_000) == IMAGE
    (name,) = os.listdir(folder)
    before = os.stat(f"{folder}/{name}")
    assert ArchivePool(cache_dir=folder).read(archive, "d/b.jpg", 10_000) == FILES["d/b.jpg"]
    assert (os.stat(f"{folder}/{name}").st_ino, os.listdir(folder)) == (before.st_ino, [name])


def test_without_a_folder_the_users_own_temporary_one_is_used(archive):
    assert ArchivePool().read(archive, "a.jpg", 10_000) == IMAGE
    assert len(cache_files(archive_cache.default_folder())) == 1
    assert os.stat(archive_cache.default_folder()).st_mode & 0o777 == 0o700


def test_a_temporary_folder_others_may_write_to_is_not_used(archive):
    os.mkdir(archive_cache.default_folder())
    os.chmod(archive_cache.default_folder(), 0o777)
    assert ArchivePool().read(archive, "a.jpg", 10_000) == IMAGE
    assert os.listdir(archive_cache.default_folder()) == []


@pytest.mark.parametrize("spoil", ["cut", "empty", "flip", "foreign", "grown", "folder", "link"])
def test_a_spoiled_cache_file_is_built_anew(archive, tmp_path, spoil):
    folder, other = str(tmp_path / "cache"), str(tmp_path / "other")
    assert ArchivePool(cache_dir=folder).read(archive, "a.jpg", 10_000) == IMAGE
    path = f"{folder}/{cache_files(folder)[0]}"
    data = bytearray(Path(path).read_bytes())
    os.unlink(path)
    if spoil == "foreign":
        ArchivePool(cache_dir=other).read(make_zip(tmp_path / "other.zip", {"a.jpg": b"foreign"}), "a.jpg", 10_000)
        shutil.copy(f"{other}/{cache_files(other)[0]}", path)
    elif spoil == "folder":
        os.mkdir(path)
    elif spoil == "link":
        (tmp_path / "copy").write_bytes(data)
        os.symlink(tmp_path / "copy", path)
    else:
        data[-20] ^= spoil == "flip"
        with open(path, "wb") as file:
            file.write({"cut": data[:-52], "empty": b"", "grown": data + data[-52:]}.get(spoil, data))
    assert ArchivePool(cache_dir=folder).read(archive, "a.jpg", 10_000) == IMAGE


def test_a_changed_archive_gets_a_new_index(tmp_path):
    folder = str(tmp_path / "cache")
    for content in (b"one", b"two two"):
        path = make_zip(tmp_path / "a.zip", {"a.jpg": content, content.decode(): b"x"})
        assert ArchivePool(cache_dir=folder).read(path, "a.jpg", 10) == content
    assert len(cache_files(folder)) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_sharing(archive, tmp_path):
    (tmp_path / "file").touch()
    assert ArchivePool(cache_dir=str(tmp_path / "file" / "cache")).read(archive, "a.jpg", 10_000) == IMAGE
    assert ArchivePool(cache_dir="/proc/self").read(archive, "a.jpg", 10_000) == IMAGE


def test_old_tables_and_leftovers_go_when_the_folder_is_full(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    paths = [make_zip(tmp_path / f"{index}.zip", {"a.jpg": b"%d" % index}) for index in range(4)]
    ArchivePool(cache_dir=str(folder)).read(paths[0], "a.jpg", 10)
    (first,) = cache_files(folder)
    (folder / f"{'0' * 64}dead.tmp").touch()
    (folder / "somebody-elses.tmp").touch()
    for name in os.listdir(folder):
        os.utime(folder / name, (time.time() - 2e5,) * 2)
    monkeypatch.setattr(archive_cache, "MAX_CACHE_BYTES", 3 * os.path.getsize(folder / first))
    for path in paths[1:]:
        ArchivePool(cache_dir=str(folder)).read(path, "a.jpg", 10)
    assert len(cache_files(folder)) == 3
    assert first not in os.listdir(folder)
    assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == ["somebody-elses.tmp"]


SCRIPT = """
import sys
from packer import archives
from packer.archives import ArchivePool
built = []
archives.build_tar = lambda file, build=archives.build_tar, **rest: built.append(1) or build(file, **rest)
assert ArchivePool(cache_dir=sys.argv[2]).read(sys.argv[1], "500", 10) == b"500"
print(len(built))
"""


def test_processes_that_start_together_build_one_index(tmp_path):
    path = make_tar(tmp_path / "a.tar", {str(index): b"%d" % index for index in range(3000)})
    command = [sys.executable, "-c", SCRIPT, path, str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    assert sorted(process.communicate()[0].strip() for process in processes) == [b"0", b"0", b"1"]
    assert len(os.listdir(tmp_path / "cache")) == 1
