import base64
import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.inline import decode_bare_base64, decode_data_url, is_bare_base64, is_data_url
from packer.references import ReferenceReader, ReferenceRules

JPEG_HEAD = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01"


def encoded_image(image_format):
    buffer = io.BytesIO()
    noise = random.Random(5).randbytes(24 * 16 * 3)
    Image.frombytes("RGB", (24, 16), noise).save(buffer, image_format)
    return buffer.getvalue()


def reader(root, max_bytes=1 << 20):
    return ReferenceReader(ReferenceRules(image_root=str(root), archive=None, allow_hosts=(), max_bytes=max_bytes))


def reason_of(read, *arguments):
    with pytest.raises(RowError) as caught:
        read(*arguments)
    return caught.value.reason


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF"])
def test_bare_base64_of_every_format_is_told_from_a_path(image_format, tmp_path):
    data = encoded_image(image_format)
    text = base64.b64encode(data).decode()
    wrapped = base64.encodebytes(data).decode()
    forms = [text, text.rstrip("="), wrapped, wrapped.replace("\n", "\r\n"), f"\n{text}", base64.urlsafe_b64encode(data).decode()]
    assert [reader(tmp_path).read(form) for form in forms] == [data] * len(forms)


def test_a_tracking_pixel_is_long_enough():
    assert is_bare_base64("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")


@pytest.mark.parametrize(
    "name",
    [
        "iVBORw0KGgo.png",
        "9j/4AAQSkZJRgABAQ",
        "R0lGOD/a",
        "Qk0" + "a" * 61,
        "Qk1/" + "b" * 60,
        "UklGRg" + "c" * 60,
        "AAAA" * 16,
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQ.png",
    ],
)
def test_a_path_that_looks_like_base64_is_a_path(name, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"from the file")
    assert reader(tmp_path).read(name) == b"from the file"


@pytest.mark.parametrize(
    "ref", ["/9j/4AAQSkZJRgABAQ", "/9j/" + "a" * 60, "/9j/4AAQSkZJRgABAQAAAQABAADAAAAAAAAAAAAAAAA/photo.jpg"]
)
def test_an_absolute_path_below_9j_is_a_path(ref, tmp_path):
    assert reason_of(reader(tmp_path).read, ref) is Reason.MISSING_IMAGE


def test_long_damaged_base64_is_said_to_be_that():
    text = base64.b64encode(JPEG_HEAD + bytes(4000)).decode()
    assert is_bare_base64(text[:3000] + "!" + text[3000:])
    assert reason_of(decode_bare_base64, text[:3000] + "!" + text[3000:], 1 << 20) is Reason.INVALID_BASE64


@given(st.binary(min_size=30))
def test_bare_base64_round_trips(tail):
    text = base64.b64encode(JPEG_HEAD + tail).decode()
    assert is_bare_base64(text)
    assert decode_bare_base64(text, 1 << 20) == JPEG_HEAD + tail


@given(st.binary(min_size=1), st.sampled_from(["data:", "DATA:image/png", " data:image/png;charset=utf-8"]))
def test_data_urls_round_trip(data, head):
    text = base64.b64encode(data).decode()
    percent = "".join(f"%{byte:02x}" for byte in data)
    spaced = " ".join(text[at : at + 5] for at in range(0, len(text), 5))
    forms = [
        f"{head};base64,{text}",
        f"{head} ; BASE64 ,{spaced}\n",
        f"{head};base64,{text.replace('=', '%3D')}",
        f"{head},{percent}",
    ]
    assert all(is_data_url(form) for form in forms)
    assert [decode_data_url(form, len(data)) for form in forms] == [data] * 4


@pytest.mark.parametrize(
    ("ref", "reason"),
    [
        ("data:image/png;base64", Reason.INVALID_BASE64),
        ("data:image/png;base64,a", Reason.INVALID_BASE64),
        ("data:image/png;base64,!!!!", Reason.INVALID_BASE64),
        ("data:image/png;base64,ab=cd", Reason.INVALID_BASE64),
        ("data:image/png;base64,사진", Reason.INVALID_BASE64),
        ("data:image/png,\ud83d", Reason.INVALID_BASE64),
        ("data:image/png;base64,", Reason.EMPTY_IMAGE),
        ("data:image/png;base64, \n", Reason.EMPTY_IMAGE),
        ("data:,", Reason.EMPTY_IMAGE),
    ],
)
def test_a_bad_data_url_is_refused(ref, reason):
    assert reason_of(decode_data_url, ref, 100) is reason


def test_the_limit_holds_before_decoding_and_names_both_sizes():
    just_right = base64.b64encode(bytes(100)).decode()
    assert len(decode_data_url(f"data:;base64,{just_right}", 100)) == 100
    for ref in ["data:;base64,!" + "A" * 4000, "data:," + "x" * 101, "data:," + "%00" * 3000, "data:," + "%00" * 101]:
        with pytest.raises(RowError, match=r"found \d+ bytes, expected at most 100") as caught:
            decode_data_url(ref, 100)
        assert caught.value.reason is Reason.IMAGE_TOO_LARGE
