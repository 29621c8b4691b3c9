"""Runs tasks on Ray: a fair share per source, bounded in flight, deaths and faults counted here and nowhere else.

A death is laid at the door of a row only when the row, worked on alone, killed two workers. Bad data is never tried again;
faults that may pass are, with growing pauses. Ray's own retries are off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from packer.convert import Step
from packer.format.errors import BayplanError, OutputError, StorageFault, UsageError
from packer.storage import may_pass
from pipelines.crumbs import Crumb, Suspects, take_crumb
from pipelines.recipe import Resources
from pipelines.tasks import Result, Task, condemning, named_row, position_word, probe_of, run_task, tolerating

FAULT_DELAYS_SECONDS: tuple[float, ...] = (5.0, 30.0, 120.0)
"""Pauses before a task is run again after a fault that may pass."""
TOLERATED_FAULTS = 20
"""In the last try: images in a row whose store keeps failing that go to quarantine; more of them are an outage."""
MAX_CONDEMNED = 100
"""Rows of one task that kill their workers, before what kills them is taken to be no row: a rule, a schema, the machine."""
MAX_DEATHS = 12
"""Deaths of a task's workers without one step forward, before its source is given up."""
_DEATHS_ALONE = 2
_REPORT_SECONDS = 0.5
_POLL_SECONDS = 0.2
_CRUMB_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_CANCEL_SECONDS = 5.0
_DEATHS = (
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ObjectLostError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.RaySystemError,
)


@dataclass(frozen=True, slots=True)
class Started:
    """A worker began: where its crumb lies."""

    node_id: str
    crumb_path: str


@dataclass(slots=True)
class Progress:
    """Steps since the last report."""

    num_rows: int = 0
    num_quarantined: int = 0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Unit:
    """A task and what happened to it so far."""

    source: str
    task: Task
    num_faults: int = 0
    num_deaths: int = 0
    num_condemned: int = 0
    deaths_alone: Counter[int] = field(default_factory=Counter)
    furthest: int = -1
    probe: Suspects | None = None
    """Set while the suspects of a death are tried alone."""
    not_before: float = 0.0
    started: Started | None = None
    steps: Any = None

    @property
    def runnable(self) -> Task:
        """The task itself, or the probe of its suspects."""
        return self.task if self.probe is None else probe_of(self.task, self.probe.first, self.probe.last)


class Listener:
    """Told what happens; progress displays override what they show."""

    def queued(self, source: str, count: int) -> None:
        """Tasks of a source were queued."""

    def started(self, source: str) -> None:
        """A task of a source began on a worker."""

    def advanced(self, source: str, progress: Progress) -> None:
        """A task made steps."""

    def finished(self, source: str) -> None:
        """A task is done."""

    def say(self, source: str, message: str) -> None:
        """Something a person should know."""

    def tick(self) -> None:
        """Called a few times a second."""


STOPPED = "stopped; what is committed stays: run the same command again to go on"


class Interrupted(BayplanError):
    """The user stopped the job."""


@dataclass(slots=True)
class Outcome:
    """What became of the tasks."""

    results: dict[str, list[Result]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Source -> why it was given up."""


def connect(address: str | None, workers: int | None) -> None:
    """Join the cluster at `address` (or the one this process was submitted to), or start Ray on this machine.

    Raises:
        BayplanError: when there is no such cluster or Ray does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    address = address or os.environ.get("RAY_ADDRESS")
    _check_address(address)
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            ray.init(
                address="local",
                num_cpus=workers or os.cpu_count(),
                include_dashboard=False,
                object_store_memory=100 << 20,
                **quiet,
            )
    except Exception as error:  # Ray raises its own, and plain ones, for a node that does not start
        raise BayplanError(f"cannot use Ray at {address or 'this machine'}: {error}") from error


def _check_address(address: str | None) -> None:
    """Fail within seconds where nothing listens; Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise BayplanError(
            f"no Ray cluster answers at {address}: {error.strerror or error}: check the address and the port"
        ) from error


@ray.remote(max_retries=0, num_returns="streaming")
def _work(task: Task, dataset_url: str, timeout_seconds: float) -> Iterator[Started | Progress | Result]:
    with Crumb(timeout_seconds) as crumb:
        yield Started(ray.get_runtime_context().get_node_id(), crumb.path)
        progress, reported = Progress(), time.monotonic()
        for item in run_task(task, dataset_url, crumb):
            if isinstance(item, Step):
                progress.num_rows += item.num_rows
                progress.num_quarantined += item.num_quarantined
                progress.num_bytes += item.num_bytes
                if time.monotonic() - reported > _REPORT_SECONDS:
                    yield progress
                    progress, reported = Progress(), time.monotonic()
            else:
                yield item
        yield progress


@ray.remote(max_retries=0, num_cpus=0)
def _take_crumb(path: str) -> Suspects | None:
    return take_crumb(path)


class RayExecutor:
    """Runs units until all are done, given up, or the user stops."""

    def __init__(
        self,
        dataset_url: str,
        resources: Resources,
        timeouts: dict[str, float],
        listener: Listener,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._dataset_url = dataset_url
        self._timeouts = timeouts
        self._listener = listener
        self._should_stop = should_stop
        self._options: dict[str, Any] = {"num_cpus": resources.num_cpus}
        if resources.memory_bytes is not None:
            self._options["memory"] = resources.memory_bytes
        if resources.custom:
            self._options["resources"] = dict(resources.custom)
        self._max_in_flight = resources.max_tasks_in_flight
        self._waiting: dict[str, deque[Unit]] = {}
        self._running: list[Unit] = []
        self._outcome = Outcome()

    def run(self, units: Iterable[tuple[str, Task]]) -> Outcome:
        """Run tasks, given with their source's name.

        Raises:
            OutputError: when the dataset cannot be written. Interrupted: when the user stopped the job.
        """
        self._outcome = Outcome()
        self._check_room()
        for source, task in units:
            self._waiting.setdefault(source, deque()).append(Unit(source, task))
            self._outcome.results.setdefault(source, [])
        for source, queue in self._waiting.items():
            self._listener.queued(source, len(queue))
        try:
            while self._running or any(self._waiting.values()):
                if self._should_stop():
                    raise Interrupted(STOPPED)
                self._submit()
                self._consume()
                self._listener.tick()
        finally:
            self._cancel()
        return self._outcome

    def _check_room(self) -> None:
        """Say at once when no node can hold a task: Ray would wait for one in silence."""
        wanted = {
            "CPU": self._options["num_cpus"],
            "memory": self._options.get("memory", 0),
            **self._options.get("resources", {}),
        }
        nodes = [node["Resources"] for node in cast(Any, ray).nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in nodes):
            return
        asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
        largest = max((node.get("CPU", 0) for node in nodes), default=0)
        message = f"no node can hold a task of {asked}; the largest of {len(nodes)} has {largest:g} CPUs"
        if not os.environ.get("RAY_ADDRESS") and len(nodes) == 1:
            raise UsageError(f"{message}: lower `resources` in the recipe or raise --workers")
        self._listener.say("ray", f"{message}: waiting for one")

    def _slots(self) -> int:
        if self._max_in_flight is not None:
            return self._max_in_flight
        with contextlib.suppress(Exception):
            cpus = float(cast(Any, ray).cluster_resources().get("CPU", 1.0))
            return max(2, int(cpus / max(self._options["num_cpus"], 0.01)) + 2)
        return 2

    def _submit(self) -> None:
        """Fill free places, always from the source with the fewest tasks running."""
        slots = self._slots()
        while len(self._running) < slots:
            now = time.monotonic()
            heads = (next((unit for unit in queue if unit.not_before <= now), None) for queue in self._waiting.values())
            ready = [unit for unit in heads if unit is not None]
            if not ready:
                return
            running = Counter(unit.source for unit in self._running)
            unit = min(ready, key=lambda unit: running[unit.source])
            self._waiting[unit.source].remove(unit)
            unit.started = None
            timeout = self._timeouts[unit.source]
            unit.steps = _work.options(**self._options).remote(unit.runnable, self._dataset_url, timeout)
            self._running.append(unit)

    def _consume(self) -> None:
        if not self._running:
            time.sleep(_POLL_SECONDS)
            return
        by_steps: dict[Any, Unit] = {unit.steps: unit for unit in self._running}
        ray.wait(list(by_steps), num_returns=1, timeout=_POLL_SECONDS, fetch_local=False)
        ready, _ = ray.wait(list(by_steps), num_returns=len(by_steps), timeout=0, fetch_local=False)
        for steps in cast(list[Any], ready):
            unit = by_steps[steps]
            try:
                item = ray.get(next(steps))
            except StopIteration:
                self._running.remove(unit)
                self._done(unit)
            except Exception as error:
                self._running.remove(unit)
                self._failed(unit, error)
            else:
                self._received(unit, item)

    def _received(self, unit: Unit, item: Started | Progress | Result) -> None:
        if isinstance(item, Started):
            unit.started = item
            self._listener.started(unit.source)
        elif isinstance(item, Progress):
            self._listener.advanced(unit.source, item)
        else:
            unit.num_faults = 0
            self._outcome.results[unit.source].append(item)

    def _done(self, unit: Unit) -> None:
        if unit.probe is not None:
            unit.probe = None
            self._requeue(unit)
            return
        self._listener.finished(unit.source)

    def _requeue(self, unit: Unit, delay_seconds: float = 0.0) -> None:
        unit.not_before = time.monotonic() + delay_seconds
        self._waiting[unit.source].append(unit)

    def _failed(self, unit: Unit, error: Exception) -> None:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, ray.exceptions.RuntimeEnvSetupError):
            raise BayplanError(f"Ray could not set up its workers: {cause}") from error
        if isinstance(error, ray.exceptions.LocalRayletDiedError):
            raise BayplanError(
                "the Ray node this job runs on died; what is committed stays: run the same command again"
            ) from error
        if isinstance(error, _DEATHS):
            self._died(unit, error)
        elif isinstance(cause, OutputError):
            raise cause
        elif isinstance(cause, StorageFault) or may_pass(cause):
            self._faulted(unit, cause)
        elif isinstance(cause, BayplanError):
            self._give_up(unit.source, str(cause))
        else:
            self._give_up(unit.source, f"unexpected {type(cause).__name__}: {cause}; please report this\n{error}")

    def _faulted(self, unit: Unit, error: BaseException) -> None:
        last_try = tolerating(unit.task, TOLERATED_FAULTS) if unit.num_faults == len(FAULT_DELAYS_SECONDS) else None
        if last_try is not None:
            self._listener.say(unit.source, f"{error}; trying once more, up to {TOLERATED_FAULTS} such images go to quarantine")
            unit.task = last_try
            self._requeue(unit)
            return
        if unit.num_faults >= len(FAULT_DELAYS_SECONDS):
            self._give_up(unit.source, f"gave up after {unit.num_faults + 1} tries: {error}")
            return
        delay = FAULT_DELAYS_SECONDS[unit.num_faults]
        unit.num_faults += 1
        self._listener.say(unit.source, f"{error}; trying again in {delay:.0f} s")
        self._requeue(unit, delay)

    def _died(self, unit: Unit, error: Exception) -> None:
        suspects = self._suspects(unit)
        if suspects is not None and suspects.first > unit.furthest:
            unit.furthest, unit.num_deaths = suspects.first, 0
        unit.num_deaths += 1
        if unit.num_deaths > MAX_DEATHS:
            self._give_up(unit.source, f"its workers died {unit.num_deaths} times without getting further: {_first_line(error)}")
            return
        if suspects is not None and unit.probe is not None:
            unit.deaths_alone[suspects.first] += 1
            if unit.deaths_alone[suspects.first] >= _DEATHS_ALONE:
                self._condemn(unit, suspects.first)
                if unit.source in self._outcome.failures:
                    return
            unit.probe = dataclasses.replace(unit.probe, first=suspects.first)
        elif suspects is not None:
            unit.probe = suspects
        where = (
            f"between {position_word(unit.task)}s {suspects.first} and {suspects.last}" if suspects else "before its first row"
        )
        self._listener.say(unit.source, f"a worker died {where} ({_first_line(error)}); going on from the last committed part")
        self._requeue(unit, 0.5)

    def _condemn(self, unit: Unit, position: int) -> None:
        row = named_row(unit.task, position)
        self._listener.say(unit.source, f"{row} killed two workers when alone: it goes to quarantine")
        unit.task = condemning(unit.task, position)
        unit.num_condemned += 1
        if unit.num_condemned > MAX_CONDEMNED:
            self._give_up(
                unit.source,
                f"more than {MAX_CONDEMNED} rows of one task killed their workers, which no data does: find what they have in "
                "common (a rule or schema of your own, the memory of a node), mend it and run again",
            )

    def _suspects(self, unit: Unit) -> Suspects | None:
        """The crumb of a dead worker; None when its node is gone as well."""
        if unit.started is None:
            return None
        strategy = NodeAffinitySchedulingStrategy(unit.started.node_id, soft=False)
        try:
            reference = _take_crumb.options(scheduling_strategy=strategy).remote(unit.started.crumb_path)
            suspects: Suspects | None = ray.get(reference, timeout=_CRUMB_SECONDS)
        except Exception:
            return None
        return suspects

    def _give_up(self, source: str, reason: str) -> None:
        """Fail a source: its waiting tasks are dropped, its running ones cancelled; all others go on."""
        self._outcome.failures.setdefault(source, reason)
        self._waiting[source].clear()
        units = [unit for unit in self._running if unit.source == source]
        self._running = [unit for unit in self._running if unit.source != source]
        _cancel(units)

    def _cancel(self) -> None:
        _cancel(self._running)
        self._running.clear()
        self._waiting.clear()


def _cancel(units: list[Unit]) -> None:
    """Interrupt tasks, so that they remove their temporary files; end those that do not listen, and only those: Ray (2.60) ends
    this process without a word of ours where it is told to cancel a task that is just ending (`Tried to complete task that was
    not pending`).
    """
    deadline = time.monotonic() + _CANCEL_SECONDS
    for unit in units:
        with contextlib.suppress(Exception):
            ray.cancel(unit.steps)
    for unit in [unit for unit in units if not _has_ended(unit, deadline)]:
        with contextlib.suppress(Exception):
            ray.cancel(unit.steps, force=True)


def _has_ended(unit: Unit, deadline: float) -> bool:
    """Whether a task ends before then; what it still tells is dropped."""
    try:
        while ray.wait([unit.steps], timeout=max(0.0, deadline - time.monotonic()))[0]:
            ray.get(next(unit.steps))
    except Exception:  # its last word: that it was cancelled, that it failed, or that there is nothing more
        return True
    return False


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
