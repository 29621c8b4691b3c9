"""The processes that build packs under an Energon loader: which of them have died, and how they are ended."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from packer.format.errors import BayplanError

logger = logging.getLogger(__name__)

_SECONDS_TO_END = 1.0
"""A process that is killed closes its connections a moment before it has ended."""


class WorkerDied(BayplanError):
    """A loader worker ended in the middle of its work, by no error of its own."""


def refuse_dead(loader: Any, what: str, error: BaseException | None = None) -> None:
    """Args:
        loader: Energon's. what: cannot be done without them, for the message. error: what was seen of it.

    Raises:
        WorkerDied: saying which worker, and by what it ended.
    """
    workers = getattr(_iterator_of(loader), "_workers", ())
    if workers and error is not None:
        _wait_for_end(workers)
    dead = [f"worker {number} {_end_of(worker.exitcode)}" for number, worker in enumerate(workers) if not worker.is_alive()]
    if dead:
        raise WorkerDied(
            f"{what}: found {', '.join(dead)}, expected all loader workers alive; the machine's log may say why, above all that "
            "memory ran out; resume from the latest state"
        ) from error


def _wait_for_end(workers: Sequence[Any]) -> None:
    """Until one of them has ended, so that it can be named."""
    deadline = time.monotonic() + _SECONDS_TO_END
    while time.monotonic() < deadline:
        try:
            for sentinel in wait([worker.sentinel for worker in workers], _SECONDS_TO_END):
                next(worker for worker in workers if worker.sentinel == sentinel).join()
            return
        except RuntimeError:
            continue  # torch tells of a worker that was killed by raising wherever the trainer is


def _end_of(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def shut_down(loader: Any) -> None:
    """End all workers; may be called again."""
    iterator = _iterator_of(loader)
    if iterator is None:
        return
    try:
        iterator._shutdown_workers()
    except RuntimeError as error:
        # As above; the others were ended all the same.
        logger.warning("while loader workers were ended: %s", error)


def _iterator_of(loader: Any) -> Any:
    """torch's, which has the processes; None without workers and before the first pack."""
    return getattr(loader, "_iterator", None)
