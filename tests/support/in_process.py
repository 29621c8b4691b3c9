"""Whole jobs in this process, its tasks one after the other: what runs on Ray must equal it to the byte."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from packer.convert import Step
from packer.format import layout
from packer.format.errors import FormatError, InputError, UsageError
from packer.guard import NoGuard
from pipelines import retrying
from pipelines.index import IndexJob, IndexReport
from pipelines.pack import JobReport, PackJob, RunTasks
from pipelines.ray_executor import Listener, Outcome
from pipelines.recipe import load_recipe
from pipelines.run import RunOutcome, check_run, run_recipe
from pipelines.tasks import Task, run_task


def run_here(url: str, order: random.Random | None = None) -> RunTasks:
    """Runs the tasks of a job in their own order, or shuffled by `order`."""

    def run_tasks(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        outcome = Outcome(results={source: [] for source, _ in tasks})
        ordered = list(tasks)
        if order is not None:
            order.shuffle(ordered)
        for source, task in ordered:
            if source in outcome.failures:
                continue
            try:
                steps = run_task(task, url, NoGuard())
                outcome.results[source] += [item for item in steps if not isinstance(item, Step)]
            except (FormatError, InputError, UsageError) as error:
                outcome.failures[source] = str(error)
        return outcome

    return run_tasks


def pack_in_process(
    recipe: Path, order: random.Random | None = None, *, limit: int | None = None, replace_changed: bool = False
) -> JobReport:
    """Pack a recipe."""
    loaded = load_recipe(recipe)
    url = loaded.output if limit is None else f"{loaded.output.rstrip('/')}.limit-{limit}"
    return PackJob(loaded, limit=limit, replace_changed=replace_changed, run_tasks=run_here(url, order)).run()


def index_in_process(
    dataset: Path,
    order: random.Random | None = None,
    *,
    recipe: Path | None = None,
    profiles: Sequence[str] = (),
    replace_changed: bool = False,
) -> IndexReport:
    """Index a dataset, by the profiles of a recipe or of its own."""
    loaded = None if recipe is None else load_recipe(recipe)
    return IndexJob(
        str(dataset),
        profiles=profiles,
        recipe=loaded,
        replace_changed=replace_changed,
        run_tasks=run_here(str(dataset), order),
    ).run()


def run_in_process(recipe: Path, *, replace_changed: bool = False) -> RunOutcome:
    """Pack, index and report a recipe."""
    loaded = load_recipe(recipe)
    check_run(loaded, replace_changed=replace_changed)
    tasks = run_here(loaded.output)
    return run_recipe(loaded, replace_changed=replace_changed, run_pack_tasks=tasks, run_index_tasks=tasks)


def retry_in_process(dataset: Path) -> JobReport:
    """Retry the quarantined rows of a dataset."""

    class Executor:
        def __init__(self, url: str, *_: object) -> None:
            self.run = lambda tasks: run_here(url)(tasks, Listener())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrying, "RayExecutor", Executor)
        return retrying.retry_dataset(str(dataset), (), Listener())


def digests(dataset: Path) -> dict[str, str]:
    """Every published file with its digest; the inventory holds time stamps and is no part of the promise."""
    files = [path for path in dataset.rglob("*") if path.is_file() and not path.name.startswith(layout.TEMPORARY_PREFIX)]
    return {
        str(path.relative_to(dataset)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != layout.INVENTORY_FILE
    }
