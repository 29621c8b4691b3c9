"""`pack`: one call over a buffer. Which packs leave, what is handed back, and the counts that say how full they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.packing.balanced import balanced_fill
from plugin.packing.bounds import fewest_packs, sizes_of
from plugin.packing.filling import Plan, Pool, exact_fill, first_fit_decreasing
from plugin.packing.limited import LimitedPool
from plugin.packing.limits import IntArray, PackLimits, Refusal, Samples, refusals

FULL_PER_MILLE = 999
"""A pack this full is not worth waiting for."""
LEAVING_SHARE = 4
"""At least one pack in so many leaves a call, the fullest first: a buffer that nothing leaves would stop the stream."""


class Method(StrEnum):
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    EXACT_FILL = "exact_fill"
    BALANCED_FILL = "balanced_fill"
    """Tried only where images or patches limit packs, and the others are above the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """What became of the samples of one call. Every index is in exactly one of `packs`, `leftovers` and `refused`."""

    packs: tuple[IntArray, ...]
    """Indices of each pack, ascending; `shuffled` gives the order to emit them in."""
    leftovers: IntArray
    """To be handed in again, ascending: the eldest stay first."""
    leftover_age: IntArray
    """Their ages at the next call."""
    refused: IntArray
    """Samples that fit no pack, ascending."""
    refusal: npt.NDArray[np.uint8]
    """The `Refusal` of each of them."""
    method: Method
    num_tokens: int
    """Real tokens in the packs."""
    alignment_tokens: int
    """Padding of their samples to the alignment: a loss apart from packing."""
    capacity_tokens: int
    """Packs times sequence length."""

    @property
    def over_long(self) -> IntArray:
        """The refused ones that are longer than a pack."""
        over_long: IntArray = self.refused[self.refusal == Refusal.OVER_LONG]
        return over_long

    @property
    def filled_tokens(self) -> int:
        return self.num_tokens + self.alignment_tokens

    @property
    def unfilled_tokens(self) -> int:
        """The loss of packing itself."""
        return self.capacity_tokens - self.filled_tokens

    @property
    def efficiency(self) -> float:
        """Real tokens per slot; 1 when there is no pack."""
        return self.num_tokens / self.capacity_tokens if self.packs else 1.0


def pack(samples: Samples, limits: PackLimits, *, flush: bool = False, max_age: int = 5) -> Packing:
    """Pack whole samples; what is not worth emitting yet is handed back, unless `flush`.

    Args:
        max_age: a sample that was handed back so often leaves in this call, whatever its pack looks like.
    """
    if max_age < 0:
        raise UsageError(f"found max_age {max_age}, expected 0 (hand nothing back) or more calls")
    refusal = refusals(samples, limits)
    fits = np.flatnonzero(refusal == Refusal.NONE)
    sizes, ages = sizes_of(samples, limits)[fits], samples.age[fits]
    # Among equals the eldest first, then the order of the buffer (lexsort is stable, its last key counts most).
    by_rank = np.lexsort((-ages, -sizes))
    order = fits[by_rank]
    method, plan = _best_plan(samples, limits, sizes[by_rank], order)
    leaving = np.ones(len(plan.starts), bool) if flush else _leaving(plan, sizes[by_rank], ages[by_rank], limits, max_age)
    bins = np.split(order[plan.order], plan.starts[1:]) if len(plan.starts) else []
    packs = tuple(np.sort(bin_) for bin_, leaves in zip(bins, leaving, strict=True) if leaves)
    kept = [bin_ for bin_, leaves in zip(bins, leaving, strict=True) if not leaves]
    leftovers = np.sort(np.concatenate(kept)) if kept else np.zeros(0, np.int64)
    refused = np.flatnonzero(refusal)
    num_tokens = int(samples.num_tokens.sum() - samples.num_tokens[leftovers].sum() - samples.num_tokens[refused].sum())
    padded = int(sizes.sum() - sizes_of(samples, limits)[leftovers].sum()) * limits.alignment
    return Packing(
        packs=packs,
        leftovers=leftovers,
        leftover_age=samples.age[leftovers] + 1,
        refused=refused,
        refusal=refusal[refused],
        method=method,
        num_tokens=num_tokens,
        alignment_tokens=padded - num_tokens,
        capacity_tokens=len(packs) * limits.sequence_length,
    )


def shuffled(packs: Sequence[IntArray], *, worker_seed: int, sample_index: int) -> tuple[IntArray, ...]:
    """The packs of one call in the order to emit them, the same for the same two numbers (0 or more) in every numpy.

    Both methods make the packs of large samples first; emitted like that, ranks would drift apart.
    """
    # The raw stream of PCG64 is promised never to change (numpy's compatibility policy, NEP 19); that of Generator is not.
    keys = np.random.PCG64((worker_seed, sample_index)).random_raw(len(packs))
    return tuple(packs[index] for index in np.argsort(keys, kind="stable"))


def _best_plan(samples: Samples, limits: PackLimits, sizes: IntArray, order: IntArray) -> tuple[Method, Plan]:
    """The plan with fewest bins; among equals the one with most full bins, then the method named first."""
    capacity = limits.sequence_length // limits.alignment
    others = [
        (column[order], limit)
        for column, limit in ((samples.num_images, limits.max_images), (samples.num_patches, limits.max_patches))
        if limit is not None
    ]
    fills = {Method.FIRST_FIT_DECREASING: first_fit_decreasing, Method.EXACT_FILL: exact_fill}
    plans = {method: fill(Pool(sizes, capacity), sizes.tolist(), capacity) for method, fill in fills.items()}
    broken = [method for method, plan in plans.items() if any((plan.totals(column) > limit).any() for column, limit in others)]
    if broken:
        columns, most = zip(*others, strict=True)
        # A plan that keeps the limits without minding them is what minding them would give.
        for method in broken:
            plans[method] = fills[method](LimitedPool(sizes, capacity, columns, most), sizes.tolist(), capacity)
        if min(len(plan.starts) for plan in plans.values()) > fewest_packs(samples, limits):
            plans[Method.BALANCED_FILL] = balanced_fill((sizes, *columns), (capacity, *most))
    return min(plans.items(), key=lambda made: (len(made[1].starts), -int(_is_full(made[1], sizes, limits).sum())))


def _is_full(plan: Plan, sizes: IntArray, limits: PackLimits) -> npt.NDArray[np.bool_]:
    return plan.totals(sizes) * limits.alignment * 1000 >= FULL_PER_MILLE * limits.sequence_length


def _leaving(plan: Plan, sizes: IntArray, ages: IntArray, limits: PackLimits, max_age: int) -> npt.NDArray[np.bool_]:
    oldest = plan.largest(ages)
    leaving = _is_full(plan, sizes, limits) | (oldest >= max_age)
    least = -(-len(leaving) // LEAVING_SHARE)
    if leaving.sum() < least:
        # Those that leave anyway, then the fullest, then those with the eldest sample, then as they were filled.
        leaving[np.lexsort((-oldest, -plan.totals(sizes), ~leaving))[:least]] = True
    return leaving
