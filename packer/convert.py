"""One range of a source -> its parts, record by record: plain Python, one process, bounded memory.

The same range gives the same parts, byte for byte: a part depends on nothing but its first line's place and what follows.
So a rerun goes on behind the last part that was committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from packer.format.errors import RowError
from packer.format.layout import PartId, file_hash
from packer.format.manifest import PartManifest
from packer.guard import Guard, NoGuard
from packer.loading import Outcome
from packer.part import PartWriter
from packer.readahead import ReadAhead
from packer.references import ReferenceReader
from packer.row_source import RowSource, SourceConfig
from packer.samples import Row
from packer.sources import InputRange, LineReader, RawLine
from packer.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertTask:
    """A range and where in it to go on."""

    source: SourceConfig
    work: InputRange
    next_roll: int = 0
    resume_at: int | None = None
    """Offset behind the last committed part of the range."""
    condemned: frozenset[int] = field(default_factory=frozenset)
    """Offsets of rows that kill their worker."""
    max_rows: int | None = None
    """Stop after so many rows (trial datasets)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One line is done."""

    num_bytes: int
    num_rows: int
    """0 for a blank line."""
    num_quarantined: int


def convert_range(task: ConvertTask, storage: Storage, guard: Guard | None = None) -> Iterator[Step | PartManifest]:
    """Convert a range from where it stands to its end; a part is committed when its manifest is yielded.

    Yields:
        A step for every line, and the manifest of every part that was committed.

    Raises:
        InputError: when the file cannot be used. StorageFault, OSError: when a store failed and may work again.
        OutputError: when the dataset cannot be written.
    """
    with LineReader(task.work, max_line_bytes=task.source.max_line_bytes, resume_at=task.resume_at) as lines:
        yield from _Conversion(task, storage, lines, guard or NoGuard()).run()


class _Conversion:
    """State of one `convert_range` call."""

    def __init__(self, task: ConvertTask, storage: Storage, lines: LineReader, guard: Guard) -> None:
        self._task = task
        self._storage = storage
        self._lines = lines
        self._guard = guard
        self._rows = RowSource(task.source, task.work.file, guard=guard, condemned=task.condemned)
        self._committed: list[PartManifest] = []
        self._part = self._open_part(task.next_roll, lines.position)

    def _open_part(self, roll: int, byte_start: int) -> PartWriter:
        work = self._task.work
        part_id = PartId(file_hash(work.file), work.range_index, roll)
        return PartWriter(self._storage, self._task.source.name, part_id, byte_start)

    def run(self) -> Iterator[Step | PartManifest]:
        source = self._task.source
        with ReferenceReader(source.references) as reader:
            rows = self._rows.rows(self._limited(), lambda: self._lines.fault)
            ahead = ReadAhead(rows, source.loader(reader), on_image=self._guard.progress)
            try:
                for row, outcomes in ahead:
                    yield self._write(row, outcomes)
                    yield from self._committed
                    self._committed.clear()
                self._commit(is_last_of_range=True)
                yield from self._committed
            finally:
                ahead.close()
                self._part.abandon()

    def _limited(self) -> Iterator[RawLine]:
        remaining = self._task.max_rows
        for line in self._lines:
            if remaining == 0:
                return
            yield line
            if remaining is not None and not line.is_blank:
                remaining -= 1

    def _write(self, row: Row, outcomes: Iterator[Outcome]) -> Step:
        num_quarantined = 0
        if row.line.is_blank:
            self._part.count_line(row.line)
        else:
            try:
                self._write_sample(row, outcomes)
            except RowError as error:
                self._refuse(row, error)
                num_quarantined = 1
        self._guard.finish(row.line.byte_end)
        return Step(row.line.byte_end - row.line.byte_offset, int(not row.line.is_blank), num_quarantined)

    def _write_sample(self, row: Row, outcomes: Iterator[Outcome]) -> None:
        sample = self._rows.sample(row, outcomes)
        try:
            if self._part.is_full_for(sample, self._task.source.target_bundle_bytes):
                self._roll()
            self._part.add(sample)
        finally:
            sample.spool.close()
        self._part.count_line(row.line)

    def _refuse(self, row: Row, error: RowError) -> None:
        self._part.count_line(row.line)
        self._part.quarantine(self._rows.quarantine_line(row, error))

    def _roll(self) -> None:
        part = self._part
        self._commit(is_last_of_range=False)
        self._part = self._open_part(part.part_id.roll + 1, part.byte_end)

    def _commit(self, *, is_last_of_range: bool) -> None:
        source = self._task.source
        manifest = self._part.commit(
            self._task.work,
            recipe_fingerprint=source.fingerprint,
            check=source.images.check.value,
            is_last_of_range=is_last_of_range,
            fault=self._lines.fault if is_last_of_range else None,
        )
        self._committed.append(manifest)
