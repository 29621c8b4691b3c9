"""What all ranks must have been started with alike, and the message when they were not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt
import orjson
from blake3 import blake3

from packer.format.errors import UsageError

VERSION = 1
"""Of what ranks say to each other."""
ROW_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Compared once, before the first batch."""

    version: int = VERSION
    profile: str
    """Fingerprint of the profile the packs were made with."""
    cost: str
    """Fingerprint of the cost model."""
    planner: str
    """What the planner calls itself: its mode and its settings."""
    sequence_length: int
    dp_size: int
    num_microbatches: int
    """Of the first global batch."""
    micro_batch_size: int
    first_step: int
    """0, or where the restored state stood."""
    first_yielded: int
    transport: str
    slice_bytes: int
    readers: str
    stream: str = ""
    """What else must be alike for streams that share no sample, as a text."""

    def digest(self) -> bytes:
        """16 bytes."""
        return blake3(orjson.dumps(asdict(self))).digest(16)


def encode(settings: Settings, host: str) -> npt.NDArray[np.uint8]:
    """One row; the host's name goes along to tell nodes apart, and is not compared."""
    text = orjson.dumps({**asdict(settings), "host": host})
    if len(text) > ROW_BYTES:
        raise UsageError(f"found settings of {len(text):,} bytes, expected at most {ROW_BYTES:,}: use shorter fingerprints")
    return np.frombuffer(text.ljust(ROW_BYTES), np.uint8)


def agree(rows: npt.NDArray[np.uint8], ranks: Sequence[int]) -> tuple[str, ...]:
    """The hosts of the ranks.

    Raises:
        UsageError: settings that differ; the message names the first such field, and who has which value.
    """
    found = [orjson.loads(row.tobytes()) for row in rows]
    for field in fields(Settings):
        if said := differing([one.get(field.name) for one in found], ranks):
            raise UsageError(
                f"settings of ranks that exchange packs: found {field.name} {said}, expected one value; "
                "start all ranks with the same settings, from the same checkpoint"
            )
    return tuple(one["host"] for one in found)


def differing(values: Sequence[object], ranks: Sequence[int]) -> str:
    """'4 on ranks 0, 2 and 5 on rank 1'; nothing where all ranks have the same."""
    whose: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        whose.setdefault(repr(value), []).append(rank)
    return " and ".join(f"{value} on {named(those)}" for value, those in whose.items()) if len(whose) > 1 else ""


def named(ranks: Sequence[int], most: int = 8) -> str:
    """'rank 3', 'ranks 0, 1, 2 and 61 more'."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
