"""Room for a connection to each rank of a group: 4,096 ranks do not fit under the usual limit of 1,024 open files."""

from __future__ import annotations

import logging
import os
import resource

from packer.format.errors import UsageError

SPARE = 256
"""For files and connections that come later."""
_log = logging.getLogger(__name__)


def make_room(num_connections: int) -> None:
    """Raise this process's own limit where that is needed and allowed.

    Raises:
        UsageError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _num_open() + num_connections + SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"found a limit of {hard:,} open files, expected at least {needed:,} to connect to {num_connections:,} ranks; raise "
            "it for the job (`ulimit -Hn`, or LimitNOFILE of the service or container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    _log.info("limit of open files raised from %d to %d, to connect to %d ranks", soft, needed, num_connections)


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0
