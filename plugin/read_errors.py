"""What can go wrong when a trainer reads a dataset. Every message says where, what was found, what was expected, what to do.

BayplanError
`- ReadError           bytes of a dataset could not be had; `place` says which
   |- FileMissing      there is no such file
   |- FileCut          the file ends before the bytes that were recorded
   |- FileChanged      other bytes stand there than were recorded
   |- StoreFailed      the store kept failing, or answers something else than was asked
   |- ReadStalled      a read never came back, twice
   `- ReadCancelled    the pool was closed, or the key cancelled, while somebody waited
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from packer.format import layout
from packer.format.errors import BayplanError
from packer.storage import join_url

Raised = TypeVar("Raised", bound=BaseException)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlace:
    """Bytes [offset, offset + size) of a file of a source."""

    dataset: str
    source: str
    file: str
    """A bundle or a record file, in the source's folder."""
    offset: int
    size: int
    sample_id: str | None = None
    """None where the caller did not say it."""

    @property
    def url(self) -> str:
        """Of the file."""
        return join_url(self.dataset, f"{layout.source_dir(self.source)}/{self.file}")

    def __str__(self) -> str:
        sample = "" if self.sample_id is None else f", sample {self.sample_id!r}"
        return f"{self.url} at offset {self.offset}, {self.size} bytes (source {self.source!r}{sample})"


class ReadError(BayplanError):
    """A read for training failed. Made from a message alone too, as torch does when it hands a worker's error on."""

    def __init__(self, message: str, place: ReadPlace | None = None) -> None:
        self.place = place
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ReadError], tuple[Any, ...]]:
        return type(self), (str(self), self.place)


class FileMissing(ReadError):
    """There is no such file."""


class FileCut(ReadError):
    """The file ends before the bytes that were recorded."""


class FileChanged(ReadError):
    """Other bytes stand there than were recorded."""


class StoreFailed(ReadError):
    """The store kept failing, or answers something else than was asked."""


class ReadStalled(ReadError):
    """A read never came back, twice."""


class ReadCancelled(ReadError):
    """The pool was closed, or the key cancelled, while somebody waited for it."""


def file_missing(place: ReadPlace) -> FileMissing:
    """The error of a file that is not there."""
    return FileMissing(
        f"{place}: found no file: was it moved or deleted, or is the dataset not mounted on this machine? Restore it, or pack "
        f"source {place.source!r} again",
        place,
    )


def file_cut(place: ReadPlace, found_bytes: int) -> FileCut:
    """The error of a file that is too short."""
    return FileCut(
        f"{place}: found a file of {found_bytes} bytes, expected at least {place.offset + place.size}: it was cut or is another "
        f"file than was packed. {_way_out(place)}",
        place,
    )


def file_changed(place: ReadPlace, found: str, expected: str) -> FileChanged:
    """The error of bytes that are not the recorded ones, read twice."""
    return FileChanged(
        f"{place}: found {found}, expected {expected}: the file was changed or is damaged. {_way_out(place)}", place
    )


def store_failed(place: ReadPlace, why: object) -> StoreFailed:
    """The error of a store that does not give the bytes."""
    return StoreFailed(f"{place}: found {why}, expected its bytes: check the store and this machine's access to it", place)


def _way_out(place: ReadPlace) -> str:
    return f"`bayplan verify {place.dataset}` lists all damage; restore the file, or pack source {place.source!r} again"


def without_frames(error: Raised) -> Raised:
    """An error that is kept: it and those it came of without their tracebacks, which lead to files and pixels and back to it."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
