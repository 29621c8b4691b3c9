"""Which bytes are wanted, and the fewest reads that bring them. Pure: no file is touched here."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

FileKey: TypeAlias = tuple[str, str]
"""A source and the name of a file in its folder."""


_PLACE = itemgetter(0, 1, 2)
"""File, offset and size of a piece."""


class Piece(NamedTuple):
    """Bytes [offset, offset + size) of a file that somebody wants."""

    file: FileKey
    offset: int
    size: int
    crc32: int | None
    """None where none was recorded."""
    slot: Any
    """The caller's name for it."""
    sample_id: str | None = None


class Span(NamedTuple):
    """One read: bytes [start, end) of a file, and the pieces that lie in them."""

    file: FileKey
    start: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Of the pieces, without the gaps between them."""
        return sum(piece.size for piece in self.pieces)


def single(piece: Piece) -> Span:
    """A read of one piece alone."""
    return Span(piece.file, piece.offset, piece.offset + piece.size, (piece,))


def coalesce(pieces: Iterable[Piece], *, gap_bytes: int, span_bytes: int) -> list[Span]:
    """Spans that hold every piece whole, exactly once, in order of file and offset.

    Neighbours of one file share a span when at most `gap_bytes` lie between them and the span stays within `span_bytes`; equal
    and overlapping pieces share one under the same limit. A single larger piece is a span of its own.
    """
    spans: list[Span] = []
    run: list[Piece] = []
    start = end = 0
    for piece in sorted(pieces, key=_PLACE):
        piece_end = piece.offset + piece.size
        is_near = bool(run) and piece.file == run[0].file and piece.offset - end <= gap_bytes
        if is_near and max(end, piece_end) - start <= span_bytes:
            end = max(end, piece_end)
        else:
            if run:
                spans.append(Span(run[0].file, start, end, tuple(run)))
                run = []
            start, end = piece.offset, piece_end
        run.append(piece)
    if run:
        spans.append(Span(run[0].file, start, end, tuple(run)))
    return spans
