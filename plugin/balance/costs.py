"""The costs of one global batch, checked: integers of 0 or more, small enough that no sum of them leaves 64 bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.balance.keys import IntArray

SUM_BITS = 62
"""(dearest encoder + dearest LLM cost) * packs stays below 2^62, so that sums and keys (see `keys`) need no further care."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Costs:
    """[rank, position] of the packs as the loaders yielded them."""

    encoder: IntArray
    llm: IntArray

    @property
    def total(self) -> IntArray:
        return self.encoder + self.llm

    @property
    def num_ranks(self) -> int:
        return len(self.encoder)

    @property
    def num_microbatches(self) -> int:
        return int(self.encoder.shape[1])


def checked_costs(encoder: npt.ArrayLike, llm: npt.ArrayLike | None, num_ranks: int) -> Costs:
    """Costs as int64; no LLM costs are costs of 0: only the encoder is balanced."""
    one = checked("encoder", encoder, num_ranks)
    two = np.zeros_like(one) if llm is None else checked("llm", llm, num_ranks)
    if one.shape != two.shape:
        raise UsageError(f"costs: found encoder of shape {one.shape} and llm of shape {two.shape}, expected the same shape")
    dearest = int(one.max()) + int(two.max())
    if dearest * one.size >= 1 << SUM_BITS:
        raise UsageError(
            f"costs: found a dearest pack of {dearest:,} among {one.size:,} packs, expected less than "
            f"{(1 << SUM_BITS) // one.size:,}: sums would leave 64 bits; give costs in a larger unit"
        )
    return Costs(encoder=one, llm=two)


def checked(name: str, values: npt.ArrayLike, num_ranks: int) -> IntArray:
    """[rank, position] of integers, none below 0."""
    try:
        found = np.asarray(values)
    except ValueError:
        raise UsageError(f"costs: found rows of {name} that differ in length; every rank must bring as many packs") from None
    if found.ndim != 2 or found.shape[0] != num_ranks or not found.shape[1]:
        raise UsageError(
            f"costs: found {name} of shape {found.shape}, expected ({num_ranks}, number of microbatches): one row per rank, "
            "every rank the same number of packs"
        )
    if found.dtype.kind not in "iu":
        raise UsageError(f"costs: found {name} as {found.dtype}, expected integers; round them the same way on every rank")
    if found.size > np.iinfo(np.int32).max:
        raise UsageError(f"costs: found {found.size:,} packs, expected fewer than 2^31")
    if found.dtype == np.uint64 and int(found.max()) >> 63:
        raise UsageError(f"costs: found {name} {int(found.max()):,}, expected less than 2^63; give costs in a larger unit")
    result = np.ascontiguousarray(found, np.int64)
    if int(result.min()) < 0:
        rank, position = np.unravel_index(int(result.argmin()), result.shape)
        raise UsageError(f"costs: found {name} {result.min()} at rank {rank}, position {position}, expected 0 or more")
    return result
