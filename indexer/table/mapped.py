"""One source's index, memory-mapped: its batches, its parts, its ids. Rows count from 0 in here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc

from indexer.rows import SCHEMA, Ints, batch_columns, check_schema
from indexer.table.consolidating import parts_digest
from indexer.table.files import KIND_TABLE, Header, damage, parse_header, read_batch, stats_in
from indexer.table.sorted_ids import SortedIds, ids_schema
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import PartKey


@dataclass(frozen=True, slots=True)
class MappedFile:
    """An index file as it lies in memory."""

    header: Header
    values: dict[str, bytes]
    """All of its metadata."""
    batches: Sequence[pa.RecordBatch]
    """Without the file's metadata, so that batches of several sources make one table."""


def map_file(path: str, where: str, kind: str) -> MappedFile:
    """Map a local file; nothing but the sizes of its batches is read.

    Raises:
        FormatError: when it is cut, damaged, foreign or of another version.
    """
    with damage(where):
        reader = pa.ipc.open_file(pa.memory_map(path))
    header, values = parse_header(reader.schema.metadata, where, kind)
    with damage(where):
        _check_columns(reader.schema.remove_metadata(), header, where)
    numbers = range(reader.num_record_batches)
    batches = [read_batch(reader, number, where).replace_schema_metadata(None) for number in numbers]
    rows = sum(batch.num_rows for batch in batches)
    if rows != header.num_rows:
        raise FormatError(f"{where}: found {rows:,} rows, its header says {header.num_rows:,}: remove it and index again")
    return MappedFile(header, values, batches)


def _check_columns(found: pa.Schema, header: Header, where: str) -> None:
    if header.kind == KIND_TABLE:
        check_schema(found, where)
    elif found != (expected := ids_schema(header.num_rows)):
        raise FormatError(f"{where}: found columns {found}, expected {expected}: not an index of format version 1")


class MappedSource:
    """The index of one source."""

    def __init__(self, table: MappedFile, ids: MappedFile, where: str) -> None:
        """`where` names the table in messages.

        Raises:
            FormatError: when the two files are not of one piece.
        """
        self.name = table.header.source
        self.num_rows = table.header.num_rows
        self.profile_fingerprint = table.header.profile_fingerprint
        self.batches = table.batches
        self._values, self._where = table.values, where
        self.ids = SortedIds(ids.batches)
        self.digest = table.values.get("parts_digest", b"").decode(errors="replace")
        parts = table.values.get("parts", b"")
        if self.digest != parts_digest(self.profile_fingerprint, parts):
            raise FormatError(f"{where}: its table of parts does not match its own digest: remove it and index again")
        if ids.values.get("parts_digest", b"").decode(errors="replace") != self.digest:
            raise FormatError(f"{where}: its .ids.arrow is of other parts: indexing is at work or was interrupted; index again")
        with damage(where):
            self.parts = [PartKey(*row) for row in orjson.loads(parts)]
        self._part_starts = np.concatenate(([0], np.cumsum([key.num_rows for key in self.parts], dtype=np.int64)))
        self._batch_starts = np.concatenate(([0], np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64))).tolist()
        if self.num_rows != self._part_starts[-1] or self.num_rows != ids.header.num_rows:
            raise FormatError(f"{where}: its parts have {self._part_starts[-1]:,} rows, it has {self.num_rows:,}: index again")
        self._columns: dict[int, tuple[dict[str, Ints], Ints]] = {}
        self._numbers: dict[str, int] | None = None

    @property
    def stats(self) -> bytes:
        """The stats blob. Asked for, it must be of this release; the rows can be read without it.

        Raises:
            FormatError: when it is of another.
        """
        return stats_in(self._values, self._where)

    def part_of(self, row: int) -> tuple[PartKey, int]:
        """The part of a row, and its line there."""
        number = int(np.searchsorted(self._part_starts, row, "right")) - 1
        return self.parts[number], row - int(self._part_starts[number])

    def row_of(self, part_id: str, line: int) -> int:
        """The row of a part's line.

        Raises:
            UsageError: when there is no such part or line.
        """
        if self._numbers is None:
            self._numbers = {key.part_id: number for number, key in enumerate(self.parts)}
        number = self._numbers.get(part_id)
        if number is None:
            raise UsageError(f"source {self.name!r}: found no part {part_id!r} in its index")
        if not 0 <= line < self.parts[number].num_rows:
            raise UsageError(f"part {part_id} of source {self.name!r}: line {line} of {self.parts[number].num_rows}")
        return int(self._part_starts[number]) + line

    def place_of(self, row: int) -> tuple[dict[str, Ints], Ints, int]:
        """The columns and image offsets of the batch a row is in, and its position in it."""
        number = bisect_right(self._batch_starts, row) - 1
        columns = self._columns.get(number)
        if columns is None:
            columns = self._columns[number] = batch_columns(self.batches[number])
        return *columns, row - self._batch_starts[number]

    def take(self, name: str, rows: Ints) -> Ints:
        """Values of a column at some rows, which rise."""
        cuts = np.searchsorted(rows, self._batch_starts)
        found = [np.empty(0, SCHEMA.field(name).type.to_pandas_dtype())]
        for number in range(len(self.batches)):
            chosen = rows[cuts[number] : cuts[number + 1]]
            if len(chosen):
                columns, _, _ = self.place_of(int(chosen[0]))
                found.append(columns[name][chosen - self._batch_starts[number]])
        return np.concatenate(found)
