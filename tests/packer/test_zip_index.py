import io
import random
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest

from packer import archive_cache, storage
from packer.archives import ArchivePool
from packer.format.errors import RowError
from packer.format.reasons import Reason

IMAGE = random.Random(7).randbytes(3000)
FILES = {"a.jpg": IMAGE, "d/b.jpg": b"b" * 5000}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(archive_cache.tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0,))


def make_zip(path, files=FILES, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return str(path)


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


def test_an_outer_zip_cut_after_an_inner_zip_is_not_taken_for_the_inner_one(tmp_path):
    inner = Path(make_zip(tmp_path / "inner.zip", {"a.jpg": b"inner"})).read_bytes()
    outer = make_zip(tmp_path / "outer.zip", {"first": b"1", "inner.zip": inner})
    path = damaged(outer, lambda data: data[: data.index(inner) + len(inner)])
    assert refusal(path)[0] is Reason.UNREADABLE_IMAGE


def test_bytes_after_the_archive_do_not_matter(tmp_path):
    path = damaged(make_zip(tmp_path / "a.zip"), lambda data: data + bytes(700) + b"PK\5\6 and no end record")
    assert ArchivePool().read(path, "a.jpg", 10_000) == IMAGE


def test_a_directory_that_lists_other_than_its_end_record_says_is_damaged(tmp_path):
    path = damaged(make_zip(tmp_path / "a.zip"), lambda data: data.__setitem__(-12, 3))
    reason, detail = refusal(path)
    assert reason is Reason.UNREADABLE_IMAGE
    assert "lists 2 members, its end record says 3" in detail


@pytest.mark.parametrize("header", [0, 1])
def test_data_begins_where_the_local_header_says(tmp_path, header):
    """The local extra field may be longer than the one in the directory, or the other way round."""
    extras = [b"", b"\x99\x99\x40\x00" + bytes(64)]
    local, central = extras[header], extras[1 - header]
    name, crc = "사.jpg".encode(), zlib.crc32(IMAGE)
    body = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0x800, 0, 0, 33, crc, 3000, 3000, len(name), len(local)) + name + local + IMAGE
    fields = (b"PK\1\2", 20, 3, 20, 0, 0x800, 0, 0, 33, crc, 3000, 3000, len(name), len(central), 0, 0, 0, 0, 0)
    directory = struct.pack("<4s4B4H3L5H2L", *fields) + name + central
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), len(body), 0)
    (tmp_path / "a.zip").write_bytes(body + directory + end)
    assert ArchivePool().read(str(tmp_path / "a.zip"), "사.jpg", 10_000) == IMAGE


def test_reserved_64_bit_sizes_and_a_huge_local_extra_field(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        with archive.open(zipfile.ZipInfo("64.jpg"), "w", force_zip64=True) as member:
            member.write(IMAGE)
        info = zipfile.ZipInfo("extra.jpg")
        info.extra = struct.pack("<HH", 0x9999, 40_000) + bytes(40_000)
        archive.writestr(info, IMAGE)
    pool = ArchivePool()
    assert [pool.read(str(tmp_path / "a.zip"), name, 10_000) for name in ("64.jpg", "extra.jpg")] == [IMAGE] * 2


def test_a_zip64_archive_above_65535_members(tmp_path):
    path = make_zip(tmp_path / "a.zip", {str(index): b"%d" % index for index in range(66_000)})
    pool = ArchivePool()
    assert [pool.read(path, name, 9) for name in ("0", "65535", "65999")] == [b"0", b"65535", b"65999"]


def test_a_zip64_offset_is_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    path = make_zip(tmp_path / "a.zip")
    assert b"PK\x06\x06" in Path(path).read_bytes()
    assert ArchivePool().read(path, "d/b.jpg", 10_000) == b"b" * 5000


def test_a_zip_with_a_program_before_it_and_a_comment_after_it(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jpg", IMAGE)
        archive.comment = b"PK\5\6 not the end " * 9
    path = damaged(tmp_path / "a.zip", lambda data: b"#!/bin/sh\n" * 99 + data)
    assert ArchivePool().read(path, "a.jpg", 10_000) == IMAGE


def test_a_streamed_zip_with_sizes_after_the_data(tmp_path):
    class Pipe(io.RawIOBase):
        def __init__(self):
            self.data = bytearray()

        def writable(self):
            return True

        def write(self, data):
            self.data += data
            return len(data)

    pipe = Pipe()
    make_zip(pipe, method=zipfile.ZIP_DEFLATED)
    (tmp_path / "a.zip").write_bytes(pipe.data)
    assert ArchivePool().read(str(tmp_path / "a.zip"), "a.jpg", 10_000) == IMAGE


@pytest.mark.parametrize("shown", ["한글.jpg", "한글.jpg".encode().decode("cp437")])
def test_an_unmarked_utf_8_name_is_found_as_it_is_and_as_zipfile_shows_it(tmp_path, shown):
    path = damaged(
        make_zip(tmp_path / "a.zip", {"한글.jpg": IMAGE}), lambda data: data.replace(b"\x00\x08\x00\x00", b"\x00\x00\x00\x00")
    )
    assert zipfile.ZipFile(path).namelist() == ["한글.jpg".encode().decode("cp437")]
    assert ArchivePool().read(path, shown, 10_000) == IMAGE


def test_backslashes_of_a_dos_zip_are_slashes(tmp_path):
    info = zipfile.ZipInfo("x")
    info.filename, info.create_system = "d\\a.jpg", 0
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, IMAGE)
    assert ArchivePool().read(str(tmp_path / "a.zip"), "d/a.jpg", 10_000) == IMAGE


def set_flag(data):
    for magic, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        data[data.index(magic) + at] |= 1


def test_an_encrypted_member_is_refused(tmp_path):
    reason, detail = refusal(damaged(make_zip(tmp_path / "a.zip"), set_flag))
    assert reason is Reason.UNSUPPORTED_REFERENCE
    assert "password" in detail


@pytest.mark.parametrize(("method", "name"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "lzma")])
def test_other_zip_methods_are_refused_by_name(tmp_path, method, name):
    reason, detail = refusal(make_zip(tmp_path / "a.zip", method=method))
    assert reason is Reason.UNSUPPORTED_REFERENCE
    assert name in detail


def test_a_changed_byte_of_a_zip_member_is_noticed(tmp_path):
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = damaged(make_zip(tmp_path / "a.zip", method=method), lambda data: data.__setitem__(2000, data[2000] ^ 1))
        assert refusal(path)[0] is Reason.UNREADABLE_IMAGE


def test_a_bomb_that_lies_about_its_size_is_not_inflated(tmp_path):
    path = make_zip(tmp_path / "a.zip", {"a.jpg": bytes(50 << 20)}, zipfile.ZIP_DEFLATED)
    small = struct.pack("<L", 4000)
    lying = damaged(path, lambda data: data.replace(struct.pack("<L", 50 << 20), small))
    tracemalloc.start()
    assert refusal(lying)[0] is Reason.UNREADABLE_IMAGE
    assert tracemalloc.get_traced_memory()[1] < 5 << 20
    tracemalloc.stop()
    assert refusal(path)[0] is Reason.IMAGE_TOO_LARGE
