"""Lists of sample ids that must not be trained on, in `exclude/`: a layer over the index, which stays as it is.

A list is a `.txt` (one id a line) or an `.arrow` or `.parquet` with a column `id` and, where ids are only unique within a
source, a column `source`. Ids are compared by the 64-bit hash the index keeps: among 100 million rows, a million excluded ids
take a row that was not meant along once in 180,000 datasets.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import blake3
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from indexer.rows import Status, id_hashes
from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.storage import FileStat, Storage, join_url

NUM_EXAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExclusionList:
    """One list as it was read."""

    name: str
    """Of its file, relative to the dataset."""
    ids: Sequence[str]
    hashes: npt.NDArray[np.uint64]
    sources: Sequence[str] | None
    """One per id; None when the ids are of all sources."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exclusions:
    """All lists of a dataset, by name."""

    lists: Sequence[ExclusionList]
    fingerprint: str
    """Of the names and bytes of the lists, 32 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListEffect:
    """What one list does to a table."""

    name: str
    num_ids: int
    num_matched: int
    """Entries of the list that name at least one row."""
    num_rows: int
    """Rows it excludes, alone."""
    unmatched: Sequence[str]
    """The first five entries that name no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEffect:
    """What all lists together do to a source."""

    num_rows: int
    num_usable: int
    """Those of the rows that could be trained on otherwise."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExclusionReport:
    """What the lists do to a table."""

    rows: npt.NDArray[np.int64]
    """Excluded rows of the table, rising, each once."""
    lists: Sequence[ListEffect]
    sources: Mapping[str, SourceEffect]


class SearchableTable(Protocol):
    """What a table must offer to have rows excluded."""

    @property
    def sources(self) -> Sequence[str]: ...

    def find_many(self, hashes: npt.NDArray[np.uint64], source: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(Position in the sorted hashes, row of the table) of every match."""

    def take(self, name: str, rows: npt.NDArray[np.int64], source: str) -> npt.NDArray[Any]:
        """Values of a column at rows of a source, which rise."""


_read: dict[str, tuple[Sequence[FileStat], Exclusions]] = {}
"""Dataset -> its lists as they were read last in this process, which opens every source by itself."""


def read_exclusions(storage: Storage) -> Exclusions:
    """Every list of a dataset; none is fine. They are read again only when their names, sizes or stamps changed.

    Raises:
        UsageError: for a file of an unknown kind or without the column. FormatError: for one that cannot be read.
    """
    files = storage.list_dir(layout.EXCLUDE_DIR)
    _refuse_what_is_no_list(storage)
    known = _read.get(storage.url)
    if known is not None and known[0] == files:
        return known[1]
    _read.pop(storage.url, None)
    exclusions = _read_lists(storage, files)
    _read[storage.url] = files, exclusions
    return exclusions


def _refuse_what_is_no_list(storage: Storage) -> None:
    """A list that is not where lists are read would be passed over, and its samples trained on."""
    if storage.stat(layout.EXCLUDE_DIR) is not None and layout.EXCLUDE_DIR not in storage.list_dirs(""):
        raise UsageError(f"{join_url(storage.url, layout.EXCLUDE_DIR)}: found a file, expected a folder of lists")
    if folders := storage.list_dirs(layout.EXCLUDE_DIR):
        raise UsageError(
            f"{join_url(storage.url, layout.EXCLUDE_DIR)}: found the folder {folders[0]!r}, expected lists only: move them up"
        )


def _read_lists(storage: Storage, files: Sequence[FileStat]) -> Exclusions:
    lists = []
    digest = blake3.blake3()
    for file in files:
        data = storage.read_bytes(file.name)
        digest.update(f"{file.name}\n{len(data)}\n".encode() + data)
        lists.append(_read_list(file.name, data, join_url(storage.url, file.name)))
    return Exclusions(lists=lists, fingerprint=digest.hexdigest()[:32])


def _read_list(name: str, data: bytes, where: str) -> ExclusionList:
    extension = posixpath.splitext(name)[1]
    if extension == ".txt":
        ids, sources = _lines(data, where), None
    elif extension in _TABLES:
        ids, sources = _columns(data, where, _TABLES[extension])
    else:
        raise UsageError(f"{where}: found a file ending in {extension!r}, expected a list ending in .txt, .arrow or .parquet")
    return ExclusionList(name=name, ids=ids, hashes=id_hashes(ids), sources=sources)


def _lines(data: bytes, where: str) -> list[str]:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise FormatError(f"{where}: line {line}: found bytes that are not UTF-8, expected one id a line") from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [line for line in lines if line.strip()]


def _read_arrow(data: bytes) -> pa.Table:
    if data.startswith(b"ARROW1"):
        return pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return pa.ipc.open_stream(pa.BufferReader(data)).read_all()


def _read_parquet(data: bytes) -> pa.Table:
    from pyarrow.parquet import read_table  # 20 MB that few readers need

    return read_table(pa.BufferReader(data))


_TABLES: dict[str, Callable[[bytes], pa.Table]] = {".arrow": _read_arrow, ".parquet": _read_parquet}


def _columns(data: bytes, where: str, read: Callable[[bytes], pa.Table]) -> tuple[list[str], list[str] | None]:
    try:
        table = read(data)
    except (pa.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0]
        raise FormatError(f"{where}: cannot be read ({said}): it is cut, or of another kind than its name says") from error
    names = table.column_names
    if "id" not in names:
        raise UsageError(f"{where}: found columns {names}, expected `id` (strings) and, if wanted, `source`")
    wanted = [name for name in ("id", "source") if name in names]
    if twice := [name for name in wanted if names.count(name) > 1]:
        raise UsageError(f"{where}: found several columns `{twice[0]}`, expected one")
    for name in wanted:
        kind = table.schema.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise UsageError(f"{where}: found column `{name}` of type {kind}, expected strings: cast it")
        if table.column(name).null_count:
            raise UsageError(f"{where}: found {table.column(name).null_count:,} nulls in column `{name}`, expected none")
    try:
        ids, *sources = (table.column(name).to_pylist() for name in wanted)
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: found strings that are not UTF-8 ({error}): write the list again") from error
    return ids, sources[0] if sources else None


def apply_exclusions(exclusions: Exclusions, table: SearchableTable) -> ExclusionReport:
    """Find the rows that the lists exclude; about four seconds for a million ids over 100 million rows."""
    by_source: dict[str, list[npt.NDArray[np.int64]]] = {source: [np.empty(0, np.int64)] for source in table.sources}
    effects = [_apply(one, table, by_source) for one in exclusions.lists]
    rows = {source: np.unique(np.concatenate(pieces)) for source, pieces in by_source.items()}
    sources = {
        source: SourceEffect(
            num_rows=len(found),
            num_usable=int(np.count_nonzero(table.take("status", found, source) == Status.USABLE)),
            num_tokens=int(table.take("num_tokens", found, source).sum(dtype=np.int64)),
        )
        for source, found in rows.items()
    }
    return ExclusionReport(rows=np.concatenate([np.empty(0, np.int64), *rows.values()]), lists=effects, sources=sources)


def _apply(one: ExclusionList, table: SearchableTable, by_source: Mapping[str, list[npt.NDArray[np.int64]]]) -> ListEffect:
    matched = np.zeros(len(one.ids), np.bool_)
    order = np.argsort(one.hashes, kind="stable")
    sources = None if one.sources is None else np.array(one.sources, dtype=object)
    num_rows = 0
    for source in table.sources:
        entries = order if sources is None else order[sources[order] == source]
        positions, rows = table.find_many(one.hashes[entries], source)
        matched[entries[positions]] = True
        distinct = np.unique(rows)
        num_rows += len(distinct)
        by_source[source].append(distinct)
    unmatched = [one.ids[position] for position in np.flatnonzero(~matched)[:NUM_EXAMPLES]]
    return ListEffect(name=one.name, num_ids=len(one.ids), num_matched=int(matched.sum()), num_rows=num_rows, unmatched=unmatched)
