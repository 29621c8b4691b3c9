"""Which ranks exchange packs, and which read the same stream. Found once by the trainer's integration, given to the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from packer.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Global ranks around this one."""

    rank: int = 0
    data_ranks: Sequence[int] = (0,)
    """The data-parallel group, ascending: those that read different streams and train on one global batch."""
    replica_ranks: Sequence[int] = ()
    """Tensor, context and pipeline peers, ascending, with this one: those that read the same stream. () is this rank alone."""
    num_stages: int = 1
    """Pipeline stages among the peers. With more than one, peers ask for packs at different times, so none waits for another."""

    def __post_init__(self) -> None:
        for name, ranks in (("data_ranks", self.data_ranks), ("replica_ranks", self.peers)):
            if self.rank not in ranks or any(one >= other for one, other in pairwise(ranks)):
                raise UsageError(f"parallel: found {name} {list(ranks)}, expected ascending ranks with this one, {self.rank}")
        if self.num_stages < 1 or len(self.peers) % self.num_stages:
            raise UsageError(
                f"parallel: found {self.num_stages} stages among {len(self.peers)} peers, expected a divisor: peers of all stages"
            )

    @classmethod
    def world(cls) -> Parallel:
        """Data parallel over all ranks of torch.distributed, or alone without it."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return cls()
        return cls(rank=dist.get_rank(), data_ranks=tuple(range(dist.get_world_size())))

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(self.replica_ranks) or (self.rank,)

    @property
    def dp_size(self) -> int:
        return len(self.data_ranks)

    @property
    def dp_rank(self) -> int:
        return tuple(self.data_ranks).index(self.rank)

    def reads(self, readers: str) -> bool:
        """Whether this rank reads packs: all do, or the first of each replica."""
        return readers == "all" or self.rank == self.peers[0]
