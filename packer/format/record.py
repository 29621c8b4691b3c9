"""One record line: what it holds, how it is written, how it is read.

Written with orjson in a fixed key order; carried fields are spliced in as their original bytes, so their numbers,
escapes and spaces survive exactly. `messages` and `content` are mutually exclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from packer.format.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """An image of a record: where its bytes stand and what they show."""

    bundle: str
    offset: int
    size: int
    crc32: int
    digest: str
    width: int
    """Upright, in pixels."""
    height: int
    """Upright, in pixels."""
    format: str
    mode: str
    """Pixel layout as stored, before any conversion by a trainer."""
    orientation: int
    """EXIF orientation of the stored bytes, 1..8."""
    frames: int
    ref: str
    """The source's own reference; data: URLs are replaced by their digest."""
    converted_from: Mapping[str, Any] | None = None
    """Only where the recipe asked for a conversion: digest, size and facts of the original."""

    def to_json(self) -> dict[str, Any]:
        """The JSON object of this entry, in the format's key order."""
        entry: dict[str, Any] = {
            "bundle": self.bundle,
            "offset": self.offset,
            "size": self.size,
            "crc32": self.crc32,
            "digest": self.digest,
            "width": self.width,
            "height": self.height,
            "format": self.format,
            "mode": self.mode,
            "orientation": self.orientation,
            "frames": self.frames,
            "ref": self.ref,
        }
        if self.converted_from is not None:
            entry["converted_from"] = dict(self.converted_from)
        return entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What a schema makes of a row: documents have `content`, conversations have `messages`.

    A part of content is `{"type": "text", "text": str}` or `{"type": "image", "image": k}`, k indexing the record's
    images; a message is `{"role": str, "content": [part, ...]}` and may hold `extra`, its other fields.
    """

    kind: str
    """`content` or `messages`."""
    items: Sequence[Mapping[str, Any]]


def encode_record(
    *,
    sample_id: str,
    body: Body,
    images: Sequence[ImageEntry],
    origin_file: str,
    origin_offset: int,
    extra: Mapping[str, bytes],
    num_images_dropped: int = 0,
) -> bytes:
    """The line of a record, newline included. `extra` maps field names to their original JSON bytes.

    Raises:
        TypeError: when the body holds a value that cannot be written.
    """
    document: dict[str, Any] = {
        "id": sample_id,
        body.kind: body.items,
        "images": [image.to_json() for image in images],
        "origin": {"file": origin_file, "byte_offset": origin_offset},
    }
    if num_images_dropped:
        document["num_images_dropped"] = num_images_dropped
    document["extra"] = {name: orjson.Fragment(value) for name, value in extra.items()}
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def decode_record(line: bytes | memoryview, where: str) -> dict[str, Any]:
    """The JSON object of a record line, checked for the keys every record has.

    Raises:
        FormatError: when the line is not a record.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{where}: not a record line: {error}") from error
    if not isinstance(record, dict) or not {"id", "images", "origin", "extra"} <= record.keys():
        raise FormatError(f"{where}: not a record line: expected the keys id, images, origin, extra")
    if ("content" in record) == ("messages" in record):
        raise FormatError(f"{where}: not a record line: expected exactly one of content and messages")
    return record


def content_parts(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All parts in reading order, whichever way the record holds them."""
    contents = [record["content"]] if "content" in record else [m["content"] for m in record["messages"]]
    return [part for content in contents for part in content]


def image_parts(record: Mapping[str, Any]) -> list[int]:
    """Image indexes in reading order, as the record's content or messages name them."""
    return [part["image"] for part in content_parts(record) if part["type"] == "image"]
