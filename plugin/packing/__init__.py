"""Sequence packing: whole samples into sequences of `sequence_length` tokens. Pure integers: numpy alone, no torch, no I/O.

1. `PackLimits` says what a pack may hold, `Samples` what there is: columns of the index, and how long each has waited.
2. `pack` plans all of it by first-fit decreasing and by exact fill (`filling`), where images or patches are what limits packs
   by balanced fill too (`limited`, `balanced`), and takes the plan with fewest packs.
3. Packs that are full, or that hold a sample which has waited long enough, leave; the samples of the others are handed back to
   the buffer with their new ages. Unfilled packs are nearly the whole loss: 99.97% instead of 99.6% on web-like lengths with a
   buffer of 1,000 (`benchmarks/packing.py`). `flush=True` hands nothing back.
4. A sample that fits no pack, however empty, is refused with its reason: never cut, never dropped unseen.
"""

from plugin.packing.bounds import fewest_packs, lower_bound
from plugin.packing.core import Packing, pack, shuffled
from plugin.packing.limits import PackLimits, Refusal, Samples, refusals

__all__ = ["PackLimits", "Packing", "Refusal", "Samples", "fewest_packs", "lower_bound", "pack", "refusals", "shuffled"]
