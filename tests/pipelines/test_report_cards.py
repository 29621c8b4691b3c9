"""Sample cards: the same choice every time, any image as a small upright picture, and a grey tile for what gives none."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from PIL import Image

from packer.format.errors import FormatError
from pipelines.report_cards import beginning, card, choose, thumbnail, within_budget


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def decoded(found: Mapping[str, Any]) -> Image.Image:
    head, _, data = found["data"].partition(",")
    assert head == "data:image/webp;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format == "WEBP"
    return image.convert("RGB")


def is_tile(found: Mapping[str, Any]) -> bool:
    return decoded(found).size == (8, 8)


def near(colour: Any, wanted: tuple[int, int, int]) -> bool:
    return all(abs(a - b) < 30 for a, b in zip(colour, wanted, strict=True))


def test_the_choice_is_the_same_for_the_same_seed_and_differs_between_sources() -> None:
    assert choose("photos", 10**9, 4, 7) == choose("photos", 10**9, 4, 7)
    assert choose("photos", 10**9, 4, 7) == sorted(set(choose("photos", 10**9, 4, 7)))
    assert choose("photos", 10**9, 4, 7) != choose("charts", 10**9, 4, 7) != choose("charts", 10**9, 4, 8)
    assert choose("photos", 3, 4, 7) == [0, 1, 2]
    assert choose("photos", 0, 4, 7) == []


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_every_mode_gives_a_picture(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = Image.new("RGB", (400, 200), (200, 40, 40)) if mode != "I;16" else Image.new("I;16", (400, 200), 40_000)
    found = thumbnail(encoded(image.convert(mode), kind))
    assert (found["width"], found["height"]) == (400, 200)
    assert decoded(found).size == (160, 80)


def test_16_bit_grey_keeps_its_shades() -> None:
    image = Image.frombytes("I;16", (2, 1), struct.pack("<2H", 300, 60_000)).resize((100, 50), Image.Resampling.NEAREST)
    picture = decoded(thumbnail(encoded(image, "PNG")))
    assert near(picture.getpixel((10, 25)), (0, 0, 0))
    assert near(picture.getpixel((90, 25)), (255, 255, 255))


def test_transparent_parts_become_white() -> None:
    assert near(decoded(thumbnail(encoded(Image.new("RGBA", (50, 50), (9, 9, 9, 0)), "PNG"))).getpixel((25, 25)), (255, 255, 255))


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_pictures_are_upright(kind: str) -> None:
    image = Image.new("RGB", (400, 200), "blue")
    image.paste("red", (0, 0, 200, 200))
    exif = Image.Exif()
    exif[0x0112] = 6
    found = thumbnail(encoded(image, kind, exif=exif))
    picture = decoded(found)
    assert (found["width"], found["height"], picture.size) == (200, 400, (80, 160))
    assert near(picture.getpixel((40, 20)), (255, 0, 0))
    assert near(picture.getpixel((40, 140)), (0, 0, 255))


def test_the_first_frame_of_an_animation_is_shown() -> None:
    frames = [Image.new("RGB", (60, 40), colour) for colour in ("red", "lime")]
    found = thumbnail(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert found["title"] == "gif P, 2 frames"
    assert near(decoded(found).getpixel((30, 20)), (255, 0, 0))


def test_extreme_sizes() -> None:
    assert decoded(thumbnail(encoded(Image.new("L", (5000, 1)), "PNG"))).size == (160, 1)
    assert decoded(thumbnail(encoded(Image.new("L", (1, 1)), "PNG"))).size == (1, 1)


def test_what_gives_no_picture_gives_a_grey_tile_with_the_reason() -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    whole = encoded(Image.effect_noise((300, 300), 90), "PNG")
    for data, why in [(bomb, "pixels"), (b"<html>", "image"), (b"", "image"), (whole[: len(whole) // 2], "")]:
        found = thumbnail(data)
        assert is_tile(found), why
        assert why in found["title"]
        assert found["title"]


RECORD = {
    "id": "first",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What\n is  this? "}, {"type": "image", "image": 0}]},
        {"role": "assistant", "content": [{"type": "text", "text": "배입니다."}]},
    ],
    "images": [{"width": 40, "height": 30, "ref": "a.png"}, {"width": 7, "height": 9, "ref": "gone.png"}],
}  # fmt: skip
ROW = {
    "num_tokens": 30,
    "num_text_tokens": 10,
    "num_image_tokens": 16,
    "images": [{"num_image_tokens": 12}, {"num_image_tokens": 4}],
}


def read(entry: Mapping[str, Any]) -> bytes:
    if entry["ref"] == "gone.png":
        raise FormatError("bundle x.zip is gone")
    return encoded(Image.new("RGB", (40, 30), "red"), "PNG")


def test_a_card_holds_what_the_page_shows() -> None:
    found = card(RECORD, ROW, read, part="p", line=5)
    assert {key: value for key, value in found.items() if key != "thumbnails"} == {
        "id": "first", "line": 5, "part": "p", "num_tokens": 30, "num_text_tokens": 10, "num_image_tokens": 16, "num_images": 2,
        "text": "user: What is this? [image] assistant: 배입니다.", "more_images": 0,
    }  # fmt: skip
    good, gone = found["thumbnails"]
    assert (good["num_image_tokens"], good["width"], good["title"]) == (12, 40, "png RGB")
    assert is_tile(gone)
    assert (gone["num_image_tokens"], gone["width"], gone["height"]) == (4, 7, 9)
    assert "bundle x.zip is gone" in gone["title"]
    assert card(RECORD, ROW, read, part="p", line=5, max_thumbnails=1)["more_images"] == 1


@pytest.mark.parametrize("length", [100, 279, 280, 281, 10_000_000])
def test_long_texts_are_cut(length: int) -> None:
    found = beginning({"id": "a", "content": [{"type": "text", "text": "가" * length}], "images": []})
    assert found == ("가" * length if length <= 280 else "가" * 279 + "…")


def test_a_budget_keeps_the_first_image_of_every_card_first() -> None:
    def cards(*counts: int) -> list[dict[str, Any]]:
        return [{"thumbnails": [{"data": "x" * 10}] * count, "more_images": 1} for count in counts]

    fitted = within_budget({"a": cards(3, 1), "b": cards(2)}, 40)
    found = {name: [(len(item["thumbnails"]), item["more_images"]) for item in items] for name, items in fitted.items()}
    assert found == {"a": [(2, 2), (1, 1)], "b": [(1, 2)]}
