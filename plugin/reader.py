"""Images and records of a dataset, read by offset and size, each checked before it is handed out.

Any thread may read, and any process forked or spawned after: each opens its own descriptors. Nothing is read ahead here; that is
`prefetch`'s. A read that is wrong once is made again from a fresh descriptor, then refused by name.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from os import pread
from typing import Any

from packer.format.bundle import crc32
from packer.format.errors import BayplanError, FormatError, StorageFault, UsageError
from packer.storage import is_local, local_path, with_retries
from plugin.files import Files, Handle, LocalFiles, RemoteFiles
from plugin.pieces import image_piece, image_pieces, parsed_record, record_piece
from plugin.read_errors import ReadPlace, file_changed, file_cut, file_missing, store_failed
from plugin.requests import Entry, RowPlace, Sample
from plugin.spans import FileKey, Piece, Span, coalesce, single

_UNREADABLE = (KeyError, TypeError, ValueError, OverflowError, OSError, MemoryError)


class _WrongLength(OSError):
    """A store gave more or fewer bytes than asked, of a file that has them; it may do better next time."""


class BundleReader:
    """Reads a dataset anywhere: a folder by `pread`, an object store (any fsspec URL, msc:// too) by range requests.

    Args:
        check_crc: off saves a fifth of the time of small images on a local disk and lets damaged ones through.
        max_open: descriptors kept open in a process; at most a quarter of what the process may have.
        gap_bytes, span_bytes: how far apart two ranges may lie that are read as one, and how long such a read may get; None takes
            what suits the store: 4 KiB and 128 KiB in a folder, 256 KiB and 8 MiB elsewhere.
    """

    def __init__(
        self,
        dataset_url: str | os.PathLike[str],
        *,
        check_crc: bool = True,
        max_open: int = 256,
        gap_bytes: int | None = None,
        span_bytes: int | None = None,
    ) -> None:
        if max_open < 1:
            raise UsageError(f"max_open: found {max_open}, expected at least 1")
        dataset_url = os.fspath(dataset_url)
        local = is_local(dataset_url)
        root = os.path.abspath(os.path.expanduser(local_path(dataset_url))) if local else dataset_url.rstrip("/")
        self.dataset_url = root
        self.check_crc = check_crc
        self._settings = {"check_crc": check_crc, "max_open": max_open, "gap_bytes": gap_bytes, "span_bytes": span_bytes}
        self._files: Files
        self._handles: OrderedDict[FileKey, Handle] = OrderedDict()
        if local:
            self._files = files = LocalFiles(root, max_open)
            self._handles = files.handles
        else:
            self._files = RemoteFiles(root)
        self._gap_bytes = self._files.gap_bytes if gap_bytes is None else gap_bytes
        self._span_bytes = self._files.span_bytes if span_bytes is None else span_bytes
        self._lock = threading.Lock()
        self._num_retries = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_anew, (self.dataset_url, self._settings)

    def __repr__(self) -> str:
        return f"BundleReader({self.dataset_url!r})"

    @property
    def num_open(self) -> int:
        """Descriptors open in this process."""
        return len(self._handles)

    @property
    def num_retries(self) -> int:
        """Reads that were made again, in this process and those it was forked from."""
        return self._num_retries

    def close(self) -> None:
        """Give all descriptors back; the next read opens again."""
        self._files.close()

    def read(self, source: str, bundle: str, entry: Entry, *, sample_id: str | None = None) -> bytes:
        """The bytes of one image.

        Args:
            entry: of the record's `images`. sample_id: for messages.

        Raises:
            ReadError: naming the bundle and the place in it.
        """
        file = (source, bundle)
        try:
            size = entry["size"]  # type: ignore[index]
            data = pread(self._handles[file].descriptor, size, entry["offset"])  # type: ignore[index]
            if len(data) == size and (not self.check_crc or crc32(data) == entry["crc32"]):  # type: ignore[index]
                self._handles.move_to_end(file)
                return data
        except _UNREADABLE:
            pass  # not open yet, not local, or wrong: the slow way finds out
        return self.read_span(single(image_piece(source, entry, sample_id=sample_id, bundle=bundle)))[0]

    def read_images(self, source: str, entries: Sequence[Entry], *, sample_id: str | None = None) -> list[bytes]:
        """The bytes of many images of a source, in the order of the entries. Errors as `read`."""
        try:
            return self._read_runs(source, entries)
        except _UNREADABLE:
            return self._read_pieces(image_pieces(source, entries, sample_id=sample_id))

    def read_record(self, row: RowPlace) -> dict[str, Any]:
        """The record of an index row, found to be the one that was indexed. Errors as `read`."""
        return self.read_records([row])[0]

    def read_records(self, rows: Sequence[RowPlace]) -> list[dict[str, Any]]:
        """The records of many rows, in their order."""
        lines = self._read_pieces([record_piece(row, slot) for slot, row in enumerate(rows)])
        return [self.record_of(row, line) for row, line in zip(rows, lines, strict=True)]

    def read_sample(self, row: RowPlace, *, with_images: bool = True) -> Sample:
        """The record of an index row and its images."""
        record = self.read_record(row)
        images = self.read_images(row.source, record["images"], sample_id=record["id"]) if with_images else []
        return Sample(record=record, images=images)

    def plan(self, pieces: Iterable[Piece]) -> list[Span]:
        """The reads that bring these pieces; neighbours are joined."""
        return coalesce(pieces, gap_bytes=self._gap_bytes, span_bytes=self._span_bytes)

    def read_span(self, span: Span) -> list[bytes]:
        """The pieces of one read, in its order, each checked. Errors as `read`."""
        return self._checked(span, self._fetch(span))

    def read_span_now(self, span: Span) -> list[bytes] | None:
        """As `read_span` if all of it is right and in memory here; else None, and `read_span` finds out. Never waits."""
        data = self._files.read_now(span)
        if data is None:
            return None
        pieces = _cut(span, data)
        if self.check_crc and any(
            crc32(data) != piece.crc32 for piece, data in zip(span.pieces, pieces, strict=True) if piece.crc32 is not None
        ):
            return None
        return pieces

    def forget(self, file: FileKey) -> None:
        """The next read of this file begins with a fresh descriptor."""
        self._files.forget(file)

    def place_of(self, piece: Piece) -> ReadPlace:
        """Where a piece stands, for messages."""
        source, name = piece.file
        return ReadPlace(
            dataset=self.dataset_url, source=source, file=name, offset=piece.offset, size=piece.size, sample_id=piece.sample_id
        )

    def record_of(self, row: RowPlace, line: bytes) -> dict[str, Any]:
        """The record in a line, read once more if it is not the one that was indexed."""
        piece = record_piece(row, 0)
        try:
            return parsed_record(row, line)
        except FormatError:
            self._note_retry()
            self.forget(piece.file)
        try:
            return parsed_record(row, self.read_span(single(piece))[0])
        except FormatError as error:
            raise file_changed(self.place_of(piece), str(error), "the record that was indexed") from error

    def _read_runs(self, source: str, entries: Sequence[Entry]) -> list[bytes]:
        """The quick way for bundles that are open: images that follow each other in a bundle, as those of a record do, are read
        at once. Raises one of `_UNREADABLE` when anything is not so.
        """
        found: list[bytes] = []
        run: list[Any] = []
        bundle, start, end = "", 0, 0
        for entry in entries:
            offset, size = entry["offset"], entry["size"]  # type: ignore[index]
            if size <= 0:
                raise ValueError(size)
            is_next = entry["bundle"] == bundle and 0 <= offset - end <= self._gap_bytes  # type: ignore[index]
            if not is_next or offset + size - start > self._span_bytes:
                if run:
                    found += self._read_run((source, bundle), start, end, run)
                run, bundle, start = [], entry["bundle"], offset  # type: ignore[index]
            run.append(entry)
            end = offset + size
        if run:
            found += self._read_run((source, bundle), start, end, run)
        return found

    def _read_run(self, file: FileKey, start: int, end: int, run: Sequence[Any]) -> list[bytes]:
        data = pread(self._handles[file].descriptor, end - start, start)
        if len(data) != end - start:
            raise _WrongLength
        self._handles.move_to_end(file)
        images = [data]
        if len(run) > 1:
            images = [data[entry["offset"] - start : entry["offset"] - start + entry["size"]] for entry in run]
        if self.check_crc and any(crc32(image) != entry["crc32"] for image, entry in zip(images, run, strict=True)):
            raise _WrongLength
        return images

    def _read_pieces(self, pieces: Sequence[Piece]) -> list[bytes]:
        spans = self.plan(pieces)
        found: list[bytes] = [b""] * len(pieces)
        for span, data in zip(spans, self._files.read_many(spans), strict=True):
            if isinstance(data, Exception) or len(data) != span.end - span.start:
                self._note_retry()
                data = self._fetch(span)
            for piece, image in zip(span.pieces, self._checked(span, data), strict=True):
                found[piece.slot] = image
        return found

    def _checked(self, span: Span, data: bytes) -> list[bytes]:
        """The pieces of a span's bytes. One with a wrong checksum is read again alone, then refused."""
        pieces = _cut(span, data)
        if self.check_crc:
            for number, piece in enumerate(span.pieces):
                if piece.crc32 is not None and crc32(pieces[number]) != piece.crc32:
                    pieces[number] = self._read_again(piece, piece.crc32)
        return pieces

    def _read_again(self, piece: Piece, expected: int) -> bytes:
        self._note_retry()
        self.forget(piece.file)
        data = self._fetch(single(piece))
        if (found := crc32(data)) != expected:
            raise file_changed(self.place_of(piece), f"crc32 {found:#010x} (read twice)", f"crc32 {expected:#010x}")
        return data

    def _fetch(self, span: Span) -> bytes:
        """The bytes of a span, as many as asked; tried again while its faults may pass."""
        place = self.place_of(span.pieces[0])
        tries = 0

        def once() -> bytes:
            nonlocal tries
            tries += 1
            if tries > 1:
                self._note_retry()
            return self._try(span)

        try:
            return with_retries(once, place.url)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise file_missing(place) from error
        except StorageFault as error:
            cause = error.__cause__
            raise store_failed(place, f"{type(cause).__name__}: {cause}") from cause
        except BayplanError:
            raise
        except Exception as error:
            raise store_failed(place, f"{type(error).__name__}: {error}") from error

    def _try(self, span: Span) -> bytes:
        try:
            data = self._files.read(span)
        except (FileNotFoundError, NotADirectoryError, BayplanError):
            raise
        except Exception:
            self._files.forget(span.file)
            self._refuse_cut(span)
            raise
        if len(data) != span.end - span.start:
            self._files.forget(span.file)
            self._refuse_cut(span)
            raise _WrongLength(f"{len(data)} bytes where {span.end - span.start} were asked for")
        return data

    def _refuse_cut(self, span: Span) -> None:
        """Name the first piece that lies beyond the end of its file, if one does."""
        try:
            size = self._files.size(span.file)
        except Exception:
            return  # the error that brought us here says more
        if size is None:
            raise FileNotFoundError(span.file[1])
        for piece in span.pieces:
            if piece.offset + piece.size > size:
                raise file_cut(self.place_of(piece), size)

    def _note_retry(self) -> None:
        with self._lock:
            self._num_retries += 1


def _cut(span: Span, data: bytes) -> list[bytes]:
    """The pieces of a span's bytes."""
    if len(span.pieces) == 1:
        return [data]
    return [data[piece.offset - span.start : piece.offset - span.start + piece.size] for piece in span.pieces]


def _made_anew(dataset_url: str, settings: dict[str, Any]) -> BundleReader:
    return BundleReader(dataset_url, **settings)
