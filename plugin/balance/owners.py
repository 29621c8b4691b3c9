"""Who trains which pack of a slot: its own first, then packs of the same machine, then whoever has done least so far.

A rank keeps one pack of each slot in which it owns any; of wide slots about 1 - 1/e of all packs stay. The choice inside a slot
changes nothing for ranks that meet at each microbatch, so it is free for this.
"""

from __future__ import annotations

import numpy as np

from plugin.balance.keys import BoolArray, IntArray, cost_order


def owned(
    members: IntArray, costs: IntArray, owner: IntArray, ranks: IntArray, node: IntArray | None, load: IntArray
) -> IntArray:
    """The pack of each rank and slot: [group, slot, rank].

    Args:
        members: [group, slot, pack], indices into the flat costs, in the order in which the slots are trained.
        costs: flat.
        owner: flat, the rank that holds the pack.
        ranks: [group, rank].
        node: of each rank, or None.
        load: of each rank, what it has done before; it is added to.
    """
    packs = members.reshape(-1).take(cost_order(costs.take(members)))
    result, spare = _kept(packs, owner, ranks, len(load))
    nodes = None if node is None or (node[ranks] == node[ranks][:, :1]).all() else node
    for slot in range(members.shape[1]):
        _deal(result[:, slot], packs[:, slot], spare[:, slot], costs, owner, ranks, nodes, load)
    return result


def _kept(packs: IntArray, owner: IntArray, ranks: IntArray, num_ranks: int) -> tuple[IntArray, BoolArray]:
    """What each rank keeps of its own, -1 if nothing, and which packs are left: both [group, slot, width].

    Packs stand dearest first in their slots.
    """
    num_groups, num_slots, width = packs.shape
    place, group = np.full(num_ranks, -1), np.full(num_ranks, -1)
    place[ranks], group[ranks] = np.arange(width), np.arange(num_groups)[:, None]
    holder = owner.take(packs)
    is_own = group[holder] == np.arange(num_groups)[:, None, None]
    cells = np.arange(num_groups * num_slots).reshape(num_groups, num_slots, 1) * width + place[holder]
    # Written backwards, so that of several own packs in a slot the dearest is written last.
    own = np.flatnonzero(is_own)[::-1]
    kept = np.full(packs.size, -1)
    kept[cells.reshape(-1)[own]] = own
    spare = np.ones(packs.size, np.bool_)
    spare[kept[kept >= 0]] = False
    result = np.where(kept >= 0, packs.reshape(-1)[kept], -1)
    return result.reshape(packs.shape), spare.reshape(packs.shape)


def _deal(
    result: IntArray,
    packs: IntArray,
    spare: BoolArray,
    costs: IntArray,
    owner: IntArray,
    ranks: IntArray,
    node: IntArray | None,
    load: IntArray,
) -> None:
    """Fill the places of one slot in all groups that are still empty."""
    group, place = np.nonzero(result < 0)
    if len(group):
        order = np.lexsort((load[ranks[group, place]], group))
        group, place = group[order], place[order]
        surplus = packs[spare]
        if node is not None:
            surplus = _near_first(surplus, node[owner[surplus]], group, node[ranks[group, place]])
        result[group, place] = surplus
    load[ranks] += costs[result]


def _near_first(surplus: IntArray, of_pack: IntArray, group: IntArray, of_place: IntArray) -> IntArray:
    """Surplus packs in the order of the places: as many as can stay in their machine do, the others keep their order.

    Packs and places stand in the order of groups, each group with as many of one as of the other.
    """
    num_nodes = int(max(of_pack.max(), of_place.max())) + 1
    keys = [group * num_nodes + nodes for nodes in (of_pack, of_place)]
    orders = [np.argsort(key, kind="stable") for key in keys]
    counts = [np.bincount(key, minlength=(int(group[-1]) + 1) * num_nodes) for key in keys]
    matched = np.minimum(*counts)
    near = []
    for key, order, count in zip(keys, orders, counts, strict=True):
        within = np.arange(len(order)) - (np.cumsum(count) - count)[key[order]]
        is_near = np.zeros(len(order), np.bool_)
        chosen = order[within < matched[key[order]]]
        is_near[chosen] = True
        near.append((chosen, np.flatnonzero(~is_near)))
    result = np.empty_like(surplus)
    for packs, places in zip(*near, strict=True):
        result[places] = surplus[packs]
    return result
