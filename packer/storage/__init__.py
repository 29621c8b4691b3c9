"""All file access: datasets are published here, inputs and images are read here. The only user of fsspec."""

from __future__ import annotations

from packer.storage.base import Proof, Staged, Storage, same_as
from packer.storage.faults import TooLarge, may_pass, with_retries, writes_to
from packer.storage.local import LocalStorage
from packer.storage.objects import ObjectStorage
from packer.storage.ranges import ByteRange, RangeStore
from packer.storage.urls import FileStat, is_local, join_url, list_matching, local_path, open_url, read_url, stat_url

__all__ = [
    "ByteRange",
    "FileStat",
    "LocalStorage",
    "ObjectStorage",
    "Proof",
    "RangeStore",
    "Staged",
    "Storage",
    "TooLarge",
    "is_local",
    "join_url",
    "list_matching",
    "local_path",
    "may_pass",
    "open_storage",
    "open_url",
    "read_url",
    "same_as",
    "stat_url",
    "with_retries",
    "writes_to",
]


def open_storage(url: str, *, fsync: bool = True) -> Storage:
    """The storage at a path or URL; nothing is read or made yet. `fsync=False` is for benchmarks only."""
    return LocalStorage(local_path(url), fsync=fsync) if is_local(url) else ObjectStorage(url)
