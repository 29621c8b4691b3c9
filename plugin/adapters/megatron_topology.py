"""From the members of Megatron's process groups to what balancing asks for: who exchanges packs, who reads the same stream, and
which data-parallel ranks meet at each microbatch. Pure, without Megatron; nothing is made of sizes of groups or rank numbers.

A data-parallel coordinate is a rank in the pure data-parallel group; tensor, context and pipeline peers of a replica share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from packer.format.errors import UsageError
from plugin.reorder.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one global rank says of itself."""

    data_rank: int
    """Its data-parallel coordinate."""
    stage: int = 0
    """Of the pipeline."""
    meets: tuple[int, ...] = ()
    """The lowest global rank of each group that it meets in expert layers: that of its experts, and that of their tensors."""


def parallel_of(rank: int, data_ranks: Sequence[int], world: Sequence[Standing]) -> Parallel:
    """Args:
        rank: this process's, in the world.
        data_ranks: members of its pure data-parallel group, in the group's order.
        world: what every global rank said.

    Raises:
        UsageError: groups that do not deal the world into equal replicas.
    """
    coordinates = [world[other].data_rank for other in data_ranks]
    if coordinates != list(range(len(data_ranks))) or list(data_ranks) != sorted(data_ranks):
        raise UsageError(
            f"balance: found the data-parallel group {list(data_ranks)} whose members stand at {coordinates}, expected ascending "
            f"ranks at 0 to {len(data_ranks) - 1}; give the process groups that the model was made with"
        )
    replicas = Counter(standing.data_rank for standing in world)
    if sorted(replicas) != coordinates or len(set(replicas.values())) > 1:
        raise UsageError(
            f"balance: found {dict(sorted(replicas.items()))} ranks at data-parallel coordinates, expected as many at each of "
            f"0 to {len(data_ranks) - 1}: all of the world in one model; switch balancing off for models on parts of it"
        )
    here = world[rank].data_rank
    peers = tuple(other for other, standing in enumerate(world) if standing.data_rank == here)
    num_stages = len({standing.stage for standing in world})
    return Parallel(rank=rank, data_ranks=tuple(data_ranks), replica_ranks=peers, num_stages=num_stages)


def expert_labels(world: Sequence[Standing]) -> tuple[int, ...] | None:
    """One label for each data-parallel coordinate; those with the same one meet at each microbatch, also by way of others.

    An expert group of tensor-parallel peers holds fewer coordinates than ranks. None: no two coordinates meet.
    """
    towards = list(range(1 + max(standing.data_rank for standing in world)))
    for standing in world:
        for lowest in standing.meets:
            one, other = sorted((_label(towards, standing.data_rank), _label(towards, world[lowest].data_rank)))
            towards[other] = one
    labels = tuple(_label(towards, coordinate) for coordinate in range(len(towards)))
    return labels if len(set(labels)) < len(labels) else None


def _label(towards: list[int], coordinate: int) -> int:
    """The lowest of those joined so far, each of which points to another below it; shortens the way."""
    while towards[coordinate] != coordinate:
        towards[coordinate] = towards[towards[coordinate]]
        coordinate = towards[coordinate]
    return coordinate
