"""The 24 bytes a pack that all ranks of a group know of each other. Pure: NumPy, no torch.

    bytes   what
    0-3     encoder cost   27 bits and a shift of 5 bits: exact below 134,217,728 (2^27), above that rounded to the nearest of 27
    4-7     LLM cost       leading bits (half up; off by at most 2^-27 of itself), up to 2^58
    8-11    size           in units of 64 bytes, which every pack is a multiple of: exact, up to 256 GiB
    12-15   loss tokens    exact
    16-19   patches        exact
    20-23   id digest      blake3 of sources, rows and ids of its samples

All little-endian uint32. The rank that owns a pack plans with the rounded costs too, so all ranks plan with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.format.errors import UsageError
from plugin.batch import format as buffer_format
from plugin.batch.core import PackedBatch

NUM_BYTES = 24
_MANTISSA_BITS = 27
_MOST_SHIFT = (1 << 5) - 1
_MOST_SUM = 1 << 62

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Column(IntEnum):
    """Places of the six numbers."""

    ENCODER = 0
    LLM = 1
    SIZE = 2
    LOSS = 3
    PATCHES = 4
    DIGEST = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackTable:
    """What is known of each pack of a global batch; every array is int64 of [ranks, packs of a rank]."""

    encoder: Ints
    llm: Ints
    num_bytes: Ints
    num_loss_tokens: Ints
    num_patches: Ints
    digest: Ints


def encode(packs: Sequence[PackedBatch]) -> Bytes:
    """[packs, 24].

    Raises:
        UsageError: a number that does not fit.
    """
    rows = np.empty((len(packs), len(Column)), "<u4")
    for row, pack in zip(rows, packs, strict=True):
        row[Column.ENCODER] = rounded(pack.encoder_cost, "an encoder cost")
        row[Column.LLM] = rounded(pack.llm_cost, "an LLM cost")
        row[Column.SIZE] = _fitting(-(-len(pack.buffer) // buffer_format.ALIGNMENT_BYTES), "a size in units of 64 bytes")
        row[Column.LOSS] = _fitting(pack.num_loss_tokens, "a number of loss tokens")
        row[Column.PATCHES] = _fitting(pack.num_patches, "a number of patches")
        row[Column.DIGEST] = id_digest(pack)
    return rows.view(np.uint8).reshape(len(packs), NUM_BYTES)


def decode(rows: Bytes) -> PackTable:
    """From [ranks, packs, 24].

    Raises:
        UsageError: costs whose sum does not fit in 62 bits.
    """
    numbers = np.ascontiguousarray(rows).view("<u4").astype(np.int64)
    columns = [numbers[:, :, column] for column in Column]
    for column in (Column.ENCODER, Column.LLM):
        columns[column] = (columns[column] >> 5) << (columns[column] & _MOST_SHIFT)
        if int(columns[column].max(initial=0)) * columns[column].size >= _MOST_SUM:
            raise UsageError(
                f"found {columns[column].size:,} packs of costs up to {int(columns[column].max()):,}, expected a sum below 2^62; "
                "count costs in a larger unit"
            )
    encoder, llm, size, loss, patches, digest = columns
    return PackTable(
        encoder=encoder,
        llm=llm,
        num_bytes=size * buffer_format.ALIGNMENT_BYTES,
        num_loss_tokens=loss,
        num_patches=patches,
        digest=digest,
    )


def rounded(cost: int, what: str = "a cost") -> int:
    """A cost as 27 bits and a shift."""
    shift = max(0, cost.bit_length() - _MANTISSA_BITS)
    mantissa = (cost + (1 << shift >> 1)) >> shift
    if mantissa >> _MANTISSA_BITS:
        mantissa, shift = mantissa >> 1, shift + 1
    if cost < 0 or shift > _MOST_SHIFT:
        raise UsageError(f"found {what} of {cost:,}, expected at least 0 and less than 2^58; count costs in a larger unit")
    return mantissa << 5 | shift


def id_digest(pack: PackedBatch) -> int:
    """Of sources, rows and ids: two packs of the same samples have the same, whatever their pixels."""
    return int.from_bytes(_identity(pack).digest(4), "little")


def pool_digest(packs: Sequence[PackedBatch]) -> bytes:
    """16 bytes of the ids of several packs, in their order."""
    return blake3(b"".join(_identity(pack).digest(32) for pack in packs)).digest(16)


def _identity(pack: PackedBatch) -> blake3:
    parts = (
        pack.source_name_bytes,
        pack.source_name_offsets,
        pack.sample_source,
        pack.sample_row,
        pack.sample_id_bytes,
        pack.sample_id_offsets,
    )
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part.tobytes())
    return hasher


def _fitting(number: int, what: str) -> int:
    if not 0 <= number < 1 << 32:
        raise UsageError(f"found {what} of {number:,}, expected less than 2^32")
    return number
