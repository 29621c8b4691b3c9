"""The id hashes of a source, sorted, each with its row: made in bounded memory, searched where they lie.

Sorting spills to a nameless temporary file by the top bits, then sorts bucket by bucket; a bucket that is still too large
(one id that repeats millions of times) is split again by the next bits. About 200 MB whatever the number of rows.
"""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from indexer.rows import as_numpy

BUCKET_ROWS = 1 << 22
"""A bucket with more rows is split again."""
_MAX_BITS = 8

Hashes = npt.NDArray[np.uint64]
RowNumbers = npt.NDArray[Any]


def row_type(num_rows: int) -> Any:
    """The smaller of two integer types that numbers the rows."""
    return np.uint32 if num_rows <= 1 << 32 else np.uint64


def ids_schema(num_rows: int) -> pa.Schema:
    """Columns of a file of sorted ids."""
    kinds = {"id_hash": np.uint64, "row": row_type(num_rows)}
    return pa.schema([pa.field(name, pa.from_numpy_dtype(kind), nullable=False) for name, kind in kinds.items()])


class IdSorter:
    """Takes the hashes of rows in row order, gives (hashes, rows) sorted by hash, then row."""

    def __init__(self, num_rows: int, folder: str, lowest: int = 0, highest: int = (1 << 64) - 1) -> None:
        """`folder` is where the temporary file goes; every hash lies in `[lowest, highest]`."""
        self._folder = folder
        self._entry = np.dtype([("id_hash", np.uint64), ("row", row_type(num_rows))])
        self._num_rows = num_rows
        bits = min(max((num_rows * 2 // BUCKET_ROWS).bit_length(), 1), _MAX_BITS)
        self._lowest = np.uint64(lowest)
        self._shift = np.uint64(max((highest - lowest).bit_length() - bits, 0))
        self._runs: list[list[tuple[int, int]]] = [[] for _ in range(1 << bits)]
        self._file = tempfile.TemporaryFile(dir=folder)
        self._end = 0

    def close(self) -> None:
        """Give the space of the temporary file back."""
        self._file.close()

    def add(self, hashes: Hashes, rows: RowNumbers) -> None:
        """The next rows; they rise from call to call."""
        buckets = ((hashes - self._lowest) >> self._shift).astype(np.uint8)
        order = np.argsort(buckets, kind="stable")
        entries = np.empty(len(order), self._entry)
        entries["id_hash"], entries["row"] = hashes[order], rows[order]
        start = 0
        for bucket, count in enumerate(np.bincount(buckets, minlength=len(self._runs)).tolist()):
            if count:
                self._runs[bucket].append((self._end + start * self._entry.itemsize, count))
                start += count
        self._file.write(entries.tobytes())
        self._end += entries.nbytes

    def sorted(self) -> Iterator[tuple[Hashes, RowNumbers]]:
        """All rows, in pieces of at most `BUCKET_ROWS` or one call of `add`."""
        self._file.flush()
        for runs in self._runs:
            count = sum(count for _, count in runs)
            if count > BUCKET_ROWS:
                yield from self._split(runs, count)
            elif count:
                yield _sort(*self._read(runs))

    def _read(self, runs: Sequence[tuple[int, int]]) -> tuple[Hashes, RowNumbers]:
        entries = np.concatenate(
            [
                np.frombuffer(os.pread(self._file.fileno(), count * self._entry.itemsize, offset), self._entry)
                for offset, count in runs
            ]
        )
        return np.ascontiguousarray(entries["id_hash"]), np.ascontiguousarray(entries["row"])

    def _split(self, runs: Sequence[tuple[int, int]], count: int) -> Iterator[tuple[Hashes, RowNumbers]]:
        extremes = [(int(hashes.min()), int(hashes.max())) for hashes, _ in (self._read([run]) for run in runs)]
        lowest, highest = min(low for low, _ in extremes), max(high for _, high in extremes)
        if lowest == highest:
            yield from (self._read([run]) for run in runs)  # equal hashes, rows rising: nothing to sort
            return
        finer = IdSorter(self._num_rows, self._folder, lowest, highest)
        try:
            for run in runs:
                finer.add(*self._read([run]))
            yield from finer.sorted()
        finally:
            finer.close()


def _sort(hashes: Hashes, rows: RowNumbers) -> tuple[Hashes, RowNumbers]:
    """Sorted by hash, then row. The quick sort of numpy is not stable, so rows of equal hashes are put in order after it."""
    order = np.argsort(hashes)
    hashes, rows = hashes[order], rows[order]
    equal = hashes[1:] == hashes[:-1]
    if equal.any():
        repeated = np.flatnonzero(np.concatenate(([False], equal)) | np.concatenate((equal, [False])))
        rows[repeated] = rows[repeated][np.lexsort((rows[repeated], hashes[repeated]))]
    return hashes, rows


class SortedIds:
    """Looks rows up by the hash of their id, in the batches of a mapped file."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = [(as_numpy(batch.column("id_hash")), as_numpy(batch.column("row"))) for batch in batches]
        self._firsts = [int(hashes[0]) for hashes, _ in self._batches]
        self._lasts = [int(hashes[-1]) for hashes, _ in self._batches]

    def find(self, wanted: int) -> list[int]:
        """All rows with this hash, rising."""
        found: list[int] = []
        number = bisect_left(self._lasts, wanted)
        while number < len(self._batches) and self._firsts[number] <= wanted:
            hashes, rows = self._batches[number]
            start, stop = (int(np.searchsorted(hashes, np.uint64(wanted), side)) for side in ("left", "right"))
            found += rows[start:stop].tolist()
            number += 1
        return found

    def find_many(self, wanted: Hashes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Pairs (position in `wanted`, row) of every match. `wanted` is sorted; a million take a second or two."""
        positions: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        found: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
        for (hashes, rows), first, last in zip(self._batches, self._firsts, self._lasts, strict=True):
            low = int(np.searchsorted(wanted, np.uint64(first), "left"))
            high = int(np.searchsorted(wanted, np.uint64(last), "right"))
            starts = np.searchsorted(hashes, wanted[low:high], "left")
            counts = np.searchsorted(hashes, wanted[low:high], "right") - starts
            positions.append(np.repeat(np.arange(low, high), counts))
            skipped = np.repeat(np.cumsum(counts) - counts - starts, counts)
            found.append(rows[np.arange(len(skipped)) - skipped].astype(np.int64))
        return np.concatenate(positions), np.concatenate(found)
