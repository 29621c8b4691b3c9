"""The processes that build packs under an Energon loader: how they begin, which of them have died, and how they are ended."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.queues
import multiprocessing.util
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import get_worker_info

from packer.format.errors import BayplanError

logger = logging.getLogger(__name__)

_SECONDS_TO_END = 1.0
"""A process that is killed closes its connections a moment before it has ended."""
_SECONDS_BETWEEN_LOOKS = 0.5
_NOT_HANDED_OVER = 74
"""Exit code: the one that `sysexits.h` has for input and output."""


class WorkerDied(BayplanError):
    """A loader worker ended in the middle of its work, by no error of its own."""


def begin_worker(trainer: int | None) -> None:
    """In a loader worker, before its first pack; elsewhere nothing. May be called again.

    Args:
        trainer: the process it was forked from, which may have ended since; None: the one that is its parent now.
    """
    if get_worker_info() is None or threading.current_thread() is not threading.main_thread():
        return
    # Ctrl-C goes to every process of a terminal: the trainer decides, and workers must live to tell it where they are.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A queue forgets what it cannot send, and the trainer would wait for that pack for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_end_unsent)  # type: ignore[attr-defined]
    _end_with(os.getppid() if trainer is None else trainer)


@cache
def _end_with(parent: int) -> None:
    """A trainer that is killed reads no more, and a worker would wait at its own end until all it made has been read."""

    def end() -> None:
        # As torch's workers look for it; `multiprocessing.parent_process` is not the parent where a server forks them.
        if os.getppid() != parent:
            os._exit(_NOT_HANDED_OVER)

    multiprocessing.util.Finalize(None, end, exitpriority=0)


def _end_unsent(error: BaseException, unsent: object) -> None:
    logger.error("this loader worker ends, since what it made could not be handed to the trainer: %s", error)
    os._exit(_NOT_HANDED_OVER)


class _Answers:
    """A queue of answers of a loader's workers, which is not waited for when one of them has died."""

    def __init__(self, answers: Any, loader: Any) -> None:
        self._answers, self._loader = answers, loader

    def get(self) -> Any:
        while True:
            try:
                return self._answers.get(timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Empty:
                refuse_dead(self._loader, "save_state")


def worker_states(loader: Any) -> Any:
    """What Energon's `save_state_rank` gives, which alone would wait for the answers of dead workers for ever.

    Raises:
        WorkerDied: there is one.
    """
    refuse_dead(loader, "save_state")
    answers = getattr(loader, "result_queues", None)
    if answers is None:
        return loader.save_state_rank()
    loader.result_queues = [_Answers(each, loader) for each in answers]
    try:
        return loader.save_state_rank()
    except (OSError, RuntimeError, EOFError) as error:  # an answer is fetched from the process that gave it
        refuse_dead(loader, "save_state", error)
        raise
    finally:
        loader.result_queues = answers


def restore_workers(loader: Any, state: Any) -> list[int]:
    """Energon's `restore_state_rank`, whatever was restored before.

    Args:
        state: None: of a loader that had not begun.

    Returns:
        Of each worker, the packs that it builds again and does not hand out; none without workers.
    """
    loader.restore_state_rank(state)
    if not loader.num_workers:
        return []
    if state is None:  # which Energon takes for nothing to do
        loader.dataset.restore_checkpoint(None, worker_offset=0)
        loader._worker_sample_counters = [-1] * loader.num_workers
        loader._next_worker_id = 0
        return [0] * loader.num_workers
    # Energon leaves packs that are built again out of its count, and a worker that gave none before the next state was saved
    # would give them once more.
    replayed = [worker.offset for worker in state.worker_states]
    loader._worker_sample_counters = [sum(each) for each in zip(loader._worker_sample_counters, replayed, strict=True)]
    return replayed


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


def let_go(error: BaseException | None, outside: BaseException | None) -> None:
    """Of all that was in hand where an error struck. A worker waits for as long as a connection to it is half open, and answers
    nobody else.

    Args:
        outside: what was being handled before the loader was asked, which is not its own.
    """
    while error is not None and error is not outside:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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
    if exit_code == _NOT_HANDED_OVER:
        return "unable to hand over what it made (is /dev/shm full? in a container it has 64 MB unless told otherwise)"
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
    if any(worker.exitcode for worker in iterator._workers):
        # One that died may hold the lock of the event that tells the others to end.
        for worker in iterator._workers:
            worker.kill()
        iterator._workers_done_event = multiprocessing.Event()
    try:
        iterator._shutdown_workers()
    except RuntimeError as error:
        # As above; the others were ended all the same.
        logger.warning("while loader workers were ended: %s", error)


def _iterator_of(loader: Any) -> Any:
    """torch's, which has the processes; None without workers and before the first pack."""
    return getattr(loader, "_iterator", None)
