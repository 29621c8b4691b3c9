"""The line-offset file beside every record file: n+1 little-endian uint64, the layout Energon reads as `.jsonl.idx`.

Entry i is the byte offset of line i, entry n the size of the record file; so line i is bytes [entry i, entry i+1).
"""

from __future__ import annotations

import itertools
import sys
from array import array

from packer.format.errors import FormatError

ENTRY_BYTES = 8


def encode_offsets(offsets: array[int]) -> bytes:
    """The file's bytes for `offsets` (n+1 entries, the last is the size of the record file)."""
    if sys.byteorder == "big":
        offsets = array("Q", offsets)
        offsets.byteswap()
    return offsets.tobytes()


def decode_offsets(data: bytes, where: str) -> array[int]:
    """The n+1 entries of an offset file.

    Raises:
        FormatError: when the file is cut or its entries do not rise from 0.
    """
    if len(data) % ENTRY_BYTES or not data:
        raise FormatError(f"{where}: found {len(data)} bytes, expected a multiple of {ENTRY_BYTES}: the offset file is cut")
    offsets = array("Q")
    offsets.frombytes(data)
    if sys.byteorder == "big":
        offsets.byteswap()
    if offsets[0] != 0 or any(a >= b for a, b in itertools.pairwise(offsets)):
        raise FormatError(f"{where}: offsets do not rise from 0: the offset file is damaged")
    return offsets
