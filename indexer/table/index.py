"""The index of a dataset under one profile, as one table over all its sources, mapped into memory.

Rows of sources follow each other in the order of the sources' names, rows of a source in part order, rows of a part in the order
of its lines. Opened once, a table can be forked or pickled to workers; nothing of it changes afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from indexer.exclusion import ExclusionReport, Exclusions, apply_exclusions
from indexer.rows import COUNTS, IMAGE_FIELDS, SCHEMA, Status, as_numpy
from indexer.table.mapped import MappedSource
from packer.format import layout
from packer.format.digest import bytes_digest, id_hash
from packer.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexImage:
    """What the index knows of one image of a record."""

    width: int
    height: int
    num_image_tokens: int
    num_patches: int
    sum_squared_attention: int
    """Patches squared, summed over the windows or tiles that attend to themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """What the index knows of one record."""

    source: str
    part_id: str
    line: int
    """Of the part's record file, from 0."""
    record_file: str
    """Relative to the dataset."""
    record_offset: int
    record_size: int
    num_text_tokens: int
    num_image_tokens: int
    num_tokens: int
    num_loss_tokens: int
    num_images: int
    num_patches: int
    images: tuple[IndexImage, ...]
    id_hash: int
    status: int
    """A `Status`, or a number that a newer release added."""

    @property
    def name(self) -> str:
        """Where the record stands; for keys and messages, known before it is read."""
        return f"{self.source}/{self.part_id}/{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a table was opened; enough to open it again in another process."""

    dataset_url: str
    profile: str
    profile_fingerprint: str
    cache_dir: str | None
    reopen: Callable[[Origin, tuple[tuple[str, str], ...], ExclusionReport | None], IndexTable]


class IndexTable:
    """All rows of a profile. Made by `open_index`."""

    def __init__(self, origin: Origin, sources: Sequence[MappedSource]) -> None:
        self._origin = origin
        self._sources = {source.name: source for source in sources}
        self._starts = [0, *accumulate(source.num_rows for source in sources)]
        self._start_of = dict(zip(self._sources, self._starts, strict=False))
        self._exclusion: ExclusionReport | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return self._origin.reopen, (self._origin, self.digests, self._exclusion)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of all sources, usable or not."""
        return self._starts[-1]

    @property
    def profile(self) -> str:
        """Name of the profile."""
        return self._origin.profile

    @property
    def profile_fingerprint(self) -> str:
        """What the rows were counted with."""
        return self._origin.profile_fingerprint

    @property
    def sources(self) -> tuple[str, ...]:
        """Names, in the order of their rows."""
        return tuple(self._sources)

    @property
    def digests(self) -> tuple[tuple[str, str], ...]:
        """(Source, digest of its parts and profile) of every source."""
        return tuple((name, source.digest) for name, source in self._sources.items())

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the rows and of what is excluded of them, 32 hex digits."""
        excluded = b"" if self._exclusion is None else self._exclusion.rows.tobytes()
        return bytes_digest(repr(self.digests).encode() + excluded)[:32]

    @property
    def exclusion(self) -> ExclusionReport | None:
        """What the lists of excluded ids did; None when opened without them."""
        return self._exclusion

    def exclude(self, exclusions: Exclusions) -> None:
        """Apply lists of excluded ids, in place of those applied before."""
        self._set_exclusion(apply_exclusions(exclusions, self))

    def _set_exclusion(self, exclusion: ExclusionReport | None) -> None:
        self._exclusion = exclusion
        for name in ("usable", "fingerprint"):
            self.__dict__.pop(name, None)

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Which rows can be trained on: counted, and not excluded. Made at its first use and kept; a byte a row."""
        mask = self.select(lambda batch: np.ones(batch.num_rows, np.bool_))
        mask.flags.writeable = False
        return mask

    def select(self, wanted: Callable[[pa.RecordBatch], npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        """Which usable rows are wanted, asked batch by batch; a byte a row, and nothing is kept."""
        mask = np.empty(self.num_rows, np.bool_)
        start = 0
        for batch in self.batches():
            stop = start + batch.num_rows
            np.equal(as_numpy(batch.column("status")), Status.USABLE, out=mask[start:stop])
            mask[start:stop] &= wanted(batch)
            start = stop
        if self._exclusion is not None:
            mask[self._exclusion.rows] = False
        return mask

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in batches of one source each; nothing is copied."""
        for source in self._sources.values():
            yield from source.batches

    def column(self, name: str) -> pa.ChunkedArray:
        """One column of all rows; nothing is copied.

        Raises:
            UsageError: when there is no such column.
        """
        if name not in SCHEMA.names:
            raise UsageError(f"found no column {name!r} in the index, expected one of: {', '.join(SCHEMA.names)}")
        return pa.chunked_array([batch.column(name) for batch in self.batches()], type=SCHEMA.field(name).type)

    def to_arrow(self) -> pa.Table:
        """All columns of all rows; nothing is copied."""
        return pa.Table.from_batches(list(self.batches()), schema=SCHEMA)

    def rows_of_source(self, source: str) -> range:
        """The rows of a source."""
        start = self._start(source)
        return range(start, start + self._sources[source].num_rows)

    def stats(self, source: str) -> bytes:
        """The stats blob of a source, as `consolidate` was given it.

        Raises:
            UsageError: when there is no such source. FormatError: when another release counted it.
        """
        self._start(source)
        return self._sources[source].stats

    def _start(self, source: str) -> int:
        if source not in self._start_of:
            raise UsageError(f"found no source {source!r} in the index, expected one of: {', '.join(self._sources)}")
        return self._start_of[source]

    def _source_of(self, row: int) -> tuple[MappedSource, int]:
        """The source a row is in, and its position there."""
        if not 0 <= row < self.num_rows:
            raise UsageError(f"found row {row:,}, expected one of the index's {self.num_rows:,}, from 0")
        number = bisect_right(self._starts, row) - 1
        return self._sources[self.sources[number]], row - self._starts[number]

    def locate(self, row: int) -> tuple[str, str, int]:
        """Source, part id and line of a row."""
        source, inside = self._source_of(row)
        part, line = source.part_of(inside)
        return source.name, part.part_id, line

    def row_of(self, source: str, part_id: str, line: int) -> int:
        """The row of a part's line.

        Raises:
            UsageError: when there is no such source, part or line.
        """
        return self._start(source) + self._sources[source].row_of(part_id, line)

    def find(self, sample_id: str, source: str | None = None) -> list[int]:
        """All rows with this id, rising; ids may repeat. Compared by hash: see the record where it must be certain."""
        wanted = id_hash(sample_id)
        found = []
        for name in self.sources if source is None else (source,):
            start = self._start(name)
            found += [start + row for row in self._sources[name].ids.find(wanted)]
        return found

    def find_many(self, hashes: npt.NDArray[np.uint64], source: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(Position in the sorted hashes, row) of every match in a source.

        Raises:
            UsageError: when there is no such source, or the hashes do not rise.
        """
        start = self._start(source)
        _check_rising(hashes, "hashes to find")
        positions, rows = self._sources[source].ids.find_many(hashes)
        return positions, rows + start

    def take(self, name: str, rows: npt.NDArray[np.int64], source: str) -> npt.NDArray[Any]:
        """Values of a column other than `images` at rows of a source, which rise; a row may be there more than once.

        Raises:
            UsageError: when there is no such source, or the rows do not rise or are not its own.
        """
        own = self.rows_of_source(source)
        _check_rising(rows, "rows to take")
        if len(rows) and not (own.start <= rows[0] and rows[-1] < own.stop):
            raise UsageError(f"found rows {rows[0]:,} to {rows[-1]:,}, expected some of source {source!r}: {own}")
        return self._sources[source].take(name, rows - own.start)

    def images_of(self, row: int) -> tuple[IndexImage, ...]:
        """The images of a row, in reading order."""
        source, inside = self._source_of(row)
        columns, offsets, position = source.place_of(inside)
        return tuple(
            IndexImage(**{field: int(columns[column][number]) for field, column in IMAGE_FIELDS.items()})
            for number in range(int(offsets[position]), int(offsets[position + 1]))
        )

    def row(self, row: int) -> IndexRow:
        """Everything the index knows of a row.

        Raises:
            UsageError: when there is no such row.
        """
        source, inside = self._source_of(row)
        part, line = source.part_of(inside)
        columns, _, position = source.place_of(inside)
        places = ("record_offset", "record_size", "id_hash", "status")
        return IndexRow(
            source=source.name,
            part_id=part.part_id,
            line=line,
            record_file=layout.part_file(source.name, part.part_id, layout.RECORDS_SUFFIX),
            images=self.images_of(row),
            **{name: int(columns[name][position]) for name in (*COUNTS, *places)},
        )


def _check_rising(values: npt.NDArray[Any], what: str) -> None:
    """Refuse what binary search would answer wrongly."""
    if (falls := values[1:] < values[:-1]).any():
        position = int(np.argmax(falls)) + 1
        raise UsageError(f"{what}: found {values[position]} after {values[position - 1]} at {position:,}, expected them sorted")
