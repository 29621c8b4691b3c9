"""Prove a dataset against its own manifests, one part at a time: nothing is believed that can be read back.

A part is read once: file digests, record lines, line offsets, and every image at its recorded place in the bundle; the
zip directory must name exactly those places. Problems are listed, never raised, so that one bad part hides no other.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packer.format import layout
from packer.format.bundle import check_image
from packer.format.digest import FileDigest, image_digest
from packer.format.errors import FormatError, RowError
from packer.format.manifest import PartManifest, check_supersedes, decode_source, encode_source
from packer.format.offsets import decode_offsets
from packer.format.quarantine import decode_quarantine
from packer.format.record import content_parts, decode_record, image_parts
from packer.images import CheckLevel, ImageLimits, inspect
from packer.storage import Storage, join_url

_BLOCK_BYTES = 4 << 20
_LOCAL_HEADER_BYTES = 30
_NO_LIMITS = ImageLimits(max_pixels=1 << 62)


@dataclass(slots=True, kw_only=True)
class PartVerdict:
    """What checking a part showed."""

    part_id: str
    problems: list[str] = field(default_factory=list)
    num_records: int = 0
    num_images: int = 0
    """Image entries of records that were compared with their bytes."""
    num_bytes: int = 0


def verify_part(storage: Storage, manifest: PartManifest, *, deep: bool = False) -> PartVerdict:
    """Check everything about one part. `deep` also decodes every image."""
    verdict = PartVerdict(part_id=manifest.part_id)
    where = f"{layout.source_dir(manifest.source)}/{manifest.part_id}"
    for file_name, entry in manifest.files.items():
        with _listing(verdict, f"{layout.source_dir(manifest.source)}/{file_name}"):
            found = _digest(storage, f"{layout.source_dir(manifest.source)}/{file_name}")
            verdict.num_bytes += found.size
            if found.size != entry.size:
                raise FormatError(f"found {found.size} bytes, the manifest says {entry.size}: the file was cut or replaced")
            if found.hexdigest() != entry.digest:
                raise FormatError(f"found blake3 {found.hexdigest()}, the manifest says {entry.digest}: the file was changed")
    with _listing(verdict, where):
        images = _verify_records(storage, manifest, verdict)
        _verify_bundle(storage, manifest, images, verdict, deep=deep)
        _verify_quarantine(storage, manifest)
    return verdict


@contextlib.contextmanager
def _listing(verdict: PartVerdict, where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        verdict.problems.append(f"{where}: found nothing, the manifest names it: the file was removed")
    except Exception as error:  # a damaged file can make a library fail in any way
        message = str(error) or type(error).__name__
        verdict.problems.append(message if message.startswith(where) else f"{where}: {message}")


def _digest(storage: Storage, name: str) -> FileDigest:
    digest = FileDigest()
    with storage.open_read(name) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest


def _verify_records(storage: Storage, manifest: PartManifest, verdict: PartVerdict) -> dict[int, dict[str, Any]]:
    """Check record lines, their offsets and counts; the distinct image entries by their offset in the bundle."""
    name = layout.part_file(manifest.source, manifest.part_id, layout.RECORDS_SUFFIX)
    index = layout.part_file(manifest.source, manifest.part_id, layout.OFFSETS_SUFFIX)
    offsets = decode_offsets(storage.read_bytes(index), index)
    images: dict[int, dict[str, Any]] = {}
    position = num_references = num_dropped = 0
    with storage.open_read(name) as file:
        for number, line in enumerate(file):
            where = f"{name} line {number}"
            if number >= len(offsets) - 1 or offsets[number] != position or not line.endswith(b"\n"):
                raise FormatError(f"{where}: begins at byte {position}, which is not what its offset file says")
            position += len(line)
            record = decode_record(line, where)
            _check_record(record, manifest, where)
            num_dropped += record.get("num_images_dropped", 0)
            num_references += len(record["images"])
            for entry in record["images"]:
                _note_image(images, entry, manifest, where)
            verdict.num_records += 1
    if position != offsets[-1] or verdict.num_records != len(offsets) - 1:
        raise FormatError(f"{name}: found {verdict.num_records} lines, its offset file has {len(offsets) - 1}")
    _expect(name, "records", verdict.num_records, manifest.num_written)
    _expect(name, "image references", num_references, manifest.num_images)
    _expect(name, "dropped images", num_dropped, sum(manifest.images_dropped_by_reason.values()))
    verdict.num_images = num_references
    return images


def _check_record(record: Mapping[str, Any], manifest: PartManifest, where: str) -> None:
    if not isinstance(record["id"], str) or not record["id"]:
        raise FormatError(f"{where}: found id {record['id']!r}, expected a text")
    for part in content_parts(record):
        if part["type"] == "text" and isinstance(part["text"], str):
            continue
        if part["type"] != "image" or type(part["image"]) is not int:
            raise FormatError(f"{where}: found a part {str(part)[:60]}, expected a text or the number of an image")
    if sorted(image_parts(record)) != list(range(len(record["images"]))):
        raise FormatError(f"{where}: its content does not name each of its {len(record['images'])} images once")
    origin, span = record["origin"], manifest.input
    if origin["file"] != span.file or not span.byte_start <= origin["byte_offset"] < span.byte_end:
        raise FormatError(f"{where}: its origin {origin} does not lie in the part's input {span.file} from {span.byte_start} on")


def _note_image(images: dict[int, dict[str, Any]], entry: dict[str, Any], manifest: PartManifest, where: str) -> None:
    bundle = f"{manifest.part_id}{layout.BUNDLE_SUFFIX}"
    if entry["bundle"] != bundle:
        raise FormatError(f"{where}: found an image in bundle {entry['bundle']!r}, expected {bundle!r}")
    known = images.setdefault(entry["offset"], entry)
    if any(known[key] != entry[key] for key in ("size", "crc32", "digest", "width", "height", "format")):
        raise FormatError(f"{where}: two records tell different things of the image at offset {entry['offset']}")


def _expect(where: str, what: str, found: int, expected: int) -> None:
    if found != expected:
        raise FormatError(f"{where}: found {found} {what}, the manifest says {expected}")


def _verify_bundle(
    storage: Storage, manifest: PartManifest, images: Mapping[int, dict[str, Any]], verdict: PartVerdict, *, deep: bool
) -> None:
    name = layout.part_file(manifest.source, manifest.part_id, layout.BUNDLE_SUFFIX)
    _expect(name, "distinct images", len(images), manifest.num_images_stored)
    if not images:
        return
    with storage.open_read(name) as file:
        members = _directory(file, name)
        if members.keys() != images.keys():
            raise FormatError(f"{name}: the zip directory names {len(members)} places, the records {len(images)} others")
        for offset, entry in sorted(images.items()):
            with _listing(verdict, name):
                member = members[offset]
                where = f"{name}: image {member.filename} at offset {offset}"
                if (member.file_size, member.CRC) != (entry["size"], entry["crc32"]):
                    raise FormatError(f"{where}: the zip directory tells another size or crc32 than the record")
                file.seek(offset)
                data = file.read(entry["size"])
                check_image(data, crc=entry["crc32"], size=entry["size"], where=where)
                _verify_image(data, entry, where, deep=deep)


def _directory(file: Any, name: str) -> dict[int, zipfile.ZipInfo]:
    """Members by the offset of their data, taken from each local header."""
    members = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED:
                raise FormatError(f"{name}: member {info.filename} is compressed; bundles are stored: it was packed anew")
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER_BYTES)
            name_bytes, extra_bytes = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            members[info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes] = info
    return members


def _verify_image(data: bytes, entry: Mapping[str, Any], where: str, *, deep: bool) -> None:
    if image_digest(data) != entry["digest"]:
        raise FormatError(f"{where}: found digest {image_digest(data)}, the record says {entry['digest']}")
    try:
        facts = inspect(data, _NO_LIMITS, CheckLevel.DECODE if deep else CheckLevel.HEADER)
    except RowError as error:
        raise FormatError(f"{where}: {error}") from error
    for key in ("width", "height", "format", "mode", "orientation", "frames"):
        if getattr(facts, key) != entry[key]:
            raise FormatError(f"{where}: found {key} {getattr(facts, key)}, the record says {entry[key]}")


def _verify_quarantine(storage: Storage, manifest: PartManifest) -> None:
    name = layout.part_file(manifest.source, manifest.part_id, layout.QUARANTINE_SUFFIX)
    lines = storage.read_bytes(name).splitlines() if name.rpartition("/")[2] in manifest.files else []
    rows = [decode_quarantine(line, f"{name} line {number}") for number, line in enumerate(lines, 1)]
    span = manifest.input
    for row in rows:
        if (row.source, row.file) != (manifest.source, span.file) or not span.byte_start <= row.byte_offset < span.byte_end:
            raise FormatError(f"{name}: row {row.file} byte {row.byte_offset} of {row.source!r} is not of this part's input")
    reasons = Counter(row.reason.value for row in rows)
    if dict(reasons) != manifest.quarantined_by_reason:
        raise FormatError(f"{name}: found {dict(reasons)}, the manifest says {manifest.quarantined_by_reason}")


def verify_source(storage: Storage, source: str, manifests: Sequence[PartManifest]) -> list[str]:
    """Problems of a source as a whole: `source.json`, double claims, gaps between parts, files that belong to no part."""
    problems = []
    name = layout.source_file(source)
    try:
        check_supersedes(manifests)
        data = storage.read_bytes(name)
        decode_source(data, join_url(storage.url, name))
        if data != encode_source(source, manifests):
            problems.append(f"{name}: does not hold the manifests that are there: run `bayplan pack` again")
    except FileNotFoundError:
        problems.append(f"{name}: found nothing: the run did not end; run `bayplan pack` again")
    except FormatError as error:
        problems.append(str(error))
    problems += _gaps(source, manifests)
    known = {file_name for manifest in manifests for file_name in manifest.files}
    for file in storage.list_dir(layout.source_dir(source)):
        base = file.name.rpartition("/")[2]
        if layout.part_of(base) and not base.endswith(layout.MANIFEST_SUFFIX) and base not in known:
            problems.append(f"{file.name}: belongs to no committed part: an unfinished run; run `bayplan pack` again")
    return problems


def _gaps(source: str, manifests: Sequence[PartManifest]) -> Iterator[str]:
    """Bytes between two parts of a file that no part was made from."""
    position: dict[str, int] = {}
    for manifest in manifests:
        if manifest.supersedes is not None:
            continue
        span = manifest.input
        expected = position.get(span.file, 0)
        if span.byte_start != expected:
            yield f"{source}: part {manifest.part_id} begins at byte {span.byte_start} of {span.file}, expected {expected}"
        position[span.file] = span.byte_end


def read_image(storage: Storage, source: str, entry: Mapping[str, Any]) -> bytes:
    """The bytes of a record's image, checked.

    Raises:
        FormatError: when the bundle no longer holds it.
    """
    name = f"{layout.source_dir(source)}/{entry['bundle']}"
    with storage.open_read(name) as file:
        file.seek(entry["offset"], io.SEEK_SET)
        data = file.read(entry["size"])
    check_image(data, crc=entry["crc32"], size=entry["size"], where=f"{name} offset {entry['offset']}")
    return data
