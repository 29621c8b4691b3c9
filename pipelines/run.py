"""`bayplan run`: pack, index and report in one job, each going on where it ended before. Also `python -m pipelines.run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from packer.format.errors import FormatError, UsageError
from packer.storage import open_storage
from pipelines.index import IndexJob, IndexReport
from pipelines.index_profiles import open_profiles, wanted_profiles
from pipelines.index_text import index_json
from pipelines.pack import JobReport, PackJob, RunTasks
from pipelines.ray_executor import STOPPED, Interrupted, Listener
from pipelines.recipe import Recipe
from pipelines.report_text import report_json
from pipelines.reporting import WrittenReport, write_report


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """What the steps gave; those after a step that left nothing to work on are None."""

    pack: JobReport
    index: IndexReport | None = None
    report: WrittenReport | None = None
    report_failure: str | None = None
    """Why there is no report, though there is an index."""

    @property
    def exit_code(self) -> int:
        """1 when any step failed, 3 when only the quarantine is above the recipe's limit."""
        is_failed = self.report_failure is not None or (self.index is not None and self.index.exit_code)
        return 1 if is_failed else self.pack.exit_code


def check_run(recipe: Recipe, *, replace_changed: bool) -> None:
    """Open every profile, so that a mistake in one is found before hours of packing.

    Raises:
        UsageError: all that is wrong with all of them, or no profile at all.
    """
    if not recipe.profiles:
        raise UsageError("profiles: found none, expected at least one: add `profiles` to the recipe (docs/recipe.md)")
    storage = open_storage(recipe.output)
    open_profiles(storage, recipe, wanted_profiles((), recipe, storage, is_given=True), replace_changed=replace_changed)


def run_recipe(
    recipe: Recipe,
    *,
    replace_changed: bool,
    listener: Listener | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    run_pack_tasks: RunTasks | None = None,
    run_index_tasks: RunTasks | None = None,
) -> RunOutcome:
    """All of a recipe that `check_run` has seen. Sources that fail in packing are counted as far as they are packed.

    Raises:
        BayplanError: as `PackJob.run` and `IndexJob.run`.
    """
    packing = PackJob(
        recipe, replace_changed=replace_changed, listener=listener, should_stop=should_stop, run_tasks=run_pack_tasks
    )
    outcome = RunOutcome(pack=packing.run())
    if not any(state.totals.num_written for state in outcome.pack.sources.values()):
        return outcome
    job = IndexJob(recipe.output, recipe=recipe, replace_changed=replace_changed, run_tasks=run_index_tasks)
    outcome.index = job.run(listener, should_stop)
    if should_stop():
        raise Interrupted(STOPPED)
    try:
        outcome.report = write_report(recipe.output)
    except (UsageError, FormatError) as error:
        outcome.report_failure = str(error)
    return outcome


def run_json(outcome: RunOutcome) -> str:
    """What a run gave, as one JSON object."""
    document = {
        "exit_code": outcome.exit_code,
        "pack": json.loads(report_json(outcome.pack)),
        "index": json.loads(index_json(outcome.index)) if outcome.index else None,
        "report": outcome.report.place if outcome.report else None,
        "report_failure": outcome.report_failure,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    from pipelines.cli import main

    main(["run", *sys.argv[1:]])
