"""Signals, deaths and full shared memory around the processes that build packs: the trainer is told, and never waits."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from loading import SETTINGS, digests, opened, write_stream
from processes import REPOSITORY

from plugin.loader import PackLoader
from plugin.loader_workers import WorkerDied, refuse_dead

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")

NUM_WORKERS = 2


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


@pytest.fixture
def stream(url: str) -> Iterator[PackLoader]:
    with opened(url, num_workers=NUM_WORKERS) as made:
        yield made


def pids(stream: PackLoader) -> list[int]:
    return [worker.pid for worker in stream._loader._iterator._workers]


def test_ctrl_c_is_the_trainers_and_leaves_workers_to_save_their_state(url: str, stream: PackLoader) -> None:
    """A terminal sends it to all its processes; torch's workers end by it, and a state could not be saved any more."""
    digests(stream, NUM_WORKERS)
    for pid in pids(stream):
        os.kill(pid, signal.SIGINT)
    digests(stream, 4)
    state = stream.save_state()
    following = digests(stream, 4)
    with opened(url, num_workers=NUM_WORKERS) as again:
        again.restore_state(state)
        assert digests(again, 4) == following


def test_a_worker_that_dies_while_a_state_is_saved_is_not_waited_for(stream: PackLoader) -> None:
    class Deadly:
        def put(self, command: Any) -> None:
            os.kill(pids(stream)[1], signal.SIGKILL)

    next(stream)
    # Torch says nothing, as where a worker ends without an error.
    torch._C._remove_worker_pids(id(stream._loader._iterator))
    stream._loader._iterator._worker_pids_set = False
    stream._loader.cmd_queues[1] = Deadly()
    with pytest.raises(WorkerDied, match="save_state: found worker 1 killed by SIGKILL"):
        stream.save_state()


@pytest.mark.timeout(60)
def test_a_stream_is_closed_whatever_a_worker_held_when_it_was_killed(stream: PackLoader) -> None:
    next(stream)
    iterator = stream._loader._iterator
    torch._C._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    iterator._workers_done_event._cond.acquire()  # as the worker might have, a moment before
    iterator._workers[1].kill()
    iterator._workers[1].join()
    stream.close()
    assert not any(worker.is_alive() for worker in iterator._workers)


def test_a_pack_that_shared_memory_cannot_hold_ends_the_stream(url: str) -> None:
    """As in a container whose /dev/shm is full. The queue between the processes drops such a pack and tells nobody."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(url, replace(SETTINGS, sequence_length=16_384), num_workers=1) as stream:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # the worker inherits it; shared memory is a file
        try:
            with pytest.raises((WorkerDied, RuntimeError), match=r"unable to hand over|exited unexpectedly"):
                next(stream)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(WorkerDied, match=r"worker 0 unable to hand over what it made \(is /dev/shm full\?"):
            refuse_dead(stream._loader, "no pack")
        assert stream.save_state()["num_packs"] == 0, "what nobody was given is not lost with the worker"


TRAINER = """
import sys
from dataclasses import replace
from loading import SETTINGS, opened

with opened(sys.argv[1], replace(SETTINGS, sequence_length=int(sys.argv[2])), num_workers=2) as stream:
    next(stream)
    print(*[worker.pid for worker in stream._loader._iterator._workers], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("sequence_length", [256, 4096, 16_384])
def test_workers_end_with_a_trainer_that_is_killed(url: str, sequence_length: int) -> None:
    """Whether packs fit a pipe, fill it, or go through shared memory."""
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parents[1] / "support")])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, url, str(sequence_length)],
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(workers) == NUM_WORKERS
        trainer.kill()
        trainer.wait()
    _, left = psutil.wait_procs(workers, timeout=60)
    for worker in left:
        worker.kill()
    assert not left


def test_nothing_is_changed_in_the_trainers_own_process(url: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with opened(url) as stream:
        next(stream)
    assert signal.getsignal(signal.SIGINT) is before
