"""Datasets in an object store: built and proven on a local disk, sent by one PUT, then compared with what the store holds."""

from __future__ import annotations

import hashlib
import os
import posixpath
import secrets
import shutil
import tempfile
import weakref
from typing import Any, BinaryIO, cast

from packer.format.digest import FileDigest
from packer.format.errors import OutputError, StorageFault
from packer.storage.base import Proof, Staged, Storage
from packer.storage.faults import with_retries
from packer.storage.urls import FileStat, filesystem, join_url, remote_stamp

_BLOCK_BYTES = 1 << 20


class ObjectStorage(Storage):
    """A prefix in an object store behind fsspec. Files are built in a local scratch folder and sent when proven."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        self._fs, self._prefix = filesystem(self.url)
        self._scratch = tempfile.mkdtemp(prefix="bayplan-")
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if name else str(self._prefix)

    def _stat_of(self, name: str, info: dict[str, Any]) -> FileStat:
        return FileStat(name=name, size=int(info["size"]), stamp=remote_stamp(info))

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

    def publish(self, staged: Staged, prove: Proof) -> FileDigest:
        proven = prove(staged.path)
        key, where = self._key(staged.name), join_url(self.url, staged.name)
        self.on_operation("put", staged.name)
        try:
            with_retries(lambda: self._fs.put_file(staged.path, key), where)
        except (FileNotFoundError, PermissionError) as error:
            raise OutputError(
                f"cannot write to {where}: {error}: make the bucket or give this job write access, then run it again"
            ) from error
        self.on_operation("read", staged.name)
        found = with_retries(lambda: self._stored(key, staged.path, proven.hexdigest()), where)
        if found != (sent := (proven.size, proven.hexdigest())):
            raise StorageFault(f"{where}: found {found[0]} bytes, blake3 {found[1]}; sent {sent[0]} bytes, blake3 {sent[1]}")
        self.discard(staged)
        return proven

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
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
