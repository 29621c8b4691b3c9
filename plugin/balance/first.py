"""The first microbatch: a pack that every rank already holds, so that training starts before anything has moved."""

from __future__ import annotations

import numpy as np

from plugin.balance.keys import IntArray

FRACTIONS = (0, 2, 4)
"""Caps tried: the encoder cost below which every rank has one pack, half of its packs (in quarters), all of them"""


def first_positions(encoder: IntArray, llm: IntArray) -> IntArray:
    """The position each rank trains first: its dearest pack under a cap that all ranks of the group share.

    Of the caps tried, each group takes that under which its ranks wait least for each other.

    Args:
        encoder: [group, rank, position].
        llm: the same shape.
    """
    num_groups, num_ranks, num_packs = encoder.shape
    by_cost = np.sort(encoder, axis=2)
    total = encoder + llm
    best = np.zeros((num_groups, num_ranks), np.int64)
    least = np.full(num_groups, np.iinfo(np.int64).max)
    for fraction in FRACTIONS:
        caps = by_cost[:, :, (num_packs - 1) * fraction // FRACTIONS[-1]].max(axis=1)
        fits = encoder <= caps[:, None, None]
        lightest = np.where(fits, llm, np.iinfo(np.int64).max).min(axis=2).max(axis=1)
        fits &= llm <= lightest[:, None, None]
        positions = np.where(fits, total, -1).argmax(axis=2)
        parts = [np.take_along_axis(costs, positions[:, :, None], axis=2)[:, :, 0] for costs in (encoder, llm)]
        waiting = sum(num_ranks * part.max(axis=1) - part.sum(axis=1) for part in parts)
        better = waiting < least
        best[better], least[better] = positions[better], waiting[better]
    return best
