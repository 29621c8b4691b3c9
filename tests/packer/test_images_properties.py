"""Whatever the bytes, packer.images answers with facts or a reason, soon and without much memory."""

import io
import random
import struct
import tracemalloc
import zlib
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images import CheckLevel, Conversion, ImageLimits, convert, inspect

LIMITS = ImageLimits(max_pixels=2**20)
ANY_INPUT = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def noise(mode="RGB", size=(23, 17)):
    seeded = random.Random(7)
    return Image.frombytes(mode, size, seeded.randbytes(size[0] * size[1] * len(Image.getmodebands(mode) * "x")))


def encoded(image, name, **options):
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


ANIMATED = {"save_all": True, "append_images": [noise()] * 2}
EXIF = Image.Exif()
EXIF[0x0112] = 6
OWN = {
    "jpeg": encoded(noise(), "JPEG", exif=EXIF),
    "jpeg progressive": encoded(noise("L"), "JPEG", progressive=True, comment=b"\xff\xd9"),
    "png": encoded(noise(), "PNG", exif=EXIF),
    "png animated": encoded(noise(), "PNG", **ANIMATED),
    "webp": encoded(noise(), "WEBP", exif=EXIF),
    "webp lossless": encoded(noise(), "WEBP", lossless=True),
    "webp animated": encoded(noise(), "WEBP", **ANIMATED),
    "gif": encoded(noise("L"), "GIF"),
    "gif animated": encoded(noise("L"), "GIF", **ANIMATED),
}
BMP = encoded(noise(), "BMP")
OTHERS = {
    "bmp": BMP,
    "tiff": encoded(noise(), "TIFF", exif=EXIF),
    "tiff lzw": encoded(noise(), "TIFF", compression="tiff_lzw", **ANIMATED),
    "ico": encoded(noise(), "ICO", sizes=[(16, 12), (23, 17)]),
    "jp2": encoded(noise(), "JPEG2000"),
    "avif": encoded(noise(), "AVIF", exif=EXIF),
    "ppm": encoded(noise(), "PPM"),
    "tga": encoded(noise(), "TGA", rle=True),
    "qoi": encoded(noise(), "QOI"),
    "pcx": encoded(noise(), "PCX"),
    "sgi": encoded(noise(), "SGI"),
}


@pytest.mark.parametrize("name", OWN)
def test_every_cut_is_noticed(name):
    data = OWN[name]
    assert inspect(data, LIMITS)
    for length in range(len(data)):
        with pytest.raises(RowError) as caught:
            inspect(data[:length], LIMITS)
        # A text of a few letters is not yet an image, cut or not.
        expected = Reason.TRUNCATED_IMAGE if length > 12 else caught.value.reason
        assert (length, caught.value.reason) == (length, expected)


def test_every_cut_of_a_bmp_is_noticed_but_for_the_padding_of_its_last_row():
    data = BMP
    padding = -23 * 3 % 4
    for length in range(18, len(data) - padding):
        with pytest.raises(RowError) as caught:
            inspect(data[:length], LIMITS)
        assert caught.value.reason == Reason.TRUNCATED_IMAGE


@pytest.mark.parametrize("name", OWN)
def test_a_cut_never_changes_what_a_header_says(name):
    data = OWN[name]
    whole = inspect(data, LIMITS)
    for length in range(len(data) * 3 // 4, len(data)):
        found = facts_or_reason(data[:length], CheckLevel.HEADER)
        if found is not None:
            assert replace(found, frames=whole.frames) == whole
    assert found is not None or name == "webp"  # whose EXIF stands at its end


def answer(function, *arguments):
    """The result or the RowError; any other error fails the test."""
    try:
        return function(*arguments)
    except RowError as error:
        return error


def facts_or_reason(data, check):
    facts = answer(inspect, data, LIMITS, check)
    if isinstance(facts, RowError):
        assert "\n" not in facts.detail
        return None
    assert min(facts.width, facts.height, facts.frames) >= 1
    assert facts.width * facts.height <= LIMITS.max_pixels
    return facts


@st.composite
def mutations(draw):
    """A valid file with some bytes changed, cut out, doubled or appended."""
    data = bytearray(draw(st.sampled_from([*OWN.values(), *OTHERS.values()])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1) | st.integers(0, min(64, len(data) - 1)))
        kind = draw(st.sampled_from(["set", "cut", "drop", "double", "number"]))
        if kind == "set":
            data[at] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, 0xD9, 0xDA]) | st.integers(0, 255))
        elif kind == "number":
            data[at : at + 4] = draw(st.binary(min_size=4, max_size=4))
        elif kind == "cut" and at:
            del data[at:]
        elif kind == "drop" and at:
            del data[at : at + draw(st.integers(1, 40))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
    return bytes(data)


@ANY_INPUT
@given(data=mutations(), check=st.sampled_from(CheckLevel))
@example(data=b"\xff\xd8\xff" + b"\xff" * 200_000, check=CheckLevel.STRUCTURE)
@example(data=b"\xff\xd8\xff" + b"\x00\xff" * 100_000, check=CheckLevel.STRUCTURE)
@example(data=OWN["gif"][:13] + bytes(200_000), check=CheckLevel.HEADER)
@example(data=b"II*\x00\x08\x00\x00\x00\x00\x00\x08\x00\x00\x00", check=CheckLevel.STRUCTURE)
@example(data=b"II+\x00\x08\x00\x00\x00" + b"\xff" * 40, check=CheckLevel.STRUCTURE)
def test_mutated_files_give_facts_or_a_reason(data, check):
    facts_or_reason(data, check)


@ANY_INPUT
@given(
    data=st.binary(max_size=300),
    start=st.sampled_from([*OWN.values(), *OTHERS.values()]).flatmap(
        lambda data: st.integers(0, 40).map(lambda length: data[:length])
    ),
)
def test_any_bytes_after_any_beginning(data, start):
    for check in CheckLevel:
        facts_or_reason(start + data, check)


@ANY_INPUT
@given(data=mutations(), longest_side=st.none() | st.integers(1, 30), kind=st.sampled_from([None, "jpeg", "webp"]))
def test_conversion_gives_an_image_or_a_reason(data, longest_side, kind):
    facts = facts_or_reason(data, CheckLevel.HEADER)
    if facts is None:
        return
    converted = answer(convert, data, facts, Conversion(longest_side=longest_side, format=kind, quality=None))
    if isinstance(converted, RowError):
        assert converted.reason == Reason.CONVERSION_FAILED
    else:
        found = inspect(converted or data, LIMITS, CheckLevel.HEADER)
        assert max(found.width, found.height) <= (longest_side or 2**20)


def huge_claims():
    sides = struct.pack(">II", 16000, 16000)
    header = b"IHDR" + sides + bytes([8, 6, 0, 0, 0])
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    yield png + struct.pack(">I4s", 2**31 - 1, b"IDAT")
    yield OWN["gif"][:6] + b"\xff\x3f\xff\x3f" + OWN["gif"][10:]
    yield b"RIFF\xff\xff\xff\xffWEBPVP8X\x0a\x00\x00\x00" + bytes(4) + b"\xff\x3f\x00\xff\x3f\x00"
    yield b"BM" + bytes(8) + struct.pack("<IIiiHHIIIIII", 54, 40, 16000, 16000, 1, 32, 0, 0, 0, 0, 0, 0)
    yield b"II+\x00\x08\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00" + b"\xff\xff\xff\x7f" + bytes(40)


@pytest.mark.parametrize("data", [*huge_claims()])
def test_claims_allocate_nothing(data):
    tracemalloc.start()
    answer(inspect, data, ImageLimits())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
