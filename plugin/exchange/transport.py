"""How packs travel: the job of one global batch, and the default transport, gloo in the background thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from packer.format.errors import FormatError
from plugin.batch import format as buffer_format
from plugin.batch.torch_batch import TorchBatch
from plugin.exchange.group import GlooGroup
from plugin.exchange.metadata import Ints, id_digest
from plugin.exchange.moves import Route


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What one rank sends and receives for a global batch."""

    step: int
    routes: Sequence[Route]
    """Slices; as many on all ranks."""
    packs: list[TorchBatch | None]
    """The rank's own; given up (None) once sent."""
    digests: Ints
    """[packs of the global batch], as every rank knows them."""
    deliver: Callable[[int, TorchBatch], None]
    """(microbatch, pack) that arrived."""


class Transport(Protocol):
    """Carries one job after the other. `exchange` is called by the background thread, all else by the trainer's."""

    @property
    def name(self) -> str: ...

    @property
    def is_launched(self) -> bool:
        """Whether the trainer's thread has a part in it."""
        ...

    def begin(self, job: Job) -> None:
        """By the background thread: a plan is known. Does not wait."""
        ...

    def exchange(self, job: Job) -> None:
        """Returns when everything has arrived."""
        ...

    def launch(self, microbatch: int, num_microbatches: int) -> None:
        """Before the trainer takes that microbatch, of so many, of the batch before the job's: launch what is due."""
        ...

    def settle(self) -> None:
        """The trainer needs what was launched: wait for it."""
        ...

    def fail(self) -> None:
        """By either: end every wait, there is no more to come."""
        ...


class GlooTransport:
    """Host memory, all in the background thread."""

    name = "gloo"
    is_launched = False

    def __init__(self, group: GlooGroup) -> None:
        self._group = group

    def exchange(self, job: Job) -> None:
        for route in job.routes:
            sent = buffer(sum(route.sent_bytes))
            pack_up(job, route, sent)
            received = buffer(sum(route.received_bytes))
            self._group.all_to_all(received, sent, route.received_bytes, route.sent_bytes)
            deliver(job, route, received)

    def begin(self, job: Job) -> None:
        """Nothing to prepare, and nothing for the trainer's thread to do."""

    def launch(self, microbatch: int, num_microbatches: int) -> None: ...

    def settle(self) -> None: ...

    def fail(self) -> None: ...


def buffer(num_bytes: int) -> torch.Tensor:
    """At a multiple of 64, as fields of packs are."""
    return torch.from_numpy(buffer_format.new_buffer(num_bytes))


def pack_up(job: Job, route: Route, sent: torch.Tensor) -> None:
    """Copy what a slice sends behind each other, and let go of it."""
    start = 0
    for position in route.sent.tolist():
        pack = job.packs[position]
        assert pack is not None, "each pack is sent once"
        end = start + len(pack.tensor)
        sent[start:end].copy_(pack.tensor)
        job.packs[position] = None
        start = end


def deliver(job: Job, route: Route, received: torch.Tensor) -> None:
    """Hand out what arrived; packs are views, and keep their slice in memory while they live.

    Raises:
        FormatError: something else arrived than was announced.
    """
    start = 0
    for pack, microbatch, size in zip(route.received, route.microbatches, route.pack_bytes, strict=True):
        arrived = TorchBatch.from_tensor(received[start : start + int(size)])
        start += int(size)
        found, expected = id_digest(arrived.batch), int(job.digests[pack])
        if found != expected:
            raise FormatError(
                f"pack {int(pack)} of step {job.step}: samples of digest {found:08x} arrived, {expected:08x} were announced"
            )
        job.deliver(int(microbatch), arrived)
