"""What stands between a line and its record: the row a schema took apart, and the sample whose images are all there."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from packer.format.bundle import StoredImage
from packer.format.errors import RowError
from packer.format.record import Body, ImageEntry, encode_record
from packer.loading import LoadedImage
from packer.schemas import Mapped
from packer.sources import RawLine
from packer.storage import writes_to

SPOOL_BYTES = 64 << 20
"""Image bytes of one record that are held in memory; the rest goes to a temporary file."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A line and what the schema made of it, or why it is refused."""

    line: RawLine
    text: bytes = b""
    fields: Mapping[str, Any] = field(default_factory=dict)
    mapped: Mapped | None = None
    error: RowError | None = None
    num_non_finite: int = 0

    @property
    def references(self) -> Sequence[str]:
        """Image references in reading order; none for a refused row, whose images nobody needs."""
        return self.mapped.references if self.mapped is not None and self.error is None else ()


@dataclass(slots=True, kw_only=True)
class Sample:
    """A row whose images are all there: everything its record needs but their places."""

    line: RawLine
    sample_id: str
    body: Body
    images: Sequence[LoadedImage]
    origin_file: str
    extra: Mapping[str, bytes]
    dropped: Counter[str]
    num_non_finite: int
    spool: Spool

    def distinct_images(self) -> Iterable[LoadedImage]:
        """One image for each content."""
        return {image.digest: image for image in self.images}.values()

    def encode(self, bundle: str, stored: Sequence[StoredImage]) -> bytes:
        """The record line, given where the images stand."""
        entries = [
            ImageEntry(
                bundle=bundle,
                offset=place.offset,
                size=place.size,
                crc32=place.crc32,
                digest=image.digest,
                width=image.facts.width,
                height=image.facts.height,
                format=image.facts.format,
                mode=image.facts.mode,
                orientation=image.facts.orientation,
                frames=image.facts.frames,
                ref=image.ref,
                converted_from=image.converted_from,
            )
            for image, place in zip(self.images, stored, strict=True)
        ]
        return encode_record(
            sample_id=self.sample_id,
            body=self.body,
            images=entries,
            origin_file=self.origin_file,
            origin_offset=self.line.byte_offset,
            extra=self.extra,
            num_images_dropped=self.dropped.total(),
        )


class Spool:
    """The image bytes of one record: each content once, in memory up to a budget, then in a temporary file."""

    def __init__(self) -> None:
        self._memory: dict[str, bytes] = {}
        self._on_disk: dict[str, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        self._num_bytes = 0

    def put(self, image: LoadedImage) -> None:
        """Take over the image's bytes."""
        data, image.data = image.data, b""
        if image.digest in self._memory or image.digest in self._on_disk:
            return
        if self._num_bytes + len(data) <= SPOOL_BYTES:
            self._memory[image.digest] = data
            self._num_bytes += len(data)
            return
        with writes_to(tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="bayplan-spool-")
            self._on_disk[image.digest] = (self._file.seek(0, 2), len(data))
            self._file.write(data)
            self._file.flush()

    def get(self, digest: str) -> bytes:
        """The bytes of a content."""
        if digest in self._memory:
            return self._memory[digest]
        assert self._file is not None
        offset, size = self._on_disk[digest]
        self._file.seek(offset)
        return self._file.read(size)

    def close(self) -> None:
        """Give the bytes up."""
        self._memory.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):  # what a full disk refused is not needed any more
                self._file.close()
