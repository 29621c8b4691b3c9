"""`assign`: from the costs of a global batch to its plan. Pure; a function of its arguments to the bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.balance.costs import Costs, checked, checked_costs
from plugin.balance.first import first_positions
from plugin.balance.keys import IdArray, IntArray
from plugin.balance.measuring import lower_bound, measure
from plugin.balance.owners import owned
from plugin.balance.plan import Plan, plan_of
from plugin.balance.refining import refined
from plugin.balance.repair import repaired
from plugin.balance.slots import kd_slots
from plugin.balance.topology import Mode, Topology

FLOOR_PER_MILLE = 10
"""A gain of less than 1% is not worth the traffic."""


def assign(
    encoder: npt.ArrayLike,
    llm: npt.ArrayLike | None,
    topology: Topology,
    mode: Mode | str = Mode.AUTO,
    *,
    first_local: bool = True,
    pipeline: bool = False,
    floor_per_mille: int = FLOOR_PER_MILLE,
    num_bytes: npt.ArrayLike | None = None,
) -> Plan:
    """Assign the packs of one global batch to ranks and microbatches.

    Args:
        encoder: integer costs [rank, position], in the order in which each rank's loader yielded its packs.
        llm: the same for the LLM, in the same unit; None balances the encoder alone.
        topology: who waits for whom.
        mode: see `Mode`.
        first_local: every rank starts with a pack it holds.
        pipeline: cheap microbatches at both ends, for pipeline stages; otherwise dearest first, cheapest last.
        floor_per_mille: nothing moves or changes its order for a predicted gain of less than this.
        num_bytes: [rank, position] sizes of the packs, to count what moves.

    Raises:
        UsageError: costs or topology that cannot be used.
    """
    costs = checked_costs(encoder, llm, topology.num_ranks)
    if isinstance(floor_per_mille, bool) or not isinstance(floor_per_mille, int) or not 0 <= floor_per_mille <= 1000:
        raise UsageError(f"found floor_per_mille {floor_per_mille!r}, expected a whole number from 0 to 1000")
    sizes = None if num_bytes is None else checked("num_bytes", num_bytes, topology.num_ranks)
    if sizes is not None and sizes.shape != costs.encoder.shape:
        raise UsageError(f"found num_bytes of shape {sizes.shape}, expected {costs.encoder.shape}: one size a pack")
    mode = topology.resolve(mode)
    meeting = topology.meeting(mode)
    arrival: IdArray = np.arange(costs.encoder.size, dtype=np.int32).reshape(costs.encoder.shape)
    before, bound = measure(costs, arrival, meeting), lower_bound(costs, meeting)
    taken = arrival
    # Not even a plan without any waiting would reach the floor: not tried.
    if _reaches(before.cost, bound.cost, floor_per_mille):
        if mode is Mode.LOCAL:
            taken = _local(costs, arrival, meeting, pipeline=pipeline)
        else:
            taken = _exchanged(costs, mode, meeting, topology.nodes, first_local=first_local, pipeline=pipeline)
    after = measure(costs, taken, meeting)
    if not _reaches(before.cost, after.cost, floor_per_mille):
        taken, after = arrival, before
    return plan_of(taken, topology.nodes, sizes, mode, (before, after, bound))


def _reaches(before: int, after: int, floor_per_mille: int) -> bool:
    return before > after and (before - after) * 1000 >= floor_per_mille * before


def _local(costs: Costs, rows: IntArray, meeting: IntArray, *, pipeline: bool) -> IntArray:
    """Each rank's packs (a row) in an order of its own that fits those of the ranks it meets."""
    taken = np.empty_like(rows)
    for ranks in _equal_groups(meeting):
        packs = rows[ranks]
        encoder, llm = (values.reshape(-1).take(packs) for values in (costs.encoder, costs.llm))
        members = packs.reshape(-1).take(kd_slots(encoder, llm, packs.shape[2])[..., 0])
        members = _in_order(members, costs, pipeline=pipeline)
        taken[ranks] = members.transpose(0, 2, 1)
    return taken


def _exchanged(
    costs: Costs, mode: Mode, meeting: IntArray, node: IntArray | None, *, first_local: bool, pipeline: bool
) -> IdArray:
    """First the pack that each rank starts with, then totals of groups, then the order inside each group."""
    rest: IntArray = np.arange(costs.encoder.size, dtype=np.int32).reshape(costs.encoder.shape)
    first = rest[:, :0]
    # Ranks that only meet at the end of the batch share a cap as well: it costs nothing.
    together = np.zeros_like(meeting) if mode is Mode.DP else meeting
    if first_local:
        first, rest = _first(costs, rest, together)
    if not rest.size:
        return first
    classes = _equal_groups(meeting)
    # By position, then by rank, so that packs of equal cost are not all taken from the first rank.
    pools: list[IntArray] = [np.ascontiguousarray(rest[ranks].transpose(0, 2, 1)).reshape(len(ranks), -1) for ranks in classes]
    total = costs.total.reshape(-1)
    load = total[first].sum(axis=1)
    sizes = np.repeat([ranks.shape[1] for ranks in classes], [len(ranks) for ranks in classes])
    if len(sizes) > 1:
        fixed = np.concatenate([load[ranks].sum(axis=1) for ranks in classes])
        pools = repaired(pools, total, sizes, fixed, _tolerance_per_mille(mode, costs.num_microbatches))
    if mode is Mode.DP:
        return np.concatenate([first, _local(costs, pools[0], together, pipeline=pipeline)], axis=1)
    taken = np.empty_like(rest)
    for ranks, pool in zip(classes, pools, strict=True):
        members = _slots(costs, pool, rest.shape[1], pipeline=pipeline)
        owner = np.repeat(np.arange(costs.num_ranks), costs.num_microbatches)
        taken[ranks] = owned(members, total, owner, ranks, node, load).transpose(0, 2, 1)
    return np.concatenate([first, taken], axis=1)


def _tolerance_per_mille(mode: Mode, num_microbatches: int) -> int:
    """How far above the mean a total may stay.

    Rank totals to 1%: a pack is paid for each one over that. Group totals to a sixth of a pack per rank: what is left weighs
    little beside the waiting inside the group, and swaps leave the machine.
    """
    return 10 if mode is Mode.DP else max(1, 160 // num_microbatches)


def _first(costs: Costs, packs: IntArray, together: IntArray) -> tuple[IntArray, IntArray]:
    """The pack each rank starts with, and its others."""
    positions = np.empty(len(packs), np.int64)
    for ranks in _equal_groups(together):
        positions[ranks] = first_positions(costs.encoder[ranks], costs.llm[ranks])
    is_first = positions[:, None] == np.arange(packs.shape[1])
    return packs[is_first].reshape(-1, 1), packs[~is_first].reshape(len(packs), -1)


def _slots(costs: Costs, pool: IntArray, num_slots: int, *, pipeline: bool) -> IntArray:
    """[group, slot, pack] of the packs of groups of one size."""
    encoder, llm = (values.reshape(-1) for values in (costs.encoder, costs.llm))
    packs = pool[:, None]
    members = packs.reshape(-1).take(kd_slots(encoder.take(packs), llm.take(packs), num_slots)[:, :, 0])
    return _in_order(refined(members, encoder, llm), costs, pipeline=pipeline)


def _equal_groups(meeting: IntArray) -> list[IntArray]:
    """Ranks [group, rank] of the groups of each size, to be worked on at once."""
    sizes = np.bincount(meeting)
    order = np.argsort(meeting, kind="stable")
    return [order[sizes[meeting[order]] == size].reshape(-1, size) for size in np.unique(sizes)]


def _in_order(members: IntArray, costs: Costs, *, pipeline: bool) -> IntArray:
    """Slots [group, slot, pack] in the order in which they are trained."""
    price = sum(values.reshape(-1).take(members).max(axis=2) for values in (costs.encoder, costs.llm))
    order = np.argsort(-price, axis=1, kind="stable")
    if pipeline:
        # The cheapest last, the second first, the third before the last, and so on.
        cheapest = order[:, ::-1]
        order = np.concatenate([cheapest[:, 1::2], cheapest[:, ::2][:, ::-1]], axis=1)
    return np.take_along_axis(members, order[:, :, None], axis=1)
