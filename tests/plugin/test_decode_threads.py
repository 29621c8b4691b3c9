"""Work of one pack on several threads: in order, one error at a time, and nothing of it crosses a fork."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from plugin.decode_threads import DecodeThreads

may_fork = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[DecodeThreads]:
    threads = DecodeThreads(request.param)
    yield threads
    threads.close()
    assert not any(thread.name.startswith("bayplan-decode") for thread in threading.enumerate())


def test_results_come_in_the_order_of_the_items(threads: DecodeThreads) -> None:
    assert threads.map(lambda number: number**2, range(100)) == [number**2 for number in range(100)]
    assert threads.map(lambda number: number, []) == []


def test_so_many_run_at_once() -> None:
    threads, together = DecodeThreads(3), threading.Barrier(3)
    assert sorted(threads.map(lambda _: together.wait(60), range(3))) == [0, 1, 2]
    threads.close()


def test_an_error_is_raised_and_the_next_call_works(threads: DecodeThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        threads.map(lambda number: 1 // number, [1, 0, 2])
    assert threads.map(str, [1]) == ["1"]


def test_closed_ones_begin_again(threads: DecodeThreads) -> None:
    for _ in range(3):
        assert threads.map(str, [1, 2]) == ["1", "2"]
        threads.close()


def test_a_copy_in_another_process_has_threads_of_its_own(threads: DecodeThreads) -> None:
    threads.map(str, [1])
    twin = pickle.loads(pickle.dumps(threads))
    assert twin.map(str, [2]) == ["2"]
    twin.close()


def _in_child(threads: DecodeThreads, connection: Any) -> None:
    connection.send(threads.map(str, [1, 2, 3]))
    threads.close()


@may_fork
def test_a_forked_child_has_threads_of_its_own(threads: DecodeThreads) -> None:
    threads.map(str, [1])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(threads, theirs))
    child.start()
    assert ours.poll(60), "the child waits for its parent's threads"
    assert ours.recv() == ["1", "2", "3"]
    child.join(60)
    assert (child.exitcode, threads.map(str, [4])) == (0, ["4"])
