"""The part manifest (`.part.json`), written last: it IS the commit. And `source.json`, all manifests of a source in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from packer.format.digest import bytes_digest
from packer.format.errors import FormatError
from packer.format.layout import PartId
from packer.format.version import FORMAT_VERSION, MAGIC, check_version


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published file: its size in bytes and its blake3 (64 hex digits)."""

    size: int
    digest: str


class InputSpan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The piece of an input file a part was made from."""

    file: str
    """Path relative to the source's root."""
    byte_start: int
    """First byte of the first line (decompressed offset in compressed files)."""
    byte_end: int
    """One past the last byte of the last line."""
    file_size: int
    """Size of the file as stored, in bytes."""
    digest: str
    """blake3 of the (decompressed) bytes [byte_start, byte_end)."""
    input_complete: bool = True
    """False when the file ended before its own structure said (a cut .gz or .zst)."""


class Supersedes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retries only: the quarantined rows of `part_id` that are records now."""

    part_id: str
    byte_offsets: tuple[int, ...]
    by_reason: dict[str, int]
    """The reasons those rows were quarantined with."""


class PartManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a part holds, what it was made from, and the counts that must add up."""

    part_id: str
    source: str
    input: InputSpan
    recipe_fingerprint: str
    num_read: int
    num_written: int
    num_quarantined: int
    quarantined_by_reason: dict[str, int]
    num_images: int
    """Image references of all records, repeats included."""
    num_images_stored: int
    """Distinct images in the bundle."""
    images_dropped_by_reason: dict[str, int] = {}
    """Images left out of records that were kept, by the reason (`on_error: drop_image`, `over_max: keep_first`)."""
    num_blank_lines: int = 0
    num_byte_order_marks: int = 0
    """1 when the file began with a byte order mark, which was left out."""
    num_non_finite: int = 0
    """Numbers turned into null by `non_finite: "null"`."""
    check: str
    """Check level the images were held to."""
    files: dict[str, FileEntry]
    is_last_of_range: bool
    supersedes: Supersedes | None = None

    def __post_init__(self) -> None:
        """Refuse counts that do not add up: nothing may be lost between reading and writing."""
        if self.num_read != self.num_written + self.num_quarantined:
            raise ValueError(
                f"part {self.part_id}: read {self.num_read}, but written {self.num_written} + quarantined {self.num_quarantined}"
            )
        if sum(self.quarantined_by_reason.values()) != self.num_quarantined:
            raise ValueError(f"part {self.part_id}: reasons do not add up to {self.num_quarantined} quarantined rows")

    @property
    def identity(self) -> PartId:
        """The part's identity, taken apart."""
        identity = PartId.parse(self.part_id)
        if identity is None:
            raise FormatError(f"part id {self.part_id!r}: not a part id of format version {FORMAT_VERSION}")
        return identity

    @property
    def fingerprint(self) -> str:
        """Identity of the part's content for indexes built on it: digests of its files."""
        return _files_fingerprint(self.files)


def _files_fingerprint(files: Mapping[str, FileEntry]) -> str:
    return bytes_digest(msgspec.json.encode(files, order="sorted"))[:32]


_HEADER = {"format": MAGIC, "format_version": FORMAT_VERSION}


def _indented(document: Mapping[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def encode_manifest(manifest: PartManifest) -> bytes:
    """The bytes of a `.part.json`."""
    return _indented({**_HEADER, "kind": "part", **msgspec.to_builtins(manifest)})


def decode_manifest(data: bytes, where: str) -> PartManifest:
    """The manifest in a `.part.json`.

    Raises:
        FormatError: when it is cut, foreign, of another version, or does not add up.
    """
    return _from_document(parse_document(data, where, kind="part"), where)


def parse_document(data: bytes, where: str, *, kind: str) -> dict[str, Any]:
    """A JSON document of this format without its header, checked for kind and version.

    Raises:
        FormatError: when it is cut, foreign, or of another version.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{where}: found {len(data)} bytes that are not JSON ({error}): the file is cut or damaged") from error
    if not isinstance(document, dict):
        raise FormatError(f"{where}: found {type(document).__name__}, expected a JSON object")
    check_version(document, where)
    if document.get("kind") != kind:
        raise FormatError(f"{where}: found kind {document.get('kind')!r}, expected {kind!r}")
    return {key: value for key, value in document.items() if key not in ("format", "format_version", "kind")}


def _from_document(document: Mapping[str, Any], where: str) -> PartManifest:
    try:
        return msgspec.convert(document, PartManifest)
    except (msgspec.ValidationError, ValueError) as error:
        raise FormatError(f"{where}: {error}") from error


def encode_document(kind: str, content: Mapping[str, Any]) -> bytes:
    """A JSON document of this format with its header."""
    return _indented({**_HEADER, "kind": kind, **content})


def encode_source(source: str, manifests: Iterable[PartManifest]) -> bytes:
    """The bytes of `source.json`: totals and every manifest, ordered by part id."""
    ordered = sorted(manifests, key=lambda manifest: manifest.identity)
    check_supersedes(ordered)
    content = {
        "source": source,
        "totals": msgspec.to_builtins(total(ordered)),
        "parts": [msgspec.to_builtins(manifest) for manifest in ordered],
    }
    return encode_document("source", content)


def decode_source(data: bytes, where: str) -> list[PartManifest]:
    """The manifests of a `source.json`, ordered by part id.

    Raises:
        FormatError: when it is cut, foreign, or of another version.
    """
    document = parse_document(data, where, kind="source")
    parts = document.get("parts")
    if not isinstance(parts, list):
        raise FormatError(f"{where}: expected a list `parts`")
    return [_from_document(part, where) for part in parts]


class PartKey(NamedTuple):
    """What an index remembers of a part: enough to notice that it was packed again."""

    part_id: str
    num_rows: int
    """Records of the part."""
    fingerprint: str
    """`PartManifest.fingerprint`."""


def part_keys(manifests: Iterable[PartManifest]) -> list[PartKey]:
    """The keys of some parts, in part order."""
    ordered = sorted(manifests, key=lambda manifest: manifest.identity)
    return [PartKey(manifest.part_id, manifest.num_written, manifest.fingerprint) for manifest in ordered]


class _PartFiles(msgspec.Struct, frozen=True):
    part_id: str
    num_written: int
    files: dict[str, FileEntry]


class _SourceFiles(msgspec.Struct, frozen=True):
    format: str
    format_version: int
    kind: str
    parts: list[_PartFiles]


def decode_part_keys(data: bytes, where: str) -> list[PartKey]:
    """The keys in a `source.json`, in part order: half the time of `decode_source`.

    Raises:
        FormatError: when it is cut, foreign, or of another version.
    """
    try:
        document = msgspec.json.decode(data, type=_SourceFiles)
    except msgspec.DecodeError as error:
        parse_document(data, where, kind="source")
        raise FormatError(f"{where}: {error}") from error
    check_version(msgspec.structs.asdict(document), where)
    if document.kind != "source":
        raise FormatError(f"{where}: found kind {document.kind!r}, expected 'source'")
    return [PartKey(part.part_id, part.num_written, _files_fingerprint(part.files)) for part in document.parts]


class Totals(msgspec.Struct, kw_only=True):
    """Counts of many parts. `num_read == num_written + num_quarantined` holds for any set of whole sources."""

    num_parts: int = 0
    num_read: int = 0
    num_written: int = 0
    num_quarantined: int = 0
    quarantined_by_reason: dict[str, int] = {}
    num_images: int = 0
    num_images_stored: int = 0
    images_dropped_by_reason: dict[str, int] = {}
    num_blank_lines: int = 0
    num_byte_order_marks: int = 0
    num_non_finite: int = 0
    num_bytes: int = 0
    """Bytes of all published files of the parts."""


def total(manifests: Iterable[PartManifest]) -> Totals:
    """Sum of many parts. Rows that a retry superseded count once, as written."""
    totals = Totals()
    reasons: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for manifest in manifests:
        totals.num_parts += 1
        totals.num_written += manifest.num_written
        totals.num_images += manifest.num_images
        totals.num_images_stored += manifest.num_images_stored
        dropped.update(manifest.images_dropped_by_reason)
        totals.num_blank_lines += manifest.num_blank_lines
        totals.num_byte_order_marks += manifest.num_byte_order_marks
        totals.num_non_finite += manifest.num_non_finite
        totals.num_bytes += sum(entry.size for entry in manifest.files.values())
        reasons.update(manifest.quarantined_by_reason)
        if manifest.supersedes is None:
            totals.num_read += manifest.num_read
            totals.num_quarantined += manifest.num_quarantined
        else:
            totals.num_quarantined -= len(manifest.supersedes.byte_offsets)
            reasons.subtract(manifest.supersedes.by_reason)
    totals.quarantined_by_reason = {reason: count for reason, count in sorted(reasons.items()) if count}
    totals.images_dropped_by_reason = dict(sorted(dropped.items()))
    return totals


def check_supersedes(manifests: Sequence[PartManifest]) -> None:
    """Refuse two retries that both claim a row, or a retry of a part that is not there.

    Raises:
        FormatError: naming the parts.
    """
    claimed: dict[tuple[str, int], str] = {}
    known = {manifest.part_id for manifest in manifests}
    for manifest in manifests:
        if manifest.supersedes is None:
            continue
        parent = manifest.supersedes.part_id
        if parent not in known:
            raise FormatError(f"part {manifest.part_id} retries part {parent}, which is not in this source")
        for offset in manifest.supersedes.byte_offsets:
            other = claimed.setdefault((parent, offset), manifest.part_id)
            if other != manifest.part_id:
                raise FormatError(
                    f"parts {other} and {manifest.part_id} both hold the retried row at byte {offset} of part {parent}: "
                    f"remove {manifest.part_id}{'.part.json'} and run `bayplan retry` again"
                )
