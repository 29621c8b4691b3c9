"""Facts and verdicts of packer.images, format by format; cuts and mutations are in test_images_properties.py."""

import dataclasses
import io
import struct
import subprocess
import sys
import threading
import zlib

import pytest
from PIL import Image, ImageFile, ImageOps, PngImagePlugin

from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.images import EXTENSIONS, CheckLevel, ImageFacts, ImageLimits, inspect
from packer.images.decode import first_frame

LIMITS = ImageLimits()


def noise(mode="RGB", size=(60, 40)):
    """A picture that does not compress to nothing, in any mode Pillow can save."""
    bands = [Image.effect_noise(size, 80 + 10 * k) for k in range(len(Image.getmodebands(mode) * "x"))]
    if mode in ("1", "P"):
        return bands[0].convert("RGB").convert(mode)
    if mode == "I;16":
        return Image.frombytes("I;16", size, bytes(range(256)) * (size[0] * size[1] * 2 // 256 + 1), "raw", "I;16")
    return Image.merge(mode, bands)


def encoded(image, name, **options):
    out = io.BytesIO()
    image.save(out, name, **options)
    return out.getvalue()


def facts(width, height, kind, mode, orientation=1, frames=1):
    return ImageFacts(width=width, height=height, format=kind, mode=mode, orientation=orientation, frames=frames)


def reason(data, check=CheckLevel.STRUCTURE, limits=LIMITS):
    with pytest.raises(RowError) as caught:
        inspect(data, limits, check)
    assert "\n" not in caught.value.detail
    assert " at 0x" not in caught.value.detail
    return caught.value.reason


def chunk(kind, payload):
    return struct.pack(">I4s", len(payload), kind) + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(width, height, colour=2, depth=8, extra=(), pixels=None, interlace=0):
    """A PNG by hand: `extra` chunks stand between header and pixels."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    if pixels is None:
        pixels = (b"\x00" + bytes((width * channels * depth + 7) // 8)) * height
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)), *extra]
    parts += [chunk(b"IDAT", zlib.compress(pixels)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def exif(orientation, order="<", kind=3):
    start = b"II*\x00" if order == "<" else b"MM\x00*"
    value = struct.pack(order + "HH", orientation, 0) if kind == 3 else struct.pack(order + "I", orientation)
    model = struct.pack(order + "HHI4s", 0x0110, 2, 4, b"cam\x00")
    entry = struct.pack(order + "HHI", 0x0112, kind, 1) + value
    return start + struct.pack(order + "IH", 8, 2) + model + entry + struct.pack(order + "I", 0)


def segments(data):
    """Split a JPEG into [SOI, segment, ..., scan and the rest]."""
    parts, position = [data[:2]], 2
    while data[position + 1] != 0xDA:
        length = int.from_bytes(data[position + 2 : position + 4], "big") + 2
        parts.append(data[position : position + length])
        position += length
    return [*parts, data[position:]]


def with_frame(data, marker=None, **fields):
    """The JPEG with fields of its frame header changed (the first frame header is C0 or C2)."""
    parts = segments(data)
    index = next(k for k, part in enumerate(parts) if part[1] in (0xC0, 0xC2))
    frame = bytearray(parts[index])
    frame[1] = marker or frame[1]
    for name, value in fields.items():
        at, size = {"bits": (4, 1), "height": (5, 2), "width": (7, 2), "components": (9, 1)}[name]
        frame[at : at + size] = value.to_bytes(size, "big")
    parts[index] = bytes(frame)
    return b"".join(parts)


# Formats and modes against Pillow.


@pytest.mark.parametrize(
    ("name", "mode", "options", "expected"),
    [
        ("JPEG", "RGB", {}, "RGB"),
        ("JPEG", "L", {}, "L"),
        ("JPEG", "CMYK", {}, "CMYK"),
        ("JPEG", "RGB", {"progressive": True}, "RGB"),
        ("JPEG", "RGB", {"subsampling": 0, "restart_marker_rows": 1}, "RGB"),
        ("PNG", "1", {}, "1"),
        ("PNG", "L", {}, "L"),
        ("PNG", "LA", {}, "LA"),
        ("PNG", "P", {}, "P"),
        ("PNG", "P", {"transparency": 3}, "PA"),
        ("PNG", "RGB", {}, "RGB"),
        ("PNG", "RGB", {"transparency": (1, 2, 3)}, "RGBA"),
        ("PNG", "RGBA", {}, "RGBA"),
        ("PNG", "I;16", {}, "I;16"),
        ("WEBP", "RGB", {}, "RGB"),
        ("WEBP", "RGBA", {}, "RGBA"),
        ("WEBP", "RGB", {"lossless": True}, "RGB"),
        ("WEBP", "RGBA", {"lossless": True}, "RGBA"),
        ("WEBP", "RGB", {"xmp": b"<x/>"}, "RGB"),
        ("GIF", "P", {}, "P"),
        ("GIF", "L", {"interlace": 0}, "P"),
        ("BMP", "1", {}, "P"),
        ("BMP", "P", {}, "P"),
        ("BMP", "RGB", {}, "RGB"),
        ("TIFF", "RGB", {}, "RGB"),
        ("TIFF", "I;16", {}, "I;16"),
        ("TIFF", "CMYK", {"compression": "tiff_lzw"}, "CMYK"),
        ("PPM", "RGB", {}, "RGB"),
        ("ICO", "RGBA", {"sizes": [(32, 21)]}, "RGBA"),
        ("TGA", "RGB", {"rle": True}, "RGB"),
        ("QOI", "RGB", {}, "RGB"),
        ("PCX", "RGB", {}, "RGB"),
        ("SGI", "RGB", {}, "RGB"),
        ("JPEG2000", "RGB", {}, "RGB"),
        ("AVIF", "RGB", {}, "RGB"),
    ],
)
def test_facts_are_those_pillow_finds_at_every_level(name, mode, options, expected):
    data = encoded(noise(mode), name, **options)
    with Image.open(io.BytesIO(data)) as image:
        width, height, kind = *image.size, image.format.lower().replace("jpeg2000", "jp2")
    found = [inspect(data, LIMITS, check) for check in CheckLevel]
    assert found == [facts(width, height, kind, expected)] * 3
    assert kind in EXTENSIONS


def test_jpeg_2000_codestream_without_a_container():
    assert inspect(encoded(noise(), "JPEG2000", no_jp2=True), LIMITS) == facts(60, 40, "j2k", "RGB")


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize(
    ("colour", "depth", "expected"),
    [
        *((0, depth, mode) for depth, mode in ((1, "1"), (2, "L"), (4, "L"), (8, "L"), (16, "I;16"))),
        *((3, depth, "P") for depth in (1, 2, 4, 8)),
        *((2, 8, "RGB"), (2, 16, "RGB;16"), (4, 8, "LA"), (4, 16, "LA;16"), (6, 8, "RGBA"), (6, 16, "RGBA;16")),
    ],
)
def test_every_png_layout(colour, depth, expected, interlace):
    palette = [chunk(b"PLTE", bytes(6))] if colour == 3 else []
    data = png(8, 8, colour, depth, palette, pixels=bytes(8 * 8 * 8 + 64), interlace=interlace)
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(8, 8, "png", expected)


@pytest.mark.parametrize(
    ("colour", "depth", "key", "expected"),
    [(0, 1, 2, "LA"), (0, 8, 2, "LA"), (0, 16, 2, "LA;16"), (2, 8, 6, "RGBA"), (2, 16, 6, "RGBA;16"), (3, 8, 1, "PA")],
)
def test_a_transparent_colour_counts_as_alpha(colour, depth, key, expected):
    extra = [chunk(b"PLTE", bytes(6))] if colour == 3 else []
    data = png(9, 4, colour, depth, [*extra, chunk(b"tRNS", bytes(key))])
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(9, 4, "png", expected)


@pytest.mark.parametrize("name", ["PNG", "WEBP", "GIF", "TIFF", "AVIF"])
def test_frames_are_counted(name):
    frames = [noise(size=(20, 10)) for _ in range(4)]
    data = encoded(frames[0], name, save_all=True, append_images=frames[1:])
    assert [inspect(data, LIMITS, check).frames for check in CheckLevel] == [4, 4, 4]


# Orientation.


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "AVIF"])
def test_exif_orientation_gives_the_upright_size(name, orientation, order):
    prefix = b"Exif\x00\x00" if name == "JPEG" else b""
    data = encoded(noise(size=(64, 48)), name, exif=prefix + exif(orientation, order))
    found = inspect(data, LIMITS)
    with Image.open(io.BytesIO(data)) as image:
        assert (found.width, found.height) == ImageOps.exif_transpose(image).size
    assert (found.orientation, found.width) == (orientation, 64 if orientation < 5 else 48)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_orientation_gives_the_upright_size_at_every_level(orientation):
    data = encoded(noise(size=(64, 48)), "TIFF", tiffinfo={0x0112: orientation})
    size = (64, 48) if orientation < 5 else (48, 64)
    assert [inspect(data, LIMITS, check) for check in CheckLevel] == [facts(*size, "tiff", "RGB", orientation)] * 3


def test_phone_photo_is_upright():
    data = encoded(noise(size=(640, 480)), "JPEG", exif=b"Exif\x00\x00" + exif(6))
    assert inspect(data, LIMITS) == facts(480, 640, "jpeg", "RGB", orientation=6)


def test_png_orientation_after_the_pixels_counts():
    data = png(64, 48)
    data = data[:-12] + chunk(b"eXIf", exif(8)) + data[-12:]
    assert [inspect(data, LIMITS, check) for check in CheckLevel] == [facts(48, 64, "png", "RGB", 8)] * 3


@pytest.mark.parametrize(
    "block",
    [
        b"",
        b"Exif",
        b"II*\x00",
        exif(6)[:20],
        exif(0),
        exif(9),
        exif(6).replace(b"II*", b"XX*"),
        b"II*\x00\xff\xff\xff\xff",
        b"II*\x00\x08\x00\x00\x00\xff\xff" + bytes(7),
        exif(6).replace(struct.pack("<HHI", 0x0112, 3, 1), struct.pack("<HHI", 0x0112, 3, 2)),
        exif(6).replace(struct.pack("<HHI", 0x0112, 3, 1), struct.pack("<HHI", 0x0112, 5, 1)),
    ],
)
def test_broken_exif_is_orientation_1(block):
    assert inspect(png(64, 48, extra=[chunk(b"eXIf", block)]), LIMITS) == facts(64, 48, "png", "RGB")


def test_orientation_as_a_long_and_xmp_is_not_looked_at():
    assert inspect(png(64, 48, extra=[chunk(b"eXIf", exif(6, ">", kind=4))]), LIMITS).orientation == 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    for name in ("WEBP", "AVIF", "JPEG"):
        assert inspect(encoded(noise(), name, xmp=xmp), LIMITS).orientation == 1


# Limits: decided on the header, before anything else, by us and not by Pillow.


def test_claimed_size_is_refused_before_anything_else():
    bomb = png(50_000, 50_000, colour=0, depth=1, pixels=b"")
    assert len(bomb) < 70
    assert [reason(bomb, check) for check in CheckLevel] == [Reason.TOO_MANY_PIXELS] * 3
    assert reason(bomb[:40], limits=ImageLimits(max_pixels=10**9)) == Reason.TOO_MANY_PIXELS


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO"])
def test_limits_hold_for_every_format(name):
    data = encoded(noise(size=(96, 32)), name, **({"sizes": [(96, 32)]} if name == "ICO" else {}))
    for check in CheckLevel:
        assert reason(data, check, ImageLimits(max_pixels=96 * 32 - 1)) == Reason.TOO_MANY_PIXELS
        assert reason(data, check, ImageLimits(min_side=33)) == Reason.IMAGE_TOO_SMALL
        assert reason(data, check, ImageLimits(max_aspect_ratio=2.9)) == Reason.ASPECT_RATIO
        assert inspect(data, ImageLimits(max_pixels=96 * 32, min_side=32, max_aspect_ratio=3.0), check).width == 96


def test_ten_thousand_squared_passes_whatever_pillow_thinks(monkeypatch):
    data = png(10_000, 10_000, colour=0, depth=1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow alone would refuse
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(10_000, 10_000, "png", "1")
    assert Image.MAX_IMAGE_PIXELS == 1000
    assert reason(data, limits=ImageLimits(max_pixels=10**8 - 1)) == Reason.TOO_MANY_PIXELS


def test_header_that_claims_more_than_its_pixel_bytes_can_hold():
    assert reason(png(10_000, 10_000, pixels=b"\x00")) == Reason.CORRUPT_IMAGE
    small = encoded(noise(), "JPEG")
    assert reason(with_frame(small, width=16_000, height=16_000)) == Reason.CORRUPT_IMAGE
    assert inspect(with_frame(small, 0xC9, width=16_000, height=16_000), LIMITS).width == 16_000  # arithmetic coding


def with_tiff_size(data, side):
    for tag in (256, 257):
        at = min(at for kind in (3, 4) if (at := data.find(struct.pack("<HHI", tag, kind, 1))) > 0)
        data = data[:at] + struct.pack("<HHII", tag, 4, 1, side) + data[at + 12 :]
    return data


def test_no_memory_is_taken_for_claims_that_so_few_bytes_cannot_hold():
    codestream = bytearray(encoded(noise(), "JPEG2000", no_jp2=True))
    at = codestream.index(b"\xff\x51")
    for field in (6, 22):  # size of the image, size of a tile
        codestream[at + field : at + field + 8] = struct.pack(">II", 16_000, 16_000)
    compressed = ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")
    tiffs = [with_tiff_size(encoded(noise(), "TIFF", compression=kind), 16_000) for kind in compressed]
    for data in (bytes(codestream), *tiffs):
        with pytest.raises(RowError, match=r"bytes cannot hold the 256,000,000 pixels"):
            inspect(data, LIMITS)


@pytest.mark.parametrize("progressive", [True, False])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_blank_jpeg_is_no_false_claim(mode, progressive):
    page = Image.new(mode, (3000, 4000), "white")
    data = encoded(page, "JPEG", quality=1, progressive=progressive, optimize=True)
    assert inspect(data, LIMITS) == facts(3000, 4000, "jpeg", mode)


@pytest.mark.parametrize(
    ("mode", "compression"),
    [("1", "group4"), *((mode, kind) for mode in ("1", "L") for kind in ("tiff_lzw", "tiff_adobe_deflate", "packbits"))],
)
def test_a_blank_tiff_is_no_false_claim(mode, compression):
    page = Image.new(mode, (3000, 4000), "white")
    data = encoded(page, "TIFF", compression=compression, strip_size=2**24)
    assert inspect(data, LIMITS) == facts(3000, 4000, "tiff", mode)


def icon(inner, side=16):
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, side, side, 0, 0, 1, 32, len(inner), 22) + inner


def test_icon_whose_directory_is_wrong_has_the_size_of_its_picture():
    with pytest.warns(UserWarning, match="not the expected size"):
        Image.open(io.BytesIO(icon(png(20, 10))))
    assert inspect(icon(png(20, 10)), LIMITS) == facts(20, 10, "ico", "RGB")  # and without the warning


def test_icon_whose_picture_claims_more_than_its_directory():
    data = icon(png(30_000, 30_000, pixels=b""))
    assert [reason(data, check) for check in CheckLevel] == [Reason.TOO_MANY_PIXELS] * 3


@pytest.mark.parametrize("setting", [True, False])
def test_pillows_tolerance_of_cut_files_does_not_decide(monkeypatch, setting):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", setting)
    assert reason(encoded(noise(), "TIFF")[:-300]) == Reason.TRUNCATED_IMAGE
    assert reason(encoded(noise(), "PPM")[:-300]) == Reason.TRUNCATED_IMAGE
    assert ImageFile.LOAD_TRUNCATED_IMAGES is setting


# JPEG.


def test_noise_jpeg_cut_at_half_is_noticed():
    data = encoded(noise(size=(200, 200)), "JPEG")
    cut = data[: len(data) // 2]
    assert inspect(cut, LIMITS, CheckLevel.HEADER) == facts(200, 200, "jpeg", "RGB")
    assert reason(cut) == reason(cut, CheckLevel.DECODE) == Reason.TRUNCATED_IMAGE


def test_thumbnail_inside_exif_does_not_hide_a_cut():
    thumbnail = encoded(noise(size=(16, 16)), "JPEG")
    parts = segments(encoded(noise(), "JPEG"))
    app1 = b"Exif\x00\x00" + exif(1) + thumbnail
    parts.insert(1, b"\xff\xe1" + struct.pack(">H", len(app1) + 2) + app1)
    data = b"".join(parts)
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(60, 40, "jpeg", "RGB")
    assert reason(data[:-2]) == reason(data[:-500]) == Reason.TRUNCATED_IMAGE


def test_bytes_after_the_end_marker_are_fine():
    data = encoded(noise(), "JPEG")
    expected = facts(60, 40, "jpeg", "RGB")
    assert inspect(data + b"\x00" * 5000, LIMITS, CheckLevel.DECODE) == expected
    assert inspect(data + encoded(noise(), "PNG"), LIMITS) == expected


def test_multi_picture_jpeg_is_one_frame():
    data = encoded(noise(), "MPO", save_all=True, append_images=[noise()])
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(60, 40, "jpeg", "RGB")


def test_fill_bytes_junk_and_missing_app_segments():
    start, *parts = segments(encoded(noise(), "JPEG"))
    bare = [part for part in parts if not 0xE0 <= part[1] <= 0xEF]
    data = start + b"".join(b"ab"[: k % 3] + b"\xff" * k + part for k, part in enumerate(bare))
    assert inspect(data, LIMITS) == facts(60, 40, "jpeg", "RGB")


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF])
def test_every_kind_of_frame_header(marker):
    data = with_frame(encoded(noise(), "JPEG"), marker)
    assert inspect(data, LIMITS) == facts(60, 40, "jpeg", "RGB")


def test_sample_precision_is_in_the_mode():
    data = with_frame(encoded(noise(), "JPEG"), bits=12)
    assert inspect(data, LIMITS).mode == "RGB;12"
    assert reason(data, CheckLevel.DECODE) == Reason.UNSUPPORTED_IMAGE_FORMAT
    assert inspect(with_frame(encoded(noise("L"), "JPEG"), bits=16), LIMITS).mode == "L;16"


@pytest.mark.parametrize("fields", [{"height": 0}, {"width": 0}, {"components": 2}, {"bits": 7}])
def test_impossible_jpeg_header(fields):
    data = with_frame(encoded(noise(), "JPEG"), **fields)
    assert [reason(data, check) for check in CheckLevel] == [Reason.CORRUPT_IMAGE] * 3


def test_jpeg_segments_out_of_order():
    parts = segments(encoded(noise(), "JPEG"))
    frame = next(part for part in parts if part[1] == 0xC0)
    assert reason(b"".join(part for part in parts if part is not frame)) == Reason.CORRUPT_IMAGE
    assert reason(b"".join([parts[0], frame, *parts[1:]])) == Reason.CORRUPT_IMAGE
    assert reason(parts[0] + frame + b"\xff\xd9" + bytes(10)) == Reason.CORRUPT_IMAGE
    assert reason(parts[0] + b"\xff\xdb\x00\x01" + b"".join(parts[1:])) == Reason.CORRUPT_IMAGE


# PNG.


def test_text_and_profile_bombs_do_no_harm():
    bomb = zlib.compress(bytes(2_000_000))
    assert len(bomb) < 3000
    extra = [chunk(b"zTXt", b"k\x00\x00" + bomb), chunk(b"iCCP", b"p\x00\x00" + bomb)]
    data = png(20, 10, extra=extra)
    with pytest.raises(ValueError, match="Decompressed data too large"):  # what Pillow does with it
        PngImagePlugin.PngImageFile(io.BytesIO(data)).load()
    assert [inspect(data, LIMITS, check) for check in CheckLevel] == [facts(20, 10, "png", "RGB")] * 3


def test_broken_png_chunks():
    good = png(20, 10)
    at = good.index(b"IDAT")
    assert reason(good[: at + 6] + bytes([good[at + 6] ^ 1]) + good[at + 7 :]) == Reason.CORRUPT_IMAGE
    assert reason(good[:-12]) == Reason.TRUNCATED_IMAGE
    assert reason(good[: at - 4] + good[-12:]) == Reason.CORRUPT_IMAGE  # no IDAT
    assert reason(good[:8] + chunk(b"CgBI", bytes(4)) + good[8:]) == Reason.CORRUPT_IMAGE
    assert reason(good[:8] + chunk(b"tEXt", bytes(13)) + good[8:]) == Reason.CORRUPT_IMAGE
    assert reason(png(20, 10, colour=3)) == Reason.CORRUPT_IMAGE  # no palette
    assert reason(good.replace(b"\r\n", b"\n", 1)) == Reason.CORRUPT_IMAGE
    assert reason(png(20, 10, colour=2, depth=4)) == Reason.CORRUPT_IMAGE
    assert inspect(good + b"trailing", LIMITS, CheckLevel.DECODE) == facts(20, 10, "png", "RGB")


@pytest.mark.parametrize("size", [(0, 10), (10, 0)])
def test_png_without_pixels(size):
    assert [reason(png(*size), check) for check in CheckLevel] == [Reason.CORRUPT_IMAGE] * 3


def test_animation_that_contradicts_itself_is_a_still():
    data = png(20, 10, extra=[chunk(b"acTL", struct.pack(">II", 3, 0))])
    assert [inspect(data, LIMITS, check).frames for check in CheckLevel] == [1, 1, 1]
    animated = encoded(noise(), "PNG", save_all=True, append_images=[noise(), noise()])
    cut = animated[: animated.rindex(b"fcTL") - 4] + animated[-12:]
    assert [inspect(data, LIMITS).frames for data in (animated, cut)] == [3, 1]


def test_transparency_after_the_pixels_does_not_count():
    data = png(20, 10)
    data = data[:-12] + chunk(b"tRNS", bytes(6)) + data[-12:]
    assert inspect(data, LIMITS) == facts(20, 10, "png", "RGB")


def test_pixels_that_do_not_inflate_are_found_by_decoding_only():
    good = png(20, 10)
    data = good[: good.index(b"IDAT") - 4] + chunk(b"IDAT", b"not deflated") + chunk(b"IEND", b"")
    assert inspect(data, LIMITS) == facts(20, 10, "png", "RGB")
    assert reason(data, CheckLevel.DECODE) == Reason.CORRUPT_IMAGE


# WebP, GIF, BMP.


def test_webp_cut_and_patched():
    data = encoded(noise(), "WEBP")
    assert inspect(data[:-1], LIMITS, CheckLevel.HEADER) == facts(60, 40, "webp", "RGB")
    assert reason(data[:-1]) == Reason.TRUNCATED_IMAGE
    patched = data[:4] + struct.pack("<I", len(data) - 9) + data[8:-1]
    assert reason(patched) == Reason.CORRUPT_IMAGE  # the RIFF size was made to fit, its chunk was not
    assert inspect(data + b"trailing", LIMITS, CheckLevel.DECODE) == facts(60, 40, "webp", "RGB")


def test_webp_chunks_of_odd_length_are_padded():
    data = encoded(noise(), "WEBP", icc_profile=b"odd", exif=exif(6))
    assert inspect(data, LIMITS) == facts(40, 60, "webp", "RGB", orientation=6)


def test_webp_whose_canvas_is_not_its_picture():
    data = bytearray(encoded(noise("RGBA"), "WEBP"))
    assert data[12:16] == b"VP8X"
    data[24] += 1
    assert reason(bytes(data)) == Reason.CORRUPT_IMAGE


def test_gif_quirks():
    data = encoded(noise("P"), "GIF")
    assert data.endswith(b";")
    assert reason(data[:-1]) == Reason.TRUNCATED_IMAGE
    assert inspect(data[:-1] + b"\x00\x00;", LIMITS) == facts(60, 40, "gif", "P")
    assert reason(data[:-1] + b"junk;") == Reason.CORRUPT_IMAGE
    assert reason(data[:13] + bytes(3 << 8) + b";" if data[10] & 0x80 else data[:13] + b";") == Reason.CORRUPT_IMAGE


def test_transparent_gif():
    image = noise("P")
    opaque = encoded(image, "GIF", duration=100)
    assert b"!\xf9" in opaque
    assert inspect(opaque, LIMITS).mode == "P"
    data = encoded(image, "GIF", transparency=image.getpixel((5, 5)))
    assert [inspect(data, LIMITS, check) for check in CheckLevel] == [facts(60, 40, "gif", "PA")] * 3


def test_gif_picture_larger_than_its_screen_has_the_size_pillow_shows():
    data = bytearray(encoded(noise("P"), "GIF"))
    data[6:10] = struct.pack("<HH", 30, 0)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (60, 40)
    assert inspect(bytes(data), LIMITS, CheckLevel.DECODE) == facts(60, 40, "gif", "P")


def bmp(width, height, bits=24, compression=0, header=40, pixels=None, data_bytes=0):
    if header == 12:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, compression, data_bytes, 0, 0, 0, 0)
        info += bytes(header - len(info))
    palette = bytes((3 if header == 12 else 4) << bits) if bits <= 8 else b""
    if pixels is None:
        pixels = bytes((width * bits + 31) // 32 * 4 * abs(height))
    offset = 14 + len(info) + len(palette)
    return struct.pack("<2sIII", b"BM", offset + len(pixels), 0, offset) + info + palette + pixels


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"height": -10}, "RGB"),
        ({"height": 10, "header": 12}, "RGB"),
        ({"height": 10, "bits": 16}, "RGB"),
        ({"height": 10, "bits": 32}, "RGB"),
        ({"height": 10, "bits": 4}, "P"),
        ({"height": 10, "bits": 8, "header": 12}, "P"),
        ({"height": 10, "header": 124}, "RGB"),
        ({"height": 10, "bits": 8, "compression": 1, "pixels": b"\x07\x00\x00\x00" * 10 + b"\x00\x01"}, "P"),
    ],
)
def test_bmp_headers(options, mode):
    data = bmp(7, **options)
    assert inspect(data, LIMITS, CheckLevel.DECODE) == facts(7, 10, "bmp", mode)


def test_bmp_cuts():
    data = encoded(noise(), "BMP")
    assert inspect(data[:-1], LIMITS, CheckLevel.HEADER) == facts(60, 40, "bmp", "RGB")
    assert reason(data[:-1]) == reason(data[: len(data) // 2]) == Reason.TRUNCATED_IMAGE
    run_length = bmp(7, 10, 8, compression=1, pixels=bytes(40), data_bytes=41)
    assert reason(run_length) == Reason.TRUNCATED_IMAGE
    assert inspect(run_length + b"\x00", LIMITS).width == 7


def test_bmp_with_and_without_alpha_mask():
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    data = bytearray(bmp(7, 10, bits=32, compression=3, header=124))
    data[54:70] = masks
    assert inspect(bytes(data), LIMITS, CheckLevel.DECODE).mode == "RGBA"
    data[66:70] = bytes(4)
    assert inspect(bytes(data), LIMITS, CheckLevel.DECODE).mode == "RGB"


def test_bmp_that_wraps_a_png():
    assert reason(bmp(7, 10, compression=5)) == Reason.UNSUPPORTED_IMAGE_FORMAT
    assert reason(bmp(7, 10, compression=9)) == Reason.CORRUPT_IMAGE
    assert reason(bmp(0, 10)) == Reason.CORRUPT_IMAGE


# Formats decoded by Pillow.


def test_cut_page_of_a_tiff_is_noticed():
    pages = [noise(size=(30, 20)) for _ in range(3)]
    data = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert inspect(data, LIMITS, CheckLevel.HEADER).frames == 3
    for position in (len(data) - 20, len(data) // 2, 100, 9):
        assert reason(data[:position]) == Reason.TRUNCATED_IMAGE


def test_tiff_of_16_bits_a_channel_says_so_and_floats_are_refused_by_name():
    data = encoded(noise(), "TIFF")
    assert inspect(data, LIMITS).mode == "RGB"
    at = data.index(struct.pack("<HHI", 258, 3, 3))
    (where,) = struct.unpack_from("<I", data, at + 8)
    wide = data[:where] + struct.pack("<HHH", 16, 16, 16) + data[where + 6 :]
    assert inspect(wide, LIMITS, CheckLevel.HEADER).mode == "RGB;16"
    odd = data[:where] + struct.pack("<HHH", 64, 64, 64) + data[where + 6 :]
    assert reason(odd) == Reason.UNSUPPORTED_IMAGE_FORMAT


@pytest.mark.parametrize(
    ("name", "options"),
    [("AVIF", {}), ("JPEG2000", {}), ("JPEG2000", {"no_jp2": True}), ("PPM", {}), ("SGI", {}), ("TIFF", {})],
)
def test_cut_files_of_formats_without_a_parser_of_ours(name, options):
    data = encoded(noise(), name, **options)
    assert reason(data[: len(data) // 2]) == Reason.TRUNCATED_IMAGE


def test_pages_are_decoded_up_to_the_pixel_limit_only():
    pages = [noise(size=(30, 20)) for _ in range(3)]
    data = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    assert inspect(data, ImageLimits(max_pixels=600), CheckLevel.DECODE).frames == 3
    big_last = encoded(pages[0], "TIFF", save_all=True, append_images=[noise(size=(30, 200))])
    assert inspect(big_last, ImageLimits(max_pixels=600)).frames == 2


# Not images.


@pytest.mark.parametrize(
    ("data", "expected", "named"),
    [
        (b"", Reason.EMPTY_IMAGE, "0 bytes"),
        (b"<!DOCTYPE html><title>404</title>", Reason.NOT_AN_IMAGE, "looks like HTML: <!DOCTYPE"),
        (b"\n\n <HTML lang=en>", Reason.NOT_AN_IMAGE, "HTML"),
        (b"\xef\xbb\xbf<html>", Reason.NOT_AN_IMAGE, "HTML"),
        (b'{"error": "gone"}', Reason.NOT_AN_IMAGE, "JSON"),
        (b"<?xml version='1.0'?><Error/>", Reason.NOT_AN_IMAGE, "XML"),
        ("Zugriff verweigert \u2026 zur\u00fcck".encode(), Reason.NOT_AN_IMAGE, "plain text"),
        (b"BMW is a car maker", Reason.NOT_AN_IMAGE, "plain text"),
        (b"P1 is a police station", Reason.NOT_AN_IMAGE, "plain text"),
        (b"version https://git-lfs.github.com/spec/v1\noid", Reason.NOT_AN_IMAGE, "Git LFS"),
        (b"PK\x03\x04" + bytes(30), Reason.NOT_AN_IMAGE, "zip"),
        (bytes(range(1, 90)), Reason.NOT_AN_IMAGE, "01 02 03"),
        (b"<svg xmlns='x'/>", Reason.UNSUPPORTED_IMAGE_FORMAT, "SVG"),
        (b"<?xml version='1.0'?>\n<!-- c -->\n<svg/>", Reason.UNSUPPORTED_IMAGE_FORMAT, "SVG"),
        (b"%PDF-1.7\n", Reason.UNSUPPORTED_IMAGE_FORMAT, "PDF"),
        (b"%!PS-Adobe-3.0", Reason.UNSUPPORTED_IMAGE_FORMAT, "PostScript"),
        (b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00isommp42", Reason.UNSUPPORTED_IMAGE_FORMAT, "video (mp42)"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", Reason.UNSUPPORTED_IMAGE_FORMAT, "HEIC"),
        (b"\x1aE\xdf\xa3" + bytes(20), Reason.UNSUPPORTED_IMAGE_FORMAT, "WebM"),
        (b"RIFF\x00\x00\x00\x00AVI LIST", Reason.UNSUPPORTED_IMAGE_FORMAT, "AVI"),
        (b"\xff\x0a" + bytes(20), Reason.UNSUPPORTED_IMAGE_FORMAT, "JPEG XL"),
        (b"8BPS\x00\x01", Reason.UNSUPPORTED_IMAGE_FORMAT, "Photoshop"),
        (b"\xff\xd8", Reason.TRUNCATED_IMAGE, "jpeg"),
        (b"\x89PN", Reason.TRUNCATED_IMAGE, "png"),
        (b"GIF8", Reason.TRUNCATED_IMAGE, "gif"),
        (b"RIFF\x00\x00\x00\x00WE", Reason.TRUNCATED_IMAGE, "webp"),
    ],
)
def test_what_it_is_instead_is_named(data, expected, named):
    with pytest.raises(RowError) as caught:
        inspect(data, LIMITS)
    assert caught.value.reason == expected
    assert named in caught.value.detail


def test_avif_inside_a_generic_container_brand_is_avif():
    data = encoded(noise(), "AVIF")
    assert inspect(data.replace(b"ftypavif", b"ftypmif1", 1), LIMITS).format == "avif"


# Around Pillow.


def test_importing_and_checking_structure_does_not_load_pillow():
    code = (
        "import sys; from packer.images import *; from packer.format.errors import RowError\n"
        "inspect(bytes.fromhex(sys.argv[1]), ImageLimits())\n"
        "sys.exit('PIL' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, png(3, 2).hex()], check=False).returncode == 0


def test_many_threads_decode_at_once_and_leave_pillow_as_it_was(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    data = [encoded(noise(), name) for name in ("JPEG", "PNG", "WEBP", "TIFF")]
    found = []

    def work(start):
        found.extend(inspect(data[(start + k) % 4], LIMITS, CheckLevel.DECODE).width for k in range(40))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [60] * 320
    assert Image.MAX_IMAGE_PIXELS == 100
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data[0]))


def test_the_first_frame_is_what_the_header_said():
    data = encoded(noise(), "GIF", save_all=True, append_images=[noise("L")])
    header = inspect(data, LIMITS, CheckLevel.HEADER)
    assert header.frames == 2
    assert first_frame(data, header, LIMITS).convert("RGB").tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()
    with pytest.raises(RowError, match="its header says 61 x 40, decoded 60 x 40"):
        first_frame(data, dataclasses.replace(header, width=61), LIMITS)
