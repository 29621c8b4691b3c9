"""The index of one part: written by the task that counted it, read when the source is consolidated. Row i is record line i."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
import pyarrow.ipc

from indexer.rows import SCHEMA, Rows
from indexer.table.batching import rebatch
from indexer.table.files import (
    KIND_PART,
    Header,
    damage,
    open_reader,
    parse_header,
    publish_table,
    read_batch,
    read_metadata,
    stats_in,
    stats_metadata,
    write_staged,
)
from indexer.table.readahead import in_order
from packer.format import layout
from packer.format.errors import FormatError
from packer.format.manifest import PartKey, PartManifest, part_keys
from packer.storage import Storage, is_local, join_url


class PartState(StrEnum):
    """What a profile's index has of a part."""

    DONE = "done"
    MISSING = "missing"
    STALE = "stale"
    """The part was packed again after it was counted, or counted by a release whose statistics are others."""
    FOREIGN = "foreign"
    """Counted by another profile, or a file of another part or source."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCheck:
    """The state of one part."""

    key: PartKey
    state: PartState
    message: str
    """What is wrong and what to do; empty when done."""
    stats: bytes
    """The blob the part was written with; empty unless done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """Which index the parts are looked for in."""

    storage: Storage
    profile: str
    source: str
    profile_fingerprint: str

    def name(self, key: PartKey) -> str:
        """The file of a part, relative to the dataset."""
        return layout.index_part_file(self.profile, self.source, key.part_id)

    def where(self, key: PartKey) -> str:
        """The same as messages name it."""
        return join_url(self.storage.url, self.name(key))


def write_part(
    storage: Storage,
    profile: str,
    source: str,
    part_id: str,
    rows: Rows,
    *,
    profile_fingerprint: str,
    part_fingerprint: str,
    stats: bytes,
) -> None:
    """Publish the index of one part. Equal arguments give equal bytes.

    Args:
        part_fingerprint: `PartManifest.fingerprint` of the part that was counted.
        stats: `indexer.stats.encode_stats`, kept as it is under this release's `STATS_VERSION` and given back by `part_states`.

    Raises:
        FormatError: what was read back is not what was written. OutputError, StorageFault: as `Storage.publish`.
    """
    header = Header(kind=KIND_PART, profile=profile, profile_fingerprint=profile_fingerprint, source=source, num_rows=len(rows))
    more: dict[str, str | bytes] = {"part_id": part_id, "part_fingerprint": part_fingerprint, **stats_metadata(stats)}
    schema = SCHEMA.with_metadata(header.metadata(more))
    staged = storage.stage(layout.index_part_file(profile, source, part_id))
    try:
        written = write_staged(storage, staged, schema, (batch.to_batch(schema) for batch in rebatch([rows])))
        publish_table(storage, staged, written, len(rows))
    except BaseException:
        storage.discard(staged)
        raise


def part_state(storage: Storage, profile: str, manifest: PartManifest, *, profile_fingerprint: str) -> PartCheck:
    """What the index has of a part: its counts of this very part by this very profile, or why not."""
    place = PartPlace(storage=storage, profile=profile, source=manifest.source, profile_fingerprint=profile_fingerprint)
    (key,) = part_keys([manifest])
    try:
        return _compare(place, key, read_metadata(storage, place.name(key)))
    except FileNotFoundError:
        return _missing(place, key)
    except FormatError as error:
        return PartCheck(key=key, state=PartState.DAMAGED, message=str(error), stats=b"")


def part_states(
    storage: Storage, profile: str, source: str, manifests: Iterable[PartManifest], *, profile_fingerprint: str
) -> Iterator[PartCheck]:
    """`part_state` of many parts of a source, in part order, with one listing for those that are missing."""
    place = PartPlace(storage=storage, profile=profile, source=source, profile_fingerprint=profile_fingerprint)
    sizes = part_sizes(place)

    def check(key: PartKey) -> PartCheck:
        name = place.name(key)
        if posixpath.basename(name) not in sizes:
            return _missing(place, key)
        try:
            return _compare(place, key, read_metadata(storage, name))
        except FileNotFoundError:
            return _missing(place, key)
        except FormatError as error:
            return PartCheck(key=key, state=PartState.DAMAGED, message=str(error), stats=b"")

    yield from in_order(check, part_keys(manifests), remote=not is_local(storage.url))


def part_sizes(place: PartPlace) -> dict[str, int]:
    """The index files of a source's parts and their bytes, from one listing."""
    listed = place.storage.list_dir(layout.index_parts_dir(place.profile, place.source))
    return {posixpath.basename(file.name): file.size for file in listed}


def open_listed(place: PartPlace, key: PartKey, sizes: Mapping[str, int]) -> pa.ipc.RecordBatchFileReader:
    """The file of a part that a listing named.

    Raises:
        FileNotFoundError: when it did not. FormatError: when it is not an Arrow file.
    """
    name = place.name(key)
    if (size := sizes.get(posixpath.basename(name))) is None:
        raise FileNotFoundError(name)
    return open_reader(place.storage, name, size)


def _missing(place: PartPlace, key: PartKey) -> PartCheck:
    message = f"{place.where(key)}: found no file: part {key.part_id} is not counted; index again"
    return PartCheck(key=key, state=PartState.MISSING, message=message, stats=b"")


def _compare(place: PartPlace, key: PartKey, metadata: Mapping[bytes, bytes] | None) -> PartCheck:
    where = place.where(key)

    def verdict(state: PartState, what: str) -> PartCheck:
        return PartCheck(key=key, state=state, message=f"{where}: {what}", stats=b"")

    try:
        header, values = parse_header(metadata, where, KIND_PART)
    except FormatError as error:
        return PartCheck(key=key, state=PartState.DAMAGED, message=str(error), stats=b"")
    identity = (header.profile, header.source, values.get("part_id", b"").decode(errors="replace"))
    if identity != (expected := (place.profile, place.source, key.part_id)):
        return verdict(PartState.FOREIGN, f"found profile, source, part {identity}, expected {expected}: the file was moved here")
    if header.profile_fingerprint != place.profile_fingerprint:
        return verdict(
            PartState.FOREIGN,
            f"found counts of profile fingerprint {header.profile_fingerprint}, expected {place.profile_fingerprint}: "
            "the profile changed; index again",
        )
    if (found := values.get("part_fingerprint", b"").decode(errors="replace")) != key.fingerprint:
        return verdict(
            PartState.STALE,
            f"found counts of part fingerprint {found}, expected {key.fingerprint}: the part was packed again; index again",
        )
    if header.num_rows != key.num_rows:
        return verdict(PartState.DAMAGED, f"found {header.num_rows:,} rows, expected {key.num_rows:,}: remove it and index again")
    try:
        return PartCheck(key=key, state=PartState.DONE, message="", stats=stats_in(values, where))
    except FormatError as error:
        return PartCheck(key=key, state=PartState.STALE, message=str(error), stats=b"")


def rows_of(place: PartPlace, key: PartKey, reader: pa.ipc.RecordBatchFileReader) -> Iterator[Rows]:
    """The rows of a part that was found done, batch by batch.

    Raises:
        FormatError: when the file is damaged, or was replaced since.
    """
    where = place.where(key)
    check = _compare(place, key, reader.schema.metadata)
    if check.state is not PartState.DONE:
        raise FormatError(check.message)
    found = 0
    for number in range(reader.num_record_batches):
        with damage(where):
            rows = Rows.from_batch(read_batch(reader, number, where), where)
        found += len(rows)
        yield rows
    if found != key.num_rows:
        raise FormatError(
            f"{where}: found {found:,} rows, expected {key.num_rows:,}: the file is damaged; remove it and index again"
        )


def read_part(storage: Storage, profile: str, manifest: PartManifest, *, profile_fingerprint: str) -> tuple[Rows, bytes]:
    """All rows of a part and its stats blob.

    Raises:
        FormatError: when the part is not done; the message of its `PartCheck`.
    """
    check = part_state(storage, profile, manifest, profile_fingerprint=profile_fingerprint)
    if check.state is not PartState.DONE:
        raise FormatError(check.message)
    place = PartPlace(storage=storage, profile=profile, source=manifest.source, profile_fingerprint=profile_fingerprint)
    with open_reader(storage, place.name(check.key)) as reader:
        return Rows.concatenate(list(rows_of(place, check.key, reader))), check.stats
