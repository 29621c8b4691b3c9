"""A store that misbehaves as told: an fsspec file system (faulty://) over a local folder."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

Fault = Callable[[bytes], bytes]
"""Makes of the right answer the answer that is given; or raises, or never returns."""


def short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def empty(data: bytes) -> bytes:
    return b""


def one_too_many(data: bytes) -> bytes:
    return data + b"\0"


def wrong(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def time_out(data: bytes) -> bytes:
    raise TimeoutError("no answer in time")


def lost(data: bytes) -> bytes:
    raise ConnectionResetError("the store hung up")


def right(data: bytes) -> bytes:
    return data


class FaultyFileSystem(AbstractFileSystem):
    """Faults of `once` go to one read each, in order; `always` to every read after them; `reads` are all that were made."""

    protocol = "faulty"
    once: ClassVar[deque[Fault]] = deque()
    always = staticmethod(right)
    reads: ClassVar[list[tuple[str, int, int]]] = []
    hanging = threading.Event()

    @classmethod
    def reset(cls) -> None:
        cls.once, cls.always, cls.reads = deque(), staticmethod(right), []
        cls.hanging = threading.Event()

    @classmethod
    def never(cls, data: bytes) -> bytes:
        """Never returns while the test runs."""
        cls.hanging.wait()
        return data

    def cat_file(self, path, start=None, end=None, **options):
        with open(path, "rb") as file:
            file.seek(start)
            data = file.read(end - start)
        self.reads.append((os.path.basename(path), start, end))
        try:
            fault = self.once.popleft()
        except IndexError:
            fault = type(self).always
        return fault(data)

    def _open(self, path, mode="rb", **options):
        """What is read whole, as a profile is, is never faulty."""
        return open(path, mode)

    def info(self, path, **options):
        return {"name": path, "size": os.stat(path).st_size, "type": "file"}


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
