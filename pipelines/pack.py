"""The pack job: a recipe's JSONL sources become a dataset whose counts are proven at the end. Also `python -m pipelines.pack`.

Order of writing: identity, resolved recipe, inventory; then parts, in any order; then one `source.json` a source and the
interop view. Every step may be the last: the next run finds out from the manifests what is left.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packer.format import layout
from packer.format.errors import BayplanError, UsageError
from packer.format.manifest import PartManifest, Totals, total
from packer.row_source import SourceConfig
from packer.storage import Storage, open_storage
from pipelines import dataset
from pipelines.inputs import (
    InputFile,
    Inventory,
    first_not_empty,
    list_inputs,
    naming_root,
    read_inventory,
    source_config,
    write_inventory,
)
from pipelines.ledger import SourceLedger, changed_meanwhile, check_coverage, drop_parts, open_ledger, read_manifests
from pipelines.ray_executor import Listener, Outcome, RayExecutor
from pipelines.recipe import Pin, Recipe, Source, differing_fields, fingerprint_keys, source_fingerprint
from pipelines.tasks import Scouted, ScoutTask, Task

_MAX_LISTED = 10
_RAY_COPY = "/runtime_resources/working_dir_files/"


@dataclass(slots=True, kw_only=True)
class SourceReport:
    """What a run made of one source."""

    totals: Totals = field(default_factory=Totals)
    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
    """Input files that ended before their own structure said."""


@dataclass(slots=True, kw_only=True)
class JobReport:
    """What a run made of a recipe."""

    output: str
    sources: dict[str, SourceReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    above_limit: str | None = None

    @property
    def exit_code(self) -> int:
        """0 all good, 1 something failed, 3 done with quarantine above the recipe's limit."""
        if any(source.failure or source.incomplete for source in self.sources.values()):
            return 1
        return 3 if self.above_limit else 0


@dataclass(slots=True, kw_only=True)
class _Prepared:
    """A source that can be worked on."""

    source: Source
    config: SourceConfig
    inputs: list[InputFile]
    pin: Pin
    manifests: list[PartManifest]
    """Its parts when the run began."""
    is_remade: bool
    """Whether its parts may go without being told: a trial, or no record in any of them."""
    ledger: SourceLedger = field(default_factory=SourceLedger)


RunTasks = Callable[[Sequence[tuple[str, Task]], Listener], Outcome]


class PackJob:
    """One run of a recipe. `run_tasks` runs its tasks; on Ray unless a test says otherwise."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        limit: int | None = None,
        replace_changed: bool = False,
        listener: Listener | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        run_tasks: RunTasks | None = None,
    ) -> None:
        if _RAY_COPY in recipe.output:
            raise UsageError(
                f"output: found {recipe.output}, a place in the copy that Ray made of the job's working dir and will delete: "
                "give an absolute path or a URL"
            )
        output = recipe.output if limit is None else f"{recipe.output.rstrip('/')}.limit-{limit}"
        self.storage: Storage = open_storage(output)
        self._recipe = recipe
        self._limit = limit
        self._replace_changed = replace_changed
        self._listener = listener or Listener()
        self._should_stop = should_stop
        self._run_tasks = run_tasks or self._on_ray
        self._kept: dict[str, str] = {}
        self._kept_pins: dict[str, Pin] = {}
        self._report = JobReport(output=output, sources={source.name: SourceReport() for source in recipe.sources})

    def run(self) -> JobReport:
        """Do what is left to do.

        Raises:
            UsageError: when the output holds something else. OutputError: when it cannot be written.
            Interrupted: when the user stopped the job.
        """
        old_recipe = self._open()
        old_pins = dataset.read_pins(old_recipe)
        prepared = self._prepare({**self._kept_pins, **old_pins})
        self._scout([item for item in prepared if not item.pin.range_bytes])
        prepared = self._working(prepared)
        inventory = read_inventory(self.storage)
        for item in prepared:
            self._open_ledger(item, inventory, old_recipe)
        prepared = self._working(prepared)
        self._write_recipe(old_pins | {item.source.name: item.pin for item in prepared}, old_recipe)
        write_inventory(self.storage, _updated(inventory, prepared))
        self._convert(prepared)
        self._conclude(prepared)
        return self._report

    def _working(self, prepared: Iterable[_Prepared]) -> list[_Prepared]:
        return [item for item in prepared if self._report.sources[item.source.name].failure is None]

    def _fail(self, source: str, reason: str) -> None:
        self._report.sources[source].failure = reason
        self._listener.say(source, f"failed: {reason}")

    def _open(self) -> Recipe | None:
        dataset.check_output(self.storage, self._recipe, self._limit)
        identity = dataset.read_identity(self.storage)
        old_recipe = dataset.read_recipe(self.storage)
        if identity is None:
            dataset.write_identity(self.storage, self._recipe, self._limit, {}, {})
            return old_recipe
        names = {source.name for source in self._recipe.sources}
        gone = [name for name in identity.fingerprints if name not in names]
        self._kept = {name: identity.fingerprints[name] for name in gone if self.storage.list_dir(layout.source_dir(name))}
        self._kept_pins = {**identity.kept_pins, **dataset.read_pins(old_recipe)}
        if self._kept:
            listed = ", ".join(sorted(self._kept))
            self._report.notes.append(f"in the dataset but not in the recipe any more, kept as they are: {listed}")
        return old_recipe

    def _write_recipe(self, pins: Mapping[str, Pin], old_recipe: Recipe | None) -> None:
        """Publish identity and recipe as they are true now: a source that failed keeps the recipe its parts were made by.

        Weights are the new ones for all, since they say something only together.
        """
        old = {source.name: source for source in old_recipe.sources} if old_recipe else {}

        def true_now(source: Source) -> Source:
            if self._report.sources[source.name].failure is None or source.name not in old:
                return source
            mixture = {"weight": source.weight, "token_share": source.token_share}
            return old[source.name].model_copy(update=mixture)

        recipe = self._recipe.model_copy(update={"sources": tuple(map(true_now, self._recipe.sources))})
        back_but_refused = {name for name, report in self._report.sources.items() if report.failure and name not in old}
        kept_pins = {name: pin for name, pin in self._kept_pins.items() if name in self._kept.keys() | back_but_refused}
        dataset.write_identity(self.storage, recipe, self._limit, self._kept, kept_pins)
        dataset.write_recipe(self.storage, recipe, pins)

    def _prepare(self, pins: Mapping[str, Pin]) -> list[_Prepared]:
        prepared = []
        for source in self._recipe.sources:
            pin = pins.get(source.name)
            try:
                manifests = read_manifests(self.storage, source.name)
                is_remade = self._limit is not None or not any(manifest.num_written for manifest in manifests)
                if is_remade:
                    pin = None  # nothing hangs on its names
                root = naming_root(source, pin.root if pin else None)
                config = source_config(source, root)
                inputs = list_inputs(source, root, outside=self._recipe.output)
            except (BayplanError, OSError) as error:
                self._fail(source.name, str(error))
                continue
            range_bytes = source.range_bytes or (pin.range_bytes if pin else 0)
            if pin and source.range_bytes not in (None, pin.range_bytes):
                self._fail(
                    source.name,
                    f"range_bytes: found {source.range_bytes}, its parts were cut with {pin.range_bytes}: "
                    "keep that number, or pack into a new output",
                )
                continue
            self.storage.remove_stale_temporaries(layout.source_dir(source.name))
            pin = Pin(root=root, range_bytes=range_bytes)
            prepared.append(
                _Prepared(source=source, config=config, inputs=inputs, pin=pin, manifests=manifests, is_remade=is_remade)
            )
        return prepared

    def _scout(self, prepared: list[_Prepared]) -> None:
        """Look at the first rows of sources that have no pins yet: how large ranges must be, or that all is wrong."""
        tasks: list[tuple[str, Task]] = []
        for item in prepared:
            first = first_not_empty(item.inputs)
            if first is None:
                item.pin = dataclasses.replace(item.pin, range_bytes=Scouted().range_bytes)
                continue
            tasks.append((item.source.name, ScoutTask(source=item.config, work=first.whole)))
        outcome = self._run_tasks(tasks, _Relay(self._listener))
        for item in prepared:
            name = item.source.name
            if name in outcome.failures:
                self._fail(name, outcome.failures[name])
            for scouted in outcome.results.get(name, []):
                assert isinstance(scouted, Scouted)
                item.pin = dataclasses.replace(item.pin, range_bytes=scouted.range_bytes)
                if scouted.all_refused:
                    reasons = ", ".join(f"{reason} {count}" for reason, count in scouted.reasons.most_common())
                    self._fail(
                        name,
                        f"its first {scouted.num_rows} rows are all refused ({reasons}), expected good ones: check `schema`, "
                        f"`fields` and `image_root`; the first, at byte {scouted.first_refusal}",
                    )

    def _on_ray(self, tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        if not tasks:
            return Outcome()
        timeouts = {source.name: source.row_timeout_seconds for source in self._recipe.sources}
        executor = RayExecutor(self.storage.url, self._recipe.resources, timeouts, listener, self._should_stop)
        return executor.run(tasks)

    def _open_ledger(self, item: _Prepared, inventory: Inventory, old_recipe: Recipe | None) -> None:
        name = item.source.name
        try:
            known, manifests = inventory.get(name, {}), item.manifests
            ledger = open_ledger(item.config, item.inputs, manifests, known, item.pin.range_bytes, self._limit)
            files = {file.file for file in item.inputs}
            if item.is_remade and (ledger.changed or any(manifest.input.file not in files for manifest in manifests)):
                drop_parts(self.storage, manifests)
                ledger = open_ledger(item.config, item.inputs, [], known, item.pin.range_bytes, self._limit)
            elif ledger.changed and self._replace_changed:
                drop_parts(self.storage, ledger.stale)
                ledger = open_ledger(item.config, item.inputs, ledger.done, known, item.pin.range_bytes, self._limit)
        except (BayplanError, OSError) as error:
            self._fail(name, str(error))
            return
        item.ledger = ledger
        self._report.sources[name].notes.extend(ledger.notes)
        if ledger.changed:
            self._fail(name, _changed_message(ledger, item.source, old_recipe))

    def _convert(self, prepared: list[_Prepared]) -> None:
        tasks: list[tuple[str, Task]] = [(item.source.name, task) for item in prepared for task in item.ledger.tasks]
        outcome = self._run_tasks(tasks, self._listener)
        for name, reason in outcome.failures.items():
            self._fail(name, reason)

    def _conclude(self, prepared: list[_Prepared]) -> None:
        """Consolidate, and prove for every source that each input byte is in a part and each row counted once."""
        parts: dict[str, list[PartManifest]] = {}
        working = {item.source.name: item for item in prepared}
        for name in self._kept:
            try:
                dataset.consolidate(self.storage, name)
            except BayplanError as error:
                self._report.notes.append(str(error))
        for source in self._recipe.sources:
            name, report = source.name, self._report.sources[source.name]
            try:
                parts[name] = dataset.consolidate(self.storage, name)
            except BayplanError as error:
                self._fail(name, str(error))
                continue
            report.totals = total(parts[name])
            report.incomplete = [part.input.file for part in parts[name] if not part.input.input_complete]
            if report.failure is None and name in working and self._limit is None:
                problems = changed_meanwhile(working[name].ledger, working[name].inputs)
                problems += check_coverage(working[name].inputs, parts[name])
                if problems:
                    self._fail(name, "; ".join(problems[:_MAX_LISTED]))
            if report.failure is None and report.totals.num_read and not report.totals.num_written:
                reasons = ", ".join(f"{reason} {count}" for reason, count in report.totals.quarantined_by_reason.items())
                self._fail(name, f"all {report.totals.num_read} rows are quarantined ({reasons}): {_see(self.storage.url, name)}")
        view, num_parts = dataset.stock_view(self._recipe, parts)
        self.storage.publish_bytes(layout.STOCK_FILE, view)
        if any(source.token_share is not None for source in self._recipe.sources):
            blend = f"{layout.INDEX_DIR}/<profile>/{layout.PROFILE_DATASET_FILE}"
            self._report.notes.append(
                f"{layout.STOCK_FILE} takes `token_share` for weights by samples, since nothing is counted yet; "
                f"`bayplan index` puts the weights that give these shares of tokens into {blend}"
            )
        if num_parts > dataset.MAX_STOCK_PARTS:
            self._report.notes.append(
                f"{layout.STOCK_FILE} names {num_parts} files; stock Energon opens them all: raise `ulimit -n` above that"
            )
        self._report.above_limit = above_limit(self._recipe, total(part for many in parts.values() for part in many))


class _Relay(Listener):
    """Passes on messages, not counts."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner

    def say(self, source: str, message: str) -> None:
        self._inner.say(source, message)

    def tick(self) -> None:
        self._inner.tick()


def _see(output: str, source: str) -> str:
    return f"see `bayplan quarantine {output} --source {source}`"


def _updated(inventory: Inventory, prepared: Iterable[_Prepared]) -> Inventory:
    now = {item.source.name: {file.file: (file.stat.size, file.stat.stamp) for file in item.inputs} for item in prepared}
    return inventory | now


def _changed_message(ledger: SourceLedger, source: Source, old_recipe: Recipe | None) -> str:
    shown = "; ".join(f"{file}: {why}" for file, why in list(ledger.changed.items())[:_MAX_LISTED])
    more = f"; and {len(ledger.changed) - _MAX_LISTED} more" if len(ledger.changed) > _MAX_LISTED else ""
    old = next((old for old in old_recipe.sources if old.name == source.name), None) if old_recipe else None
    fields = differing_fields(fingerprint_keys(old), fingerprint_keys(source)) if old else []
    if not fields and any(part.recipe_fingerprint != source_fingerprint(source) for part in ledger.stale):
        fields = ["the file of its python: schema"]  # its old text is not kept, so it cannot be compared
    in_fields = f" (in {', '.join(fields)})" if fields else ""
    return (
        f"{len(ledger.changed)} files changed since their parts were made{in_fields}: {shown}{more}: "
        "undo the change, or let `--replace-changed` drop their parts and make them anew"
    )


def above_limit(recipe: Recipe, totals: Totals) -> str | None:
    """How the quarantine passes the recipe's limit; None when it does not."""
    limits, found = recipe.limits, totals.num_quarantined
    if limits.max_quarantined is not None and found > limits.max_quarantined:
        return f"{found} rows quarantined, the recipe allows {limits.max_quarantined}"
    share = found / totals.num_read if totals.num_read else 0.0
    if limits.max_quarantined_share is not None and share > limits.max_quarantined_share:
        return f"{share:.2%} of rows quarantined, the recipe allows {limits.max_quarantined_share:.2%}"
    return None


if __name__ == "__main__":
    from pipelines.cli import main

    main(["pack", *sys.argv[1:]])
