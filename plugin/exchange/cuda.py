"""The device of the staged transport: NCCL on a stream of its own. Only the trainer's thread comes here.

A slice goes host -> device -> other ranks -> host, all on that stream, so that packs arrive where gloo would bring them and the
device holds two slices at most. A rank that dies ends in NCCL's own abort of the process: only gloo can say who it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from packer.format.errors import UsageError
from plugin.batch import format as buffer_format

_ROUND = 1 << 20
_cuda: Any = torch.cuda
"""Streams and events have no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaTicket:
    done: Any
    """A CUDA event."""
    kept: tuple[torch.Tensor, ...]
    """What the stream still reads or writes: neither allocator may give it to others before."""

    def is_done(self) -> bool:
        return bool(self.done.query())

    def wait(self) -> None:
        self.done.synchronize()


class CudaDevice:
    """The current device of the thread that makes it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Connects; all ranks must do so.

        Raises:
            UsageError: torch has no NCCL or no device.
        """
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise UsageError("balanced loader: found no CUDA device or no NCCL, expected both for transport 'nccl'; use 'gloo'")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = _cuda.Stream(self._device)
        self._group = dist.new_group(list(ranks), backend="nccl", use_local_synchronization=True)

    def host(self, num_bytes: int) -> torch.Tensor:
        # Of a size that comes again and again, so that torch's cache of pinned memory has it.
        space = torch.empty(-(-num_bytes // _ROUND) * _ROUND + buffer_format.ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=True)
        start = -space.data_ptr() % buffer_format.ALIGNMENT_BYTES
        return space[start : start + num_bytes]

    def launch(self, sent: torch.Tensor, received: torch.Tensor, received_bytes: list[int], sent_bytes: list[int]) -> _CudaTicket:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # Both are made, used and given back under our stream, which waits for NCCL's: no record_stream is needed, and the
            # ticket keeps them until the event has passed.
            outgoing = sent.to(self._device, non_blocking=True)
            incoming = torch.empty(len(received), dtype=torch.uint8, device=self._device)
            work = dist.all_to_all_single(incoming, outgoing, received_bytes, sent_bytes, group=self._group, async_op=True)
            work.wait()  # Our stream waits for NCCL's; the host does not.
            received.copy_(incoming, non_blocking=True)
            done = _cuda.Event()
            done.record(self._stream)
        return _CudaTicket(done=done, kept=(sent, received, outgoing, incoming))
