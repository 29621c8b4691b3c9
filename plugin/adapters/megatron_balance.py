"""What balancing takes from a Megatron run: settings, microbatches of each step, process groups. Imports no Megatron.

All of it is given: a calculator and groups are Megatron's own objects, and tests may hand in others.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch.distributed as dist

from packer.format.errors import UsageError
from plugin.adapters.megatron_topology import Standing, expert_labels, parallel_of
from plugin.balance import Topology
from plugin.reorder import BalanceSettings, Parallel

Synchronises = Literal["microbatch", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run's configuration says that a dataset is not told."""

    loss_per_token: bool
    synchronises: Synchronises

    @classmethod
    def of(cls, cfg: Any) -> RunFacts:
        """From Bridge's `ConfigContainer`."""
        # Other strategies leave gradients and parameters whole: nothing is waited for before the end of the batch.
        sharded = cfg.ddp.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
        megatron = (cfg.dist.use_megatron_fsdp or cfg.ddp.use_megatron_fsdp) and sharded
        meets = megatron or cfg.dist.use_torch_fsdp2
        return cls(loss_per_token=bool(cfg.model.calculate_per_token_loss), synchronises="microbatch" if meets else "batch")


def balance_settings(balance: Mapping[str, Any], *, loss_per_token: bool = False) -> BalanceSettings:
    """Raises:
    UsageError: a setting that is unknown or means nothing.
    """
    known = {each.name for each in fields(BalanceSettings)} - {"loss_per_token"}
    if unknown := sorted(set(balance) - known):
        raise UsageError(
            f"found balance {', '.join(unknown)}, expected of {', '.join(sorted(known))} (`loss_per_token` is the model's "
            "`calculate_per_token_loss`)"
        )
    return BalanceSettings(loss_per_token=loss_per_token, **balance)


def surroundings(groups: Any, synchronises: Synchronises) -> tuple[Parallel, Topology]:
    """This rank's peers, and who waits for whom, from a `ProcessGroupCollection`: one gather over the world.

    None: a process alone.
    """
    if groups is None:
        return Parallel(), Topology(num_ranks=1)
    if missing := [name for name in ("ep", "expt_tp") if getattr(groups, name, None) is None]:
        raise UsageError(
            f"balance: found process groups without {' and '.join(missing)}, expected them too: they say which ranks meet in "
            "expert layers; give the `pg_collection` of Megatron's `initialize_model_parallel`"
        )
    lowest = tuple(min(dist.get_process_group_ranks(group)) for group in (groups.ep, groups.expt_tp))
    own = Standing(data_rank=groups.dp.rank(), stage=groups.pp.rank(), meets=lowest)
    world: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(world, own)
    parallel = parallel_of(dist.get_rank(), dist.get_process_group_ranks(groups.dp), world)
    return parallel, Topology(num_ranks=parallel.dp_size, expert_group=expert_labels(world), synchronises=synchronises)


class Microbatches:
    """Microbatches of a rank at each step, ramp-up and schedules of the batch size included.

    Megatron's calculator stands where the training does; a copy of it is asked for the steps ahead, by what will have
    been consumed.
    """

    def __init__(self, calculator: Any, *, dp_size: int) -> None:
        """Args:
        calculator: Megatron Core's, of whatever kind.

        Raises:
            UsageError: it is for other ranks, or packs of more than one to a microbatch.
        """
        if calculator is None or not all(hasattr(calculator, name) for name in ("update", "get", "get_micro_batch_size")):
            raise UsageError(
                f"balance: found a {type(calculator).__name__} as Megatron's calculator of microbatches, expected one with "
                "`update` and `get`, to know the microbatches of each step ahead; call `init_num_microbatches_calculator` "
                "before the data is built, as Bridge does, or switch balancing off"
            )
        self._calculator = copy.deepcopy(calculator)
        self._dp_size = dp_size
        number, running = self._calculator.get(), self._calculator.get_current_running_global_batch_size()
        if self._calculator.get_micro_batch_size() != 1 or number * dp_size != running:
            raise UsageError(
                f"balance: found global batches of {running} in {number} microbatches of "
                f"{self._calculator.get_micro_batch_size()}, expected microbatches of 1 on {dp_size} data-parallel ranks"
            )
        self.begin(0, 0)

    def begin(self, step: int, num_consumed: int) -> None:
        """The run had consumed so many packs of all ranks before a step: what schedules go by."""
        self._starts, self._numbers = [step], [self._at(num_consumed)]
        self._step, self._reached = step, num_consumed
        """Up to which the spells of equal numbers are known."""

    def __call__(self, step: int) -> int:
        """Raises:
        UsageError: a step before the one that the run began with.
        """
        if step < self._starts[0]:
            raise UsageError(f"balance: found step {step}, expected {self._starts[0]} or a later one, where the run began")
        while self._step < step:
            self._reached += self._numbers[-1] * self._dp_size
            self._step += 1
            if (number := self._at(self._reached)) != self._numbers[-1]:
                self._starts.append(self._step)
                self._numbers.append(number)
        return self._numbers[bisect_right(self._starts, step) - 1]

    def _at(self, num_consumed: int) -> int:
        self._calculator.update(num_consumed, False)
        number: int = self._calculator.get()
        return number
