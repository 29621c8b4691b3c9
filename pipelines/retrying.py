"""`bayplan retry`: quarantined rows are read again from their sources; those that are good now become parts of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packer.format import layout
from packer.format.errors import BayplanError, InputError, UsageError
from packer.format.manifest import total
from packer.retry import RetryTask
from packer.storage import open_storage
from pipelines import dataset
from pipelines.inputs import list_inputs, source_config
from pipelines.ledger import read_manifests, whole_file
from pipelines.pack import JobReport, SourceReport, above_limit
from pipelines.ray_executor import Listener, RayExecutor
from pipelines.tasks import Task


def retry_dataset(
    url: str, only: Sequence[str], listener: Listener, should_stop: Callable[[], bool] = lambda: False
) -> JobReport:
    """Retry the quarantined rows of a dataset, by the recipe it keeps.

    Raises:
        UsageError: when there is no dataset, or it has no such source.
    """
    storage = open_storage(url)
    dataset.require_identity(storage)
    recipe = dataset.read_recipe(storage)
    if recipe is None:
        raise UsageError(f"{url}: found no {layout.RECIPE_FILE}: the first run has not got that far; run `bayplan pack` again")
    names = {source.name for source in recipe.sources}
    if unknown := sorted(set(only) - names):
        raise UsageError(f"found no source {', '.join(unknown)} in {url}; its sources: {', '.join(sorted(names))}")
    report = JobReport(output=storage.url)
    tasks: list[tuple[str, Task]] = []
    for source in recipe.sources:
        if only and source.name not in only:
            continue
        state = report.sources[source.name] = SourceReport()
        try:
            config = source_config(source, source.resolved_root)
            quarantined = [part for part in read_manifests(storage, source.name) if part.num_quarantined]
            if any(part.recipe_fingerprint != config.fingerprint for part in quarantined):
                raise InputError("its recipe is not the one its parts were made with: run `bayplan pack` with that recipe first")
            found = list_inputs(source, source.resolved_root, outside=recipe.output) if quarantined else []
            inputs = {item.file: item for item in found}
            tasks += [
                (source.name, RetryTask(source=config, work=whole_file(config, inputs, part), part=part)) for part in quarantined
            ]
        except (BayplanError, OSError) as error:
            state.failure = str(error)
    timeouts = {source.name: source.row_timeout_seconds for source in recipe.sources}
    outcome = RayExecutor(storage.url, recipe.resources, timeouts, listener, should_stop).run(tasks)
    parts = {}
    for source in recipe.sources:
        parts[source.name] = dataset.consolidate(storage, source.name)
        if source.name in report.sources:
            state = report.sources[source.name]
            state.totals = total(parts[source.name])
            state.incomplete = [part.input.file for part in parts[source.name] if not part.input.input_complete]
            state.failure = state.failure or outcome.failures.get(source.name)
            gained = sum(getattr(result, "num_written", 0) for result in outcome.results.get(source.name, []))
            if gained or state.totals.num_quarantined:
                state.notes.append(f"{gained} rows are records now")
    report.above_limit = above_limit(recipe, total(part for many in parts.values() for part in many))
    view, _ = dataset.stock_view(recipe, parts)
    storage.publish_bytes(layout.STOCK_FILE, view)
    return report
