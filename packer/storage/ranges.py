"""Byte ranges of the files below one URL, through fsspec: one try each, and the caller retries.

Every process has a client of its own: one made before a fork is never used after it. fsspec finds msc:// (NVIDIA's
multi-storage client) by itself where that package is installed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from packer.storage.urls import filesystem


class ByteRange(NamedTuple):
    """Bytes [start, end) of a file."""

    name: str
    """Relative to the URL, with forward slashes."""
    start: int
    end: int


class RangeStore:
    """Reads ranges below a URL from any thread. A range may come back shorter or longer than asked: check it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client: tuple[int, Any, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_client": None}

    def _filesystem(self) -> tuple[Any, str]:
        client = self._client
        if client is None or client[0] != os.getpid():
            client = self._client = (os.getpid(), *filesystem(self.url))
        return client[1], client[2]

    def read(self, wanted: ByteRange) -> bytes:
        """One range. Errors are those of the store."""
        fs, prefix = self._filesystem()
        return cast(bytes, fs.cat_file(f"{prefix}/{wanted.name}", start=wanted.start, end=wanted.end))

    def read_many(self, wanted: Sequence[ByteRange]) -> list[bytes | Exception]:
        """Many ranges at once where the store can; an error stands in the place of its range."""
        fs, prefix = self._filesystem()
        paths = [f"{prefix}/{item.name}" for item in wanted]
        starts, ends = [item.start for item in wanted], [item.end for item in wanted]
        return cast(list[bytes | Exception], fs.cat_ranges(paths, starts, ends, on_error="return"))

    def size(self, name: str) -> int | None:
        """Bytes of a file as the store says now; None when there is no such file."""
        fs, prefix = self._filesystem()
        path = f"{prefix}/{name}"
        fs.invalidate_cache(fs._parent(path))
        try:
            size = fs.info(path)["size"]
        except FileNotFoundError:
            return None
        if size is None:
            raise OSError(f"{self.url}/{name}: the store does not say how large it is")
        return int(size)
