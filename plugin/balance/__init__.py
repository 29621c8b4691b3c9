"""Balance: the packs of one global batch to (rank, microbatch), so that ranks that wait for each other wait little, and few move.

1. `Topology` says which ranks meet at each microbatch and which share a machine; `Mode` what is balanced.
2. `assign` takes two integer costs a pack, encoder and LLM, and returns a `Plan`: the same one on every rank, whatever the
   machine, since nothing in it is a float or a tie. With 128 web-like packs a rank, ranks wait 3% of their work in expert groups
   of 8 instead of 45%, and 3.5% instead of 77 to 108% where all meet (`benchmarks/balance.py`).
3. Totals of groups are repaired by few swaps (`repair`); packs are cut into slots by both costs (`slots`, `refining`); in each
   slot a rank keeps a pack of its own if it has one (`owners`); the first one it always has (`first`).
4. What arrival cost, what the plan costs, and what no plan can beat stand in it (`measuring`).
"""

from plugin.balance.core import assign
from plugin.balance.measuring import Imbalance, lower_bound, measure
from plugin.balance.plan import Plan, Transfers
from plugin.balance.topology import Mode, Topology

__all__ = ["Imbalance", "Mode", "Plan", "Topology", "Transfers", "assign", "lower_bound", "measure"]
