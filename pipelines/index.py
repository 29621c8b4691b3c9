"""The index job: every record of a dataset is counted by every profile, once. Also `python -m pipelines.index`.

Order of writing: tokenizer and `profile.json`; parts, in any order; one table a source; `dataset.yaml`. Part files are the
only evidence of what is done, so the next run goes on from any end of this one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from indexer.exclusion import read_exclusions
from indexer.profile import OpenProfile, profile_names
from indexer.stats import Stats
from indexer.table import PartState, is_consolidated, part_states
from packer.format import layout
from packer.format.errors import BayplanError, FormatError, UsageError
from packer.format.manifest import PartManifest
from packer.storage import Storage, open_storage
from pipelines import dataset
from pipelines.blend import dataset_yaml, excluded_of
from pipelines.index_profiles import open_profiles, wanted_profiles
from pipelines.index_tasks import ConsolidateTask, IndexTask, source_stats
from pipelines.nv_meta import write_nv_meta
from pipelines.ray_executor import STOPPED, Interrupted, Listener, Outcome, RayExecutor
from pipelines.recipe import Recipe
from pipelines.tasks import Task

_TASK_BYTES = 64 << 20
_ROW_TIMEOUT_SECONDS = 300.0
"""For sources that the recipe does not name any more."""
_CONSOLIDATE_TIMEOUT_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class SourceIndex:
    """What a run made of one source under one profile."""

    num_rows: int = 0
    stats: Stats | None = None
    failure: str | None = None


@dataclass(slots=True, kw_only=True)
class IndexReport:
    """What a run made of a dataset: profile -> source -> state."""

    dataset: str
    profiles: dict[str, dict[str, SourceIndex]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all good, 1 something failed."""
        return int(any(state.failure for states in self.profiles.values() for state in states.values()))


RunTasks = Callable[[Sequence[tuple[str, Task]], Listener], Outcome]


class IndexJob:
    """One run over a dataset. `run_tasks` runs its tasks; on Ray unless a test says otherwise."""

    def __init__(
        self,
        url: str,
        *,
        profiles: Sequence[str] = (),
        recipe: Recipe | None = None,
        replace_changed: bool = False,
        run_tasks: RunTasks | None = None,
    ) -> None:
        """Opens the profiles and writes nothing, so that wrong use shows before Ray is started.

        Raises:
            UsageError: no dataset, or all that is wrong with all profiles. FormatError: a file of the dataset is damaged.
        """
        self.storage: Storage = open_storage(url)
        identity = dataset.require_identity(self.storage)
        kept = dataset.read_recipe(self.storage)
        if kept is None:
            raise UsageError(
                f"{url}: found no {layout.RECIPE_FILE}: its first run has not got that far; run `bayplan pack` again"
            )
        read_exclusions(self.storage)  # a list that cannot be read shows now, and not after hours of counting
        self._sources = list(identity.fingerprints)
        self._kept = kept
        self._recipe = kept if recipe is None else kept.model_copy(update={"profiles": recipe.profiles})
        self._left_alone: list[str] = []
        self._differing = [] if recipe is None else _other_mixture(kept, recipe)
        names = wanted_profiles(profiles, self._recipe, self.storage, is_given=recipe is not None)
        if recipe is not None and not profiles:
            self._left_alone = [name for name in profile_names(self.storage) if name not in names]
        self._profiles = open_profiles(self.storage, self._recipe, names, replace_changed=replace_changed)
        self._listener = Listener()
        self._should_stop: Callable[[], bool] = lambda: False
        self._run_tasks = run_tasks or self._on_ray
        self._report = IndexReport(dataset=self.storage.url)

    def run(self, listener: Listener | None = None, should_stop: Callable[[], bool] = lambda: False) -> IndexReport:
        """Do what is left to do.

        Raises:
            OutputError: when the dataset cannot be written. Interrupted: when the user stopped the job.
        """
        self._listener, self._should_stop = listener or Listener(), should_stop
        for ready in self._profiles:
            ready.store(self.storage)
        self._keep_profiles()
        if self._left_alone:
            listed = ", ".join(self._left_alone)
            self._report.notes.append(f"in the dataset but not in the recipe, left as they are: profiles {listed}")
        opened = [ready.opened for ready in self._profiles]
        self._report.notes += [ready.note for ready in self._profiles if ready.note]
        manifests, damaged = self._manifests()
        for profile in opened:
            name = profile.profile.name
            self._report.profiles[name] = {source: SourceIndex() for source in [*self._sources, *damaged]}
            for source, why in damaged.items():
                self._fail(name, source, why)
        self._count(opened, manifests)
        self._consolidate(opened, manifests)
        for profile in opened:
            self._conclude(profile, manifests)
        self._write_nv_meta(manifests)
        return self._report

    def _keep_profiles(self) -> None:
        """Let the dataset's own recipe name what it was counted by, so that the next run needs no other."""
        profiles = {**self._kept.profiles, **self._recipe.profiles}
        if profiles != self._kept.profiles:
            dataset.write_recipe(
                self.storage, self._kept.model_copy(update={"profiles": profiles}), dataset.read_pins(self._kept)
            )
        if self._differing:
            self._report.notes.append(
                f"only `profiles` are taken from the recipe; it has other weights, shares or `val` for "
                f"{', '.join(self._differing)}: run `bayplan pack` with it to use them"
            )

    def _manifests(self) -> tuple[dict[str, list[PartManifest]], dict[str, str]]:
        """Parts of every source whose packing has ended once; and why others cannot be read."""
        found: dict[str, list[PartManifest]] = {}
        damaged: dict[str, str] = {}
        for source in self._sources:
            try:
                found[source] = dataset.read_source(self.storage, source)
            except FormatError as error:
                damaged[source] = f"{error}: run `bayplan pack` again, it makes the file anew"
            except UsageError as error:
                self._report.notes.append(f"not counted: {error}")
        self._sources = list(found)
        return found, damaged

    def _fail(self, profile: str, source: str, reason: str) -> None:
        state = self._report.profiles[profile][source]
        state.failure, state.stats = reason, None
        self._listener.say(_unit(profile, source), f"failed: {reason}")

    def _count(self, opened: Sequence[OpenProfile], manifests: dict[str, list[PartManifest]]) -> None:
        tasks: list[tuple[str, Task]] = []
        for profile in opened:
            name = profile.profile.name
            for source in self._sources:
                self._stop_if_asked()
                if is_consolidated(self.storage, name, source, manifests[source], profile.fingerprint):
                    continue
                left = self._left(profile, source, manifests[source])
                tasks += [
                    (
                        _unit(name, source),
                        IndexTask(
                            source=source,
                            profile=name,
                            fingerprint=profile.fingerprint,
                            parts=tuple(parts),
                            num_cpus=self._recipe.resources.num_cpus,
                        ),
                    )
                    for parts in _grouped(left)
                ]
        self._take(self._run_tasks(tasks, self._listener))

    def _left(self, profile: OpenProfile, source: str, manifests: Sequence[PartManifest]) -> list[PartManifest]:
        """Parts that are not counted, or by another profile, or from other bytes; files of parts that are gone are removed."""
        name = profile.profile.name
        gone = self._files_of_gone_parts(name, source, manifests)
        checks = part_states(self.storage, name, source, manifests, profile_fingerprint=profile.fingerprint)
        states = {check.key.part_id: check.state for check in checks}
        if gone or any(state not in (PartState.DONE, PartState.MISSING) for state in states.values()):
            # First of all the table: the job may end, the change be undone, and then it would seem to be all there.
            self.storage.remove(layout.index_table_file(name, source))
        for file in gone:
            self.storage.remove(file)
        return [part for part in manifests if states[part.part_id] is not PartState.DONE]

    def _files_of_gone_parts(self, name: str, source: str, manifests: Sequence[PartManifest]) -> list[str]:
        gone: list[str] = []
        for folder, file_of in (
            (layout.index_quarantine_dir(name, source), layout.index_quarantine_file),
            (layout.index_parts_dir(name, source), layout.index_part_file),
        ):
            known = {file_of(name, source, part.part_id) for part in manifests}
            gone += [file.name for file in self.storage.list_dir(folder) if file.name not in known]
            self.storage.remove_stale_temporaries(folder)
        return gone

    def _consolidate(self, opened: Sequence[OpenProfile], manifests: dict[str, list[PartManifest]]) -> None:
        """Sources whose every part is counted get their one table."""
        tasks: list[tuple[str, Task]] = []
        for profile in opened:
            name = profile.profile.name
            for source in self._sources:
                is_whole = is_consolidated(self.storage, name, source, manifests[source], profile.fingerprint)
                if self._report.profiles[name][source].failure is None and not is_whole:
                    task = ConsolidateTask(source=source, profile=name, fingerprint=profile.fingerprint)
                    tasks.append((_unit(name, source), task))
        self._take(self._run_tasks(tasks, _Quiet(self._listener)))

    def _take(self, outcome: Outcome) -> None:
        for unit, reason in outcome.failures.items():
            profile, source = unit.split(_SEPARATOR)
            self._fail(profile, source, reason)

    def _on_ray(self, tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        if not tasks:
            return Outcome()
        timeouts = {unit: self._timeout_seconds(task) for unit, task in tasks}
        executor = RayExecutor(self.storage.url, self._recipe.resources, timeouts, listener, self._should_stop)
        return executor.run(tasks)

    def _timeout_seconds(self, task: Task) -> float:
        if isinstance(task, ConsolidateTask):
            return _CONSOLIDATE_TIMEOUT_SECONDS
        rows = {source.name: source.row_timeout_seconds for source in self._recipe.sources}
        return rows.get(str(task.source), _ROW_TIMEOUT_SECONDS)

    def _conclude(self, profile: OpenProfile, manifests: dict[str, list[PartManifest]]) -> None:
        """Prove that every record has a row, and write the blend."""
        name = profile.profile.name
        states = self._report.profiles[name]
        for source, state in states.items():
            self._stop_if_asked()
            if state.failure is None:
                self._prove(name, source, state, manifests[source])
        failed = [source for source, state in states.items() if state.failure is not None]
        blend = layout.profile_dataset_file(name)
        if failed and self.storage.stat(blend) is not None:
            self._report.notes.append(f"profile {name!r}: {blend} is left as it was, since {', '.join(failed)} failed")
            return
        known = {source: state.stats for source, state in states.items() if state.stats is not None}
        excluded = excluded_of(self.storage, name, list(known))
        document, notes = dataset_yaml(self._recipe, name, known, excluded)
        self.storage.publish_bytes(blend, document)
        self._report.notes += [f"profile {name!r}: {note}" for note in notes]

    def _prove(self, name: str, source: str, state: SourceIndex, manifests: Sequence[PartManifest]) -> None:
        try:
            stats = source_stats(self.storage, name, source)
        except BayplanError as error:
            self._fail(name, source, str(error))
            return
        state.stats, state.num_rows = stats, stats.num_samples
        num_records = sum(part.num_written for part in manifests)
        if stats.num_samples != num_records:
            self._fail(name, source, f"found {stats.num_samples} rows, expected one for each of {num_records} records")
        elif num_records and not stats.num_usable:
            reasons = ", ".join(f"{status} {count}" for status, count in stats.status.items())
            where = layout.index_quarantine_dir(name, source)
            self._fail(name, source, f"none of its {num_records} samples can be counted ({reasons}): see {where}/ in the dataset")

    def _stop_if_asked(self) -> None:
        if self._should_stop():
            raise Interrupted(STOPPED)
        self._listener.tick()

    def _write_nv_meta(self, manifests: dict[str, list[PartManifest]]) -> None:
        """Make each counted source loadable by Energon, under every profile it is counted by."""
        held_out = {source.name: source.val for source in self._recipe.sources}
        names = profile_names(self.storage)
        for source in self._sources:
            counted = [name for name in names if self.storage.stat(layout.index_table_file(name, source)) is not None]
            if counted:
                ordered = [name for name in self._recipe.profiles if name in counted]
                ordered += [name for name in counted if name not in ordered]
                write_nv_meta(self.storage, source, manifests[source], ordered, held_out.get(source, 0.0))


def _other_mixture(kept: Recipe, given: Recipe) -> list[str]:
    """Sources whose weight, share or held-out part the two recipes do not agree on."""

    def mixture(recipe: Recipe) -> dict[str, tuple[float | None, ...]]:
        return {source.name: (source.weight, source.token_share, source.val) for source in recipe.sources}

    old, new = mixture(kept), mixture(given)
    return [name for name in new if name in old and new[name] != old[name]]


_SEPARATOR = " / "


def _unit(profile: str, source: str) -> str:
    """What the executor knows a source of a profile by."""
    return f"{profile}{_SEPARATOR}{source}"


def _grouped(parts: Iterable[PartManifest]) -> Iterable[list[PartManifest]]:
    """Small parts share a task: starting one costs more than counting a few thousand records."""
    group: list[PartManifest] = []
    num_bytes = 0
    for part in parts:
        group.append(part)
        num_bytes += sum(entry.size for name, entry in part.files.items() if name.endswith(layout.RECORDS_SUFFIX))
        if num_bytes >= _TASK_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


class _Quiet(Listener):
    """Passes on messages, not counts."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner

    def say(self, source: str, message: str) -> None:
        self._inner.say(source, message)

    def tick(self) -> None:
        self._inner.tick()


if __name__ == "__main__":
    from pipelines.cli import main

    main(["index", *sys.argv[1:]])
