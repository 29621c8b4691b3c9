"""Reading inputs and images anywhere: a plain path or any fsspec URL. Errors are those of the file system."""

from __future__ import annotations

import errno
import io
import os
import stat as stat_module
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from packer.storage.faults import TooLarge, with_retries

_REMOTE_BLOCK_BYTES = 4 << 20
_STAMP_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "updated", "mtime")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStat:
    """A file as its store lists it."""

    name: str
    """Relative to the dataset, or the full URL of an input."""
    size: int
    stamp: str
    """Changes when the file is written again: modification time in ns, or the store's etag."""
    modified_seconds: float = 0.0


def is_local(url: str) -> bool:
    """Whether `url` is a plain path or a file:// URL."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> str:
    """The plain path of a local URL."""
    return url.removeprefix("file://")


def join_url(root: str, relative: str) -> str:
    """`relative` below `root`, with one slash between them."""
    return f"{root.rstrip('/')}/{relative.lstrip('/')}" if root not in ("", "/") else f"{root}{relative.lstrip('/')}"


def read_url(url: str, max_bytes: int | None = None) -> bytes:
    """All bytes of a file anywhere.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: as the store says.
        TooLarge: when the file is larger than `max_bytes`.
        StorageFault: when the store kept failing.
    """

    def read() -> bytes:
        with _open_once(url) as file:
            data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            if max_bytes is not None and len(data) > max_bytes:
                raise TooLarge(max(file.seek(0, io.SEEK_END), len(data)))
            return data

    return with_retries(read, url)


def open_url(url: str) -> BinaryIO:
    """A seekable binary file anywhere; remote files are read in ranges. Errors as `read_url`."""
    return with_retries(lambda: _open_once(url), url)


def _open_once(url: str) -> BinaryIO:
    if is_local(url):
        return open(local_path(url), "rb")
    fs, path = url_to_fs(url)
    return cast(BinaryIO, fs.open(path, "rb", block_size=_REMOTE_BLOCK_BYTES))


def stat_url(url: str) -> FileStat:
    """Size and stamp of a file anywhere. Errors as `read_url`."""

    def stat() -> FileStat:
        if is_local(url):
            found = os.stat(local_path(url))
            if stat_module.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory", url)
            return FileStat(name=url, size=found.st_size, stamp=str(found.st_mtime_ns))
        fs, path = url_to_fs(url)
        info = fs.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a directory", url)
        return FileStat(name=url, size=int(info["size"]), stamp=remote_stamp(info))

    return with_retries(stat, url)


def list_matching(pattern: str) -> list[FileStat]:
    """Files matching a glob anywhere, sorted by URL. A pattern without magic names one file, which may be missing."""
    if not fsspec.core.has_magic(pattern):
        try:
            return [stat_url(pattern)]
        except FileNotFoundError:
            return []
    fs, path = url_to_fs(pattern)
    found = with_retries(lambda: fs.glob(path, detail=True), pattern)
    prefix = "" if is_local(pattern) else pattern.partition("://")[0] + "://"
    files = [(name, info) for name, info in found.items() if info["type"] != "directory"]
    if is_local(pattern):
        return sorted((stat_url(name) for name, _ in files), key=lambda file: file.name)
    listed = [FileStat(name=prefix + name, size=int(info["size"]), stamp=remote_stamp(info)) for name, info in files]
    return sorted(listed, key=lambda file: file.name)


def remote_stamp(info: dict[str, Any]) -> str:
    """What of a store's listing changes when the file is written again; empty when nothing does."""
    for key in _STAMP_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    return ""
