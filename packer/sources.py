"""Splits of JSONL files -> raw lines with byte offsets, in bounded memory whatever a line or a file does.

Plain files are cut into byte ranges: a line belongs to the range its first byte lies in. Compressed files are one range,
streamed; their offsets count decompressed bytes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, BinaryIO, cast

import blake3
import zstandard
from isal import isal_zlib

from packer.format.errors import InputError
from packer.format.quarantine import MAX_LINE_BYTES
from packer.storage import FileStat, open_url

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_DECODE_ERRORS: tuple[type[Exception], ...] = (cast(type[Exception], isal_zlib.error), zstandard.ZstdError)
_ZSTD_FEED_BYTES = 2048
"""A zstd block of 4 bytes can expand to 128 KiB, so one feed expands to 64 MiB at most."""


class Compression(StrEnum):
    """How an input file is compressed, by its name; its first bytes must agree."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @classmethod
    def of(cls, name: str) -> Compression:
        """The compression a file name stands for."""
        lowered = name.lower()
        if lowered.endswith((".gz", ".gzip")):
            return cls.GZIP
        return cls.ZSTD if lowered.endswith((".zst", ".zstd")) else cls.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRange:
    """One range of one input file: the unit of work."""

    url: str
    file: str
    """Path relative to the source's root."""
    file_size: int
    range_index: int = 0
    byte_start: int = 0
    byte_end: int | None = None
    """None: to the end, wherever that is (compressed files)."""


@dataclass(slots=True, kw_only=True)
class RawLine:
    """A line as it stands in the file; blank lines too, so that the lines of a file tile it."""

    byte_offset: int
    byte_end: int
    raw: bytes
    """With its newline; the first MiB of a line that is too long."""
    too_long: bool = False
    cut: bool = False
    """The compressed stream broke inside this line."""
    digest: bytes = b""
    """blake3 of a line that is too long, which enters digests in place of its bytes."""

    @property
    def text(self) -> bytes:
        """The line without byte order mark (at offset 0 only) and line end."""
        text = self.raw.rstrip(b"\r\n")
        return text.removeprefix(BYTE_ORDER_MARK) if self.has_byte_order_mark else text

    @property
    def has_byte_order_mark(self) -> bool:
        """Whether the file begins with this line and a byte order mark; anywhere else the mark is content."""
        return self.byte_offset == 0 and self.raw.startswith(BYTE_ORDER_MARK)

    @property
    def is_blank(self) -> bool:
        """Whether the line holds nothing but white space."""
        return not self.too_long and (len(self.raw) < 64 or self.raw[:1].isspace()) and not self.text.strip()

    @property
    def is_terminated(self) -> bool:
        """Whether the line ends with a newline."""
        return self.raw.endswith(b"\n") or self.too_long


def plan_ranges(file: FileStat, relative: str, range_bytes: int) -> list[InputRange]:
    """The ranges of a file, in order; none for an empty file."""
    if file.size == 0:
        return []
    if Compression.of(file.name) is not Compression.NONE:
        return [InputRange(url=file.name, file=relative, file_size=file.size)]
    starts = range(0, file.size, range_bytes)
    return [
        InputRange(
            url=file.name,
            file=relative,
            file_size=file.size,
            range_index=index,
            byte_start=start,
            byte_end=min(start + range_bytes, file.size),
        )
        for index, start in enumerate(starts)
    ]


class _Inflated(io.RawIOBase):
    """Decompressed bytes of a gzip or zstd file, all members and frames, with every step bounded in memory.

    A stream that ends inside a frame, or is damaged, ends here quietly with `fault` set: what came before is good.
    """

    def __init__(self, file: BinaryIO, compression: Compression) -> None:
        self._file = file
        self._compression = compression
        self._decoder: Any = None
        self._pending = b""
        self._output = memoryview(b"")
        self.num_bytes = 0
        self.fault: str | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and self._advance():
            pass
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self.num_bytes += count
        self._output = self._output[count:]
        return count

    def _advance(self) -> bool:
        """Decompress one step; False at the end of the stream."""
        if self.fault is not None:
            return False
        if not self._pending:
            self._pending = self._file.read(_BUFFER_BYTES)
        if not self._pending:
            if self._decoder is not None:
                self.fault = "the file ends inside a compressed frame"
            return False
        try:
            self._output = memoryview(self._gzip_step() if self._compression is Compression.GZIP else self._zstd_step())
        except _DECODE_ERRORS as error:
            self.fault = f"damaged compressed data: {error}"
            return False
        return True

    def _gzip_step(self) -> bytes:
        if self._decoder is None:
            self._pending = self._pending.lstrip(b"\0")  # zero padding between members is allowed by the gzip tools
            if not self._pending:
                return b""
            self._decoder = isal_zlib.decompressobj(wbits=31)
        output: bytes = self._decoder.decompress(self._pending, _BUFFER_BYTES)
        self._pending = self._decoder.unconsumed_tail
        if self._decoder.eof:
            self._pending = self._decoder.unused_data
            self._decoder = None
        return output

    def _zstd_step(self) -> bytes:
        if self._decoder is None:
            self._decoder = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        feed, self._pending = self._pending[:_ZSTD_FEED_BYTES], self._pending[_ZSTD_FEED_BYTES:]
        output: bytes = self._decoder.decompress(feed)
        if self._decoder.eof:
            self._pending = self._decoder.unused_data + self._pending
            self._decoder = None
        return output


class LineReader:
    """Iterates over the lines of one range. `fault` says, at the end, why the input was not whole (or None)."""

    def __init__(self, work: InputRange, *, max_line_bytes: int, resume_at: int | None = None) -> None:
        """Open the range's file at its first line, or at `resume_at`, the start of one of its lines.

        Raises:
            InputError: when the file is gone, has another size, or is not compressed as its name says.
        """
        self._work = work
        self._max_line_bytes = max_line_bytes
        try:
            self._file = open_url(work.url)
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise InputError(f"{work.url}: cannot be read: {error}") from error
        self._inflated: _Inflated | None = None
        try:
            self._stream = self._open_stream()
            self._position = self._seek(resume_at)
        except BaseException:
            self._file.close()
            raise

    @property
    def position(self) -> int:
        """Offset of the next line."""
        return self._position

    @property
    def fault(self) -> str | None:
        """Why the compressed stream broke off, or None."""
        return self._inflated.fault if self._inflated else None

    @property
    def plain_ratio(self) -> float:
        """Bytes of lines for one byte of the file as it is stored, as far as it was read."""
        return self._inflated.num_bytes / max(self._file.tell(), 1) if self._inflated else 1.0

    def _open_stream(self) -> io.BufferedReader:
        compression = Compression.of(self._work.url)
        size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        if size != self._work.file_size:
            raise InputError(f"{self._work.url}: found {size} bytes, expected {self._work.file_size}: it changed during the run")
        self._check_magic(compression)
        if compression is Compression.NONE:
            return io.BufferedReader(cast(io.RawIOBase, self._file), _BUFFER_BYTES)
        self._inflated = _Inflated(self._file, compression)
        return io.BufferedReader(self._inflated, _BUFFER_BYTES)

    def _check_magic(self, compression: Compression) -> None:
        head = self._file.read(4)
        self._file.seek(0)
        found = Compression.NONE
        if head[:2] == _GZIP_MAGIC:
            found = Compression.GZIP
        elif head == _ZSTD_MAGIC or (head[1:] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50):
            found = Compression.ZSTD
        if found is not compression and len(head) == 4:
            raise InputError(
                f"{self._work.url}: found {found} data, expected {compression} by its name: "
                "give the file the name that fits (.jsonl, .jsonl.gz, .jsonl.zst)"
            )

    def _seek(self, resume_at: int | None) -> int:
        target = self._work.byte_start if resume_at is None else resume_at
        if target == 0:
            return 0
        if self._inflated is None:
            self._stream.seek(target - (resume_at is None))
        else:
            self._skip(target)
        return target if resume_at is not None else self._to_line_start(target - 1)

    def _skip(self, num_bytes: int) -> None:
        while num_bytes and (block := self._stream.read(min(num_bytes, _BUFFER_BYTES))):
            num_bytes -= len(block)

    def _to_line_start(self, position: int) -> int:
        """Go on behind the next newline: the line that stands there belongs to the range before."""
        while piece := self._stream.readline(_BUFFER_BYTES):
            position += len(piece)
            if piece.endswith(b"\n"):
                break
        return position

    def __iter__(self) -> Iterator[RawLine]:
        end = self._work.byte_end
        while end is None or self._position < end:
            raw = self._stream.readline(self._max_line_bytes + 1)
            if not raw:
                return
            line = RawLine(byte_offset=self._position, byte_end=self._position + len(raw), raw=raw)
            if len(raw) > self._max_line_bytes and not raw.endswith(b"\n"):
                self._read_long(line)
            if not raw.endswith(b"\n") and self.fault is not None:
                line.cut = True
            self._position = line.byte_end
            yield line

    def _read_long(self, line: RawLine) -> None:
        """Pass over the rest of a line above the limit, keeping its size, its digest and its first MiB."""
        digest = blake3.blake3(line.raw)
        line.raw, line.too_long = line.raw[: MAX_LINE_BYTES + 1], True
        while piece := self._stream.readline(_BUFFER_BYTES):
            digest.update(piece)
            line.byte_end += len(piece)
            if piece.endswith(b"\n"):
                break
        line.digest = digest.digest()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._file.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SpanDigest:
    """blake3 of the lines of a part's input: their bytes, or the digest of a line that is too long."""

    def __init__(self) -> None:
        self._hash = blake3.blake3()

    def update(self, line: RawLine) -> None:
        """Add the next line."""
        self._hash.update(line.digest or line.raw)

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._hash.hexdigest()


def span_digest(work: InputRange, byte_start: int, byte_end: int, max_line_bytes: int) -> str | None:
    """Digest of the lines in [byte_start, byte_end) of a file as it is now; None when they end elsewhere by now."""
    digest = SpanDigest()
    if byte_start == byte_end:
        return digest.hexdigest()
    with LineReader(work, max_line_bytes=max_line_bytes, resume_at=byte_start) as reader:
        for line in reader:
            digest.update(line)
            if line.byte_end >= byte_end:
                return digest.hexdigest() if line.byte_end == byte_end else None
    return None
