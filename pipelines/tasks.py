"""The tasks that jobs are made of: plain picklable values and generators that know nothing of Ray.

Every task yields `Step`s while it works and its result last, and tells a guard which rows it is working on.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from packer.convert import ConvertTask, Step, convert_range
from packer.format import layout
from packer.format.errors import RowError
from packer.format.layout import PartId, file_hash
from packer.format.manifest import PartManifest, decode_manifest
from packer.guard import Guard
from packer.loading import Outcome
from packer.readahead import ReadAhead
from packer.references import ReferenceReader
from packer.retry import RetryTask, retry_part
from packer.row_source import RowSource, SourceConfig
from packer.samples import Row, Sample
from packer.sources import InputRange, LineReader, RawLine
from packer.storage import Storage, open_storage
from pipelines.index_tasks import ConsolidateTask, CountedPart, CountedSource, IndexTask, consolidate_source, index_parts

SCOUT_ROWS = 1000
"""Rows of a source looked at before its ranges are cut; if all are refused and there are so many, the source fails."""
_SCOUT_ENOUGH_ROWS = 100
_SCOUT_ENOUGH_BYTES = 256 << 20
_RANGE_OUTPUT_BYTES = 16 << 30
_MIN_RANGE_BYTES = 1 << 20
_RECORD_OVERHEAD_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutTask:
    """Look at the first rows of a source."""

    source: SourceConfig
    work: InputRange
    """Its first file that is not empty, as one range."""
    condemned: frozenset[int] = field(default_factory=frozenset)


@dataclass(slots=True, kw_only=True)
class Scouted:
    """What the first rows of a source showed."""

    num_rows: int = 0
    num_good: int = 0
    num_images: int = 0
    input_bytes: int = 0
    """Lines of those rows."""
    plain_ratio: float = 1.0
    """Bytes of lines for one byte of the file as it is stored."""
    whole_file: bool = False
    """Whether the file was seen to its end."""
    digests: set[str] = field(default_factory=set)
    """Contents seen: equal images of a part are stored once."""
    image_bytes: int = 0
    record_bytes: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first_refusal: str = ""

    @property
    def all_refused(self) -> bool:
        """Whether the source's schema or roots are plainly wrong: 1,000 rows and not one good."""
        return self.num_rows >= SCOUT_ROWS and self.num_good == 0

    @property
    def range_bytes(self) -> int:
        """Bytes of input that give about 16 GiB of output, as a power of two."""
        output = self.image_bytes + self.record_bytes
        if not output or not self.input_bytes:
            return _RANGE_OUTPUT_BYTES
        wanted = _RANGE_OUTPUT_BYTES * self.input_bytes / output
        return int(2 ** min(max(round(math.log2(wanted)), round(math.log2(_MIN_RANGE_BYTES))), 34))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTask:
    """Work on suspect rows one at a time, alone, and throw the result away: does one of them kill its worker?"""

    source: SourceConfig
    work: InputRange
    first: int
    last: int
    condemned: frozenset[int] = field(default_factory=frozenset)


Task = ScoutTask | ConvertTask | RetryTask | ProbeTask | IndexTask | ConsolidateTask
Result = Scouted | PartManifest | CountedPart | CountedSource


def position_word(task: Task) -> str:
    """What a guard's positions count in this task."""
    return "row" if isinstance(task, IndexTask | ConsolidateTask) else "byte"


def named_row(task: Task, position: int) -> str:
    """The row at a guard's position, as a person finds it."""
    return task.named(position) if isinstance(task, IndexTask) else f"the row at byte {position}"


def probe_of(task: Task, first: int, last: int) -> Task:
    """The task that tries the rows in [first, last] alone and throws their results away."""
    if isinstance(task, IndexTask):
        return dataclasses.replace(task, probe=(first, last))
    assert not isinstance(task, ConsolidateTask)  # it has no rows, so it leaves no suspects
    return ProbeTask(source=task.source, work=task.work, first=first, last=last, condemned=task.condemned)


def condemning(task: Task, position: int) -> Task:
    """The task with one more row that is not worked on any more."""
    assert not isinstance(task, ConsolidateTask)
    return dataclasses.replace(task, condemned=task.condemned | {position})


def tolerating(task: Task, num_faults: int) -> Task | None:
    """The task that takes so many unreadable images in a row for bad ones; None where it reads none or does already."""
    if isinstance(task, IndexTask | ConsolidateTask) or task.source.max_faults:
        return None
    return dataclasses.replace(task, source=dataclasses.replace(task.source, max_faults=num_faults))


def run_task(task: Task, dataset_url: str, guard: Guard) -> Iterator[Step | Result]:
    """Run any task. Errors as `packer.convert.convert_range`."""
    if isinstance(task, ConvertTask):
        storage = open_storage(dataset_url)
        resumed = resume(task, storage)
        if resumed is not None:
            yield from convert_range(resumed, storage, guard)
    elif isinstance(task, RetryTask):
        yield from retry_part(task, open_storage(dataset_url), guard)
    elif isinstance(task, IndexTask):
        yield from index_parts(task, open_storage(dataset_url), guard)
    elif isinstance(task, ConsolidateTask):
        yield from consolidate_source(task, open_storage(dataset_url), guard)
    elif isinstance(task, ScoutTask):
        yield from _scout(task, guard)
    else:
        yield from _probe(task, guard)


def resume(task: ConvertTask, storage: Storage) -> ConvertTask | None:
    """The task from behind the last committed part of its range on; None when the range is whole."""
    source, work = task.source.name, task.work
    while True:
        part_id = PartId(file_hash(work.file), work.range_index, task.next_roll)
        name = layout.part_file(source, str(part_id), layout.MANIFEST_SUFFIX)
        if storage.stat(name) is None:
            return task
        manifest = decode_manifest(storage.read_bytes(name), name)
        if manifest.is_last_of_range:
            return None
        left = None if task.max_rows is None else max(task.max_rows - manifest.num_read, 0)
        task = dataclasses.replace(task, next_roll=task.next_roll + 1, resume_at=manifest.input.byte_end, max_rows=left)


def _scout(task: ScoutTask, guard: Guard) -> Iterator[Step | Scouted]:
    found = Scouted()
    rows = RowSource(task.source, task.work.file, guard=guard, condemned=task.condemned)
    with (
        ReferenceReader(task.source.references) as reader,
        LineReader(task.work, max_line_bytes=task.source.max_line_bytes) as lines,
    ):
        loader = task.source.loader(reader)
        ahead = ReadAhead(rows.rows(_first_rows(lines, SCOUT_ROWS)), loader, on_image=guard.progress)
        try:
            for row, outcomes in ahead:
                if not row.line.is_blank:
                    _note(found, rows, row, outcomes)
                guard.finish(row.line.byte_end)
                yield Step(row.line.byte_end - row.line.byte_offset, 0, 0)
                if _is_enough(found):
                    break
            found.whole_file = not _is_enough(found) and found.num_rows < SCOUT_ROWS
            found.plain_ratio = lines.plain_ratio
        finally:
            ahead.close()
    found.digests.clear()
    yield found


def _first_rows(lines: LineReader, count: int) -> Iterator[RawLine]:
    for line in lines:
        yield line
        count -= not line.is_blank
        if count <= 0:
            return


def _is_enough(found: Scouted) -> bool:
    return found.num_good >= _SCOUT_ENOUGH_ROWS or found.image_bytes >= _SCOUT_ENOUGH_BYTES


def _note(found: Scouted, rows: RowSource, row: Row, outcomes: Iterator[Outcome]) -> None:
    found.num_rows += 1
    found.input_bytes += row.line.byte_end - row.line.byte_offset
    try:
        sample = rows.sample(row, outcomes)
    except RowError as error:
        found.reasons[error.reason.value] += 1
        found.first_refusal = found.first_refusal or f"{row.line.byte_offset}: {error}"
        return
    found.num_good += 1
    found.num_images += len(sample.images)
    new = [image for image in sample.distinct_images() if image.digest not in found.digests]
    found.digests.update(image.digest for image in new)
    found.image_bytes += sum(image.size for image in new)
    found.record_bytes += _record_bytes(sample)
    sample.spool.close()


def _record_bytes(sample: Sample) -> int:
    text = sum(len(str(item)) for item in sample.body.items) + sum(map(len, sample.extra.values()))
    return text + _RECORD_OVERHEAD_BYTES * (1 + len(sample.images))


def _probe(task: ProbeTask, guard: Guard) -> Iterator[Step]:
    rows = RowSource(task.source, task.work.file, guard=guard, condemned=task.condemned)
    with (
        ReferenceReader(task.source.references) as reader,
        LineReader(task.work, max_line_bytes=task.source.max_line_bytes, resume_at=task.first) as lines,
    ):
        loader = task.source.loader(reader)
        for line in lines:
            if line.byte_offset > task.last:
                return
            for row in rows.rows(iter([line]), lambda: "cut"):
                outcomes = (loader.load(ref) for ref in row.references)
                try:
                    rows.sample(row, outcomes).spool.close()
                except RowError:
                    pass
            guard.finish(line.byte_end)
            yield Step(line.byte_end - line.byte_offset, 0, 0)
