"""`TorchBatch`: a pack as one uint8 tensor, so that a loader pickles, pins and copies one tensor instead of twenty-six."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from plugin.batch import format as buffer_format
from plugin.batch.core import PackedBatch

_THROUGH_PIPE_BYTES = 256 << 10
"""Up to here a pack crosses processes faster as bytes: a shared-memory block costs its receiver 0.3 ms of handshakes, and a
descriptor while it is held; a pipe costs 2 ms for each MiB.
"""
_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "|u1": torch.uint8, "|b1": torch.bool}


@dataclass(eq=False, repr=False)
class TorchBatch:
    """A dataclass of one tensor: torch's loader and Energon's batches both pin it as it is, alone or as a field of another."""

    tensor: torch.Tensor
    """[bytes], uint8, on any device: the buffer of a `PackedBatch`."""

    @classmethod
    def of(cls, batch: PackedBatch) -> TorchBatch:
        """The pack's own memory; copied if it cannot be written to, since a tensor could."""
        memory = batch.buffer.view()
        try:
            memory.flags.writeable = True
        except ValueError:
            memory = buffer_format.new_buffer(len(batch.buffer))
            memory[:] = batch.buffer
            batch = PackedBatch.from_buffer(memory, check_payload=False)
        return cls._with(torch.from_numpy(memory), batch)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, *, check_payload: bool = True) -> TorchBatch:
        """A pack that arrived as a tensor of the host's memory.

        Raises:
            FormatError: as `PackedBatch.from_buffer`.
        """
        return cls._with(tensor, PackedBatch.from_buffer(tensor.numpy(), check_payload=check_payload))

    @classmethod
    def _with(cls, tensor: torch.Tensor, batch: PackedBatch) -> TorchBatch:
        made = cls(tensor)
        made.batch = batch
        return made

    @cached_property
    def batch(self) -> PackedBatch:
        """What the host knows of it, whatever the device; a view of the same memory where that is the host's."""
        return PackedBatch.from_buffer(self.tensor.cpu().numpy(), check_payload=False)

    @cached_property
    def views(self) -> dict[str, torch.Tensor]:
        """Every field of `PackedBatch` by its name, on the tensor's device."""
        layout = buffer_format.read_fields(self.batch.buffer, check_payload=False)
        return {
            field.name: self.tensor[field.offset : field.offset + field.num_bytes].view(_DTYPES[field.dtype]).view(field.shape)
            for field in layout
        }

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        if self.tensor.device.type == "cpu" and len(self.tensor) <= _THROUGH_PIPE_BYTES:
            return _from_bytes, (self.tensor.numpy().tobytes(),)
        # Through torch's own pickler between processes this is one shared-memory block, one descriptor.
        return TorchBatch, (self.tensor,)

    def __repr__(self) -> str:
        return f"TorchBatch({self.batch!r} on {self.tensor.device})"

    def pin_memory(self, device: Any = None) -> TorchBatch:
        """In page-locked memory: what torch's loader calls. `device` is for its older releases, and not used."""
        return TorchBatch(self.tensor.pin_memory())

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> TorchBatch:
        """One copy, images still uint8; returns before it is done if the memory is pinned."""
        return TorchBatch._with(self.tensor.to(device, non_blocking=non_blocking), self.batch)


def _from_bytes(data: bytes) -> TorchBatch:
    """In memory that fields may be viewed in, and that may be written to."""
    memory = buffer_format.new_buffer(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    return TorchBatch(torch.from_numpy(memory))
