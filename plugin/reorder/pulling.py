"""Reading one rank's packs of a global batch, and the states of the source around them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from packer.format.errors import UsageError
from plugin.batch.torch_batch import TorchBatch
from plugin.stream import PackSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What every pack must have been made with."""

    profile: str
    sequence_length: int


@dataclass(slots=True, kw_only=True, eq=False)
class Pulled:
    """A rank's packs; fewer than asked for at the end of its stream, or with an error."""

    packs: list[TorchBatch | None]
    before: Any
    """State of the source before the first of them."""
    after: Any
    """And after the last."""
    error: Exception | None = None
    seconds: float = 0.0


def pull(source: PackSource, number: int, before: Any, expected: Expected) -> Pulled:
    """Read so many packs; an error is kept, to be told to all ranks."""
    started = time.monotonic()
    pulled = Pulled(packs=[], before=before, after=before)
    try:
        for _ in range(number):
            try:
                pack = next(source)
            except StopIteration:
                break
            _refuse_other(pack, expected)
            pulled.packs.append(pack)
        pulled.after = source.save_state()
    except Exception as error:
        pulled.error = error
    pulled.seconds = time.monotonic() - started
    return pulled


def _refuse_other(pack: TorchBatch, expected: Expected) -> None:
    if not isinstance(pack, TorchBatch):
        raise UsageError(f"loader: found a {type(pack).__name__}, expected packs (TorchBatch): give the loader of packs itself")
    found = pack.batch
    if found.fingerprint != expected.profile or found.sequence_length != expected.sequence_length:
        raise UsageError(
            f"loader: found a pack of profile {found.fingerprint!r} and {found.sequence_length:,} tokens, expected "
            f"{expected.profile!r} and {expected.sequence_length:,}, as the balanced loader was given"
        )
