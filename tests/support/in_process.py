"""The whole pack job in this process, its tasks one after the other: what runs on Ray must equal it to the byte."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from packer.convert import Step
from packer.format import layout
from packer.guard import NoGuard
from pipelines.pack import JobReport, PackJob
from pipelines.ray_executor import Listener, Outcome
from pipelines.recipe import load_recipe
from pipelines.tasks import Task, run_task


def pack_in_process(
    recipe: Path, order: random.Random | None = None, *, limit: int | None = None, replace_changed: bool = False
) -> JobReport:
    """Pack a recipe; tasks run in their own order, or shuffled by `order`."""
    job: PackJob

    def run_tasks(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        outcome = Outcome(results={source: [] for source, _ in tasks})
        ordered = list(tasks)
        if order is not None:
            order.shuffle(ordered)
        for source, task in ordered:
            steps = run_task(task, job.storage.url, NoGuard())
            outcome.results[source] += [item for item in steps if not isinstance(item, Step)]
        return outcome

    job = PackJob(load_recipe(recipe), limit=limit, replace_changed=replace_changed, run_tasks=run_tasks)
    return job.run()


def digests(dataset: Path) -> dict[str, str]:
    """Every published file with its digest; the inventory holds time stamps and is no part of the promise."""
    files = [path for path in dataset.rglob("*") if path.is_file() and not path.name.startswith(layout.TEMPORARY_PREFIX)]
    return {
        str(path.relative_to(dataset)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != layout.INVENTORY_FILE
    }
