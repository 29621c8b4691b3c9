"""Slots: which packs are trained at the same time. k-d cuts by encoder and LLM cost, for many groups of ranks at once.

A node is a range of slots with the packs that fill them, `rows` rows of `num_slots * width` packs each. Ranks that may exchange
packs form one row as wide as the group; without exchange every rank is a row of width one. All rows of a node are cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugin.balance.keys import IdArray, IntArray, cost_order


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of equally many slots, their packs sorted by falling cost, once for each of the two costs."""

    by_encoder: IdArray
    """[node, row, pack]."""
    by_llm: IdArray
    places: IntArray
    """[node]: the first slot of the node, counted over all groups."""


def kd_slots(encoder: IntArray, llm: IntArray, num_slots: int) -> IdArray:
    """Members of each slot: [group, slot, row, width], as indices into the flat costs.

    Args:
        encoder: [group, row, pack], each row in the order that breaks ties.
        llm: the same shape.
        num_slots: of each group; divides the packs of a row.
    """
    num_groups, num_rows, num_packs = encoder.shape
    width = num_packs // num_slots
    members = np.empty((num_groups * num_slots, num_rows, width), np.int32)
    whole = Nodes(cost_order(encoder), cost_order(llm), np.arange(num_groups) * num_slots)
    costs = _narrow(encoder), _narrow(llm)
    waiting = {num_slots: [whole]}
    while waiting:
        count = max(waiting)
        nodes = _joined(waiting.pop(count))
        if count == 1:
            members[nodes.places] = nodes.by_encoder
            break
        high = count // 2
        for size, half in zip((high, count - high), _cut(nodes, costs, high, count - high, width), strict=True):
            waiting.setdefault(size, []).append(half)
    return members.reshape(num_groups, num_slots, num_rows, width)


def _narrow(costs: IntArray) -> IntArray:
    """Flat, in half the memory if that holds them: most of the time goes into gathering costs."""
    flat = costs.reshape(-1)
    return flat.astype(np.int32) if int(flat.max()) <= np.iinfo(np.int32).max else flat


def _joined(parts: list[Nodes]) -> Nodes:
    if len(parts) == 1:
        return parts[0]
    return Nodes(
        np.concatenate([part.by_encoder for part in parts]),
        np.concatenate([part.by_llm for part in parts]),
        np.concatenate([part.places for part in parts]),
    )


def _cut(nodes: Nodes, costs: tuple[IntArray, IntArray], high: int, low: int, width: int) -> tuple[Nodes, Nodes]:
    """Dearest packs and the rest, by the cost whose cut leaves the smaller sum of maxima over the slots of both halves."""
    size = high * width
    orders = nodes.by_encoder, nodes.by_llm
    prices = [_price(order, costs[i], costs[1 - i], high, low, width) for i, order in enumerate(orders)]
    by_encoder = (prices[0] <= prices[1])[:, None, None]
    chosen, other = np.where(by_encoder, *orders), np.where(by_encoder, *orders[::-1])
    is_dear = np.zeros(len(costs[0]), np.bool_)
    is_dear[chosen[:, :, :size]] = True
    dear = is_dear.take(other)
    shape = (*other.shape[:2], -1)
    halves = []
    for part, others in ((chosen[:, :, :size], other[dear]), (chosen[:, :, size:], other[~dear])):
        rest = others.reshape(shape)
        halves.append((np.where(by_encoder, part, rest), np.where(by_encoder, rest, part)))
    return Nodes(*halves[0], nodes.places), Nodes(*halves[1], nodes.places + high)


def _price(order: IdArray, cost: IntArray, other: IntArray, high: int, low: int, width: int) -> IntArray:
    """Of a cut of each node: slots times maxima, of the dearest and of the rest."""
    size = high * width
    others = other.take(order)
    halves = ((high, 0, others[:, :, :size]), (low, size, others[:, :, size:]))
    dearest, cheapest = (
        number * (cost.take(order[:, :, first]).max(axis=1).astype(np.int64) + rest.max(axis=(1, 2)))
        for number, first, rest in halves
    )
    price: IntArray = dearest + cheapest
    return price
