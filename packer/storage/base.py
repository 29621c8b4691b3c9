"""What a dataset needs of the place it lives in. Files appear whole or not at all, and are never appended to."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from io import BufferedWriter
from typing import BinaryIO, cast

from packer.format.digest import FileDigest, digest_of_file
from packer.format.errors import FormatError
from packer.storage.faults import with_retries, writes_to
from packer.storage.urls import FileStat, join_url

Proof = Callable[[str], FileDigest]
"""Reads a finished local file back, raises when it is not what was meant, and gives its digest."""


def same_as(written: FileDigest) -> Proof:
    """The proof that a file holds exactly the bytes that were written to it."""

    def prove(path: str) -> FileDigest:
        found = digest_of_file(path)
        if (found.size, found.hexdigest()) != (written.size, written.hexdigest()):
            raise FormatError(
                f"{path}: read back {found.size} bytes, blake3 {found.hexdigest()}; wrote {written.size} bytes, blake3 "
                f"{written.hexdigest()}: the disk or memory of this machine is failing"
            )
        return found

    return prove


def _open_written(path: str, flags: int) -> int:
    """Without O_TRUNC: ext4 takes truncating a file, even an empty one, as a sign to write all of it out on close."""
    return os.open(path, flags & ~os.O_TRUNC, 0o644)


class Staged:
    """A file in the making: write to `path` (local, seekable), then `Storage.publish` it."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path

    def open(self, buffer_bytes: int = 1 << 20) -> BufferedWriter:
        """The file, empty, for writing."""
        return cast(BufferedWriter, open(self.path, "wb", buffering=buffer_bytes, opener=_open_written))


class Storage(ABC):
    """One dataset's folder or bucket prefix. Names are relative to it, with forward slashes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def on_operation(self, verb: str, name: str) -> None:  # noqa: B027 - a hook; doing nothing is right
        """Called before every operation that touches the store: the places where tests let a process end."""

    @abstractmethod
    def stat(self, name: str) -> FileStat | None:
        """The file, or None."""

    @abstractmethod
    def list_dir(self, name: str) -> list[FileStat]:
        """Files directly in a folder, sorted, temporaries left out; empty when the folder does not exist."""

    @abstractmethod
    def list_dirs(self, name: str) -> list[str]:
        """Names of the folders directly in a folder, sorted."""

    @abstractmethod
    def open_read(self, name: str) -> BinaryIO:
        """A seekable binary file.

        Raises:
            FileNotFoundError: when it does not exist.
        """

    @abstractmethod
    def stage(self, name: str) -> Staged:
        """A fresh temporary file to build `name` in."""

    @abstractmethod
    def publish(self, staged: Staged, prove: Proof) -> FileDigest:
        """Make a finished staged file appear under its name, whole, once `prove` has read it back; its digest.

        Raises:
            FormatError: what was read back is not what was written.
            OutputError: when the store is full or read-only. StorageFault: when it kept failing.
        """

    @abstractmethod
    def discard(self, staged: Staged) -> None:
        """Remove a staged file that will not be published."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a published file; nothing happens when it does not exist."""

    @abstractmethod
    def remove_stale_temporaries(self, directory: str) -> int:
        """Remove work in progress older than a day that dead processes left in a folder; how many files."""

    def read_bytes(self, name: str) -> bytes:
        """All bytes of a published file.

        Raises:
            FileNotFoundError: when it does not exist.
        """
        self.on_operation("read", name)

        def read() -> bytes:
            with self.open_read(name) as file:
                return file.read()

        return with_retries(read, join_url(self.url, name))

    def publish_bytes(self, name: str, data: bytes) -> None:
        """Publish a small file. A file that already holds these bytes is left alone."""
        found = self.stat(name)
        if found is not None and found.size == len(data) and self.read_bytes(name) == data:
            return
        staged = self.stage(name)
        try:
            with writes_to(self.url), staged.open() as file:
                file.write(data)
            written = FileDigest()
            written.update(data)
            self.publish(staged, same_as(written))
        except BaseException:
            self.discard(staged)
            raise
