"""The packs of a loader as a Megatron training loop takes them: endless, on the device, with a state. Imports no Megatron.

The loop calls `next` for each microbatch on every rank, pipeline stages included, and hands the dict to its forward step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from packer.format.errors import UsageError
from plugin.adapters.data_state import WAY_OUT, is_balanced, of_unbalanced
from plugin.batch import to_megatron
from plugin.settings import Peers

if TYPE_CHECKING:
    import torch

    from plugin.batch.torch_batch import TorchBatch

log = logging.getLogger(__name__)

STATE_VERSION = 1
_KIND = "bayplan data state"


class Loader(Protocol):
    """A source of packs in host memory: a `PackLoader`, or what stands around one."""

    def __iter__(self) -> Iterator[TorchBatch]: ...

    def __next__(self) -> TorchBatch:
        """StopIteration at an epoch's end; the next call begins another."""
        ...

    def save_state(self) -> Any:
        """After the last pack that was handed out; without any other rank's help."""
        ...

    def restore_state(self, state: Any) -> None:
        """Before the first `__next__`. Refuses a state of another rank, number of ranks, profile or limits."""
        ...

    def counters(self) -> Mapping[str, Any]: ...

    def log_line(self) -> str: ...

    def close(self) -> None: ...


class Schedule(Protocol):
    """How many packs each step takes, by what was consumed before it."""

    def begin(self, step: int, num_consumed: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands. All ranks of one replica have the same `rank` and read the same packs."""

    rank: int = 0
    """In the pure data-parallel group: with context parallel in it, the parts of one sequence would be of different packs."""
    size: int = 1
    peers: Peers = field(default_factory=Peers)


class MegatronStream:
    """One split of a dataset for one rank."""

    def __init__(
        self,
        loader: Loader,
        *,
        size: int,
        normalise: Callable[[torch.Tensor], torch.Tensor] | None,
        device: torch.device | str,
        mrope: bool = False,
        schedule: Schedule | None = None,
        takes_pixels: bool = True,
    ) -> None:
        """Nothing is read before the first `__next__`.

        Args:
            size: data-parallel ranks, each of which has such a stream.
            normalise: uint8 pixels of a pack -> what the vision encoder takes, on the tensor's own device.
            mrope: see `to_megatron`.
            schedule: of a balanced loader; it is told where the run goes on.
            takes_pixels: False on pipeline stages above the first: pixels that its reader sends along are left out.
        """
        self.loader = loader
        self._size, self._normalise = size, normalise
        self._device, self._mrope = device, mrope
        self._schedule, self._takes_pixels = schedule, takes_pixels
        self._position = 0
        self._has_started = False
        self._last: dict[str, Any] | None = None
        """The state where it was closed."""

    @property
    def position(self) -> int:
        """Packs of all ranks since the training began: `consumed_train_samples` of a trainer whose microbatch is one pack."""
        return self._position

    # Itself, so that code that takes `iter` of it keeps the state's methods.
    def __iter__(self) -> MegatronStream:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next microbatch, a row of one pack; all on the device but `max_seqlen_*`."""
        pack = self._next_pack()
        # One copy of everything, pixels as bytes: normalised and doubled in time they are eight times as large.
        normalise = self._normalise if self._takes_pixels else _as_they_are
        made = to_megatron(pack.to(self._device, non_blocking=True), normalise=normalise, mrope=self._mrope)
        if not self._takes_pixels and made["visual_inputs"] is not None:
            made["visual_inputs"].pixel_values = None
        self._position += self._size
        return made

    def _next_pack(self) -> TorchBatch:
        self._has_started = True
        try:
            return next(self.loader)
        except StopIteration:
            log.info("the data of this rank begins anew at position %d", self._position)
        try:
            return next(self.loader)
        except StopIteration:
            raise UsageError(
                "found no pack for this rank in a whole pass over the data, expected at least one for each of "
                f"{self._size} ranks; train on fewer ranks or with fewer workers, or add data (a balanced loader ends for good: "
                "balance a stream that never ends)"
            ) from None

    def save_state(self) -> dict[str, Any]:
        """Where the stream stands after the last microbatch: builtin values around the loader's own state."""
        if self._last is not None:
            return self._last
        return {"kind": _KIND, "version": STATE_VERSION, "position": self._position, "loader": self.loader.save_state()}

    def restore_state(self, state: Any) -> None:
        """Go on where a state was saved.

        Raises:
            UsageError: packs were read already, or the state is not one of this stream.
        """
        if self._has_started:
            raise UsageError(
                "restore_state: found a stream that was read from, expected a new one; restore before the first step"
            )
        if not isinstance(state, Mapping) or state.get("kind") != _KIND:
            raise UsageError(
                f"restore_state: found a {type(state).__name__} of another data loader, expected a state that this one saved; "
                f"resume with that loader, {WAY_OUT}"
            )
        if state.get("version") != STATE_VERSION:
            raise UsageError(
                f"restore_state: found a state of version {state.get('version')}, expected {STATE_VERSION}; resume with the "
                "release that saved it"
            )
        self._go_on(state["loader"], state["position"])
        self._position = state["position"]

    def _go_on(self, state: Any, position: int) -> None:
        if self._schedule is None:
            state = of_unbalanced(state)
        elif is_balanced(state):
            self._schedule.begin(state["step"], position - self._size * state["yielded"])
        self.loader.restore_state(state)

    def refuse_other_position(self, num_consumed: int) -> None:
        """Args:
            num_consumed: packs that all ranks together have trained on, by the trainer's count.

        Raises:
            UsageError: the stream stands elsewhere: no state was restored, or that of another step.
        """
        if self._position == num_consumed:
            return
        found = f"at {self._position} packs" if self._position else "at its beginning (no data state was restored)"
        raise UsageError(
            f"found the data {found} and the model at {num_consumed} packs of all ranks (consumed_train_samples), "
            f"expected both at one place; resume from a step that has both, {WAY_OUT}"
        )

    def start_over(self, num_consumed: int) -> None:
        """Take the data from its start though the model has trained on `num_consumed` packs; positions count on from there.

        Raises:
            UsageError: a state was restored, or packs were read.
        """
        if self._position or self._has_started:
            raise UsageError(f"start over: found a stream at {self._position} packs, expected a new one; leave `starts_over` out")
        log.warning("the data starts over; the model has trained on %d packs", num_consumed)
        self._position = num_consumed
        if self._schedule is not None:
            self._schedule.begin(0, num_consumed)

    def counters(self) -> dict[str, Any]:
        """The loader's, and the position."""
        return {**self.loader.counters(), "position": self._position}

    def log_line(self) -> str:
        """The loader's counters of the latest step."""
        return self.loader.log_line()

    @property
    def is_closed(self) -> bool:
        return self._last is not None

    def close(self) -> None:
        """End threads, connections and workers. The state can still be saved: trainers do so after their last step."""
        if self._last is not None:
            return
        try:
            self._last = self.save_state()
        finally:
            self.loader.close()


def _as_they_are(pixels: torch.Tensor) -> torch.Tensor:
    return pixels
