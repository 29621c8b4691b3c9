"""Better slots: two slots of a group are thrown together and dealt anew, wherever that makes the sum of their maxima smaller.

Of two slots, one takes the dearest packs of both costs and the other the packs inside a box (encoder cost, LLM cost); cuts by one
cost alone are the two extremes. Every change lowers the cost of its group, so this may end after any round; it takes a tenth of
the waiting away.
"""

from __future__ import annotations

import numpy as np

from plugin.balance.keys import BoolArray, IntArray

NUM_BOXES = 8
"""Boxes tried between the cut by encoder cost and the cut by LLM cost."""
ROUNDS = (6, 18)
"""Fewest and most."""
BUDGET = 1 << 18
"""Packs times rounds, some 40 ms. Spent on the dearest groups, since all others wait for them."""


def refined(members: IntArray, encoder: IntArray, llm: IntArray) -> IntArray:
    """Members [group, slot, pack] with a sum of maxima that is never larger in any group; costs are flat."""
    num_groups, num_slots, width = members.shape
    if num_slots < 2 or width < 2:
        return members
    size = num_slots * width
    number = min(num_groups, max(1, BUDGET // (size * ROUNDS[0])))
    price = (encoder.take(members).max(axis=2) + llm.take(members).max(axis=2)).sum(axis=1)
    groups = np.argsort(-price, kind="stable")[:number]
    result = members.copy()
    result[groups] = _refined(members[groups], encoder, llm, min(max(BUDGET // (size * number), ROUNDS[0]), ROUNDS[1]))
    return result


def _refined(members: IntArray, encoder: IntArray, llm: IntArray, num_rounds: int) -> IntArray:
    num_groups, num_slots, width = members.shape
    flat = members.reshape(-1, width).copy()
    start = np.arange(0, len(flat), num_slots)[:, None]
    dearest = np.stack([encoder.take(flat).max(axis=1), llm.take(flat).max(axis=1)])
    for number in range(num_rounds):
        left, right = _pairs(num_slots, number)
        keys = (dearest[0], dearest[1], dearest.sum(axis=0))[number % 3].reshape(num_groups, num_slots)
        order = np.argsort(keys, axis=1, kind="stable") + start
        one, two = order[:, left].reshape(-1), order[:, right].reshape(-1)
        pool = np.concatenate([flat[one], flat[two]], axis=1)
        better, high, low = _dealt(pool, encoder, llm, dearest[:, one].sum(axis=0) + dearest[:, two].sum(axis=0))
        for slots, packs in ((one[better], high), (two[better], low)):
            flat[slots] = packs
            dearest[:, slots] = encoder.take(packs).max(axis=1), llm.take(packs).max(axis=1)
    return flat.reshape(members.shape)


def _pairs(num_slots: int, number: int) -> tuple[IntArray, IntArray]:
    """Neighbours at distance 1, 2, ... in some order of the slots; every slot is in one pair at most."""
    distance = min(1 + number // 6, num_slots // 2)
    offset = distance * (number // 3 % 2)
    left = np.arange(offset, num_slots - distance)
    left = left[(left - offset) // distance % 2 == 0]
    return left, left + distance


def _dealt(pool: IntArray, encoder: IntArray, llm: IntArray, now: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Rows of `pool` that a new deal makes cheaper than `now`, and the packs of the two slots of each."""
    width = pool.shape[1] // 2
    pool = np.take_along_axis(pool, np.argsort(llm.take(pool), axis=1, kind="stable"), axis=1)
    costs, others = encoder.take(pool), llm.take(pool)
    limits = np.sort(costs, axis=1)[:, width - 1 + width * np.arange(NUM_BOXES + 1) // NUM_BOXES]
    top = costs.max(axis=1) + others[:, -1]
    best, chosen = now, np.full(len(pool), -1)
    for box, limit in enumerate(limits.T):
        inside = costs <= limit[:, None]
        count = np.cumsum(inside, axis=1, dtype=np.int32)
        price = limit + others[np.arange(len(pool)), (count >= width).argmax(axis=1)]
        # Between the extremes the other slot is taken to hold the dearest of both costs.
        price += top if 0 < box < NUM_BOXES else _dearest(~(inside & (count <= width)), costs, others)
        cheaper = price < best
        best, chosen = np.where(cheaper, price, best), np.where(cheaper, box, chosen)
    better = np.flatnonzero(chosen >= 0)
    inside = costs[better] <= limits[better, chosen[better]][:, None]
    low = inside & (np.cumsum(inside, axis=1, dtype=np.int32) <= width)
    changed = pool[better]
    return better, changed[~low].reshape(-1, width), changed[low].reshape(-1, width)


def _dearest(which: BoolArray, costs: IntArray, others: IntArray) -> IntArray:
    price: IntArray = np.where(which, costs, 0).max(axis=1) + np.where(which, others, 0).max(axis=1)
    return price
