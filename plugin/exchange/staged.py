"""Transport over a device: the background thread fills pinned memory, the trainer's launches, at microbatches all ranks know.

Two threads that launch on devices can deadlock, and so can ranks that launch in different orders. So everything of the device is
in `Device`, called by the trainer's thread alone, and slices go in their order, at indices that follow from the plan.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from plugin.exchange.errors import ExchangeError
from plugin.exchange.moves import Route, launch_indices
from plugin.exchange.transport import Job, deliver, pack_up

DEPTH = 2
"""Slices on their way at once: while one travels, the next is packed."""


class Ticket(Protocol):
    """A slice that was launched."""

    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """Until it has arrived in the host's memory."""
        ...


class Device(Protocol):
    """What touches a device; a test has one of gloo."""

    def host(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that the device copies from and to, at a multiple of 64."""
        ...

    def launch(self, sent: torch.Tensor, received: torch.Tensor, received_bytes: list[int], sent_bytes: list[int]) -> Ticket:
        """Begin an all-to-all, and return."""
        ...


class StagedTransport:
    """One job at a time; `exchange` waits for what the trainer's thread does, and the other way round."""

    is_launched = True

    def __init__(self, device: Device, *, name: str) -> None:
        self.name = name
        self._device = device
        self._changed = threading.Condition()
        self._job: Job | None = None
        self._sent: dict[int, torch.Tensor] = {}
        """By slice: memory that is being packed, or travels."""
        self._received: dict[int, torch.Tensor] = {}
        self._tickets: dict[int, Ticket] = {}
        self._num_packed = self._num_launched = self._num_arrived = 0
        self._is_failed = False

    def begin(self, job: Job) -> None:
        with self._changed:
            assert self._job is None, "the job before has been exchanged"
            self._job = job
            self._num_packed = self._num_launched = self._num_arrived = 0

    def exchange(self, job: Job) -> None:
        for number, route in enumerate(job.routes):
            self._wait(lambda number=number: number in self._sent)  # type: ignore[misc]
            pack_up(job, route, self._sent[number])
            with self._changed:
                self._num_packed += 1
                self._changed.notify_all()
        for number, route in enumerate(job.routes):
            self._wait(lambda number=number: number < self._num_arrived)  # type: ignore[misc]
            deliver(job, route, self._received.pop(number))
        with self._changed:
            self._job = None

    def launch(self, microbatch: int, num_microbatches: int) -> None:
        job = self._job
        if job is None:
            return
        self._look()
        due = [index for index in launch_indices(len(job.routes), num_microbatches) if index <= microbatch]
        self._open(job)
        for number in range(self._num_launched, len(due)):
            if number >= DEPTH:
                self._arrive(number - DEPTH)
            self._open(job)
            self._wait(lambda number=number: number < self._num_packed)  # type: ignore[misc]
            self._launch(number, job.routes[number])

    def settle(self) -> None:
        for number in range(self._num_arrived, self._num_launched):
            self._arrive(number)

    def fail(self) -> None:
        with self._changed:
            self._is_failed = True
            self._changed.notify_all()

    def _look(self) -> None:
        """Hand over what has arrived meanwhile, without waiting."""
        while self._num_arrived < self._num_launched and self._tickets[self._num_arrived].is_done():
            self._arrive(self._num_arrived)

    def _open(self, job: Job) -> None:
        """Give the background thread memory to pack slices into, as many as may be on their way."""
        with self._changed:
            for number in range(self._num_launched, min(self._num_arrived + DEPTH, len(job.routes))):
                if number not in self._sent:
                    self._sent[number] = self._device.host(sum(job.routes[number].sent_bytes))
            self._changed.notify_all()

    def _launch(self, number: int, route: Route) -> None:
        received = self._device.host(sum(route.received_bytes))
        self._tickets[number] = self._device.launch(self._sent[number], received, route.received_bytes, route.sent_bytes)
        self._received[number] = received
        self._num_launched += 1

    def _arrive(self, number: int) -> None:
        if number < self._num_arrived:
            return
        self._tickets.pop(number).wait()
        with self._changed:
            del self._sent[number]
            self._num_arrived += 1
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_failed or is_so())
            if self._is_failed:
                raise ExchangeError("exchanging packs: stopped, since the other thread of this rank failed")
