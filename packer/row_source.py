"""Line -> row -> sample, by the rules of one source; shared by conversion, retries, probes and estimates."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from packer.format.errors import BayplanError, RowError
from packer.format.layout import file_hash
from packer.format.quarantine import QuarantineLine, quarantine_text
from packer.format.reasons import Reason
from packer.format.record import Body
from packer.guard import Guard
from packer.loading import ImageLoader, ImagePolicy, LoadedImage, Outcome, internal_error
from packer.redact import without_signatures_in
from packer.references import ReferenceReader, ReferenceRules, safe_ref
from packer.rows import null_non_finite, parse_row, raw_fields, raw_items
from packer.samples import Row, Sample, Spool
from packer.schemas import IMAGE_KEYS, MESSAGE_FIELDS, Mapped, SchemaConfig, sample_id, schema_of
from packer.sources import RawLine
from packer.storage import may_pass

_MAX_LISTED_IMAGES = 20
Fault = Callable[[], str | None]
"""Why the stream broke off, once it has."""
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
    max_faults: int = 0
    """Images in a row whose store may keep failing: 0 until a task has been tried again and again."""

    def loader(self, reader: ReferenceReader) -> ImageLoader:
        """The loader of this source's images."""
        return ImageLoader(reader, self.images, max_faults=self.max_faults)


class RowSource:
    """Turns lines into rows and samples by a source's rules; shared by conversion, retry, probing and estimates."""

    def __init__(self, source: SourceConfig, file: str, *, guard: Guard, condemned: frozenset[int]) -> None:
        self.source = source
        self._file = file
        self._hash = file_hash(file)
        self._guard = guard
        self._condemned = condemned
        self._map = schema_of(source.schema)

    def rows(self, lines: Iterator[RawLine], fault: Fault = lambda: None) -> Iterator[Row]:
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

    def _fill(self, row: Row, fault: Fault) -> None:
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
            extra = self._extra(row)
            return Sample(
                line=row.line,
                sample_id=self.sample_id(row),
                body=_without_dropped(row.mapped.body, images) if dropped else row.mapped.body,
                images=[image for image in images if image is not None],
                origin_file=self._file,
                extra=extra,
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
        if not names and row.mapped.message_field is None and row.mapped.part_field is None:
            return {}
        raw = raw_fields(row.text)
        if row.mapped.part_field is not None:
            _original_part_fields(row.mapped.body, raw[row.mapped.part_field])
        if row.mapped.message_field is not None:
            groups = MESSAGE_FIELDS[schema.name]
            for message, fields in zip(row.mapped.body.items, raw_items(raw[row.mapped.message_field]), strict=True):
                used_here = {next((name for name in group if name in fields), None) for group in groups}
                extra = {name: orjson.Fragment(value) for name, value in fields.items() if name not in used_here}
                if extra:
                    message["extra"] = extra  # type: ignore[index]
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


def _original_part_fields(body: Body, raw: bytes) -> None:
    """Put the original bytes of the parts' other fields in the place of their values."""
    contents = [(body.items, raw)]
    if body.kind == "messages":
        raw_contents = [message.get("content", b"null") for message in raw_items(raw)]
        contents = [(message["content"], text) for message, text in zip(body.items, raw_contents, strict=True)]
    for parts, text in contents:
        if not any("extra" in part for part in parts):
            continue
        for part, fields in zip(parts, raw_items(text), strict=True):
            extra = part.get("extra", {})
            nested = next((name for name in IMAGE_KEYS if fields.get(name, b"null") != b"null"), None)
            for name in extra.keys() - ({nested} if part["type"] == "image" else set()):
                extra[name] = orjson.Fragment(fields[name])


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
            {**part, "image": numbers[part["image"]]} if part["type"] == "image" else part
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
