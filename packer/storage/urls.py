"""Reading inputs and images anywhere: a plain path or any fsspec URL. Errors are those of the file system."""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import re
import stat as stat_module
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from packer.format.errors import InputError, UsageError
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


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        UsageError: for a scheme nobody knows or a store whose package is not installed.
    """
    try:
        found: tuple[Any, str] = url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise UsageError(
            f"{url}: {error}: expected a path or the URL of a store whose fsspec package is installed here and on every node "
            f"(s3: `bayplan[s3]`, gcs: `bayplan[gcs]`; found scheme {scheme!r})"
        ) from error
    return found


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
    fs, path = filesystem(url)
    return cast(BinaryIO, fs.open(path, "rb", block_size=_REMOTE_BLOCK_BYTES))


def stat_url(url: str) -> FileStat:
    """Size and stamp of a file anywhere. Errors as `read_url`."""

    def stat() -> FileStat:
        if is_local(url):
            found = os.stat(local_path(url))
            if stat_module.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "found a folder, expected files: name them with a pattern", url)
            if not stat_module.S_ISREG(found.st_mode):
                raise InputError(f"{url}: found a pipe, socket or device, expected a file")
            return FileStat(name=url, size=found.st_size, stamp=str(found.st_mtime_ns))
        fs, path = filesystem(url)
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
    if is_local(pattern):
        return _list_local(local_path(pattern))
    fs, path = filesystem(pattern)
    found = with_retries(lambda: fs.glob(path, detail=True), pattern)
    prefix = pattern.partition("://")[0] + "://"
    files = [(name, info) for name, info in found.items() if info["type"] != "directory"]
    listed = [FileStat(name=prefix + name, size=int(info["size"]), stamp=remote_stamp(info)) for name, info in files]
    return sorted(listed, key=lambda file: file.name)


def _list_local(pattern: str) -> list[FileStat]:
    root, *steps = pattern.split("/")
    names = sorted(set(_expand(root or "/", steps, frozenset())))
    return [stat_url(name) for name in names if not os.path.isdir(name)]


def _expand(folder: str, steps: list[str], above: frozenset[str]) -> Iterator[str]:
    """Paths below a folder that match the steps of a pattern. Links are followed; a folder that may not be read is an error."""
    if not steps:
        yield folder
        return
    step, rest = steps[0], steps[1:]
    if step == "**":
        real = os.path.realpath(folder)
        if real in above:
            return  # a link to a folder it lies in
        yield from _expand(folder, rest or ["*"], above)
        for name in _names(folder, "*"):
            if os.path.isdir(os.path.join(folder, name)):
                yield from _expand(os.path.join(folder, name), steps, above | {real})
    elif fsspec.core.has_magic(step):
        for name in _names(folder, step):
            path = os.path.join(folder, name)
            if not rest or os.path.isdir(path):
                yield from _expand(path, rest, above)
    elif step and os.path.lexists(path := os.path.join(folder, step)):
        yield from _expand(path, rest, above)
    elif not step:
        yield from _expand(folder, rest, above)


def _names(folder: str, step: str) -> list[str]:
    """Entries of a folder that match one step; hidden ones only where the step begins with a dot."""
    if not os.path.isdir(folder):
        return []
    matches = re.compile(fnmatch.translate(step)).match
    return [name for name in os.listdir(folder) if matches(name) and (step[0] == "." or name[0] != ".")]


def remote_stamp(info: dict[str, Any]) -> str:
    """What of a store's listing changes when the file is written again; empty when nothing does."""
    for key in _STAMP_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    return ""
