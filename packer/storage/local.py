"""Datasets in a folder: temporary name, fsync, read back, rename, fsync of the folder."""

from __future__ import annotations

import os
import posixpath
import secrets
import time
from typing import BinaryIO

from packer.format.digest import FileDigest
from packer.format.layout import TEMPORARY_PREFIX
from packer.storage.base import Proof, Staged, Storage
from packer.storage.faults import writes_to
from packer.storage.urls import FileStat

STALE_SECONDS = 24 * 3600


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
        return FileStat(name=name, size=found.st_size, stamp=str(found.st_mtime_ns))

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
            files.append(FileStat(name=full, size=found.st_size, stamp=str(found.st_mtime_ns)))
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

    def publish(self, staged: Staged, prove: Proof) -> FileDigest:
        final = self._path(staged.name)
        with writes_to(self.url):
            if self._fsync:
                self.on_operation("fsync", staged.name)
                _fsync_path(staged.path)
            proven = prove(staged.path)
            self.on_operation("rename", staged.name)
            os.rename(staged.path, final)
            if self._fsync:
                self.on_operation("fsync_dir", staged.name)
                _fsync_path(os.path.dirname(final))
        return proven

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
