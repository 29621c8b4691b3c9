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
from plugin.reorder import BalancedPackLoader, BalanceSettings

COST = "qwen2_5_vl_vit+qwen3_8b"
MICROBATCHES = 5


@contextmanager
def streams(url: str, num_workers: int, mode: str) -> Iterator[tuple[Any, Any]]:
    warnings.simplefilter("ignore")
    size, rank = dist.get_world_size(), dist.get_rank()
    settings = replace(SETTINGS, cost=COST)
    inner = opened(url, settings, rank=rank, world_size=size, num_workers=num_workers)
    topology = Topology(num_ranks=size, expert_group=np.zeros(size, np.int64), synchronises="microbatch")
    settings = BalanceSettings(mode=mode)
    with BalancedPackLoader(inner, num_microbatches=MICROBATCHES, settings=settings, topology=topology) as balanced:
        yield inner, balanced


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
        counters, line, balance = loader.counters(), loader.log_line(), str(loader.balance)
    with streams(url, num_workers, mode) as (_, again):
        again.restore_state(state)
        tail = [digest(next(again)) for _ in range(number - saved_at)]
    return {"whole": whole, "tail": tail, "counters": counters, "line": line, "balance": balance, "num_packs": loader.num_packs}


def begins_to_balance(url: str, number: int) -> dict[str, Any]:
    """A run that trained without balancing for so many packs, goes on with it for a global batch, and without it again."""
    with streams(url, 0, "dp") as (inner, _):
        for _ in range(number):
            next(inner)
        state = inner.save_state()
    with streams(url, 0, "dp") as (_, loader):
        loader.restore_state(state)
        dealt = [digest(next(loader)) for _ in range(MICROBATCHES)]
        state, num_packs = loader.save_state(), loader.num_packs
    with streams(url, 0, "dp") as (inner, _):
        inner.restore_state(state["snapshot"])
        after = [digest(next(inner)) for _ in range(MICROBATCHES)]
    return {"dealt": dealt, "after": after, "step": state["step"], "num_packs": num_packs}
