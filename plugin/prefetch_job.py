"""What one key of the prefetch pool asks for and how far it has come. No thread and no lock in here: the engine has those.

A sample takes two steps: its record must be read before its images are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plugin.pieces import image_piece, parsed_record, record_piece
from plugin.reader import BundleReader
from plugin.requests import ImageRead, Request, Result, RowPlace, Sample, SampleRead
from plugin.spans import Piece, Span

RECORD = -1
"""In place of an image's number: the record itself."""

Part = tuple[tuple[int, int], Any]
"""((Number of the request, number of the image or `RECORD`), bytes or record)."""
Brought = tuple[list[Part], list[Span]]
"""What a read brought, and the reads of the images that its records name."""


@dataclass(slots=True, eq=False)
class Task:
    """One read of a job."""

    job: Job
    span: Span
    num_tries: int = 0
    was_held_back: bool = False
    """By the byte budget."""

    @property
    def num_bytes(self) -> int:
        """What it counts in the budget."""
        return self.span.num_bytes


@dataclass(slots=True, eq=False)
class Job:
    """The requests of one key. Only the engine changes it, under its lock."""

    key: Hashable
    requests: tuple[Request, ...]
    values: list[Result | None] = field(default_factory=list)
    tasks: deque[Task] = field(default_factory=deque)
    """Not begun yet."""
    num_open: int = 0
    """Reads not landed, begun or not."""
    held_bytes: int = 0
    """Landed and not yet taken."""
    is_wanted: bool = False
    """Somebody waits for it: the budget no longer holds it back."""
    is_done: bool = False
    error: BaseException | None = None

    def first_pieces(self) -> list[Piece]:
        """What can be read at once: records, and images asked for by their entries.

        Raises:
            FormatError: for an entry that is none.
        """
        self.values = [None] * len(self.requests)
        pieces = []
        for number, request in enumerate(self.requests):
            if isinstance(request, ImageRead):
                pieces.append(image_piece(request.source, request.entry, (number, 0), sample_id=request.sample_id))
            else:
                pieces.append(record_piece(request.row, (number, RECORD)))
        return pieces

    def add(self, spans: Iterable[Span]) -> None:
        """Reads to make next."""
        new = [Task(self, span) for span in spans]
        self.tasks.extend(new)
        self.num_open += len(new)

    def store(self, parts: Iterable[Part]) -> None:
        """Put what a read brought in its place."""
        for (number, image), value in parts:
            request = self.requests[number]
            if isinstance(request, ImageRead):
                self.values[number] = value
            elif image == RECORD:
                num_images = len(value["images"]) if request.with_images else 0
                self.values[number] = Sample(record=value, images=[b""] * num_images)
            else:
                sample = self.values[number]
                assert isinstance(sample, Sample), "images are asked for after their record has landed"
                sample.images[image] = value


def read_task(reader: BundleReader, requests: Sequence[Request], span: Span) -> Brought:
    """Make one read. No job is changed."""
    return _brought(reader, requests, span, reader.read_span(span), reader.record_of)


def read_task_now(reader: BundleReader, requests: Sequence[Request], span: Span) -> Brought | None:
    """The same if it takes no waiting; None where `read_task` is to find out, as for anything that is wrong."""
    try:
        data = reader.read_span_now(span)
        return None if data is None else _brought(reader, requests, span, data, parsed_record)
    except Exception:
        return None


def _brought(
    reader: BundleReader,
    requests: Sequence[Request],
    span: Span,
    found: Sequence[bytes],
    record_of: Callable[[RowPlace, bytes], dict[str, Any]],
) -> Brought:
    parts: list[Part] = []
    pieces: list[Piece] = []
    for piece, data in zip(span.pieces, found, strict=True):
        number, image = piece.slot
        request = requests[number]
        if image != RECORD or not isinstance(request, SampleRead):
            parts.append((piece.slot, data))
            continue
        record = record_of(request.row, data)
        parts.append((piece.slot, record))
        if request.with_images:
            for position, entry in enumerate(record["images"]):
                pieces.append(image_piece(request.row.source, entry, (number, position), sample_id=record["id"]))
    return parts, reader.plan(pieces)
