"""`BalancedPackLoader`: a `PackLoader` whose packs are dealt among ranks. It is used as the `PackLoader` itself is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from packer.format.errors import UsageError
from plugin.balance import Mode, Topology
from plugin.batch.torch_batch import TorchBatch
from plugin.counters import StreamCounters, difference, line
from plugin.reorder.assigned import Assigned
from plugin.reorder.counters import Counters, shown
from plugin.reorder.loader import BalancedLoader, Readers
from plugin.reorder.options import microbatches_at, refuse_wrong_seconds
from plugin.reorder.parallel import Parallel

if TYPE_CHECKING:
    import torch

    from plugin.loader import PackLoader

_OF_THE_READER = ("failed_samples", "refused_samples", "refused_by_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """How packs are dealt; the same on all ranks."""

    mode: str = "auto"
    """`ep`, `fsdp`, `dp`, `local` or `auto`: see `plugin.balance.Mode`."""
    readers: Readers = "all"
    """`replica`: the first rank of each replica reads, and feeds its tensor, context and pipeline peers."""
    transport: Literal["gloo", "nccl"] = "gloo"
    loss_per_token: bool = False
    """The trainer weighs the loss by tokens over the global batch; needed for more than one pack to a microbatch."""
    slice_bytes: int = 256 << 20
    """What a rank holds to send, and to receive, at once."""
    timeout_seconds: float = 1800.0
    """A rank that is later than this is lost."""
    slow_seconds: float = 30.0
    """Waits longer than this are warned of."""

    def __post_init__(self) -> None:
        if self.mode not in set(Mode):
            raise UsageError(f"found mode {self.mode!r}, expected one of {', '.join(Mode)}")
        for name, known in (("readers", get_args(Readers)), ("transport", ("gloo", "nccl"))):
            if getattr(self, name) not in known:
                raise UsageError(f"found {name} {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if not self.slice_bytes > 0:
            raise UsageError(f"found slice_bytes {self.slice_bytes}, expected more than 0")
        refuse_wrong_seconds(timeout_seconds=self.timeout_seconds, slow_seconds=self.slow_seconds)


class BalancedPackLoader:
    """Iterate it: each item is one pack, of this rank's share of a global batch. See `BalancedLoader` for how it gets there.

    Counters and `num_packs` are of packs handed out; failures, refusals and reads are of those this rank has read.
    """

    def __init__(
        self,
        loader: PackLoader,
        *,
        num_microbatches: int | Callable[[int], int],
        settings: BalanceSettings | None = None,
        parallel: Parallel | None = None,
        topology: Topology | None = None,
        micro_batch_size: int = 1,
        on_batch: Callable[[Counters], None] | None = None,
    ) -> None:
        """Connects the ranks: every rank makes one, over a loader of its own, before it asks for a pack.

        Args:
            num_microbatches: of a step, or a function of the step: what a rank accumulates gradients over.
            parallel: None: all ranks of torch.distributed are data-parallel.
            topology: which ranks wait for each other; None: at the end of a global batch only.
            micro_batch_size: packs that the trainer joins to one microbatch.
            on_batch: called with the counters of each global batch.

        Raises:
            UsageError: a loader whose packs carry no costs, or of another rank.
        """
        settings = settings or BalanceSettings()
        parallel = parallel or Parallel.world()
        topology = topology or Topology(num_ranks=parallel.dp_size)
        builder = loader.encoder.builder
        if builder.cost is None:
            raise UsageError(
                "balanced loader: found packs without costs, expected PackSettings(cost=...): two presets as in "
                "'qwen2_5_vl_vit+qwen3_8b', or a file"
            )
        _refuse_other_place(loader, parallel, topology)
        self.loader = loader
        self.num_packs = 0
        """Handed out to this rank, counting on over a resume."""
        self._num_microbatches, self._micro_batch_size = num_microbatches, micro_batch_size
        self._counters = StreamCounters()
        self._reported: Mapping[str, Any] = self._counters.totals()
        self.topology = topology
        self.mode = topology.resolve(settings.mode)
        """What is balanced; never `auto`."""
        self._balanced = BalancedLoader(
            loader,
            parallel=parallel,
            planner=Assigned(topology=topology, mode=settings.mode, pipeline=parallel.num_stages > 1),
            num_microbatches=num_microbatches,
            profile=loader.fingerprint,
            cost=builder.cost.fingerprint,
            sequence_length=loader.encoder.settings.sequence_length,
            micro_batch_size=micro_batch_size,
            loss_per_token=settings.loss_per_token,
            readers=settings.readers,
            transport=settings.transport,
            slice_bytes=settings.slice_bytes,
            timeout_seconds=settings.timeout_seconds,
            slow_seconds=settings.slow_seconds,
            stream=loader.shared_identity(),
            on_batch=on_batch,
        )

    @property
    def rank(self) -> int:
        """In the data-parallel group, as the loader's."""
        return self.loader.rank

    @property
    def world_size(self) -> int:
        """Of the data-parallel group."""
        return self.loader.world_size

    @property
    def num_workers(self) -> int:
        """Of the loader."""
        return self.loader.num_workers

    @property
    def fingerprint(self) -> str:
        """Of the profile."""
        return self.loader.fingerprint

    @property
    def normalise(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """As the loader's."""
        return self.loader.normalise

    def num_microbatches(self, step: int) -> int:
        """Of a rank, at a step counted from the beginning of training."""
        return microbatches_at(step, self._num_microbatches)

    @property
    def balance(self) -> Counters:
        """Of the global batch that the last pack belongs to."""
        return self._balanced.counters

    @property
    def num_loss_tokens(self) -> int:
        """Of that global batch, over all ranks and microbatches: what a loss per token is divided by."""
        return self._balanced.num_loss_tokens

    def __iter__(self) -> BalancedPackLoader:
        return self

    def __next__(self) -> TorchBatch:
        """StopIteration on all ranks, and for good, before a global batch that one of them cannot fill."""
        started = time.perf_counter()
        pack = next(self._balanced)
        self._counters.add(pack.batch, wait_seconds=time.perf_counter() - started)
        self.num_packs += 1
        return pack

    def counters(self) -> dict[str, Any]:
        """As `PackLoader.counters`."""
        of_reader = self.loader.counters()
        taken = {key: of_reader[key] for key in of_reader if key in _OF_THE_READER or key.startswith("read_")}
        return {**self._counters.totals(), **taken}

    def step_counters(self) -> dict[str, Any]:
        """Since the last call of this or of `log_line`: call it once a step."""
        before, self._reported = self._reported, self.counters()
        return difference(self._reported, before)

    def log_line(self) -> str:
        """`step_counters` as one line, and what balancing did for the global batch."""
        counted = line(self.step_counters())
        if not self._counters.packs:
            return counted
        balance = self.balance
        before, after, bound = (shown(imbalance) for imbalance in (balance.before, balance.after, balance.bound))
        return f"{counted}; imbalance {before} dealt to {after} ({bound} at best), {balance.num_moved:,} packs moved"

    def save_state(self) -> dict[str, Any]:
        """Local and cheap; see `BalancedLoader.save_state`."""
        return {**self._balanced.save_state(), "num_packs": self.num_packs}

    def restore_state(self, state: Any) -> None:
        """Go on where a state was saved, before the first pack; also where a `PackLoader` alone stood between two global batches.

        Raises:
            UsageError: it does not fit this loader, with every value that differs.
        """
        if isinstance(state, Mapping) and "energon" in state:
            state = self._state_of_unbalanced(state)
        elif isinstance(state, Mapping) and not isinstance(state.get("num_packs"), int):
            raise UsageError("restore_state: found no num_packs in the state, expected what save_state of such a loader returned")
        self._balanced.restore_state(state)
        self.num_packs = state["num_packs"]

    def _state_of_unbalanced(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A run that begins to balance."""
        num_packs, step, counted = int(state["num_packs"]), 0, 0
        while counted < num_packs:
            counted += self.num_microbatches(step) * self._micro_batch_size
            step += 1
        if counted != num_packs:
            raise UsageError(
                f"restore_state: found a state without balancing after {num_packs} packs of a rank, expected one between two "
                f"global batches: step {step} ends at {counted}; go on from a checkpoint at the end of a step"
            )
        return {**self._balanced.save_state(), "snapshot": state, "step": step, "yielded": 0, "num_packs": num_packs}

    def state_dict(self) -> dict[str, Any]:
        """`save_state`, as torchdata and accelerate call it."""
        return self.save_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`restore_state`, as torchdata and accelerate call it."""
        self.restore_state(state_dict)

    def close(self) -> None:
        """End the thread, the connections and the loader; no pack comes after it."""
        self._balanced.close()
        self.loader.close()

    def __enter__(self) -> BalancedPackLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_other_place(loader: PackLoader, parallel: Parallel, topology: Topology) -> None:
    here = (parallel.dp_rank, parallel.dp_size)
    if (loader.rank, loader.world_size) != here:
        raise UsageError(
            f"balanced loader: found a loader of rank {loader.rank} of {loader.world_size}, expected rank {here[0]} of {here[1]} "
            "as in this process's data-parallel group; open it with those"
        )
    if topology.num_ranks != parallel.dp_size:
        raise UsageError(
            f"balanced loader: found a topology of {topology.num_ranks} ranks, expected the {parallel.dp_size} of the "
            "data-parallel group"
        )
