"""From image entries and index rows to the bytes to read, and from a line's bytes back to the record that was indexed."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import Any

from packer.format.digest import id_hash
from packer.format.errors import FormatError
from packer.format.record import ImageEntry, decode_record
from plugin.requests import Entry, RowPlace
from plugin.spans import Piece


def image_pieces(source: str, entries: Iterable[Entry], *, sample_id: str | None = None) -> list[Piece]:
    """What to read for the images of a record; slots are their numbers. Errors as `image_piece`."""
    return [image_piece(source, entry, slot, sample_id=sample_id) for slot, entry in enumerate(entries)]


def image_piece(source: str, entry: Entry, slot: Any = 0, *, sample_id: str | None = None, bundle: str | None = None) -> Piece:
    """What to read for one image; `bundle` goes before the entry's own.

    Raises:
        FormatError: for an entry that is none.
    """
    try:
        fields = entry.to_json() if isinstance(entry, ImageEntry) else entry
        file = (source, bundle or fields["bundle"])
        piece = Piece(file, fields["offset"], fields["size"], fields["crc32"], slot, sample_id)
        if piece.offset >= 0 < piece.size and piece.crc32 is not None:
            return piece
        why = "out of range"
    except (KeyError, TypeError) as error:
        why = repr(error)
    sample = "" if sample_id is None else f" of sample {sample_id!r}"
    raise FormatError(
        f"source {source!r}{sample}: found the image entry {entry!r} ({why}), expected a bundle, an offset, a size and a crc32: "
        "the record file was changed or is damaged"
    )


def record_piece(row: RowPlace, slot: Any = 0) -> Piece:
    """What to read for the record of an index row."""
    return Piece((row.source, posixpath.basename(row.record_file)), row.record_offset, row.record_size, None, slot)


def parsed_record(row: RowPlace, line: bytes) -> dict[str, Any]:
    """The record of a line, if it is the one the index saw: one line, its id, its number of images.

    Raises:
        FormatError: saying what was found instead.
    """
    if line.find(b"\n") != len(line) - 1:
        raise FormatError("bytes that are not one line")
    record = decode_record(line, "these bytes")
    if not isinstance(record["id"], str) or id_hash(record["id"]) != row.id_hash:
        raise FormatError(f"the record of sample {record['id']!r}")
    if row.status == 0 and len(record["images"]) != row.num_images:
        raise FormatError(f"a record of {len(record['images'])} images where the index counted {row.num_images}")
    return record
