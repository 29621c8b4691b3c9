"""`bayplan show`: one record as a person reads it, its images written out beside, or all of it as one HTML page."""

from __future__ import annotations

import base64
import html
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from packer.format import layout
from packer.format.errors import UsageError
from packer.format.manifest import PartManifest
from packer.format.offsets import decode_offsets
from packer.format.record import decode_record
from packer.images import EXTENSIONS
from packer.storage import Storage, open_storage
from packer.verify import read_image
from pipelines import dataset
from pipelines.ledger import read_manifests

_SHOWN_CHARS = 2000


def show_record(url: str, what: str, *, as_html: bool, folder: str | None) -> None:
    """Print a record and write its images, or write and open a page.

    Raises:
        UsageError: when there is no such record.
    """
    storage = open_storage(url)
    dataset.require_identity(storage)
    source, _, key = what.partition(":")
    record = find_record(storage, source, key)
    target = Path(folder or tempfile.mkdtemp(prefix=f"bayplan-{source}-"))
    target.mkdir(parents=True, exist_ok=True)
    if as_html:
        page = target / "record.html"
        page.write_text(record_page(storage, source, record), encoding="utf-8")
        click.echo(page)
        webbrowser.open(page.resolve().as_uri())
        return
    for line in record_lines(record):
        click.echo(line)
    for number, entry in enumerate(record["images"]):
        path = target / f"{number:03d}.{EXTENSIONS[entry['format']]}"
        path.write_bytes(read_image(storage, source, entry))
        click.echo(f"image {number} written to {path}")


def find_record(storage: Storage, source: str, key: str) -> dict[str, Any]:
    """The record at place `key` of a source, or with id `key`; the first for an empty key.

    Raises:
        UsageError: when there is none.
    """
    manifests = read_manifests(storage, source)
    if not manifests:
        known = ", ".join(storage.list_dirs(layout.SOURCES_DIR)) or "none"
        raise UsageError(f"found no source {source!r} in {storage.url}; its sources: {known}")
    if key.isdecimal() or not key:
        record = _record_at(storage, manifests, int(key or 0))
        if record is not None:
            return record
    for manifest in manifests:
        for record in _records(storage, manifest):
            if record["id"] == key:
                return record
    num_records = sum(manifest.num_written for manifest in manifests)
    raise UsageError(f"found no record {key!r} in source {source!r}, expected a place from 0 to {num_records - 1} or an id")


def _record_at(storage: Storage, manifests: Sequence[PartManifest], place: int) -> dict[str, Any] | None:
    for manifest in manifests:
        if place < manifest.num_written:
            name = layout.part_file(manifest.source, manifest.part_id, layout.RECORDS_SUFFIX)
            index = layout.part_file(manifest.source, manifest.part_id, layout.OFFSETS_SUFFIX)
            offsets = decode_offsets(storage.read_bytes(index), index)
            with storage.open_read(name) as file:
                file.seek(offsets[place])
                return decode_record(file.read(offsets[place + 1] - offsets[place]), f"{name} line {place}")
        place -= manifest.num_written
    return None


def _records(storage: Storage, manifest: PartManifest) -> Iterator[dict[str, Any]]:
    name = layout.part_file(manifest.source, manifest.part_id, layout.RECORDS_SUFFIX)
    with storage.open_read(name) as file:
        for number, line in enumerate(file):
            yield decode_record(line, f"{name} line {number}")


def _turns(record: Mapping[str, Any]) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    if "content" in record:
        return [("", record["content"])]
    return [(message["role"], message["content"]) for message in record["messages"]]


def _image_line(number: int, entry: Mapping[str, Any]) -> str:
    turned = f", EXIF orientation {entry['orientation']}" if entry["orientation"] != 1 else ""
    frames = f", {entry['frames']} frames" if entry["frames"] != 1 else ""
    return (
        f"image {number}: {entry['width']}x{entry['height']} {entry['format']} {entry['mode']}{turned}{frames}, "
        f"{entry['size']} bytes, {entry['ref']}"
    )


def record_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A record as text, long texts cut."""
    yield f"id {record['id']}, from {record['origin']['file']} byte {record['origin']['byte_offset']}"
    for role, parts in _turns(record):
        if role:
            yield f"[{role}]"
        for part in parts:
            if part["type"] == "image":
                yield f"  <{_image_line(part['image'], record['images'][part['image']])}>"
            else:
                text = part["text"]
                yield text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}... ({len(text)} characters)"
    if record.get("num_images_dropped"):
        yield f"{record['num_images_dropped']} images dropped"
    for name, value in record["extra"].items():
        yield f"extra {name}: {value}"


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "img{max-width:100%;display:block}figure{margin:1rem 0}figcaption,.meta{opacity:.7;font-size:.85rem}pre{white-space:pre-wrap;"
    "font:inherit}h2{font-size:1rem;margin:1.5rem 0 .3rem}"
)


def record_page(storage: Storage, source: str, record: Mapping[str, Any]) -> str:
    """A record as one HTML page that needs nothing else."""
    pieces = [f"<!doctype html><meta charset=utf-8><title>{html.escape(record['id'])}</title><style>{_STYLE}</style>"]
    pieces.append(f"<h1>{html.escape(source)}: {html.escape(record['id'])}</h1>")
    for role, parts in _turns(record):
        if role:
            pieces.append(f"<h2>{html.escape(role)}</h2>")
        for part in parts:
            if part["type"] == "text":
                pieces.append(f"<pre>{html.escape(part['text'])}</pre>")
                continue
            entry = record["images"][part["image"]]
            data = base64.b64encode(read_image(storage, source, entry)).decode()
            caption = html.escape(_image_line(part["image"], entry))
            image = f'<img alt="{caption}" src="data:image/{entry["format"]};base64,{data}">'
            pieces.append(f"<figure>{image}<figcaption>{caption}</figcaption></figure>")
    rows = "".join(f"<p class=meta>{html.escape(name)}: {html.escape(str(value))}</p>" for name, value in record["extra"].items())
    origin = record["origin"]
    pieces.append(f"{rows}<p class=meta>{html.escape(origin['file'])} byte {origin['byte_offset']}</p>")
    return "\n".join(pieces)
