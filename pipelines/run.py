"""`bayplan run`: pack, index and report in one job, each going on where it ended before. Also `python -m pipelines.run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pipelines.index import IndexJob, IndexReport, check_profiles
from pipelines.index_text import index_json
from pipelines.pack import JobReport, PackJob
from pipelines.ray_executor import Listener
from pipelines.recipe import Recipe
from pipelines.report_text import report_json
from pipelines.reporting import WrittenReport, write_report


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """What the steps gave; those after a step that left nothing to work on are None."""

    pack: JobReport
    index: IndexReport | None = None
    report: WrittenReport | None = None

    @property
    def exit_code(self) -> int:
        """1 when any step failed, 3 when only the quarantine is above the recipe's limit."""
        return 1 if self.index is not None and self.index.exit_code else self.pack.exit_code


def run_recipe(
    recipe: Recipe,
    *,
    replace_changed: bool,
    listener: Listener,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunOutcome:
    """All of a recipe. Sources that fail in packing are counted as far as they are packed.

    Raises:
        UsageError: a profile that cannot be used, before anything is packed. Else as `PackJob.run` and `IndexJob.run`.
    """
    check_profiles(recipe)
    packed = PackJob(recipe, replace_changed=replace_changed, listener=listener, should_stop=should_stop).run()
    outcome = RunOutcome(pack=packed)
    if not any(state.totals.num_written for state in packed.sources.values()):
        return outcome
    job = IndexJob(recipe.output, recipe=recipe, replace_changed=replace_changed, listener=listener, should_stop=should_stop)
    outcome.index = job.run()
    outcome.report = write_report(recipe.output)
    return outcome


def run_json(outcome: RunOutcome) -> str:
    """What a run gave, as one JSON object."""
    document = {
        "exit_code": outcome.exit_code,
        "pack": json.loads(report_json(outcome.pack)),
        "index": json.loads(index_json(outcome.index)) if outcome.index else None,
        "report": outcome.report.place if outcome.report else None,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


if __name__ == "__main__":
    from pipelines.cli import main

    main(["run", *sys.argv[1:]])
