"""One index file: an Arrow IPC file, uncompressed, whose schema's metadata says what it is.

It is written whole, proven, then published. Equal rows give equal bytes: batches are cut by `batching`, buffers are written at
their exact size, padding is zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from indexer.stats import STATS_VERSION
from packer.format.digest import FileDigest
from packer.format.errors import BayplanError, FormatError, StorageFault
from packer.format.version import FORMAT_VERSION, MAGIC, check_version
from packer.storage import Staged, Storage, is_local, join_url, local_path, may_pass, with_retries, writes_to

KIND_PART = "index_part"
KIND_TABLE = "index_table"
KIND_IDS = "index_ids"

_WHOLE_BYTES = 16 << 20
"""Remote files up to this size are read in one request, larger ones in ranges."""
_TAIL_BYTES = 256 << 10
"""What is read of the end of a remote file for its metadata: the footers of most parts, statistics and all, are shorter."""
_FOOTER_END_BYTES = 10
"""The length of the footer in 4 bytes, and Arrow's magic."""
_MAGIC_BYTES = 6
_BLOCK_BYTES = 8 << 20
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


def stats_metadata(stats: bytes) -> dict[str, str | bytes]:
    """A stats blob as the metadata of a file holds it."""
    return {"stats_version": str(STATS_VERSION), "stats": stats}


def stats_in(values: Mapping[str, bytes], where: str) -> bytes:
    """The stats blob of a file's metadata.

    Raises:
        FormatError: when it is of another version, or there is none.
    """
    if (found := values.get("stats_version", b"none").decode(errors="replace")) != str(STATS_VERSION):
        raise FormatError(
            f"{where}: found statistics of version {found}, expected {STATS_VERSION}: counted by another release; index again"
        )
    if "stats" not in values:
        raise FormatError(f"{where}: found no statistics: the file is damaged; remove it and index again")
    return values["stats"]


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


def read_metadata(storage: Storage, name: str) -> dict[bytes, bytes]:
    """What a published index file says of itself. Of a remote one nothing but its end is read, where Arrow keeps the schema.

    Raises:
        FileNotFoundError: when there is none. FormatError: when it is not an Arrow file.
    """
    where = join_url(storage.url, name)
    if is_local(storage.url):
        with open_reader(storage, name) as reader:
            return _metadata(reader)
    storage.on_operation("read", name)
    tail = with_retries(lambda: _read_tail(storage, name), where)
    with damage(where), pa.ipc.open_file(pa.BufferReader(tail)) as reader:
        return _metadata(reader)


def _metadata(reader: pa.ipc.RecordBatchFileReader) -> dict[bytes, bytes]:
    return dict(reader.schema.metadata or {})


def _read_tail(storage: Storage, name: str) -> bytes:
    """The end of a file from before its footer on: to Arrow, a file whose batches are out of reach."""
    with storage.open_read(name) as file:
        size = file.seek(0, os.SEEK_END)

        def last(num_bytes: int) -> bytes:
            file.seek(max(size - num_bytes, 0))
            return file.read(num_bytes)

        tail = last(_TAIL_BYTES)
        footer = int.from_bytes(tail[-_FOOTER_END_BYTES:-_MAGIC_BYTES], "little")
        whole = _MAGIC_BYTES + footer + _FOOTER_END_BYTES
        return last(whole) if len(tail) < whole <= size else tail


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


def publish_table(
    storage: Storage, staged: Staged, written: FileDigest, num_rows: int, on_block: Callable[[], None] = lambda: None
) -> None:
    """Publish a written file once it reads back as it was written, opens, and holds the rows it says.

    Args:
        on_block: called for every 8 MB that are read back, and before and after the file is sent.

    Raises:
        FormatError: when it does not.
    """

    def prove(path: str) -> FileDigest:
        found = _read_back(path, written, on_block)
        with damage(path), pa.memory_map(path) as mapped, pa.ipc.open_file(mapped) as reader:
            rows = sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
        if rows != num_rows:
            raise FormatError(f"{os.path.basename(path)}: found {rows:,} rows, wrote {num_rows:,}")
        on_block()
        return found

    on_block()
    storage.publish(staged, prove)
    on_block()


def _read_back(path: str, written: FileDigest, on_block: Callable[[], None]) -> FileDigest:
    """`packer.storage.same_as`, telling of every block: files are of many gigabytes, and whoever waits must see them read."""
    found = FileDigest()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
            on_block()
    if (found.size, found.hexdigest()) != (written.size, written.hexdigest()):
        raise FormatError(
            f"{path}: read back {found.size} bytes, blake3 {found.hexdigest()}; wrote {written.size} bytes, blake3 "
            f"{written.hexdigest()}: the disk or memory of this machine is failing"
        )
    return found
