"""How few packs any packer could need: what an efficiency has to be compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.packing.limits import IntArray, PackLimits, Refusal, Samples, refusals


def lower_bound(lengths: npt.ArrayLike, capacity: int) -> int:
    """Bins that any packing of whole `lengths` needs at least: the bound L2, which is never below ceil(sum / capacity).

    S. Martello, P. Toth: Lower bounds and reduction procedures for the bin packing problem, Discrete Applied Mathematics 28
    (1990) 59-70, section 3. For a threshold k up to half the capacity: lengths above capacity - k take a bin that nothing from
    k up can join; the others above one half take a bin each, and what of the middle (k to one half) does not fit beside them
    needs more. At k = 0 that is max(number above one half, ceil(sum / capacity)). Only lengths need be tried as k.
    """
    sizes = np.sort(np.asarray(lengths, dtype=np.int64))
    if not len(sizes):
        return 0
    if sizes[0] < 0 or sizes[-1] > capacity:
        raise UsageError(f"found lengths from {sizes[0]} to {sizes[-1]}, expected 0 to the capacity {capacity}")
    before = np.concatenate([[0], np.cumsum(sizes)])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], sizes[:half]])
    closed = np.searchsorted(sizes, capacity - thresholds, side="right")
    middle = before[half] - before[np.searchsorted(sizes, thresholds, side="left")]
    beside = (closed - half) * capacity - (before[closed] - before[half])
    more = np.maximum(0, -((beside - middle) // capacity))
    return int((len(sizes) - half + more).max())


def fewest_packs(samples: Samples, limits: PackLimits) -> int:
    """Packs that the packable samples need at least: the bound by tokens, by images or by patches, whichever is highest."""
    fits = refusals(samples, limits) == Refusal.NONE
    columns = [(sizes_of(samples, limits), limits.sequence_length // limits.alignment)]
    columns += [(samples.num_images, limits.max_images)] if limits.max_images else []
    columns += [(samples.num_patches, limits.max_patches)] if limits.max_patches else []
    return max(lower_bound(column[fits], limit) for column, limit in columns)


def sizes_of(samples: Samples, limits: PackLimits) -> IntArray:
    """Padded lengths in units of the alignment."""
    return -(-samples.num_tokens // limits.alignment)
