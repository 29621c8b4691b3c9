"""The threads, the byte budget and the deadlines of a prefetch pool, in one process.

No thread watches the others: who submits or waits looks for reads that are overdue. A thread that does not come back is given up
and another takes its place; it costs memory until its read returns, so there is a limit to how many.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from packer.format.errors import BayplanError, UsageError
from plugin.prefetch_job import Job, Part, Task, read_task, read_task_now
from plugin.prefetch_queue import ReadQueue
from plugin.read_errors import ReadCancelled, ReadStalled, without_frames
from plugin.reader import BundleReader
from plugin.requests import Request, Result
from plugin.spans import Span

REMEMBERED_KEYS = 256
"""Taken keys whose requests are kept, so that getting them again reads again."""
_MAX_TRIES = 2
_MOST_AT_ONCE = 1 << 20
"""Bytes of a read that whoever submits makes itself, in well under a millisecond, if they are in memory already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pool may use."""

    num_threads: int
    max_bytes: int
    read_deadline_seconds: float
    max_abandoned: int


@dataclass(slots=True, eq=False)
class Worker:
    """A thread, and the read it is in."""

    task: Task | None = None
    deadline: float = 0.0
    is_abandoned: bool = False
    thread: threading.Thread | None = None


class Engine:
    """Everything of a pool that must not cross a fork."""

    def __init__(self, reader: BundleReader, limits: Limits) -> None:
        self._reader = reader
        self._limits = limits
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        """Threads wait here for something to read."""
        self._done = threading.Condition(lock)
        """Getters wait here for their job."""
        self._jobs: dict[Hashable, Job] = {}
        self._taken: OrderedDict[Hashable, tuple[Request, ...]] = OrderedDict()
        self._queue = ReadQueue(limits.max_bytes)
        self._kept_bytes: int | None = None
        """Taken, and still counted in the budget; None: what is taken is not."""
        self._workers: set[Worker] = set()
        self._abandoned: set[Worker] = set()
        self._refusal: BayplanError | None = None
        self._counts = dict.fromkeys(("hits", "waits", "bytes", "reads", "retries", "abandoned", "errors"), 0)
        self._wait_seconds = 0.0
        self._retries_before = reader.num_retries

    def submit(self, key: Hashable, requests: tuple[Request, ...]) -> None:
        with self._work:
            self._check_usable()
            self._give_up_overdue()
            job = self._jobs.get(key)
            if job is None:
                self._new_job(key, requests)
            elif job.requests != requests:
                raise UsageError(f"key {key!r}: submitted before with other requests; get or cancel those first")

    def get(self, key: Hashable, requests: tuple[Request, ...] | None = None) -> list[Result]:
        with self._work:
            self._check_usable()
            job = self._jobs.get(key)
            if job is None:
                job = self._new_job(key, self._requests_of(key) if requests is None else requests)
            if job.is_done:
                self._counts["hits"] += 1
            else:
                self._wait_for(job)
            self._drop(job)
            if job.error is not None:
                self._counts["errors"] += 1
                raise job.error
            return self._delivered(job)

    def keep(self) -> None:
        with self._work:
            self._kept_bytes = self._kept_bytes or 0

    def let_go(self) -> None:
        with self._work:
            num_bytes, self._kept_bytes = self._kept_bytes or 0, None
            self._release(num_bytes)

    def is_done(self, key: Hashable) -> bool:
        with self._work:
            job = self._jobs.get(key)
            return job is not None and job.is_done

    def cancel(self, key: Hashable) -> bool:
        with self._work:
            job = self._jobs.pop(key, None)
            if job is not None:
                self._finish(job, ReadCancelled(f"key {key!r}: cancelled before its reads were done; submit it again"))
            return job is not None

    def close(self) -> None:
        with self._work:
            self._refuse(ReadCancelled("this prefetch pool was closed; make another one"))
            idle = [worker.thread for worker in self._workers if worker.task is None and worker.thread is not None]
        for thread in idle:
            thread.join()

    def counters(self) -> dict[str, float]:
        with self._work:
            retries = self._counts["retries"] + self._reader.num_retries - self._retries_before
            return {
                **self._counts,
                "retries": retries,
                "wait_seconds": self._wait_seconds,
                "stalls": self._queue.num_held_back,
                "held_bytes": self._queue.held_bytes,
                "keys": len(self._jobs),
            }

    # Everything below is called with the lock held, but for the reading of the threads.

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _requests_of(self, key: Hashable) -> tuple[Request, ...]:
        try:
            return self._taken[key]
        except KeyError:
            raise UsageError(
                f"key {key!r}: not submitted in this process, cancelled, or taken more than {REMEMBERED_KEYS} keys ago; submit it"
            ) from None

    def _new_job(self, key: Hashable, requests: tuple[Request, ...]) -> Job:
        job = self._jobs[key] = Job(key, requests)
        self._taken.pop(key, None)
        try:
            spans = self._reader.plan(job.first_pieces())
            self._enqueue(job, self._left_to_threads(job, spans))
        except BayplanError as error:
            self._finish(job, error)
        except BaseException as error:
            # An interrupt. Nobody would go on with this job, and who got it later would wait for ever.
            del self._jobs[key]
            self._finish(job, error)
            raise
        return job

    def _left_to_threads(self, job: Job, spans: list[Span]) -> list[Span]:
        """Read at once what is in this machine's memory: handing it to a thread and back costs more. What is left to read.

        Threads that have read something wait for the lock meanwhile, a fraction of a millisecond for each span.
        """
        left: list[Span] = []
        while spans:
            span = spans.pop()
            may_read = span.num_bytes <= _MOST_AT_ONCE and self._queue.may_read_now(span.num_bytes)
            brought = read_task_now(self._reader, job.requests, span) if may_read else None
            if brought is None:
                left.append(span)
                continue
            num_bytes = span.num_bytes
            self._counts["reads"] += 1
            self._queue.held_bytes += num_bytes  # nothing is called until both know of it, so no interrupt comes between
            job.held_bytes += num_bytes
            job.store(brought[0])
            spans += brought[1]
        return left[::-1]

    def _enqueue(self, job: Job, spans: list[Span], *, first: bool = False) -> None:
        job.add(spans)
        if spans:
            self._queue.add(job, first=first)
            self._wake_threads(len(spans))
        elif not job.num_open:
            self._finish(job)

    def _wake_threads(self, num_tasks: int) -> None:
        # All at once, and again only in the place of those that were given up: their number says nothing of the load.
        for _ in range(self._limits.num_threads - len(self._workers) if num_tasks else 0):
            worker = Worker()
            worker.thread = threading.Thread(target=self._run, args=(worker,), name="bayplan-prefetch", daemon=True)
            worker.thread.start()
            self._workers.add(worker)
        self._work.notify(num_tasks)

    def _wait_for(self, job: Job) -> None:
        self._counts["waits"] += 1
        started = time.monotonic()
        self._queue.want(job)
        self._wake_threads(len(job.tasks))
        while not job.is_done:
            self._give_up_overdue()
            if not job.is_done:
                now = time.monotonic()
                deadlines = [worker.deadline for worker in self._workers if worker.task is not None]
                self._done.wait(max(0.0, min([*deadlines, now + self._limits.read_deadline_seconds]) - now))
        self._wait_seconds += time.monotonic() - started

    def _delivered(self, job: Job) -> list[Result]:
        values = [value for value in job.values if value is not None]
        assert len(values) == len(job.requests), "a job is done when every request is answered"
        for value in values:
            self._counts["bytes"] += len(value) if isinstance(value, bytes) else sum(map(len, value.images))
        return values

    def _drop(self, job: Job) -> None:
        """It was taken: its bytes are the getters', and no longer counted unless they are kept."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._taken[job.key] = job.requests
            while len(self._taken) > REMEMBERED_KEYS:
                self._taken.popitem(last=False)
        if self._kept_bytes is None:
            self._release(job.held_bytes)
        else:
            self._kept_bytes += job.held_bytes
        job.held_bytes = 0

    def _release(self, num_bytes: int) -> None:
        self._queue.held_bytes -= num_bytes
        if num_bytes and self._queue:
            self._work.notify_all()

    def _finish(self, job: Job, error: BaseException | None = None) -> None:
        job.is_done = True
        self._queue.remove(job)
        if error is not None:
            job.error = error
            job.values = []
            self._release(job.held_bytes)
            job.held_bytes = 0
        self._done.notify_all()

    def _run(self, worker: Worker) -> None:
        while self._step(worker):
            pass

    def _step(self, worker: Worker) -> bool:
        """One read; whether the thread goes on. Its variables end with it, so an idle thread holds nobody's images."""
        with self._work:
            while (task := self._queue.next_task()) is None:
                if self._refusal is not None:
                    self._workers.discard(worker)
                    return False
                self._work.wait()
            task.num_tries += 1
            worker.task, worker.deadline = task, time.monotonic() + self._limits.read_deadline_seconds
        parts, spans, error = self._read(task)
        with self._work:
            if worker.is_abandoned:
                self._abandoned.discard(worker)
                return False
            worker.task = None
            self._land(task, parts, spans, error)
            return True

    def _read(self, task: Task) -> tuple[list[Part], list[Span], BaseException | None]:
        try:
            parts, spans = read_task(self._reader, task.job.requests, task.span)
        except BayplanError as error:
            return [], [], without_frames(error)
        except BaseException as error:
            return [], [], error
        return parts, spans, None

    def _land(self, task: Task, parts: list[Part], spans: list[Span], error: BaseException | None) -> None:
        job = task.job
        self._counts["reads"] += 1
        if job.is_done or error is not None:
            self._release(task.num_bytes)
            if not job.is_done:
                self._finish(job, error)
            return
        job.held_bytes += task.num_bytes
        job.num_open -= 1
        job.store(parts)
        self._enqueue(job, spans, first=True)

    def _give_up_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.task is not None and worker.deadline <= now:
                self._give_up(worker, worker.task)

    def _give_up(self, worker: Worker, task: Task) -> None:
        worker.is_abandoned = True
        self._workers.discard(worker)
        self._abandoned.add(worker)
        self._counts["abandoned"] += 1
        self._release(task.num_bytes)
        self._reader.forget(task.span.file)
        if len(self._abandoned) > self._limits.max_abandoned:
            self._refuse(self._stalled(task, f"this read and {len(self._abandoned) - 1} others never came back"))
            return
        if not task.job.is_done:
            if task.num_tries >= _MAX_TRIES:
                self._finish(task.job, self._stalled(task, f"read {task.num_tries} times"))
            else:
                self._counts["retries"] += 1
                task.job.tasks.appendleft(task)
                self._queue.add(task.job, first=True)
        self._wake_threads(len(self._queue))

    def _stalled(self, task: Task, what: str) -> ReadStalled:
        place = self._reader.place_of(task.span.pieces[0])
        return ReadStalled(
            f"{place}: {what}, found no answer within {self._limits.read_deadline_seconds:g} seconds: its store or mount hangs. "
            "Start again when it answers, or raise read_deadline_seconds if it is only slow",
            place,
        )

    def _refuse(self, why: BayplanError) -> None:
        """End everything: threads go when they are idle, getters are told why. The first reason stays."""
        self._refusal = self._refusal or why
        for job in self._jobs.values():
            self._release(job.held_bytes)
            job.held_bytes = 0
            if not job.is_done:
                self._finish(job, self._refusal)
        self._jobs.clear()
        self._taken.clear()
        self._work.notify_all()
        self._done.notify_all()
