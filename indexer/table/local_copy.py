"""A local file to map for every index file: the file itself in a folder, else a copy made once per machine and version.

A copy is named by the URL and by the store's stamp of it, appears whole, and replaces copies of older versions. Processes that
start together wait for the one that copies; where the cache's file system knows no locks, each copies for itself.
"""

from __future__ import annotations

import fcntl
import os
import posixpath
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from packer.format.digest import FileDigest, bytes_digest, digest_of_file
from packer.format.errors import FormatError
from packer.storage import FileStat, LocalStorage, Storage, is_local, join_url, local_path, with_retries, writes_to

_BLOCK_BYTES = 8 << 20


def default_cache_dir() -> str:
    """Where copies go unless the caller says: `$XDG_CACHE_HOME/bayplan`, else `~/.cache/bayplan`."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "bayplan")


Version = tuple[int, int]


def version_of(path: str) -> Version | None:
    """What tells a copy from the one that takes its place under the same name: inode and modification time."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def local_file(storage: Storage, stat: FileStat, cache_dir: str | None, damaged: Version | None = None) -> str:
    """The path of a local file with the bytes of a published one.

    Args:
        damaged: the version of a copy that must go first, unless another process has replaced it already.

    Raises:
        FormatError: when the copy has another size. OutputError: when the cache cannot be written.
    """
    url = join_url(storage.url, stat.name)
    if is_local(storage.url):
        return local_path(url)
    folder = os.path.abspath(os.path.expanduser(cache_dir or default_cache_dir()))
    of_url = bytes_digest(url.encode())[:16]
    name = f"{of_url}-{bytes_digest(f'{stat.stamp} {stat.size}'.encode())[:16]}-{posixpath.basename(stat.name)}"
    path = os.path.join(folder, name)
    if damaged is None and _is_there(path, stat.size):
        return path
    with writes_to(folder):
        os.makedirs(folder, exist_ok=True)
        with _only_one(os.path.join(folder, f"{of_url}.lock")):
            if damaged is not None and version_of(path) == damaged:
                os.unlink(path)
            if not _is_there(path, stat.size):
                _copy(storage, stat, LocalStorage(folder), name)
                _remove_older(folder, of_url, name)
    return path


def _is_there(path: str, size: int) -> bool:
    try:
        return os.path.getsize(path) == size
    except FileNotFoundError:
        return False


def _copy(storage: Storage, stat: FileStat, cache: LocalStorage, name: str) -> None:
    cache.remove_stale_temporaries("")
    staged = cache.stage(name)

    def copy() -> None:
        with storage.open_read(stat.name) as remote, staged.open() as file:
            shutil.copyfileobj(remote, file, _BLOCK_BYTES)

    def prove(path: str) -> FileDigest:
        found = digest_of_file(path)
        if found.size != stat.size:
            raise FormatError(
                f"{join_url(storage.url, stat.name)}: read {found.size:,} bytes, expected {stat.size:,}: it was written "
                "again meanwhile; open the index again"
            )
        return found

    try:
        storage.on_operation("read", stat.name)
        with_retries(copy, join_url(storage.url, stat.name))
        cache.publish(staged, prove)
    except BaseException:
        cache.discard(staged)
        raise


def _remove_older(folder: str, of_url: str, name: str) -> None:
    """Processes that mapped an older copy keep it until they end."""
    for other in os.listdir(folder):
        if other.startswith(f"{of_url}-") and other != name:
            os.unlink(os.path.join(folder, other))


@contextmanager
def _only_one(lock: str) -> Iterator[None]:
    """One process of this machine at a time; a process that dies lets go."""
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # no locks here: copies appear whole, so two of them do no harm
        yield
