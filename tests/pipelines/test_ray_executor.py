"""What the executor makes of faults and deaths. Ray itself is not started here; tests/test_ray_kills.py kills real workers."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any

import pytest
import ray.exceptions

from packer.convert import ConvertTask
from packer.format.errors import BayplanError, FormatError, InputError, OutputError, StorageFault
from packer.sources import InputRange
from pipelines import ray_executor
from pipelines.crumbs import Suspects
from pipelines.inputs import source_config
from pipelines.ray_executor import FAULT_DELAYS_SECONDS, MAX_DEATHS, TOLERATED_FAULTS, Listener, RayExecutor, Unit, connect
from pipelines.recipe import Resources, Source
from pipelines.tasks import ProbeTask

DEATH = ray.exceptions.WorkerCrashedError()


@pytest.fixture
def unit() -> Unit:
    source = Source(schema="text", name="web", files=("/data/a.jsonl",))
    work = InputRange(url="/data/a.jsonl", file="a.jsonl", file_size=100)
    return Unit("web", ConvertTask(source=source_config(source, "/data"), work=work))


@pytest.fixture
def executor() -> RayExecutor:
    executor = RayExecutor("/out", Resources(), {"web": 60.0}, Listener())
    executor._waiting["web"] = deque()
    return executor


def suspect(executor: RayExecutor, monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    monkeypatch.setattr(executor, "_suspects", lambda unit: Suspects(first, last))


def test_a_fault_that_may_pass_is_tried_again_with_growing_pauses(executor: RayExecutor, unit: Unit) -> None:
    for delay in FAULT_DELAYS_SECONDS:
        executor._failed(unit, StorageFault("the store is slow"))
        assert unit.not_before - time.monotonic() == pytest.approx(delay, abs=1.0)
        assert executor._waiting["web"].pop() is unit
    executor._failed(unit, StorageFault("the store is slow"))
    assert executor._waiting["web"].pop().task.source.max_faults == TOLERATED_FAULTS
    executor._failed(unit, StorageFault("the store is slow"))
    assert executor._outcome.failures == {"web": "gave up after 4 tries: the store is slow"}


@pytest.mark.parametrize("error", [InputError("the file is gone"), FormatError("a manifest is damaged")])
def test_bad_data_is_never_tried_again(executor: RayExecutor, unit: Unit, error: BayplanError) -> None:
    executor._failed(unit, error)
    assert executor._outcome.failures == {"web": str(error)}
    assert not executor._waiting["web"]


def test_an_output_that_cannot_be_written_stops_everything(executor: RayExecutor, unit: Unit) -> None:
    with pytest.raises(OutputError, match="disk full"):
        executor._failed(unit, OutputError("disk full"))


def test_an_error_of_our_own_fails_its_source_and_says_so(executor: RayExecutor, unit: Unit) -> None:
    executor._failed(unit, ZeroDivisionError("oops"))
    assert executor._outcome.failures["web"].startswith("unexpected ZeroDivisionError: oops; please report this")


def test_a_row_is_condemned_after_two_deaths_alone(executor: RayExecutor, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    suspect(executor, monkeypatch, 10, 90)
    executor._failed(unit, DEATH)
    assert isinstance(unit.runnable, ProbeTask)
    assert (unit.runnable.first, unit.runnable.last) == (10, 90)
    suspect(executor, monkeypatch, 40, 40)
    executor._failed(unit, DEATH)
    assert unit.task.condemned == frozenset()
    executor._failed(unit, DEATH)
    assert unit.task.condemned == {40}
    assert (unit.runnable.first, unit.runnable.last) == (40, 90)
    executor._done(unit)
    assert unit.runnable is unit.task


def test_deaths_at_different_rows_condemn_none(executor: RayExecutor, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    suspect(executor, monkeypatch, 10, 90)
    executor._failed(unit, DEATH)
    for offset in (20, 30, 40, 50):
        suspect(executor, monkeypatch, offset, offset)
        executor._failed(unit, DEATH)
    assert unit.task.condemned == frozenset()
    assert executor._outcome.failures == {}


def test_deaths_without_progress_end_a_source(executor: RayExecutor, unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_suspects", lambda unit: None)
    for _ in range(MAX_DEATHS):
        executor._failed(unit, DEATH)
    assert executor._outcome.failures == {}
    executor._failed(unit, DEATH)
    assert "died 13 times without getting further" in executor._outcome.failures["web"]


class Steps(list[Any]):
    """What a task still tells, ready at once; one that does not listen tells nothing that ends it."""

    name: str

    def __next__(self) -> Any:
        return self.pop(0)


@pytest.mark.parametrize("last_word", [ray.exceptions.TaskCancelledError(), DEATH, StopIteration()])
def test_only_tasks_that_do_not_listen_are_ended_by_force(
    last_word: Exception, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends the driver itself where a task that is just ending is cancelled once more."""
    cancelled = []

    def get(item: Any) -> None:
        if isinstance(item, Exception):
            raise item

    monkeypatch.setattr(ray, "cancel", lambda steps, force=False: cancelled.append((steps.name, force)))
    monkeypatch.setattr(ray, "wait", lambda steps, timeout: ([one for one in steps if one], []))
    monkeypatch.setattr(ray, "get", get)
    deaf, listening, late = Steps(["progress"]), Steps(["progress", last_word]), Steps([last_word])
    deaf.name, listening.name, late.name = "deaf", "listening", "late"
    ray_executor._cancel([dataclasses.replace(unit, steps=steps) for steps in (deaf, listening, late)])
    assert cancelled == [("deaf", False), ("listening", False), ("late", False), ("deaf", True)]


def test_a_wrong_address_fails_at_once() -> None:
    with pytest.raises(BayplanError, match=r"no Ray cluster answers at 127\.0\.0\.1:1: Connection refused"):
        connect("127.0.0.1:1", None)


def test_the_source_with_the_fewest_tasks_running_comes_next(
    executor: RayExecutor, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Worker:
        def options(self, **_: object) -> Worker:
            return self

        def remote(self, task: ConvertTask, url: str, timeout_seconds: float) -> object:
            started.append(task.source.name)
            return object()

    monkeypatch.setattr(ray_executor, "_work", Worker())
    monkeypatch.setattr(executor, "_slots", lambda: 4)
    executor._timeouts["small"] = 60.0
    small = Source(schema="text", name="small", files=("/data/b.jsonl",))
    task = ConvertTask(source=source_config(small, "/data"), work=unit.task.work)  # type: ignore[arg-type]
    executor._waiting["web"].extend(Unit("web", unit.task) for _ in range(9))
    executor._waiting["small"] = deque(Unit("small", task) for _ in range(2))
    executor._submit()
    assert started == ["web", "small", "web", "small"]
