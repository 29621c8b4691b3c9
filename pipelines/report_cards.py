"""Sample cards of the statistics report: which records to show, the beginning of their text, small pictures of their images.

Nothing here stops a report: an image that cannot be read, decoded or afforded becomes a grey tile that says why. A thumbnail
is 2 to 5 kB; `within_budget` keeps the page small when 130 sources bring four records each.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from packer.format.errors import BayplanError
from packer.images import CheckLevel, ImageFacts, ImageLimits, inspect
from packer.images.convert import upright
from packer.images.decode import one_line, opened

if TYPE_CHECKING:
    from PIL.Image import Image

Card = dict[str, Any]
Thumbnail = dict[str, Any]

_SIDE = 160
_QUALITY = 72
_TEXT_CHARS = 280
# A decoded picture of that many pixels takes 400 MB at most; JPEG is decoded at an eighth of its size and takes far less.
_LIMITS = ImageLimits(max_pixels=2**27)
_GREY = (200, 200, 200)


def choose(source_name: str, num_rows: int, count: int, seed: int) -> list[int]:
    """Up to `count` different rows of a source, rising; the same for the same arguments, and nothing is read."""
    chooser = random.Random(f"{seed}:{source_name}")
    return sorted(chooser.sample(range(num_rows), min(count, num_rows)))


def card(
    record: Mapping[str, Any],
    row: Mapping[str, Any],
    read_image: Callable[[Mapping[str, Any]], bytes],
    *,
    part: str,
    line: int,
    max_thumbnails: int = 4,
) -> Card:
    """A record as the report shows it.

    Args:
        record: as decoded from its line.
        row: its index row: `num_tokens`, `num_text_tokens`, `num_image_tokens`, and `images` with `num_image_tokens` each.
        read_image: image entry of the record -> its bytes; it may raise.
        part: id of the part the record is in.
        line: its line there, from 0.
        max_thumbnails: how many of its images get a thumbnail; the others are counted in `more_images`.
    """
    entries = record["images"]
    counted = row.get("images") or []
    thumbnails = [
        _thumbnail_of(entry, counted[number]["num_image_tokens"] if number < len(counted) else None, read_image)
        for number, entry in enumerate(entries[:max_thumbnails])
    ]
    return {
        "id": record["id"],
        "line": line,
        "part": part,
        "num_tokens": row["num_tokens"],
        "num_text_tokens": row["num_text_tokens"],
        "num_image_tokens": row["num_image_tokens"],
        "num_images": len(entries),
        "text": beginning(record),
        "thumbnails": thumbnails,
        "more_images": len(entries) - len(thumbnails),
    }


def beginning(record: Mapping[str, Any], limit: int = _TEXT_CHARS) -> str:
    """The first `limit` characters of a record's text: images as [image], roles before their turns, white space folded."""
    found = ""
    for piece in _pieces(record):
        found += " ".join(piece[: 4 * limit].split()) + " "
        if len(found) > limit + 1:
            return found[: limit - 1].rstrip() + "…"
    return found.rstrip()


def _pieces(record: Mapping[str, Any]) -> Iterator[str]:
    turns = record["messages"] if "messages" in record else [{"role": "", "content": record["content"]}]
    for turn in turns:
        if turn["role"]:
            yield f"{turn['role']}:"
        for part in turn["content"]:
            yield part["text"] if part["type"] == "text" else "[image]"


def _thumbnail_of(
    entry: Mapping[str, Any], num_image_tokens: int | None, read_image: Callable[[Mapping[str, Any]], bytes]
) -> Thumbnail:
    try:
        found = thumbnail(read_image(entry))
    except (BayplanError, OSError) as error:
        found = _tile(one_line(error))
    found["num_image_tokens"] = num_image_tokens
    if found["width"] is None:
        found["width"], found["height"] = entry["width"], entry["height"]
    return found


def thumbnail(data: bytes, *, side: int = _SIDE) -> Thumbnail:
    """A small upright WebP of an image as a data: URL, with the image's own upright `width` and `height` and a `title`.

    Transparent parts become white; of an animation the first frame is shown. Bytes that give no picture give a grey tile
    with the reason as its title.
    """
    width = height = None
    try:
        facts = inspect(data, _LIMITS, CheckLevel.HEADER)
        width, height = facts.width, facts.height
        picture = _small(data, facts, side)
    except BayplanError as error:
        return _tile(one_line(error), width, height)
    except Exception as error:  # whatever a decoder of Pillow's may raise on bad bytes
        return _tile(f"does not decode: {one_line(error)}", width, height)
    frames = f", {facts.frames} frames" if facts.frames > 1 else ""
    return {"data": _data_url(picture), "width": width, "height": height, "title": f"{facts.format} {facts.mode}{frames}"}


def _small(data: bytes, facts: ImageFacts, side: int) -> Image:
    from PIL.Image import Resampling

    with opened(data, facts.format) as image:
        image.draft("RGB", (2 * side, 2 * side))
        image.load()
        small = _opaque(image)
        small.thumbnail((side, side), Resampling.LANCZOS, reducing_gap=2.0)
    # Pillow turns TIFFs upright on loading.
    return small if facts.format == "tiff" else upright(small, facts.orientation)


def _opaque(image: Image) -> Image:
    """The picture as RGB on white; values beyond 8 bits are spread from their darkest to their brightest."""
    from PIL import Image as images

    if image.mode in ("I", "F", "I;16", "I;16B", "I;16L", "I;16N"):
        grey = image.convert("F")
        low, high = grey.getextrema()
        assert isinstance(low, float)
        assert isinstance(high, float)
        scale = 255 / (high - low) if high > low else 0.0
        return grey.point(lambda value: value * scale - low * scale).convert("L").convert("RGB")
    if image.mode in ("LA", "PA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        picture = image.convert("RGBA")
        ground = images.new("RGBA", picture.size, "white")
        return images.alpha_composite(ground, picture).convert("RGB")
    return image.convert("RGB")


def _tile(why: str, width: int | None = None, height: int | None = None) -> Thumbnail:
    from PIL import Image

    return {"data": _data_url(Image.new("RGB", (8, 8), _GREY)), "width": width, "height": height, "title": why}


def _data_url(image: Image) -> str:
    out = BytesIO()
    image.save(out, "WEBP", quality=_QUALITY, method=6)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def within_budget(cards: Mapping[str, Sequence[Card]], max_bytes: int) -> dict[str, list[Card]]:
    """The same cards with as many thumbnails as fit: the first image of every card before the second of any."""
    every = [item for items in cards.values() for item in items]
    kept: list[list[Thumbnail]] = [[] for _ in every]
    spent = 0
    for place in range(max((len(item["thumbnails"]) for item in every), default=0)):
        for item, own in zip(every, kept, strict=True):
            if len(own) == place < len(item["thumbnails"]):
                spent += len(item["thumbnails"][place]["data"])
                if spent <= max_bytes:
                    own.append(item["thumbnails"][place])
    left_out = (len(item["thumbnails"]) - len(own) for item, own in zip(every, kept, strict=True))
    fitted = iter(
        item | {"thumbnails": own, "more_images": item["more_images"] + num_left_out}
        for item, own, num_left_out in zip(every, kept, left_out, strict=True)
    )
    return {name: [next(fitted) for _ in items] for name, items in cards.items()}
