import io
import os
import random
import shutil
import subprocess
import tarfile

import pytest

from packer import archive_cache, storage
from packer.archives import ArchivePool
from packer.format.errors import RowError
from packer.format.reasons import Reason

IMAGE = random.Random(7).randbytes(3000)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(archive_cache.tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))


def make_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def refusal(path, name="a.jpg", max_bytes=10_000):
    with pytest.raises(RowError) as caught:
        ArchivePool().read(str(path), name, max_bytes)
    return caught.value.reason, caught.value.detail


def test_a_tar_without_its_end_blocks_is_read(tmp_path):
    path = make_tar(tmp_path / "a.tar", {"a.jpg": IMAGE})
    os.truncate(path, 512 + 6 * 512)
    assert ArchivePool().read(path, "a.jpg", 10_000) == IMAGE
    os.truncate(path, 512 + len(IMAGE))
    assert refusal(path)[0] is Reason.UNREADABLE_IMAGE


def test_links_lead_to_their_file_inside_the_archive(tmp_path):
    links = {"hard": (tarfile.LNKTYPE, "d/real"), "d/soft": (tarfile.SYMTYPE, "real"), "up": (tarfile.SYMTYPE, "d/../d/soft")}
    links |= {
        "dead": (tarfile.SYMTYPE, "/etc/passwd"),
        "out": (tarfile.SYMTYPE, "../../x"),
        "l1": (tarfile.SYMTYPE, "l2"),
        "l2": (tarfile.SYMTYPE, "l1"),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, (kind, target) in links.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
        info = tarfile.TarInfo("d/real")
        info.size = len(IMAGE)
        archive.addfile(info, io.BytesIO(IMAGE))
    pool = ArchivePool()
    assert [pool.read(str(tmp_path / "a.tar"), name, 10_000) for name in ("hard", "d/soft", "up")] == [IMAGE] * 3
    assert {refusal(tmp_path / "a.tar", name)[0] for name in ("dead", "out", "l1", "l2")} == {Reason.MISSING_IMAGE}


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_sparse_members_are_refused_and_their_neighbours_read(tmp_path, tar_format):
    with open(tmp_path / "sparse.bin", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"data")
    (tmp_path / "after.jpg").write_bytes(IMAGE)
    command = ["tar", "--sparse", f"--format={tar_format}", "-cf", "a.tar", "./sparse.bin", "./after.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert refusal(tmp_path / "a.tar", "sparse.bin", 1 << 21)[0] is Reason.UNSUPPORTED_REFERENCE
    assert ArchivePool().read(str(tmp_path / "a.tar"), "after.jpg", 10_000) == IMAGE


def test_a_hostile_tar_header_is_refused(tmp_path):
    for size in (b"\xff" * 12, b"\x80" + b"\x7f" * 11, b"\xff" * 11 + b"\x00"):
        for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            block = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.USTAR_FORMAT))
            block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            (tmp_path / "a.tar").write_bytes(bytes(block) + bytes(4096))
            assert refusal(tmp_path / "a.tar")[0] is Reason.UNREADABLE_IMAGE
