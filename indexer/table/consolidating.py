"""All parts of a source in one file of large batches, and its ids sorted: what readers open instead of 50,000 small files.

Streaming: one batch of about a million rows is in memory at a time. The ids are published first and the table last, so a table
is never without its ids; both name the same parts by one digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc

from indexer.rows import SCHEMA, Rows, as_arrow
from indexer.table.batching import rebatch
from indexer.table.files import (
    KIND_IDS,
    KIND_TABLE,
    Header,
    parse_header,
    publish_table,
    read_metadata,
    stats_in,
    stats_metadata,
    write_staged,
)
from indexer.table.parts import PartPlace, PartState, open_listed, part_sizes, part_states, rows_of
from indexer.table.readahead import in_order
from indexer.table.sorted_ids import IdSorter, ids_schema
from packer.format import layout
from packer.format.digest import bytes_digest
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import PartKey, PartManifest, part_keys
from packer.storage import Staged, Storage, is_local, join_url

_SHOWN = 10

MergeStats = Callable[[Iterator[bytes]], bytes]
"""Makes the stats blob of a source of those of its parts, given in part order. Its FormatErrors are of the one it took last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consolidated:
    """The whole index of a source."""

    num_parts: int
    num_rows: int
    written: bool
    """False when it covered exactly these parts already."""


def consolidate(
    storage: Storage,
    profile: str,
    source: str,
    manifests: Iterable[PartManifest],
    profile_fingerprint: str,
    *,
    merge_stats: MergeStats | None = None,
    on_batch: Callable[[], None] = lambda: None,
) -> Consolidated:
    """Publish the table and the sorted ids of a source, unless they cover exactly these parts already.

    Args:
        manifests: all parts of the source. merge_stats: None leaves the blob of the source empty.
        on_batch: called for every part that is looked at or read, every batch that is written, and every block that is read
            back; not while a store takes a file.

    Raises:
        UsageError: naming parts that are not counted, or counted before they were packed again, or by another profile.
        FormatError: when a part, or its statistics, are damaged.
    """
    place = PartPlace(storage=storage, profile=profile, source=source, profile_fingerprint=profile_fingerprint)
    manifests = list(manifests)
    keys = part_keys(manifests)
    num_rows = sum(key.num_rows for key in keys)
    if covers(place, keys):
        return Consolidated(num_parts=len(keys), num_rows=num_rows, written=False)
    stats = _check_parts(place, manifests, merge_stats, on_batch)
    for folder in (layout.index_dir(profile), layout.index_parts_dir(profile, source)):
        storage.remove_stale_temporaries(folder)
    table = storage.stage(layout.index_table_file(profile, source))
    ids: Staged | None = None
    try:
        ids = storage.stage(layout.index_ids_file(profile, source))
        _write(place, keys, num_rows, stats, table, ids, on_batch)
    except BaseException:
        storage.discard(table)
        if ids is not None:
            storage.discard(ids)
        raise
    return Consolidated(num_parts=len(keys), num_rows=num_rows, written=True)


def parts_json(keys: Sequence[PartKey]) -> bytes:
    """The part table as the files' metadata holds it: `[part id, rows, part fingerprint]` of every part, in part order."""
    return orjson.dumps([list(key) for key in keys])


def parts_digest(profile_fingerprint: str, parts: bytes) -> str:
    """Identity of a table: which parts, counted by which profile."""
    return bytes_digest(profile_fingerprint.encode() + b"\n" + parts)[:32]


def is_consolidated(
    storage: Storage, profile: str, source: str, manifests: Iterable[PartManifest], profile_fingerprint: str
) -> bool:
    """Whether the table of a source covers exactly these parts, counted by this very profile."""
    place = PartPlace(storage=storage, profile=profile, source=source, profile_fingerprint=profile_fingerprint)
    return covers(place, part_keys(manifests))


def covers(place: PartPlace, keys: Sequence[PartKey]) -> bool:
    """Whether both files are there, whole, and made of these parts."""
    expected = parts_digest(place.profile_fingerprint, parts_json(keys))
    for kind, name in _names(place).items():
        where = join_url(place.storage.url, name)
        try:
            header, values = parse_header(read_metadata(place.storage, name), where, kind)
            if kind == KIND_TABLE:
                stats_in(values, where)
        except (FormatError, FileNotFoundError):
            return False
        if (header.profile, header.source) != (place.profile, place.source):
            return False
        if values.get("parts_digest", b"").decode(errors="replace") != expected:
            return False
    return True


def _names(place: PartPlace) -> dict[str, str]:
    return {
        KIND_TABLE: layout.index_table_file(place.profile, place.source),
        KIND_IDS: layout.index_ids_file(place.profile, place.source),
    }


def _check_parts(
    place: PartPlace, manifests: Sequence[PartManifest], merge_stats: MergeStats | None, on_batch: Callable[[], None]
) -> bytes:
    """Look at every part before a byte is written; the stats of the source."""
    problems: list[str] = []
    last: PartKey | None = None

    def blobs() -> Iterator[bytes]:
        nonlocal last
        checks = part_states(place.storage, place.profile, place.source, manifests, profile_fingerprint=place.profile_fingerprint)
        for check in checks:
            on_batch()
            if check.state is PartState.DONE:
                last = check.key
                yield check.stats
            else:
                problems.append(f"part {check.key.part_id} is {check.state}: {check.message}")
        last = None

    remaining = blobs()
    try:
        stats = merge_stats(remaining) if merge_stats else b""
    except FormatError as error:
        if last is None:
            raise
        raise FormatError(f"{place.where(last)}: its statistics are damaged; remove it and index again: {error}") from error
    for _ in remaining:
        pass
    if problems:
        more = f"\n  and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
        raise UsageError(
            f"index {place.profile!r} of source {place.source!r}: {len(problems):,} of {len(manifests):,} parts cannot be used; "
            "count them first\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )
    return stats


def _write(
    place: PartPlace,
    keys: Sequence[PartKey],
    num_rows: int,
    stats: bytes,
    table: Staged,
    ids: Staged,
    on_batch: Callable[[], None],
) -> None:
    parts = parts_json(keys)
    digest = parts_digest(place.profile_fingerprint, parts)
    schema = SCHEMA.with_metadata(
        _header(place, KIND_TABLE, num_rows).metadata({"parts_digest": digest, "parts": parts, **stats_metadata(stats)})
    )
    sorter = IdSorter(num_rows, os.path.dirname(table.path))
    try:
        batches = _batches(_rows(place, keys, on_batch), schema, sorter, on_batch)
        table_written = write_staged(place.storage, table, schema, batches)
        ids_metadata = _header(place, KIND_IDS, num_rows).metadata({"parts_digest": digest})
        schema = ids_schema(num_rows).with_metadata(ids_metadata)
        ids_written = write_staged(place.storage, ids, schema, _id_batches(schema, sorter, on_batch))
    finally:
        sorter.close()
    publish_table(place.storage, ids, ids_written, num_rows, on_batch)
    publish_table(place.storage, table, table_written, num_rows, on_batch)


def _header(place: PartPlace, kind: str, num_rows: int) -> Header:
    return Header(
        kind=kind,
        profile=place.profile,
        profile_fingerprint=place.profile_fingerprint,
        source=place.source,
        num_rows=num_rows,
    )


def _rows(place: PartPlace, keys: Sequence[PartKey], on_batch: Callable[[], None]) -> Iterator[Rows]:
    sizes = part_sizes(place)

    def opened(key: PartKey) -> tuple[PartKey, pa.ipc.RecordBatchFileReader]:
        try:
            return key, open_listed(place, key, sizes)
        except FileNotFoundError as error:
            raise FormatError(f"{place.where(key)}: removed while the index was put together; index again") from error

    for key, reader in in_order(opened, keys, remote=not is_local(place.storage.url)):
        on_batch()
        with reader:
            yield from rows_of(place, key, reader)


def _batches(rows: Iterator[Rows], schema: pa.Schema, sorter: IdSorter, on_batch: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in rebatch(rows):
        sorter.add(batch.id_hash, np.arange(start, start + len(batch)))
        start += len(batch)
        on_batch()
        yield batch.to_batch(schema)


def _id_batches(schema: pa.Schema, sorter: IdSorter, on_batch: Callable[[], None]) -> Iterator[pa.RecordBatch]:
    for hashes, rows in sorter.sorted():
        on_batch()
        yield pa.RecordBatch.from_arrays([as_arrow(hashes), as_arrow(rows)], schema=schema)


def read_stats(storage: Storage, profile: str, source: str) -> bytes:
    """The stats blob of a whole source.

    Raises:
        UsageError: when the source has no table. FormatError: when its table is damaged, or counted by another release.
    """
    name = layout.index_table_file(profile, source)
    where = join_url(storage.url, name)
    try:
        metadata = read_metadata(storage, name)
    except FileNotFoundError as error:
        raise UsageError(f"{where}: found no file, expected the index of source {source!r}: index it first") from error
    _, values = parse_header(metadata, where, KIND_TABLE)
    return stats_in(values, where)
