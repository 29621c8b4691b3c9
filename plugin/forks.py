"""Objects that must begin anew in a forked child: its parent's threads are not there, its descriptors and locks are shared.

A hook costs a read nothing, where asking for the process id costs as much as a tenth of reading an icon.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class ForkAware(Protocol):
    """Has something that must not cross a fork."""

    def after_fork(self) -> None:
        """Called in the child, by its only thread, before anything else runs there."""


_aware: WeakSet[ForkAware] = WeakSet()


def begins_anew_after_fork(item: ForkAware) -> None:
    """Call `item.after_fork()` in every child forked from now on, as long as `item` lives."""
    _aware.add(item)


def _after_fork_in_child() -> None:
    for item in list(_aware):
        item.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
