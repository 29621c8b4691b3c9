"""A bundle: a plain ZIP of STORED images, written by the standard library and read by offset, never by name.

A member's name is the digest of its content plus an extension, so equal images are stored once and names never clash.
Dates, modes and the creating system are fixed: the same images in the same order give the same bytes everywhere.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from isal import isal_zlib

from packer.format.digest import FileDigest
from packer.format.errors import FormatError

MAX_IMAGES = 65_000
"""Images of a bundle before its part rolls: below the 65,535 at which a ZIP needs its 64-bit directory."""

_DATE = (1980, 1, 1, 0, 0, 0)
_UNIX = 3
_MODE = 0o100644 << 16
_BLOCK_BYTES = 8 << 20
_BUFFER_BYTES = 1 << 20


def crc32(data: bytes | memoryview) -> int:
    """The ZIP checksum of `data`."""
    return int(isal_zlib.crc32(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """Where an image's bytes stand in a bundle: [offset, offset + size) of the file."""

    name: str
    offset: int
    size: int
    crc32: int


class BundleWriter:
    """Appends images to a ZIP on a seekable local file; `close` writes its directory.

    Headers and directory are `zipfile`'s. Its `writestr` is not used: it checks each image again and goes back to each
    header, a third of the time of packing small images, though size and crc32 are known here beforehand.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._num_bytes = 0
        self._zip = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._stored: dict[str, StoredImage] = {}

    @property
    def num_images(self) -> int:
        """Distinct images stored so far."""
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        """Bytes written so far, without the directory."""
        return self._num_bytes

    @property
    def stored(self) -> Iterable[StoredImage]:
        """All images, in the order they were written."""
        return self._stored.values()

    def holds(self, digest: str, extension: str) -> bool:
        """Whether this content is already stored."""
        return f"{digest}.{extension}" in self._stored

    def add(self, data: bytes, *, digest: str, extension: str, crc: int) -> StoredImage:
        """Store `data` once and say where it stands."""
        name = f"{digest}.{extension}"
        if (known := self._stored.get(name)) is not None:
            return known
        info = zipfile.ZipInfo(name, _DATE)
        info.create_system = _UNIX
        info.external_attr = _MODE
        info.CRC, info.file_size, info.compress_size = crc, len(data), len(data)
        info.header_offset = self._num_bytes
        header = info.FileHeader()
        self._file.write(header)
        self._file.write(data)
        image = StoredImage(name=name, offset=self._num_bytes + len(header), size=len(data), crc32=crc)
        self._num_bytes = image.offset + len(data)
        self._zip.filelist.append(info)
        self._stored[name] = image
        return image

    def close(self) -> None:
        """Write the directory. The file stays open for its owner to sync."""
        self._zip.start_dir = self._num_bytes
        self._zip._didModify = True  # type: ignore[attr-defined]  # tells close() that there is a directory to write
        self._zip.close()

    def abandon(self) -> None:
        """Forget the file: nothing more is written to it, not even a directory."""
        self._zip.fp = None

    def prove(self, path: str) -> FileDigest:
        """Read the finished file back and check every image at its recorded place.

        Returns:
            Digest and size of the whole file.

        Raises:
            FormatError: when an image's bytes at its offset are not the ones that were given.
        """
        digest = FileDigest()
        with open(path, "rb", buffering=_BUFFER_BYTES) as file:
            for image in self._stored.values():
                digest.update(file.read(image.offset - digest.size))  # the member's header
                found, remaining = 0, image.size
                while block := file.read(min(remaining, _BLOCK_BYTES)):
                    digest.update(block)
                    found = isal_zlib.crc32(block, found)
                    remaining -= len(block)
                if found != image.crc32 or remaining:
                    raise FormatError(
                        f"{path}: member {image.name} at offset {image.offset}: found crc32 {found:#010x} after writing, "
                        f"expected {image.crc32:#010x}: the disk or memory of this machine is failing"
                    )
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest


def check_image(data: bytes, *, crc: int, size: int, where: str) -> None:
    """Refuse bytes that are not the recorded image.

    Raises:
        FormatError: with sizes or checksums found and expected.
    """
    if len(data) != size:
        raise FormatError(f"{where}: found {len(data)} bytes, expected {size}: the bundle is cut")
    if (found := crc32(data)) != crc:
        raise FormatError(f"{where}: found crc32 {found:#010x}, expected {crc:#010x}: the bundle was changed or is damaged")
