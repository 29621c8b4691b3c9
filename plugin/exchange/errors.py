"""What can go wrong between ranks.

BayplanError
|- UsageError        ranks were started with other settings, or their streams differ
`- ExchangeError     a rank failed, and told the others
   `- RankLost       a rank died, was later than the deadline, or stopped in the middle; who is known as far as ranks still answer
      `- RankLeft    a rank closed its loader, as all do at the end of training
"""

from __future__ import annotations

from packer.format.errors import BayplanError


class ExchangeError(BayplanError):
    """Packs could not be exchanged. Restart all ranks from the last checkpoint: no pack is lost by that."""


class RankLost(ExchangeError):
    """Raised as soon as it is known, in the middle of a global batch too: the trainer's collectives would wait for that rank."""


class RankLeft(RankLost):
    """No fault, unless somebody still wants packs: the next global batch is on its way when training ends."""
