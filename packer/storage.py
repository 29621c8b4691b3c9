"""All file access: datasets are published here, inputs and images are read here. The only user of fsspec.

A dataset lives in a `Storage`. Files appear in it whole or not at all: on a file system by temporary name, fsync, rename
and fsync of the folder; in an object store by one PUT that is checked afterwards. Nothing published is ever appended to.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import random
import secrets
import shutil
import stat as stat_module
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
from fsspec.core import url_to_fs

from packer.format.digest import FileDigest, bytes_digest, digest_of_file
from packer.format.errors import BayplanError, FormatError, OutputError, StorageFault
from packer.format.layout import TEMPORARY_PREFIX

T = TypeVar("T")

RETRY_DELAYS_SECONDS: tuple[float, ...] = (0.2, 1.0, 4.0)
"""Pauses between the tries of one read or write; the executor's own, longer pauses come after these."""
STALE_SECONDS = 24 * 3600
_BLOCK_BYTES = 1 << 20
_PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError, BayplanError)
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM})
_UNWRITABLE_ERRNOS = _FULL_ERRNOS | {errno.ENOTDIR, errno.EEXIST}
_PERMANENT_ERRNOS = _FULL_ERRNOS | {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_STAMP_KEYS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "last_modified", "updated", "mtime")
_CLIENT_MODULES = frozenset({"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "requests", "urllib3"})


class TooLarge(BayplanError):
    """A file is larger than the caller allows; nothing of it was kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"{size} bytes")


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


def may_pass(error: BaseException) -> bool:
    """Whether trying again could help: time-outs, lost connections, throttling, stale handles."""
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNOS
    return type(error).__module__.partition(".")[0] in _CLIENT_MODULES


def with_retries(operation: Callable[[], T], what: str) -> T:
    """The operation's result, tried again with growing, jittered pauses while its faults may pass.

    Raises:
        StorageFault: when the last try failed as well.
    """
    for delay in (*RETRY_DELAYS_SECONDS, None):
        try:
            return operation()
        except Exception as error:
            if not may_pass(error):
                raise
            if delay is None:
                raise StorageFault(f"{what}: {type(error).__name__}: {error}") from error
        time.sleep(delay * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable: the last try either returns or raises")


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
    return cast(BinaryIO, fs.open(path, "rb", block_size=4 * _BLOCK_BYTES))


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
        return FileStat(name=url, size=int(info["size"]), stamp=_remote_stamp(info))

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
    listed = [FileStat(name=prefix + name, size=int(info["size"]), stamp=_remote_stamp(info)) for name, info in files]
    return sorted(listed, key=lambda file: file.name)


def _remote_stamp(info: dict[str, Any]) -> str:
    for key in _STAMP_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    return ""


class Staged:
    """A file in the making: write to `path` (local, seekable), then `Storage.publish` it."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path


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
    def publish(self, staged: Staged, *, size: int, digest: str) -> None:
        """Make a finished staged file appear under its name, whole.

        Raises:
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
            with writes_to(self.url), open(staged.path, "wb") as file:
                file.write(data)
            self.publish(staged, size=len(data), digest=bytes_digest(data))
        except BaseException:
            self.discard(staged)
            raise


def open_storage(url: str, *, fsync: bool = True) -> Storage:
    """The storage at a path or URL; nothing is read or made yet. `fsync=False` is for benchmarks only."""
    return LocalStorage(local_path(url), fsync=fsync) if is_local(url) else ObjectStorage(url)


@contextmanager
def writes_to(where: str) -> Iterator[None]:
    """Turn a full, read-only or forbidden file system into an OutputError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _UNWRITABLE_ERRNOS:
            raise OutputError(
                f"cannot write to {where}: {error.strerror}: free space or change permissions, then run the same command "
                "again; what is published stays and is not done twice"
            ) from error
        raise


class LocalStorage(Storage):
    """A folder on a POSIX file system, NFS and Lustre included."""

    def __init__(self, root: str, *, fsync: bool = True) -> None:
        self._root = os.path.abspath(os.path.expanduser(root))
        super().__init__(self._root)
        self._fsync = fsync

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name) if name else self._root

    def stat(self, name: str) -> FileStat | None:
        self.on_operation("stat", name)
        try:
            found = os.stat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileStat(name=name, size=found.st_size, stamp=str(found.st_mtime_ns), modified_seconds=found.st_mtime)

    def _entries(self, name: str) -> list[os.DirEntry[str]]:
        self.on_operation("list", name)
        try:
            with os.scandir(self._path(name)) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def list_dir(self, name: str) -> list[FileStat]:
        files = []
        for entry in self._entries(name):
            if entry.name.startswith(TEMPORARY_PREFIX) or not entry.is_file():
                continue
            found = entry.stat()
            full = posixpath.join(name, entry.name)
            files.append(FileStat(name=full, size=found.st_size, stamp=str(found.st_mtime_ns), modified_seconds=found.st_mtime))
        return files

    def list_dirs(self, name: str) -> list[str]:
        return [entry.name for entry in self._entries(name) if entry.is_dir()]

    def open_read(self, name: str) -> BinaryIO:
        try:
            return open(self._path(name), "rb")
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args) from error

    def stage(self, name: str) -> Staged:
        self.on_operation("stage", name)
        directory, base = os.path.split(self._path(name))
        path = os.path.join(directory, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}-{base}")
        with writes_to(self.url):
            os.makedirs(directory, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        return Staged(name, path)

    def publish(self, staged: Staged, *, size: int, digest: str) -> None:
        final = self._path(staged.name)
        with writes_to(self.url):
            if self._fsync:
                self.on_operation("fsync", staged.name)
                _fsync_path(staged.path)
            if os.path.getsize(staged.path) != size:
                raise FormatError(f"{staged.path}: found {os.path.getsize(staged.path)} bytes after writing, expected {size}")
            self.on_operation("rename", staged.name)
            os.rename(staged.path, final)
            if self._fsync:
                self.on_operation("fsync_dir", staged.name)
                _fsync_path(os.path.dirname(final))

    def discard(self, staged: Staged) -> None:
        self.on_operation("discard", staged.name)
        try:
            os.unlink(staged.path)
        except FileNotFoundError:
            pass

    def remove(self, name: str) -> None:
        self.on_operation("remove", name)
        try:
            with writes_to(self.url):
                os.unlink(self._path(name))
        except FileNotFoundError:
            pass

    def remove_stale_temporaries(self, directory: str) -> int:
        removed = 0
        for entry in self._entries(directory):
            if not entry.name.startswith(TEMPORARY_PREFIX):
                continue
            try:
                if time.time() - entry.stat().st_mtime > STALE_SECONDS:
                    self.on_operation("remove", posixpath.join(directory, entry.name))
                    os.unlink(entry.path)
                    removed += 1
            except FileNotFoundError:
                continue
        return removed


def _fsync_path(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStorage(Storage):
    """A prefix in an object store behind fsspec. Files are built in a local scratch folder and sent when proven."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        self._fs, self._prefix = url_to_fs(self.url)
        self._scratch = tempfile.mkdtemp(prefix="bayplan-")
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else str(self._prefix)

    def _stat_of(self, name: str, info: dict[str, Any]) -> FileStat:
        return FileStat(name=name, size=int(info["size"]), stamp=_remote_stamp(info))

    def stat(self, name: str) -> FileStat | None:
        self.on_operation("stat", name)

        def stat() -> FileStat | None:
            try:
                self._fs.invalidate_cache(self._fs._parent(self._key(name)))
                info = self._fs.info(self._key(name))
            except FileNotFoundError:
                return None
            return self._stat_of(name, info) if info["type"] == "file" else None

        return with_retries(stat, join_url(self.url, name))

    def _list(self, name: str) -> list[dict[str, Any]]:
        self.on_operation("list", name)

        def listing() -> list[dict[str, Any]]:
            try:
                return cast(list[dict[str, Any]], self._fs.ls(self._key(name), detail=True, refresh=True))
            except FileNotFoundError:
                return []

        found = with_retries(listing, join_url(self.url, name))
        return sorted(found, key=lambda info: str(info["name"]))

    def list_dir(self, name: str) -> list[FileStat]:
        infos = [info for info in self._list(name) if info["type"] == "file" and not str(info["name"]).endswith("/")]
        return [self._stat_of(posixpath.join(name, posixpath.basename(info["name"])), info) for info in infos]

    def list_dirs(self, name: str) -> list[str]:
        return [posixpath.basename(str(info["name"]).rstrip("/")) for info in self._list(name) if info["type"] == "directory"]

    def open_read(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._fs.open(self._key(name), "rb"))

    def stage(self, name: str) -> Staged:
        self.on_operation("stage", name)
        return Staged(name, os.path.join(self._scratch, f"{secrets.token_hex(8)}-{posixpath.basename(name)}"))

    def publish(self, staged: Staged, *, size: int, digest: str) -> None:
        key, where = self._key(staged.name), join_url(self.url, staged.name)
        self.on_operation("put", staged.name)
        try:
            with_retries(lambda: self._fs.put_file(staged.path, key), where)
        except (FileNotFoundError, PermissionError) as error:
            raise OutputError(
                f"cannot write to {where}: {error}: make the bucket or give this job write access, then run it again"
            ) from error
        self.on_operation("read", staged.name)
        found = with_retries(lambda: self._stored(key, staged.path, digest), where)
        if found != (size, digest):
            raise StorageFault(f"{where}: found {found[0]} bytes, blake3 {found[1]}; sent {size} bytes, blake3 {digest}")
        self.discard(staged)

    def _stored(self, key: str, sent_path: str, sent_digest: str) -> tuple[int, str]:
        """Size and digest of what the store holds: by its MD5 etag where it gives one, else by reading it back."""
        self._fs.invalidate_cache(self._fs._parent(key))
        info = self._fs.info(key)
        etag = str(info.get("ETag", "")).strip('"')
        if len(etag) == 32 and info["size"] == os.path.getsize(sent_path) and etag == _md5(sent_path):
            return int(info["size"]), sent_digest
        read_back = FileDigest()
        with self._fs.open(key, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                read_back.update(block)
        return read_back.size, read_back.hexdigest()

    def discard(self, staged: Staged) -> None:
        try:
            os.unlink(staged.path)
        except FileNotFoundError:
            pass

    def remove(self, name: str) -> None:
        self.on_operation("remove", name)
        try:
            with_retries(lambda: self._fs.rm_file(self._key(name)), join_url(self.url, name))
        except FileNotFoundError:
            pass

    def remove_stale_temporaries(self, directory: str) -> int:
        return 0


def _md5(path: str) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def publish_file(storage: Storage, staged: Staged) -> tuple[int, str]:
    """Publish a finished staged file after reading it back; its size and blake3."""
    read_back = digest_of_file(staged.path)
    storage.publish(staged, size=read_back.size, digest=read_back.hexdigest())
    return read_back.size, read_back.hexdigest()
