"""What each rank does in tests of balanced loaders over real streams of packs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from loading import SETTINGS, digest, opened

from plugin.adapters.rank_states import restore_rank, save_rank
from plugin.balance import Topology
from plugin.reorder import BalancedPackLoader, BalanceSettings, Parallel

COST = "qwen2_5_vl_vit+qwen3_8b"
MICROBATCHES = 5


@contextmanager
def streams(url: str, num_workers: int, mode: str, peers: int = 1) -> Iterator[BalancedPackLoader]:
    """Every rank reads; or replicas of so many ranks, of which the first reads."""
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size() // peers
    first = rank // peers * peers
    where = Parallel.world()
    if peers > 1:
        data_ranks = tuple(range(rank % peers, size * peers, peers))
        where = Parallel(rank=rank, data_ranks=data_ranks, replica_ranks=tuple(range(first, first + peers)))
    inner = opened(url, replace(SETTINGS, cost=COST), rank=rank // peers, world_size=size, num_workers=num_workers)
    topology = Topology(num_ranks=size, expert_group=np.zeros(size, np.int64), synchronises="microbatch")
    settings = BalanceSettings(mode=mode, readers="replica" if peers > 1 else "all")
    with BalancedPackLoader(
        inner, num_microbatches=MICROBATCHES, settings=settings, parallel=where, topology=topology
    ) as balanced:
        yield balanced


def arrival(url: str, number: int, peers: int = 1) -> list[str]:
    """Packs as they come without balancing."""
    warnings.simplefilter("ignore")
    settings = replace(SETTINGS, cost=COST)
    rank, size = dist.get_rank() // peers, dist.get_world_size() // peers
    with opened(url, settings, rank=rank, world_size=size, num_workers=0) as stream:
        return [digest(next(stream)) for _ in range(number)]


def balanced(url: str, num_workers: int, mode: str, number: int, saved_at: Sequence[int], peers: int = 1) -> dict[str, Any]:
    """Packs as they are dealt, with the tails behind states that were saved after so many: each rank of a replica restores the
    state of its reader, as trainers do it.
    """
    with streams(url, num_workers, mode, peers) as loader:
        whole, states = [], {0: loader.save_state()}
        for place in range(number):
            whole.append(digest(next(loader)))
            states[place + 1] = loader.save_state()
        counters, line, balance = loader.counters(), loader.log_line(), str(loader.balance)
    tails = {}
    for position in saved_at:
        saved: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(saved, states[position])
        with streams(url, num_workers, mode, peers) as again:
            again.restore_state(saved[dist.get_rank() // peers * peers])
            tails[position] = [digest(next(again)) for _ in range(number - position)]
    return {
        "whole": whole,
        "tails": tails,
        "counters": counters,
        "line": line,
        "balance": balance,
        "num_packs": loader.num_packs,
    }


def with_a_late_peer(url: str, number: int) -> list[str]:
    """The first global batch of replicas of two, of which one rank asks for it when its reader has closed its loader."""
    with streams(url, 0, "dp", 2) as loader:
        if dist.get_rank() == 1:
            time.sleep(2)
        return [digest(next(loader)) for _ in range(number)]


def saved_by_all(url: str, folder: str) -> tuple[list[str], list[str]]:
    """What follows a state that all ranks of replicas of two save, the reader first; and what does when all restore it."""
    rank = dist.get_rank()
    with streams(url, 0, "dp", 2) as loader:
        next(loader)
        for turn in range(2):
            if rank % 2 == turn:
                save_rank(loader, folder)
            dist.barrier()
        following = [digest(next(loader)) for _ in range(MICROBATCHES)]
    with streams(url, 0, "dp", 2) as again:
        restore_rank(again, folder)
        return following, [digest(next(again)) for _ in range(MICROBATCHES)]


def other_seed(url: str) -> None:
    """The last rank draws by another seed: some samples would come twice."""
    warnings.simplefilter("ignore")
    rank, size = dist.get_rank(), dist.get_world_size()
    inner = opened(url, replace(SETTINGS, cost=COST), rank=rank, world_size=size, num_workers=0, seed=int(rank == size - 1))
    with BalancedPackLoader(inner, num_microbatches=MICROBATCHES) as loader:
        next(loader)


def begins_to_balance(url: str, number: int) -> dict[str, Any]:
    """A run that trained without balancing for so many packs, goes on with it for a global batch, and without it again."""
    with streams(url, 0, "dp") as loader:
        for _ in range(number):
            next(loader.loader)
        state = loader.loader.save_state()
    with streams(url, 0, "dp") as loader:
        loader.restore_state(state)
        dealt = [digest(next(loader)) for _ in range(MICROBATCHES)]
        state, num_packs = loader.save_state(), loader.num_packs
    with streams(url, 0, "dp") as loader:
        loader.loader.restore_state(state["snapshot"])
        after = [digest(next(loader.loader)) for _ in range(MICROBATCHES)]
    return {"dealt": dealt, "after": after, "step": state["step"], "num_packs": num_packs}
