"""What each of several real processes of a Megatron job sees of balanced data; so that spawned children find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bridge_classes
from bridge_ranks import Layout, Microbatch, digest

NUM_MICROBATCHES = 3
NUM_BEFORE, NUM_AFTER = 4, 5
"""Saved in the middle of the second of three global batches."""
COST = "qwen2_5_vl_vit+qwen3_8b"


@dataclass(frozen=True, kw_only=True)
class BalancedSeen:
    """By one rank."""

    dp_rank: int
    stage: int
    before: tuple[Microbatch, ...]
    after: tuple[Microbatch, ...]
    resumed: tuple[Microbatch, ...]
    """By a new provider that was given the state from the checkpoint."""
    arrived: tuple[Microbatch, ...]
    """Without balancing."""
    mode: str
    labels: tuple[int, ...] | None
    """Of each data-parallel rank, as the provider found them."""
    met: tuple[frozenset[int], ...]
    """Data-parallel ranks of the real groups that this rank meets in expert layers."""
    reads: bool
    validates_balanced: bool
    positions: tuple[int, int, int]
    """Of the stream at its end, and of states saved before and after it was closed."""


def config(**changes: Any) -> Any:
    """As much of a run's configuration as the callback looks at."""
    parts = {
        "train": {"micro_batch_size": 1, "iterations_to_skip": []},
        "model": {
            "seq_length": 2048,
            "sequence_parallel": False,
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "calculate_per_token_loss": False,
        },
        "dist": {"eval_context_parallel_size": None, "use_megatron_fsdp": False, "use_torch_fsdp2": False},
        "ddp": {"use_megatron_fsdp": False, "data_parallel_sharding_strategy": "no_shard"},
        "checkpoint": {"load": None, "save": None},
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        parts[part][key] = value
    return SimpleNamespace(**{part: SimpleNamespace(**values) for part, values in parts.items()})


def fire(provider: Any, *events: str, groups: Any = None, step: int = 0, consumed: int = 0, cfg: Any = None) -> None:
    """The events of a run, through Bridge's own manager."""
    import torch
    from megatron.bridge.training.callbacks import CallbackContext, CallbackManager

    from plugin.adapters.bridge import BayplanCallback

    model = torch.nn.Linear(1, 1)
    model.pg_collection = groups
    train_state = SimpleNamespace(step=step, consumed_train_samples=consumed)
    state = SimpleNamespace(cfg=cfg or config(), train_state=train_state)
    manager = CallbackManager()
    manager.add(BayplanCallback(provider))
    for event in events:
        manager.fire(event, CallbackContext(state=state, model=[model]))


def build(dataset: str, layout: Layout, groups: Any, *, balance: dict[str, Any] | None, valid: int = 0) -> tuple[Any, Any, Any]:
    """Provider, train iterator and validation stream."""
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.core.rerun_state_machine import RerunDataIterator

    from plugin.adapters.bridge import BayplanDatasetProvider

    provider = BayplanDatasetProvider(
        dataset_url=dataset,
        profile="qwen25vl",
        sequence_length=2048,
        sequence_parallel=layout.sequence_parallel,
        settings={"max_patches_per_pack": 4096, "buffer_size": 100, "cost": COST},
        num_workers=layout.num_workers,
        balance=balance,
    )
    cfg = config(model__sequence_parallel=layout.sequence_parallel, model__context_parallel_size=layout.context)
    fire(provider, "on_data_init_start", groups=groups, cfg=cfg)
    context = DatasetBuildContext(train_samples=1, valid_samples=valid, test_samples=0, pg_collection=groups)
    train, validation, _ = provider.build_datasets(context)
    return provider, RerunDataIterator(train), validation


def balanced_streams(dataset: str, folder: Path, layout: Layout) -> BalancedSeen:
    """A rank's balanced stream, saved and resumed by Bridge's functions, beside the same without balancing."""
    import torch
    from megatron.core import num_microbatches_calculator
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    size = groups.dp.size()
    rank = torch.distributed.get_rank()
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, NUM_MICROBATCHES * size, 1, size)
    save = bridge_classes.checkpointing().maybe_save_dataloader_state
    load = bridge_classes.checkpointing().maybe_load_dataloader_state
    try:
        provider, first, validation = build(dataset, layout, groups, balance=layout.balance, valid=1)
        before = _packs(first, NUM_BEFORE)
        save([], first, 1, str(folder), pg_collection=groups)
        torch.distributed.barrier()
        after = _packs(first, NUM_AFTER)
        consumed = (NUM_BEFORE + NUM_AFTER) * size
        saved = first.iterable.save_state()["position"]
        torch.distributed.barrier()  # as the last step's gradients are one
        fire(provider, "on_train_start", "on_train_end", groups=groups, step=3, consumed=consumed)
        # The groups given and Megatron's own must come to the same.
        again, second, _ = build(dataset, layout, None, balance=layout.balance)
        load(second, 1, str(folder), pg_collection=groups)
        resumed = _packs(second, NUM_AFTER)
        torch.distributed.barrier()
        fire(again, "on_train_end", groups=groups)
        _, plain, _ = build(dataset, layout, groups, balance=None)
        arrived = _packs(plain, NUM_BEFORE + NUM_AFTER)
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()
    plain.iterable.close()
    validation.close()
    loader = first.iterable.loader
    labels = loader.topology.expert_group
    return BalancedSeen(
        dp_rank=groups.dp.rank(),
        stage=groups.pp.rank(),
        before=before,
        after=after,
        resumed=resumed,
        arrived=arrived,
        mode=str(loader.mode),
        labels=None if labels is None else tuple(labels.tolist()),
        met=tuple(_coordinates(groups, group) for group in (groups.ep, groups.expt_tp)),
        reads=loader.loader.num_packs > 0,
        validates_balanced=hasattr(validation.loader, "mode"),
        positions=(first.iterable.position, saved, first.iterable.save_state()["position"]),
    )


def _packs(iterator: Any, number: int) -> tuple[Microbatch, ...]:
    return tuple(digest(next(iterator)) for _ in range(number))


def _coordinates(groups: Any, group: Any) -> frozenset[int]:
    import torch

    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, groups.dp.rank(), group=group)
    return frozenset(found)
