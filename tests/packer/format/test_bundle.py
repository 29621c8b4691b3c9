import io
import random
import shutil
import subprocess
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.bundle import BundleWriter, check_image, crc32
from packer.format.digest import FileDigest, bytes_digest, digest_of_file, image_digest
from packer.format.errors import FormatError


def write(path, images, extension="png"):
    """A bundle of images; its writer and where each image stands."""
    with open(path, "w+b") as file:
        writer = BundleWriter(file)
        places = [writer.add(data, digest=image_digest(data), extension=extension, crc=crc32(data)) for data in images]
        writer.close()
    return writer, places


def data_offset_by_local_header(data, info):
    """Where a member's bytes begin, from the lengths in its own local header and not from the directory."""
    header = data[info.header_offset : info.header_offset + 30]
    assert header[:4] == b"PK\x03\x04"
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


@given(st.lists(st.binary(max_size=200), max_size=12))
def test_images_are_read_back_by_offset_and_the_offset_is_that_of_the_local_header(tmp_path_factory, images):
    path = tmp_path_factory.mktemp("bundle") / "b.zip"
    writer, places = write(path, images)
    data = path.read_bytes()
    assert [data[place.offset : place.offset + place.size] for place in places] == images
    assert writer.prove(str(path)).hexdigest() == bytes_digest(data)
    members = zipfile.ZipFile(io.BytesIO(data)).infolist()
    assert [data_offset_by_local_header(data, info) for info in members] == [place.offset for place in writer.stored]


def test_names_are_digests_of_the_content_whatever_the_source_called_it(tmp_path):
    _, places = write(tmp_path / "b.zip", [b"one a.jpg", b"another a.jpg"], "jpg")
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert archive.namelist() == [f"{image_digest(b'one a.jpg')}.jpg", f"{image_digest(b'another a.jpg')}.jpg"]
        assert [archive.read(place.name) for place in places] == [b"one a.jpg", b"another a.jpg"]


def test_equal_images_are_stored_once(tmp_path):
    writer, places = write(tmp_path / "b.zip", [b"x" * 50, b"y", b"x" * 50])
    assert places[0] == places[2] != places[1]
    assert writer.num_images == 2
    assert (tmp_path / "b.zip").read_bytes().count(b"x" * 50) == 1


def test_the_same_images_give_the_same_bytes_at_any_time_and_umask(tmp_path, monkeypatch):
    images = [random.Random(number).randbytes(100) for number in range(5)]
    write(tmp_path / "a.zip", images)
    monkeypatch.setattr("time.localtime", lambda *_: (2031, 2, 3, 4, 5, 6, 0, 1, 0))
    write(tmp_path / "b.zip", images)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_members_are_stored_with_fixed_date_and_mode_and_no_extra_fields(tmp_path):
    write(tmp_path / "b.zip", [b"data"])
    [info] = zipfile.ZipFile(tmp_path / "b.zip").infolist()
    assert (info.compress_type, info.date_time, info.create_system) == (zipfile.ZIP_STORED, (1980, 1, 1, 0, 0, 0), 3)
    assert (info.external_attr >> 16, info.extra, info.flag_bits) == (0o100644, b"", 0)


def test_the_self_tests_of_zip_tools_pass(tmp_path):
    write(tmp_path / "b.zip", [random.Random(number).randbytes(500) for number in range(20)])
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert archive.testzip() is None
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed; zipfile's own test passed")
    result = subprocess.run(["unzip", "-tqq", str(tmp_path / "b.zip")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_image_behind_four_gib_is_read_back_at_its_offset(tmp_path):
    path, start = tmp_path / "sparse.zip", (4 << 30) + 12_345
    with open(path, "w+b") as file:
        file.seek(start)
        writer = BundleWriter(file)
        writer._num_bytes = start  # as if so much were written
        place = writer.add(b"far away", digest="0" * 32, extension="png", crc=crc32(b"far away"))
        writer.close()
        file.seek(place.offset)
        assert place.offset > 1 << 32
        assert file.read(place.size) == b"far away"
    with zipfile.ZipFile(path) as archive:
        assert archive.read(place.name) == b"far away"
        assert archive.infolist()[0].header_offset > 1 << 32


def test_more_images_than_a_32_bit_directory_holds_are_still_found(tmp_path):
    images = [number.to_bytes(4, "little") for number in range(66_000)]
    writer, places = write(tmp_path / "b.zip", images)
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert len(archive.infolist()) == writer.num_images == 66_000
        assert archive.read(places[-1].name) == images[-1]


def test_a_byte_that_changed_on_the_way_to_the_disk_is_found_by_reading_back(tmp_path):
    path = tmp_path / "b.zip"
    writer, places = write(path, [b"first image", b"second image"])
    data = bytearray(path.read_bytes())
    data[places[1].offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"{places[1].name} at offset {places[1].offset}: found crc32 0x"):
        writer.prove(str(path))


def test_an_abandoned_bundle_has_no_directory_and_no_zip_tool_opens_it(tmp_path):
    with open(tmp_path / "b.zip", "w+b") as file:
        writer = BundleWriter(file)
        writer.add(b"data", digest="0" * 32, extension="png", crc=crc32(b"data"))
        writer.abandon()
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(tmp_path / "b.zip")


def test_a_cut_and_a_changed_image_are_told_apart():
    check_image(b"abc", crc=crc32(b"abc"), size=3, where="b.zip")
    with pytest.raises(FormatError, match=r"b\.zip: found 2 bytes, expected 3: the bundle is cut"):
        check_image(b"ab", crc=crc32(b"abc"), size=3, where="b.zip")
    with pytest.raises(FormatError, match=r"b\.zip: found crc32 .*, expected .*: the bundle was changed"):
        check_image(b"abd", crc=crc32(b"abc"), size=3, where="b.zip")


@given(st.lists(st.binary(max_size=50)))
def test_a_digest_does_not_depend_on_the_pieces_it_was_fed(tmp_path_factory, pieces):
    digest = FileDigest()
    for piece in pieces:
        digest.update(piece)
    path = tmp_path_factory.mktemp("digest") / "file"
    path.write_bytes(b"".join(pieces))
    assert digest.hexdigest() == bytes_digest(b"".join(pieces)) == digest_of_file(str(path)).hexdigest()
    assert digest.size == path.stat().st_size
