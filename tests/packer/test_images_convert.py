"""Conversion on request: what changes, what is kept, and when nothing is done."""

import io
import struct
import zlib

import pytest
from PIL import Image, ImageOps

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images import CheckLevel, Conversion, ImageLimits, convert, inspect

LIMITS = ImageLimits()


def encoded(image, name, **options):
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def converted(data, *, longest_side=None, format=None, quality=None):
    facts = inspect(data, LIMITS)
    return convert(data, facts, Conversion(longest_side=longest_side, format=format, quality=quality))


def picture(size=(64, 48), mode="RGB"):
    """A quarter of each colour, so that every turn of it looks different."""
    image = Image.new("RGB", size, (250, 10, 10))
    image.paste((10, 250, 10), (size[0] // 2, 0, *size))
    image.paste((10, 10, 250), (0, size[1] // 2, size[0] // 2, size[1]))
    return image.convert(mode)


def opened(data):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image


def exif(orientation):
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def failure(data, **wanted):
    with pytest.raises(RowError) as caught:
        converted(data, **wanted)
    assert caught.value.reason == Reason.CONVERSION_FAILED
    return caught.value.detail


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF"])
def test_what_already_fits_is_left_alone(name):
    data = encoded(picture(), name)
    assert converted(data) is None
    assert converted(data, longest_side=64) is None
    assert converted(data, longest_side=1000) is None
    if name != "GIF":
        assert converted(data, longest_side=64, format=name.lower()) is None


@pytest.mark.parametrize(
    ("size", "longest_side", "expected"),
    [((64, 48), 32, (32, 24)), ((48, 64), 32, (24, 32)), ((100, 3), 10, (10, 1)), ((101, 67), 50, (50, 33))],
)
def test_longest_side_shrinks_and_keeps_the_format(size, longest_side, expected):
    for name in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
        found = inspect(converted(encoded(picture(size), name), longest_side=longest_side), LIMITS, CheckLevel.DECODE)
        assert (found.format, found.width, found.height) == (name.lower(), *expected)


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_the_result_is_upright(name, orientation):
    options = {"tiffinfo": {0x0112: orientation}} if name == "TIFF" else {"exif": exif(orientation)}
    data = encoded(picture(), name, **options)
    result = converted(data, longest_side=32, format="png")
    upright = ImageOps.exif_transpose(opened(data)).convert("RGB")
    assert inspect(result, LIMITS).orientation == 1
    assert opened(result).size == tuple(side // 2 for side in upright.size)
    for at in ((4, 4), (20, 4), (4, 20), (20, 20)):
        pairs = zip(opened(result).getpixel(at), upright.getpixel((2 * at[0], 2 * at[1])), strict=True)
        assert all(abs(a - b) < 24 for a, b in pairs)


def test_a_small_turned_image_is_turned_but_not_enlarged():
    result = converted(encoded(picture(), "JPEG", exif=exif(6)), longest_side=1000)
    assert opened(result).size == (48, 64)


def test_a_quality_encodes_again_even_what_fits():
    data = encoded(picture(), "JPEG", quality=95)
    assert len(converted(data, quality=20)) < len(converted(data, quality=90)) < len(data) + 1000
    assert converted(data, quality=90) == converted(data, quality=90)


@pytest.mark.parametrize("kind", ["png", "webp"])
@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_is_kept_where_the_format_has_it(mode, kind):
    image = picture(mode=mode)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    result = opened(converted(encoded(image, "PNG"), longest_side=32, format=kind))
    alpha = result.getchannel("A").getextrema()
    assert alpha[0] < 20
    assert alpha[1] > 235


@pytest.mark.parametrize(("mode", "expected"), [("LA", 255), ("RGBA", (255, 255, 255))])
def test_alpha_is_laid_on_white_for_jpeg(mode, expected):
    clear = Image.new(mode, (32, 32), (0,) * len(mode))
    assert opened(converted(encoded(clear, "PNG"), format="jpeg")).getpixel((9, 9)) == expected


def test_transparent_colours_become_alpha():
    grey, colour, palette = picture(mode="L"), picture(), picture().quantize(4)
    for image in (grey, colour, palette):
        data = encoded(image, "PNG", transparency=image.getpixel((1, 1)))
        result = opened(converted(data, longest_side=32, format="png"))
        assert result.getchannel("A").getpixel((1, 1)) == 0
        assert result.getchannel("A").getpixel((30, 1)) == 255


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_16_bit_grey_is_scaled_not_clipped(name, kind):
    values = [0, 1000, 30_000, 60_000, 65_535]
    row = b"".join(struct.pack("<H", value) * 16 for value in values)
    data = encoded(Image.frombytes("I;16", (80, 16), row * 16), name)
    result = opened(converted(data, format=kind, longest_side=79))
    assert result.mode == "L"
    for index, value in enumerate(values):
        assert abs(result.getpixel((16 * index + 8, 8)) - value / 257) <= 2


def test_big_endian_16_bit_tiff_is_scaled_too():
    image = Image.frombytes("I;16B", (2, 2), struct.pack(">4H", 0, 1000, 30_000, 65_535))
    assert list(opened(converted(encoded(image, "TIFF"), format="png")).tobytes()) == [0, 4, 117, 255]


def test_values_without_a_range_are_refused():
    assert "mode F" in failure(encoded(Image.new("F", (9, 9), 0.5), "TIFF"), format="png")
    assert "mode I" in failure(encoded(Image.new("I", (9, 9), 70_000), "TIFF"), format="png")


def test_16_bit_with_a_transparent_colour_is_refused():
    def chunk(kind, payload):
        return struct.pack(">I4s", len(payload), kind) + payload + struct.pack(">I", zlib.crc32(kind + payload))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(10)))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"tRNS", b"\x00\x01") + pixels + chunk(b"IEND", b"")
    assert "transparent colour" in failure(data, format="webp")


@pytest.mark.parametrize(("mode", "expected"), [("1", "L"), ("L", "L"), ("P", "RGB"), ("CMYK", "RGB")])
def test_other_modes_end_as_grey_or_rgb(mode, expected):
    image = Image.new(mode, (64, 64), 1 if mode in ("1", "P") else 200 if mode == "L" else (40, 90, 200, 0)[: len(mode)])
    if mode == "P":
        image.putpalette([0, 0, 0, 90, 10, 200])
    result = opened(converted(encoded(image, "TIFF"), longest_side=32, format="png"))
    assert (result.mode, result.size) == (expected, (32, 32))
    assert result.getpixel((9, 9)) == image.convert(expected).getpixel((9, 9))


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", None])
def test_metadata_is_not_carried(kind):
    for name in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        data = encoded(picture(), name, icc_profile=b"secret profile", exif=exif(6), comment=b"secret")
        result = converted(data, longest_side=32, format=kind)
        assert b"secret" not in result
        assert inspect(result, LIMITS).orientation == 1


def test_a_text_bomb_converts():
    bomb = b"k\x00\x00" + zlib.compress(bytes(2_000_000))
    data = encoded(picture(), "PNG")
    text = struct.pack(">I4s", len(bomb), b"zTXt") + bomb + struct.pack(">I", zlib.crc32(b"zTXt" + bomb))
    assert opened(converted(data[:33] + text + data[33:], longest_side=32)).size == (32, 24)


def test_animations_are_refused_unless_they_fit():
    data = encoded(picture(), "GIF", save_all=True, append_images=[picture(mode="L")])
    assert "2 frames" in failure(data, format="png")
    assert converted(data, longest_side=64) is None


def test_what_cannot_be_written_or_decoded():
    assert "tga" in failure(encoded(picture(), "TGA"), longest_side=32)
    assert converted(encoded(picture(), "TGA"), longest_side=32, format="png")
    broken = bytearray(encoded(picture(), "PNG"))
    at = broken.index(b"IDAT") + 6
    broken[at : at + 20] = bytes(20)
    facts = inspect(bytes(broken), LIMITS, CheckLevel.HEADER)
    with pytest.raises(RowError, match="conversion_failed"):
        convert(bytes(broken), facts, Conversion(longest_side=32, format=None, quality=None))
