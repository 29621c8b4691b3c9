"""Which read comes next, under a byte budget. Pure bookkeeping: the engine calls it with its lock held."""

from __future__ import annotations

from collections import OrderedDict

from plugin.prefetch_job import Job, Task


class ReadQueue:
    """Jobs with reads not begun: those somebody waits for first and whatever the budget, the others in order as it allows.

    The oldest is never overtaken by a smaller one that would fit, or a large one might wait for ever.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[Job, None] = OrderedDict()
        self._urgent: OrderedDict[Job, None] = OrderedDict()
        self.held_bytes = 0
        """Being read, or read and not yet taken."""
        self.num_held_back = 0
        """Reads that had to wait for the budget, so far."""

    def __len__(self) -> int:
        """Jobs that have a read to begin."""
        return len(self._waiting) + len(self._urgent)

    def add(self, job: Job, *, first: bool = False) -> None:
        """A job has reads to begin; with `first`, before all others of its urgency."""
        if not job.tasks:
            return
        queue = self._urgent if job.is_wanted else self._waiting
        queue[job] = None
        if first:
            queue.move_to_end(job, last=False)

    def want(self, job: Job) -> None:
        """Somebody waits for a job now."""
        self._waiting.pop(job, None)
        job.is_wanted = True
        self.add(job)

    def remove(self, job: Job) -> None:
        """Its reads are not to be begun any more."""
        self._waiting.pop(job, None)
        self._urgent.pop(job, None)
        job.tasks.clear()

    def may_read_now(self, num_bytes: int) -> bool:
        """Whether the budget has room for a read that the caller makes and counts itself, beside the oldest that waits."""
        oldest = next(iter(self._waiting), None)
        held = self.held_bytes + (oldest.tasks[0].num_bytes if oldest is not None else 0)
        return not held or held + num_bytes <= self._max_bytes

    def next_task(self) -> Task | None:
        """The read to begin now, its bytes counted; None when there is none or the budget is used up.

        With nothing held, even a read larger than the budget begins.
        """
        queue = self._urgent or self._waiting
        if not queue:
            return None
        job = next(iter(queue))
        task = job.tasks[0]
        if not job.is_wanted and self.held_bytes and self.held_bytes + task.num_bytes > self._max_bytes:
            self.num_held_back += not task.was_held_back
            task.was_held_back = True
            return None
        job.tasks.popleft()
        if not job.tasks:
            del queue[job]
        self.held_bytes += task.num_bytes
        return task
