"""Counting the records of parts, and putting a source's counted parts together: plain tasks that know nothing of Ray.

A guard is told rows by their place in the task: the records of its parts, one part after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from indexer.encode import SampleCount, SampleEncoder, SampleRefused
from indexer.facts import RecordFacts
from indexer.image_rules import ImageCount
from indexer.profile import open_stored
from indexer.rows import Rows, Status
from indexer.stats import Stats, decode_stats, encode_stats, stats_of
from indexer.table import PartState, consolidate, part_state, read_stats, write_part
from indexer.tokenizers import bound_threads
from packer.convert import Step
from packer.format import layout
from packer.format.digest import FileDigest, id_hash
from packer.format.errors import FormatError
from packer.format.manifest import PartManifest, decode_source
from packer.format.offsets import decode_offsets
from packer.format.record import decode_record
from packer.guard import Guard
from packer.storage import Storage, join_url, open_storage

_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTask:
    """Count the records of some parts of a source by one profile of the dataset."""

    source: str
    profile: str
    fingerprint: str
    parts: tuple[PartManifest, ...]
    num_cpus: float = 1.0
    """How many threads a tokenizer may use."""
    condemned: frozenset[int] = field(default_factory=frozenset)
    """Rows that kill their worker."""
    probe: tuple[int, int] | None = None
    """Only these rows (both ends included), one at a time, and write nothing."""

    def named(self, row: int) -> str:
        """A row as a person finds it."""
        for part in self.parts:
            if row < part.num_written:
                return f"line {row} of part {part.part_id}"
            row -= part.num_written
        raise AssertionError("a row of another task")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateTask:
    """Put the counted parts of a source together."""

    source: str
    profile: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPart:
    """A part that is counted now."""

    part_id: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSource:
    """A source whose index is whole."""

    source: str
    num_rows: int


@dataclass(frozen=True, slots=True)
class _Line:
    """A record's line and its place."""

    row: int
    """In the task."""
    offset: int
    data: bytes


def index_parts(task: IndexTask, storage: Storage, guard: Guard) -> Iterator[Step | CountedPart]:
    """Count part after part; each is committed as soon as it is whole, and not counted again after a death further on.

    Raises:
        FormatError: when a part's files are not those its manifest names.
    """
    bound_threads(task.num_cpus)
    encoder = _encoder(storage.url, task.profile, task.fingerprint)
    first_row = 0
    for part in task.parts:
        if task.probe is not None:
            yield from _probe_part(task, storage, encoder, part, first_row, guard)
        elif not _is_done(task, storage, part):
            yield from _index_part(task, storage, encoder, part, first_row, guard)
        first_row += part.num_written


def _is_done(task: IndexTask, storage: Storage, part: PartManifest) -> bool:
    """Whether the part is counted. Other counts of it go first: a quarantine never stands beside counts that are not its own."""
    state = part_state(storage, task.profile, part, profile_fingerprint=task.fingerprint).state
    if state not in (PartState.DONE, PartState.MISSING):
        storage.remove(layout.index_part_file(task.profile, task.source, part.part_id))
    return state is PartState.DONE


@lru_cache(maxsize=4)
def _encoder(url: str, profile: str, fingerprint: str) -> SampleEncoder:
    """Opened once in a worker: a tokenizer takes a second to load."""
    opened = open_stored(open_storage(url), profile)
    if opened.fingerprint != fingerprint:
        raise FormatError(f"profile {profile!r}: found {opened.fingerprint}, expected {fingerprint}: another job changed it")
    return opened.encoder


def _index_part(
    task: IndexTask, storage: Storage, encoder: SampleEncoder, part: PartManifest, first_row: int, guard: Guard
) -> Iterator[Step | CountedPart]:
    columns = _Columns()
    for batch in _batches(_lines(storage, part, first_row)):
        for line in batch:
            guard.begin(line.row)
        num_refused = columns.add(first_row, batch, _counted(encoder, batch, task.condemned, part))
        guard.finish(batch[-1].row + 1)
        yield Step(sum(len(line.data) for line in batch), len(batch), num_refused)
    rows = columns.rows()
    quarantine = layout.index_quarantine_file(task.profile, task.source, part.part_id)
    if columns.refused:
        storage.publish_bytes(quarantine, b"".join(orjson.dumps(line) + b"\n" for line in columns.refused))
    else:
        storage.remove(quarantine)
    stats = columns.stats(rows)
    write_part(
        storage,
        task.profile,
        task.source,
        part.part_id,
        rows,
        profile_fingerprint=task.fingerprint,
        part_fingerprint=part.fingerprint,
        stats=encode_stats(stats),
    )
    yield CountedPart(part_id=part.part_id, num_rows=len(rows))


def _probe_part(
    task: IndexTask, storage: Storage, encoder: SampleEncoder, part: PartManifest, first_row: int, guard: Guard
) -> Iterator[Step]:
    assert task.probe is not None
    first, last = task.probe
    if first >= first_row + part.num_written or last < first_row:
        return
    for line in _lines(storage, part, first_row):
        if first <= line.row <= last and line.row not in task.condemned:
            guard.begin(line.row)
            _counted(encoder, [line], frozenset(), part)
            guard.finish(line.row + 1)
            yield Step(0, 0, 0)


def _lines(storage: Storage, part: PartManifest, first_row: int) -> Iterator[_Line]:
    """The record lines of a part, its bytes proven at the end."""
    name = layout.part_file(part.source, part.part_id, layout.RECORDS_SUFFIX)
    offsets_name = layout.part_file(part.source, part.part_id, layout.OFFSETS_SUFFIX)
    where = join_url(storage.url, name)
    if not part.num_written:
        return
    try:
        offsets = decode_offsets(storage.read_bytes(offsets_name), offsets_name)
        if len(offsets) != part.num_written + 1:
            raise FormatError(f"{offsets_name}: found {len(offsets) - 1} records, the manifest has {part.num_written}")
        digest = FileDigest()
        with storage.open_read(name) as file:
            for k in range(part.num_written):
                data = file.read(offsets[k + 1] - offsets[k])
                digest.update(data)
                yield _Line(first_row + k, offsets[k], data)
    except FileNotFoundError as error:
        raise FormatError(f"{where}: found no such file, its manifest names it: run `bayplan verify`") from error
    expected = part.files[name.rpartition("/")[2]]
    if (digest.size, digest.hexdigest()) != (expected.size, expected.digest):
        raise FormatError(f"{where}: its bytes are not those its manifest names: run `bayplan verify`")


def _batches(lines: Iterable[_Line]) -> Iterator[list[_Line]]:
    batch: list[_Line] = []
    num_bytes = 0
    for line in lines:
        batch.append(line)
        num_bytes += len(line.data)
        if num_bytes >= _BATCH_BYTES or len(batch) >= _BATCH_ROWS:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


_ROW_COLUMNS = {
    "num_text_tokens": np.int32,
    "num_image_tokens": np.int32,
    "num_tokens": np.int32,
    "num_loss_tokens": np.int32,
    "num_images": np.int32,
    "num_patches": np.int32,
    "record_offset": np.int64,
    "record_size": np.int64,
    "status": np.uint8,
}
_IMAGE_COLUMNS = {
    "image_width": np.int32,
    "image_height": np.int32,
    "image_num_tokens": np.int32,
    "image_num_patches": np.int32,
    "image_sum_squared_attention": np.int64,
}


def _row(line: _Line, count: SampleCount) -> tuple[int, ...]:
    """In the order of `_ROW_COLUMNS`."""
    return (
        count.num_text_tokens,
        count.num_image_tokens,
        count.num_tokens,
        count.num_loss_tokens,
        len(count.images),
        sum(image.num_patches for image in count.images),
        line.offset,
        len(line.data),
        Status.USABLE,
    )


def _image(entry: dict[str, Any], image: ImageCount) -> tuple[int, ...]:
    """In the order of `_IMAGE_COLUMNS`."""
    return (entry["width"], entry["height"], image.num_image_tokens, image.num_patches, image.sum_squared_attention)


def _refusal_line(line: int, record: dict[str, Any], refusal: SampleRefused) -> dict[str, Any]:
    status = refusal.status.name.lower()
    return {"line": line, "id": record["id"], "status": status, "detail": refusal.detail, "origin": record["origin"]}


_Counted = tuple[dict[str, Any], SampleCount | SampleRefused]


def _counted(encoder: SampleEncoder, batch: Sequence[_Line], condemned: frozenset[int], part: PartManifest) -> list[_Counted]:
    """Every record of a batch with its counts, or with why there are none."""
    records = [decode_record(line.data, f"part {part.part_id}, row {line.row}") for line in batch]
    fit = [k for k, line in enumerate(batch) if line.row not in condemned]
    kills = SampleRefused(Status.KILLS_WORKER, "counting it killed or hung its worker process twice when tried alone")
    found: list[SampleCount | SampleRefused] = [kills] * len(batch)
    for k, count in zip(fit, encoder.lengths([records[k] for k in fit]), strict=True):
        found[k] = count
    return list(zip(records, found, strict=True))


class _Columns:
    """Grows the columns of a part batch by batch."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._images: list[npt.NDArray[np.int64]] = []
        self._facts = RecordFacts()
        self.refused: list[dict[str, Any]] = []

    def add(self, first_row: int, batch: Sequence[_Line], counted: Sequence[_Counted]) -> int:
        """How many of them were refused."""
        before = len(self.refused)
        rows: list[tuple[int, ...]] = []
        images: list[tuple[int, ...]] = []
        for line, (record, count) in zip(batch, counted, strict=True):
            self._facts.add(record)
            if isinstance(count, SampleRefused):
                rows.append((0, 0, 0, 0, 0, 0, line.offset, len(line.data), count.status))
                self.refused.append(_refusal_line(line.row - first_row, record, count))
                continue
            rows.append(_row(line, count))
            images += [_image(entry, image) for entry, image in zip(record["images"], count.images, strict=True)]
        self._rows.append(np.array(rows, np.int64))
        self._hashes.append(np.array([id_hash(record["id"]) for record, _ in counted], np.uint64))
        self._images.append(np.array(images, np.int64).reshape(-1, len(_IMAGE_COLUMNS)))
        return len(self.refused) - before

    def rows(self) -> Rows:
        """All of them as numpy columns."""
        rows = np.concatenate([np.empty((0, len(_ROW_COLUMNS)), np.int64), *self._rows])
        images = np.concatenate([np.empty((0, len(_IMAGE_COLUMNS)), np.int64), *self._images])
        columns: dict[str, Any] = {name: rows[:, k].astype(kind) for k, (name, kind) in enumerate(_ROW_COLUMNS.items())}
        columns |= {name: images[:, k].astype(kind) for k, (name, kind) in enumerate(_IMAGE_COLUMNS.items())}
        return Rows(id_hash=np.concatenate([np.empty(0, np.uint64), *self._hashes]), **columns)

    def stats(self, rows: Rows) -> Stats:
        """The part's statistics."""
        return stats_of(rows, self._facts.facts())


def consolidate_source(task: ConsolidateTask, storage: Storage, guard: Guard) -> Iterator[Step | CountedSource]:
    """Write the source's one table from all its parts, with their statistics summed up.

    Raises:
        FormatError: when a part is not counted, or counted from other bytes.
    """
    name = layout.source_file(task.source)
    manifests = decode_source(storage.read_bytes(name), join_url(storage.url, name))
    found = consolidate(
        storage,
        task.profile,
        task.source,
        manifests,
        task.fingerprint,
        merge_stats=_summed,
        on_batch=guard.progress,
    )
    yield CountedSource(source=task.source, num_rows=found.num_rows)


def _summed(blobs: Iterable[bytes]) -> bytes:
    return encode_stats(Stats.merged(decode_stats(blob, "its statistics") for blob in blobs))


def source_stats(storage: Storage, profile: str, source: str) -> Stats:
    """The statistics of a whole source, as its table holds them.

    Raises:
        UsageError: when it has none. FormatError: when it is damaged.
    """
    where = join_url(storage.url, layout.index_table_file(profile, source))
    return decode_stats(read_stats(storage, profile, source), where)
