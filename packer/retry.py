"""Quarantined rows, read again from their source: those that can be records now become parts of their own.

A retry part supersedes rows of the part they were quarantined in. Rows that fail again are left as they are, so a retry
that gains nothing writes nothing, and doing it twice changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packer.convert import Step
from packer.format import layout
from packer.format.errors import InputError, RowError
from packer.format.layout import PartId
from packer.format.manifest import PartManifest, Supersedes, decode_manifest
from packer.format.quarantine import QuarantineLine, decode_quarantine, quarantine_text
from packer.guard import Guard, NoGuard
from packer.loading import Outcome
from packer.part import PartWriter
from packer.readahead import ReadAhead
from packer.redact import without_signatures_in
from packer.references import ReferenceReader
from packer.row_source import RowSource, SourceConfig
from packer.samples import Row, Sample
from packer.sources import Compression, InputRange, LineReader, RawLine
from packer.storage import Storage

_NEAR_BYTES = 4 << 20
"""Quarantined rows closer than this are read in one go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryTask:
    """The quarantined rows of one part."""

    source: SourceConfig
    work: InputRange
    """The whole file the part was made from."""
    part: PartManifest
    condemned: frozenset[int] = field(default_factory=frozenset)


def superseded_offsets(retries: Sequence[PartManifest]) -> set[int]:
    """Offsets of the rows that retries of one part already turned into records."""
    return {offset for retry in retries if retry.supersedes for offset in retry.supersedes.byte_offsets}


def quarantined_rows(storage: Storage, part: PartManifest) -> list[QuarantineLine]:
    """The quarantine lines of a part, in file order."""
    if not part.num_quarantined:
        return []
    name = layout.part_file(part.source, part.part_id, layout.QUARANTINE_SUFFIX)
    lines = storage.read_bytes(name).splitlines()
    return [decode_quarantine(line, f"{name} line {number}") for number, line in enumerate(lines, 1)]


def retries_of(storage: Storage, part: PartManifest) -> list[PartManifest]:
    """Committed retries of a part, in order."""
    retries: list[PartManifest] = []
    while True:
        retry_id = dataclasses.replace(part.identity, retry=len(retries) + 1)
        name = layout.part_file(part.source, str(retry_id), layout.MANIFEST_SUFFIX)
        if storage.stat(name) is None:
            return retries
        retries.append(decode_manifest(storage.read_bytes(name), name))


def retry_part(task: RetryTask, storage: Storage, guard: Guard | None = None) -> Iterator[Step | PartManifest]:
    """Read the rows of a part that are still quarantined again and commit those that are records now.

    Yields:
        A step for every row, and the manifest of every retry part that was committed.

    Raises:
        InputError: when the file no longer holds those rows at their places.
    """
    retries = retries_of(storage, task.part)
    done = superseded_offsets(retries)
    wanted = {row.byte_offset: row for row in quarantined_rows(storage, task.part) if row.byte_offset not in done}
    if wanted:
        yield from _Retry(task, storage, wanted, guard or NoGuard(), len(retries) + 1).run()


class _Retry:
    """State of one `retry_part` call."""

    def __init__(
        self, task: RetryTask, storage: Storage, wanted: Mapping[int, QuarantineLine], guard: Guard, first_retry: int
    ) -> None:
        self._task = task
        self._storage = storage
        self._wanted = wanted
        self._guard = guard
        self._rows = RowSource(task.source, task.work.file, guard=guard, condemned=task.condemned)
        self._next_retry = first_retry
        self._part: PartWriter | None = None
        self._offsets: list[int] = []
        self._reasons: Counter[str] = Counter()

    def run(self) -> Iterator[Step | PartManifest]:
        source = self._task.source
        with ReferenceReader(source.references) as reader:
            rows = self._rows.rows(self._lines(), lambda: "the file ends inside this line")
            ahead = ReadAhead(rows, source.loader(reader), on_image=self._guard.progress)
            try:
                for row, outcomes in ahead:
                    yield from self._retry(row, outcomes)
                yield from self._commit()
            finally:
                ahead.close()
                if self._part is not None:
                    self._part.abandon()

    def _lines(self) -> Iterator[RawLine]:
        for line in lines_at(self._task.work, sorted(self._wanted), self._task.source.max_line_bytes):
            quarantined = self._wanted[line.byte_offset]
            text, truncated = quarantine_text(line.text)
            if without_signatures_in(text) != quarantined.line or (truncated or line.too_long) != quarantined.line_truncated:
                raise InputError(
                    f"{self._task.work.url}: byte {line.byte_offset}: found another line than the one quarantined from there: "
                    "the file changed; run `bayplan pack --replace-changed`"
                )
            yield line

    def _retry(self, row: Row, outcomes: Iterator[Outcome]) -> Iterator[Step | PartManifest]:
        num_quarantined = 0
        try:
            sample = self._rows.sample(row, outcomes)
        except RowError:
            num_quarantined = 1
        else:
            try:
                yield from self._add(sample)
            finally:
                sample.spool.close()
        self._guard.finish(row.line.byte_end)
        yield Step(row.line.byte_end - row.line.byte_offset, 1, num_quarantined)

    def _add(self, sample: Sample) -> Iterator[PartManifest]:
        if self._part is not None and self._part.is_full_for(sample, self._task.source.target_bundle_bytes):
            yield from self._commit()
        if self._part is None:
            identity: PartId = dataclasses.replace(self._task.part.identity, retry=self._next_retry)
            self._part = PartWriter(self._storage, self._task.source.name, identity, sample.line.byte_offset)
            self._next_retry += 1
        self._part.add(sample)
        self._part.count_line(sample.line)
        self._offsets.append(sample.line.byte_offset)
        self._reasons[self._wanted[sample.line.byte_offset].reason.value] += 1

    def _commit(self) -> Iterator[PartManifest]:
        if self._part is None:
            return
        supersedes = Supersedes(
            part_id=self._task.part.part_id,
            byte_offsets=tuple(self._offsets),
            by_reason=dict(sorted(self._reasons.items())),
        )
        manifest = self._part.commit(
            self._task.work,
            recipe_fingerprint=self._task.source.fingerprint,
            check=self._task.source.images.check.value,
            is_last_of_range=False,
            supersedes=supersedes,
        )
        self._part = None
        self._offsets.clear()
        self._reasons.clear()
        yield manifest


def lines_at(work: InputRange, offsets: Sequence[int], max_line_bytes: int) -> Iterator[RawLine]:
    """The lines that start at the given, rising offsets. Compressed files are read once from the start.

    Raises:
        InputError: when no line starts at an offset.
    """
    furthest = math.inf if Compression.of(work.url) is not Compression.NONE else _NEAR_BYTES
    remaining = list(reversed(offsets))
    while remaining:
        start = 0 if furthest == math.inf else remaining[-1]
        with LineReader(work, max_line_bytes=max_line_bytes, resume_at=start) as reader:
            for line in reader:
                if line.byte_offset == remaining[-1]:
                    remaining.pop()
                    yield line
                if not remaining or not 0 <= remaining[-1] - line.byte_end <= furthest:
                    break
        if remaining and (furthest == math.inf or start == remaining[-1]):
            break  # no line begins there
    if remaining:
        raise InputError(f"{work.url}: no line starts at byte {remaining[-1]}: the file changed; use `--replace-changed`")
