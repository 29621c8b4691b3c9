"""One index file: an Arrow IPC file, uncompressed, whose schema's metadata says what it is.

It is written whole, proven, then published. Equal rows give equal bytes: batches are cut by `batching`, buffers are written at
their exact size, padding is zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from packer.format.digest import FileDigest
from packer.format.errors import BayplanError, FormatError, StorageFault
from packer.format.version import FORMAT_VERSION, MAGIC, check_version
from packer.storage import Staged, Storage, is_local, join_url, local_path, may_pass, same_as, writes_to

KIND_PART = "index_part"
KIND_TABLE = "index_table"
KIND_IDS = "index_ids"

_WHOLE_BYTES = 16 << 20
"""Remote files up to this size are read in one request, larger ones in ranges."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression=None, use_threads=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the metadata of every index file says first."""

    kind: str
    profile: str
    profile_fingerprint: str
    source: str
    num_rows: int

    def metadata(self, more: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
        """The schema metadata of the file, keys in their order."""
        return {
            "format": MAGIC,
            "format_version": str(FORMAT_VERSION),
            "kind": self.kind,
            "profile": self.profile,
            "profile_fingerprint": self.profile_fingerprint,
            "source": self.source,
            "num_rows": str(self.num_rows),
            **more,
        }


def parse_header(metadata: Mapping[bytes, bytes] | None, where: str, kind: str) -> tuple[Header, dict[str, bytes]]:
    """The header of an index file, and all of its metadata.

    Raises:
        FormatError: for a file of another program, version or kind, or one whose metadata lacks a key.
    """
    values = {key.decode(errors="replace"): value for key, value in (metadata or {}).items()}
    text = {key: value.decode(errors="replace") for key, value in values.items() if key not in ("stats", "parts")}
    version = text.get("format_version", "")
    check_version({"format": text.get("format"), "format_version": int(version) if version.isdecimal() else version}, where)
    if text.get("kind") != kind:
        raise FormatError(f"{where}: found kind {text.get('kind')!r}, expected {kind!r}")
    try:
        header = Header(
            kind=kind,
            profile=text["profile"],
            profile_fingerprint=text["profile_fingerprint"],
            source=text["source"],
            num_rows=int(text["num_rows"]),
        )
    except (KeyError, ValueError) as error:
        raise FormatError(
            f"{where}: metadata without a usable {error}: the file is damaged; remove it and index again"
        ) from error
    return header, values


@contextmanager
def damage(where: str) -> Iterator[None]:
    """Name the file in errors of reading it: bytes that Arrow cannot read are damage, lost connections may pass."""
    try:
        yield
    except (BayplanError, FileNotFoundError):
        raise
    except Exception as error:
        # Arrow's own OSErrors (a read past the end) carry no errno; those of a disk or a store do, or are of a subclass.
        if isinstance(error, pa.ArrowException | ValueError) or (type(error) is OSError and error.errno is None):
            said = str(error).partition("\n")[0] or type(error).__name__
            raise FormatError(
                f"{where}: not a whole Arrow file ({said}): it is cut or damaged; remove it and index again"
            ) from error
        if may_pass(error):
            raise StorageFault(f"{where}: {type(error).__name__}: {error}") from error
        raise


def open_reader(storage: Storage, name: str, size: int | None = None) -> pa.ipc.RecordBatchFileReader:
    """A published index file, read batch by batch into memory of its own, so that what is done with is given back.

    Raises:
        FileNotFoundError: when there is none. FormatError: when it is not an Arrow file.
    """
    where = join_url(storage.url, name)
    if is_local(storage.url):
        storage.on_operation("read", name)
        opened = pa.OSFile(local_path(where))
    elif size is not None and size > _WHOLE_BYTES:
        storage.on_operation("read", name)
        opened = pa.PythonFile(storage.open_read(name), mode="r")
    else:
        opened = pa.BufferReader(storage.read_bytes(name))
    with damage(where):
        return pa.ipc.open_file(opened)


def read_batch(reader: pa.ipc.RecordBatchFileReader, number: int, where: str) -> pa.RecordBatch:
    """One batch, its buffers checked to be as long as its columns say.

    Raises:
        FormatError: when it is cut or damaged.
    """
    with damage(where):
        batch = reader.get_batch(number)
        batch.validate()
    return batch


class _Sink:
    """A file that digests what is written to it: what Arrow needs of one."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file
        self.written = FileDigest()

    def write(self, data: Any) -> int:
        piece = memoryview(data)
        self.written.update(piece)
        self._file.write(piece)
        return piece.nbytes

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        pass


def write_staged(storage: Storage, staged: Staged, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> FileDigest:
    """Write a whole file to its temporary place; the digest of what was written."""
    with writes_to(storage.url), staged.open() as file:
        sink = _Sink(file)
        with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema, options=_OPTIONS) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return sink.written


def publish_table(storage: Storage, staged: Staged, written: FileDigest, num_rows: int) -> None:
    """Publish a written file once it reads back as it was written, opens, and holds the rows it says.

    Raises:
        FormatError: when it does not.
    """

    def prove(path: str) -> FileDigest:
        found = same_as(written)(path)
        with damage(path), pa.memory_map(path) as mapped, pa.ipc.open_file(mapped) as reader:
            rows = sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
        if rows != num_rows:
            raise FormatError(f"{os.path.basename(path)}: found {rows:,} rows, wrote {num_rows:,}")
        return found

    storage.publish(staged, prove)
