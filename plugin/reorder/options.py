"""What a balanced loader may be given: transports by name, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

from packer.format.errors import UsageError
from plugin.exchange.group import GlooGroup
from plugin.exchange.transport import GlooTransport, Transport
from plugin.reorder.parallel import Parallel
from plugin.stream import PackSource

MOST_SECONDS = 1e9
"""Longer ones overflow in gloo, which then fails at once, and in Python's own waits."""


def microbatches_at(step: int, number: int | Callable[[int], int]) -> int:
    """Of a rank, at a step; NumPy's integers are some too.

    Raises:
        UsageError: no number of microbatches.
    """
    found: Any = number(step) if callable(number) else number
    if isinstance(found, bool) or not isinstance(found, Integral) or found < 1:
        raise UsageError(f"balanced loader: found {found!r} microbatches at step {step}, expected an integer of at least 1")
    return int(found)


def refuse_wrong_seconds(**seconds: float) -> None:
    """Raises:
    UsageError: a time that cannot be waited for.
    """
    for name, value in seconds.items():
        if not 0 < value <= MOST_SECONDS:
            raise UsageError(f"found {name} {value}, expected more than 0 and at most {MOST_SECONDS:,.0f}")


def transport_of(transport: str | Transport, group: GlooGroup) -> Transport:
    """Connects what it needs."""
    if not isinstance(transport, str):
        return transport
    if transport == "gloo" or (transport == "nccl" and group.size == 1):
        return GlooTransport(group)
    if transport == "nccl":
        from plugin.exchange.cuda import CudaDevice
        from plugin.exchange.staged import StagedTransport

        return StagedTransport(CudaDevice(group.ranks), name="nccl")
    raise UsageError(f"balanced loader: found transport {transport!r}, expected 'gloo' or 'nccl'")


def refuse_wrong(
    source: PackSource | None, parallel: Parallel, micro_batch_size: int, loss_per_token: bool, readers: str, slice_bytes: int
) -> None:
    """Raises:
    UsageError: arguments that do not go together.
    """
    if readers not in ("all", "replica"):
        raise UsageError(f"balanced loader: found readers {readers!r}, expected 'all' or 'replica'")
    if source is None and parallel.reads(readers):
        raise UsageError(f"balanced loader: found no source on rank {parallel.rank}, expected one, since this rank reads")
    if micro_batch_size < 1 or slice_bytes < 1:
        raise UsageError(
            f"balanced loader: found micro_batch_size {micro_batch_size} and slice_bytes {slice_bytes}, expected >= 1"
        )
    if micro_batch_size > 1 and not loss_per_token:
        raise UsageError(
            f"balanced loader: found micro_batch_size {micro_batch_size} without loss_per_token, expected 1: a loss averaged "
            "over a microbatch weighs a pack by those beside it, so reordering would change the loss. Weigh the loss by tokens "
            "(calculate_per_token_loss) and say loss_per_token=True, or use 1"
        )
