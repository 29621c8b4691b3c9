"""One quarantine line: the row that could not become a record, with the reason code and the original line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from packer.format.errors import FormatError
from packer.format.reasons import Reason

MAX_LINE_BYTES = 1 << 20
"""Longer original lines are cut to this many bytes and marked `line_truncated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineLine:
    """A quarantined row."""

    source: str
    file: str
    byte_offset: int
    """Of the row in the (decompressed) file."""
    sample_id: str
    reason: Reason
    detail: str
    line: str
    """The original line; bytes that are not UTF-8 are written as surrogate-free \\xNN text."""
    line_truncated: bool = False

    def encode(self) -> bytes:
        """The JSON line, newline included."""
        document: dict[str, Any] = {
            "source": self.source,
            "file": self.file,
            "byte_offset": self.byte_offset,
            "id": self.sample_id,
            "reason": self.reason.value,
            "detail": self.detail.encode("utf-8", "backslashreplace").decode(),
            "line": self.line,
        }
        if self.line_truncated:
            document["line_truncated"] = True
        return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def quarantine_text(line: bytes) -> tuple[str, bool]:
    """The text of an original line for its quarantine line, and whether it was cut."""
    return line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace"), len(line) > MAX_LINE_BYTES


def decode_quarantine(line: bytes, where: str) -> QuarantineLine:
    """The quarantine line written as `line`.

    Raises:
        FormatError: when it is not one.
    """
    try:
        document = orjson.loads(line)
        return QuarantineLine(
            source=document["source"],
            file=document["file"],
            byte_offset=document["byte_offset"],
            sample_id=document["id"],
            reason=Reason(document["reason"]),
            detail=document["detail"],
            line=document["line"],
            line_truncated=document.get("line_truncated", False),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{where}: not a quarantine line: {error!r}") from error
