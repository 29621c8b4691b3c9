"""One range of a source -> its parts, record by record: plain Python, one process, bounded memory.

The same range gives the same parts, byte for byte: a part depends on nothing but its first line's place and what follows.
So a rerun goes on behind the last part that was committed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from packer.format.errors import BayplanError, RowError
from packer.format.layout import PartId, file_hash
from packer.format.manifest import PartManifest
from packer.format.quarantine import QuarantineLine, quarantine_text
from packer.format.reasons import Reason
from packer.format.record import Body
from packer.loading import ImageLoader, ImagePolicy, LoadedImage, Outcome, internal_error
from packer.part import PartWriter
from packer.readahead import ReadAhead
from packer.redact import without_signatures_in
from packer.references import ReferenceReader, ReferenceRules, safe_ref
from packer.rows import null_non_finite, parse_row, raw_fields, raw_message_fields
from packer.samples import Row, Sample, Spool
from packer.schemas import Mapped, SchemaConfig, sample_id, schema_of
from packer.sources import InputRange, LineReader, RawLine
from packer.storage import Storage, may_pass

_MAX_LISTED_IMAGES = 20
KILLS_WORKER_DETAIL = "its worker died or ran out of time twice while working on this row alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """What converting a source needs from its recipe; picklable."""

    name: str
    schema: SchemaConfig
    references: ReferenceRules
    images: ImagePolicy
    keep: tuple[str, ...] | None
    """Top-level fields to carry; None for all the schema did not use."""
    nulls_non_finite: bool
    max_line_bytes: int
    target_bundle_bytes: int
    fingerprint: str


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


class Guard(Protocol):
    """Told which rows are being worked on, so that a death or a hang can be laid at the door of a few."""

    def begin(self, byte_offset: int) -> None:
        """Work on this row starts, while earlier ones may not be finished."""

    def progress(self) -> None:
        """An image is done."""

    def finish(self, next_offset: int) -> None:
        """All rows before `next_offset` are done."""


class NoGuard:
    """Guards nothing."""

    def begin(self, byte_offset: int) -> None:
        """Nothing to note."""

    def progress(self) -> None:
        """Nothing to note."""

    def finish(self, next_offset: int) -> None:
        """Nothing to note."""


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


class RowSource:
    """Turns lines into rows and samples by a source's rules; shared by conversion, retry, probing and estimates."""

    def __init__(self, source: SourceConfig, file: str, *, guard: Guard, condemned: frozenset[int]) -> None:
        self.source = source
        self._file = file
        self._hash = file_hash(file)
        self._guard = guard
        self._condemned = condemned
        self._map = schema_of(source.schema)

    def rows(self, lines: Iterator[RawLine], fault: Any = lambda: None) -> Iterator[Row]:
        """Rows of the lines, refused ones with their error. `fault()` tells why the stream broke off, once it has."""
        for line in lines:
            if line.is_blank:
                yield Row(line=line)
                continue
            self._guard.begin(line.byte_offset)
            row = Row(line=line, text=line.text)
            try:
                self._fill(row, fault)
            except RowError as error:
                row.error = error
            except Exception as error:
                row.error = internal_error(error)
            yield row

    def _fill(self, row: Row, fault: Any) -> None:
        line = row.line
        if line.byte_offset in self._condemned:
            with contextlib.suppress(RowError):
                row.fields = parse_row(row.text)  # for its id
            raise RowError(Reason.KILLS_WORKER, KILLS_WORKER_DETAIL)
        if line.too_long:
            limit = self.source.max_line_bytes
            size = line.byte_end - line.byte_offset
            raise RowError(Reason.LINE_TOO_LONG, f"found {size} bytes, the limit is {limit} (`max_line_bytes`)")
        if line.cut:
            raise RowError(Reason.TRUNCATED_INPUT, str(fault()))
        try:
            row.fields = parse_row(row.text)
        except RowError as error:
            if error.reason is Reason.NON_FINITE_NUMBER and self.source.nulls_non_finite:
                row.text, row.num_non_finite = null_non_finite(row.text)
                row.fields = parse_row(row.text)
            elif error.reason is Reason.INVALID_JSON and not line.is_terminated:
                detail = f"the file's last line has no newline and is not whole: {error.detail}"
                raise RowError(Reason.TRUNCATED_INPUT, detail) from error
            else:
                raise
        row.mapped = self._map(row.fields, self.source.schema)
        self._limit_images(row.mapped)

    def _limit_images(self, mapped: Mapped) -> None:
        limit = self.source.images.max_per_sample
        if limit is None or len(mapped.references) <= limit:
            return
        if not self.source.images.keeps_first:
            raise RowError(Reason.TOO_MANY_IMAGES, f"found {len(mapped.references)}, the limit is {limit} (`max_per_sample`)")
        mapped.num_cut = len(mapped.references) - limit
        del mapped.references[limit:]

    def sample(self, row: Row, outcomes: Iterator[Outcome]) -> Sample:
        """The sample of a row. The caller closes its spool.

        Raises:
            RowError: when the row is refused, or an image is and the policy says to drop the sample.
        """
        if row.error is not None:
            raise row.error
        assert row.mapped is not None
        spool = Spool()
        try:
            images, dropped = self._images(row.mapped, outcomes, spool)
            return Sample(
                line=row.line,
                sample_id=self.sample_id(row),
                body=_without_dropped(row.mapped.body, images) if dropped else row.mapped.body,
                images=[image for image in images if image is not None],
                origin_file=self._file,
                extra=self._extra(row),
                dropped=dropped,
                num_non_finite=row.num_non_finite,
                spool=spool,
            )
        except BaseException as error:
            spool.close()
            if not isinstance(error, Exception) or isinstance(error, BayplanError | OSError) or may_pass(error):
                raise
            raise internal_error(error) from error

    def _images(self, mapped: Mapped, outcomes: Iterator[Outcome], spool: Spool) -> tuple[list[LoadedImage | None], Counter[str]]:
        """The images, None for those the policy drops; the drops by reason."""
        images: list[LoadedImage | None] = []
        failed: list[tuple[str, RowError]] = []
        for ref, outcome in zip(mapped.references, outcomes, strict=True):
            if isinstance(outcome, LoadedImage):
                spool.put(outcome)
                images.append(outcome)
            else:
                failed.append((ref, outcome))
                images.append(None)
        if failed and not self.source.images.drops_image:
            raise _all_failures(failed, len(mapped.references))
        dropped = Counter(error.reason.value for _, error in failed)
        if mapped.num_cut:
            dropped[Reason.TOO_MANY_IMAGES.value] += mapped.num_cut
            images.extend([None] * mapped.num_cut)
        return images, dropped

    def _extra(self, row: Row) -> dict[str, bytes]:
        assert row.mapped is not None
        schema, keep = self.source.schema, self.source.keep
        used = row.mapped.used_fields | ({schema.id_field} if self._own_id(row) is not None else set())
        names = [name for name in row.fields if (name not in used if keep is None else name in keep)]
        if not names and row.mapped.message_field is None:
            return {}
        raw = raw_fields(row.text)
        if row.mapped.message_field is not None:
            more = raw_message_fields(raw[row.mapped.message_field], ("role", "content"))
            for message, fields in zip(row.mapped.body.items, more, strict=True):
                if fields:
                    message["extra"] = {name: _fragment(value) for name, value in fields.items()}  # type: ignore[index]
        return {name: raw[name] for name in names}

    def sample_id(self, row: Row) -> str:
        """The row's own id, exactly as written, or one made of its file and place."""
        known = self._own_id(row)
        return known if known is not None else f"{self._hash}:{row.line.byte_offset}"

    def _own_id(self, row: Row) -> str | None:
        schema = self.source.schema
        known = sample_id(row.fields, schema)
        if known is None and isinstance(row.fields.get(schema.id_field), float):
            known = raw_fields(row.text)[schema.id_field].decode()
        return known

    def quarantine_line(self, row: Row, error: RowError) -> QuarantineLine:
        """The quarantine line of a refused row."""
        text, truncated = quarantine_text(row.line.text)
        text = without_signatures_in(text)
        return QuarantineLine(
            source=self.source.name,
            file=self._file,
            byte_offset=row.line.byte_offset,
            sample_id=self.sample_id(row),
            reason=error.reason,
            detail=error.detail,
            line=text,
            line_truncated=truncated or row.line.too_long,
        )


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
            ahead = ReadAhead(rows, ImageLoader(reader, source.images), on_image=self._guard.progress)
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


def _fragment(value: bytes) -> Any:
    import orjson

    return orjson.Fragment(value)


def _all_failures(failed: list[tuple[str, RowError]], num_images: int) -> RowError:
    """One error naming every image of a sample that failed; its reason is the first one's."""
    if num_images == 1:
        return RowError(failed[0][1].reason, f"{safe_ref(failed[0][0])}: {failed[0][1].detail}")
    listed = "; ".join(f"{safe_ref(ref)}: {error.reason}: {error.detail}" for ref, error in failed[:_MAX_LISTED_IMAGES])
    more = f"; and {len(failed) - _MAX_LISTED_IMAGES} more" if len(failed) > _MAX_LISTED_IMAGES else ""
    return RowError(failed[0][1].reason, f"{len(failed)} of {num_images} images: {listed}{more}")


def _without_dropped(body: Body, images: list[LoadedImage | None]) -> Body:
    """The body without the parts of dropped images, the others numbered anew.

    Raises:
        RowError: when neither text nor image is left.
    """
    numbers: dict[int, int] = {}
    for index, image in enumerate(images):
        if image is not None:
            numbers[index] = len(numbers)

    def kept(parts: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [
            {"type": "image", "image": numbers[part["image"]]} if part["type"] == "image" else part
            for part in parts
            if part["type"] != "image" or part["image"] in numbers
        ]

    if body.kind == "content":
        items: list[Mapping[str, Any]] = kept(list(body.items))
        left = items
    else:
        items = [{**message, "content": kept(message["content"])} for message in body.items]
        left = [part for message in items for part in message["content"]]
    if not any(part["type"] == "image" or part["text"].strip() for part in left):
        raise RowError(Reason.EMPTY_SAMPLE, "every image was dropped and no text is left")
    return Body(kind=body.kind, items=items)
