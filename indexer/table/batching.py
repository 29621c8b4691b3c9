"""Where one record batch ends and the next begins. It follows from the rows alone, never from the pieces they came in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from indexer.rows import Rows

BATCH_ROWS = 1 << 20
"""Rows of every batch but the last of a file."""
BATCH_IMAGES = 1 << 24
"""A batch ends before a row that would bring its images past this (400 MB of them), so 32-bit list offsets never overflow."""


def rebatch(pieces: Iterable[Rows], max_rows: int | None = None, max_images: int | None = None) -> Iterator[Rows]:
    """The rows of all pieces in batches as large as the limits allow. A single row may have more than `max_images`."""
    batch_rows, batch_images = max_rows or BATCH_ROWS, max_images or BATCH_IMAGES
    pending: list[Rows] = []
    rows = images = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            stop = start + _fitting(piece, start, batch_rows - rows, batch_images - images, alone=not rows)
            if stop > start:
                part = piece if stop - start == len(piece) else piece.slice(start, stop)
                pending.append(part)
                rows, images = rows + len(part), images + part.num_all_images
            if rows == batch_rows or stop < len(piece):
                yield Rows.concatenate(pending)
                pending, rows, images = [], 0, 0
            start = stop
    if pending:
        yield Rows.concatenate(pending)


def _fitting(piece: Rows, start: int, rows_left: int, images_left: int, *, alone: bool) -> int:
    """How many rows of a piece, from `start` on, still fit; at least one into an empty batch."""
    window = piece.num_images[start : start + rows_left]
    images = np.cumsum(window, dtype=np.int64)
    if images[-1] <= images_left:
        return len(window)
    return max(int(np.searchsorted(images, images_left, side="right")), int(alone))
