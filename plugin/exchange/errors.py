"""What can go wrong between ranks.

BayplanError
|- UsageError        ranks were started with other settings, or their streams differ
`- ExchangeError     a rank died, was late or failed; the message says which, as far as it is known
"""

from __future__ import annotations

from packer.format.errors import BayplanError


class ExchangeError(BayplanError):
    """Packs could not be exchanged. Restart all ranks from the last checkpoint: no pack is lost by that."""
