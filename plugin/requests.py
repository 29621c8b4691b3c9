"""What can be asked of the reader and of the prefetch pool, and what comes back. Nothing is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from packer.format.record import ImageEntry

Entry: TypeAlias = Mapping[str, Any] | ImageEntry
"""An image of a record: the JSON object as it stands in the record, or the same as an `ImageEntry`."""


class RowPlace(Protocol):
    """What of an index row leads to its record; an `IndexRow` has it all."""

    @property
    def source(self) -> str: ...
    @property
    def record_file(self) -> str: ...
    @property
    def record_offset(self) -> int: ...
    @property
    def record_size(self) -> int: ...
    @property
    def id_hash(self) -> int: ...
    @property
    def status(self) -> int: ...
    @property
    def num_images(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRead:
    """Asks for the bytes of one image."""

    source: str
    entry: Entry
    sample_id: str | None = None
    """For messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRead:
    """Asks for the record of an index row, and its images."""

    row: RowPlace
    with_images: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A record and the bytes of its images."""

    record: dict[str, Any]
    images: list[bytes]
    """In the order of the record's `images`; empty when they were not asked for."""


Request: TypeAlias = ImageRead | SampleRead
Result: TypeAlias = bytes | Sample
