"""Dealing the packs of each global batch among ranks so that none waits for another, hidden behind compute.

1. `BalancedPackLoader` (`pack_loader`) is what a trainer iterates, over a `PackLoader`; `BalancedLoader` (`loader`) is its core,
   over any source of packs. It hands out the packs of one global batch (`pool`) while `worker`, one
   background thread, prepares the next: reads it (`pulling`), compares it with its peers or is fed by them (`replicas`), gathers
   costs, has a planner deal (`planner`) and exchanges (`plugin.exchange`).
2. Who owns what: the trainer's thread owns the position, and the source while it has 0 workers; the background thread owns the
   source otherwise, and all gloo groups. A pack belongs to whoever it was handed to.
3. Resume (`state`): the source's state before the global batch, and how many of its packs were handed out. The batch is read,
   dealt and exchanged again, and what was handed out is skipped: exact at every microbatch, on as many ranks as before.
4. Ends: all ranks stop together before a global batch that any rank cannot fill; what was read for it is named.
5. Failures: what a rank's own reading raises comes up where that global batch begins, on all ranks at the same step. A rank that
   dies or is later than the deadline comes up on all others at once, in the middle of a batch too.
"""

from plugin.reorder.assigned import Assigned
from plugin.reorder.chunks import LoaderCheckpoint, chunk_iterators
from plugin.reorder.counters import Counters
from plugin.reorder.loader import BalancedLoader
from plugin.reorder.pack_loader import BalancedPackLoader, BalanceSettings
from plugin.reorder.parallel import Parallel
from plugin.reorder.planner import Plan, Planner

__all__ = [
    "Assigned",
    "BalanceSettings",
    "BalancedLoader",
    "BalancedPackLoader",
    "Counters",
    "LoaderCheckpoint",
    "Parallel",
    "Plan",
    "Planner",
    "chunk_iterators",
]
