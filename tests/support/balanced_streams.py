"""What each rank does in tests of balanced loaders over real streams of packs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from loading import SETTINGS, digest, opened

from plugin.balance import Topology
from plugin.reorder import Assigned, BalancedLoader, Parallel

COST = "qwen2_5_vl_vit+qwen3_8b"
MICROBATCHES = 5


@contextmanager
def streams(url: str, num_workers: int, mode: str) -> Iterator[tuple[Any, Any]]:
    warnings.simplefilter("ignore")
    size, rank = dist.get_world_size(), dist.get_rank()
    settings = replace(SETTINGS, cost=COST)
    with opened(url, settings, rank=rank, world_size=size, num_workers=num_workers) as inner:
        groups = np.zeros(size, np.int64)
        balanced = BalancedLoader(
            inner,
            parallel=Parallel.world(),
            planner=Assigned(topology=Topology(num_ranks=size, expert_group=groups, synchronises="microbatch"), mode=mode),
            num_microbatches=MICROBATCHES,
            profile=inner.fingerprint,
            cost=inner.encoder.builder.cost.fingerprint,
            sequence_length=settings.sequence_length,
        )
        yield inner, balanced
        balanced.close()


def arrival(url: str, number: int) -> list[str]:
    """Packs as they come without balancing."""
    warnings.simplefilter("ignore")
    settings = replace(SETTINGS, cost=COST)
    with opened(url, settings, rank=dist.get_rank(), world_size=dist.get_world_size(), num_workers=0) as stream:
        return [digest(next(stream)) for _ in range(number)]


def balanced(url: str, num_workers: int, mode: str, number: int, saved_at: int) -> dict[str, Any]:
    """Packs as they are dealt, with the tail behind a state that was saved after so many."""
    with streams(url, num_workers, mode) as (_, loader):
        whole = [digest(next(loader)) for _ in range(saved_at)]
        state = loader.save_state()
        whole += [digest(next(loader)) for _ in range(number - saved_at)]
        counters = loader.counters
    with streams(url, num_workers, mode) as (_, again):
        again.restore_state(state)
        tail = [digest(next(again)) for _ in range(number - saved_at)]
    return {"whole": whole, "tail": tail, "counters": str(counters)}
