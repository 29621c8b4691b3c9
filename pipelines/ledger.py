"""What is done and what is left: manifests against inputs. A manifest is the only evidence; nothing is remembered elsewhere."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from packer.convert import ConvertTask
from packer.format import layout
from packer.format.errors import FormatError, InputError
from packer.format.manifest import PartManifest, decode_manifest
from packer.row_source import SourceConfig
from packer.sources import Compression, InputRange, plan_ranges, span_digest
from packer.storage import Storage, stat_url
from pipelines.inputs import InputFile

_READERS = 16


def read_manifests(storage: Storage, source: str) -> list[PartManifest]:
    """Every committed part of a source, ordered by part id.

    Raises:
        FormatError: when a manifest is damaged or of another version.
    """
    manifests, problems = collect_manifests(storage, source)
    if problems:
        raise problems[0]
    return manifests


def collect_manifests(storage: Storage, source: str) -> tuple[list[PartManifest], list[FormatError]]:
    """The committed parts of a source that can be read, and what is wrong with the others."""
    names = [file.name for file in storage.list_dir(layout.source_dir(source)) if file.name.endswith(layout.MANIFEST_SUFFIX)]

    def read(name: str) -> PartManifest | FormatError:
        try:
            manifest = decode_manifest(storage.read_bytes(name), name)
        except FormatError as error:
            return error
        expected = layout.part_file(source, manifest.part_id, layout.MANIFEST_SUFFIX)
        if manifest.source != source or name != expected:
            return FormatError(f"{name}: found part {manifest.part_id} of source {manifest.source!r}: the file was moved here")
        return manifest

    with ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(read, names))
    manifests = [item for item in found if isinstance(item, PartManifest)]
    problems = [item for item in found if isinstance(item, FormatError)]
    return sorted(manifests, key=lambda manifest: manifest.identity), problems


@dataclass(slots=True, kw_only=True)
class SourceLedger:
    """State of one source at the start of a run."""

    tasks: list[ConvertTask] = field(default_factory=list)
    done: list[PartManifest] = field(default_factory=list)
    """Committed parts that stay."""
    changed: dict[str, str] = field(default_factory=dict)
    """File -> what is different about it."""
    stale: list[PartManifest] = field(default_factory=list)
    """Committed parts that belong to changed files."""
    notes: list[str] = field(default_factory=list)


def open_ledger(
    config: SourceConfig,
    inputs: Sequence[InputFile],
    manifests: Sequence[PartManifest],
    known: Mapping[str, tuple[int, str]],
    range_bytes: int,
    limit: int | None,
) -> SourceLedger:
    """Compare the inputs of a source with its parts: what stays, what changed, what is left to do.

    Args:
        known: The inventory's entry of this source: file -> (size, stamp) when its parts were made.
        limit: Rows of a trial dataset, spread over the source's files; None for all.
    """
    ledger = SourceLedger()
    by_file = _by_file(manifests)
    if limit is not None:
        inputs = [item for item in inputs if item.stat.size][:limit]
    for item in inputs:
        parts = by_file.pop(item.file, [])
        ranges = plan_ranges(item.stat, item.file, range_bytes) if limit is None else [item.whole]
        if not ranges:
            ledger.notes.append(f"{item.file}: empty file")
        difference = _difference(config, item, parts, ranges, known.get(item.file))
        if difference is not None:
            ledger.changed[item.file] = difference
            ledger.stale.extend(parts)
            parts = []
        elif not parts and known and item.file not in known:
            ledger.notes.append(f"{item.file}: new file")
        ledger.done.extend(parts)
        max_rows = None if limit is None else -(-limit // len(inputs))
        ledger.tasks.extend(_left(config, ranges, parts, max_rows))
    for file, where in _moved(config, ledger, by_file, inputs).items():
        ledger.changed[file] = f"it is gone, and {where} is new and holds the same: its rows would be packed twice"
        ledger.stale.extend(by_file.pop(file))
    for file, parts in sorted(by_file.items()):
        ledger.notes.append(f"{file}: not among the inputs any more; its {len(parts)} parts are kept")
        ledger.done.extend(parts)
    return ledger


def _moved(
    config: SourceConfig, ledger: SourceLedger, vanished: Mapping[str, Sequence[PartManifest]], inputs: Sequence[InputFile]
) -> dict[str, str]:
    """Vanished files -> the new file elsewhere that holds the same lines: another `root` names every file anew."""
    done = {part.input.file for part in ledger.done}
    new = {(posixpath.basename(item.file), item.stat.size): item for item in inputs if item.file not in done}
    moved = {}
    for file, parts in sorted(vanished.items()):
        span = parts[0].input
        item = new.get((posixpath.basename(file), span.file_size))
        if item and span_digest(item.whole, span.byte_start, span.byte_end, config.max_line_bytes) == span.digest:
            moved[file] = item.file
    return moved


def _by_file(manifests: Iterable[PartManifest]) -> dict[str, list[PartManifest]]:
    by_file: dict[str, list[PartManifest]] = defaultdict(list)
    for manifest in manifests:
        by_file[manifest.input.file].append(manifest)
    return dict(by_file)


def _difference(
    config: SourceConfig,
    item: InputFile,
    parts: Sequence[PartManifest],
    ranges: Sequence[InputRange],
    known: tuple[int, str] | None,
) -> str | None:
    """Why a file's parts cannot stay, or None. A new time stamp alone is no change: the bytes are compared."""
    if not parts:
        return None
    if any(part.recipe_fingerprint != config.fingerprint for part in parts):
        return "the recipe of its source changed"
    sizes = {part.input.file_size for part in parts}
    if sizes != {item.stat.size}:
        return f"found {item.stat.size} bytes, its parts were made from {', '.join(map(str, sorted(sizes)))}"
    by_index = {work.range_index: work for work in ranges}
    for part in parts:
        work = by_index.get(part.identity.range_index)
        span = part.input
        is_behind = work is not None and work.byte_end is not None and span.byte_end > span.byte_start >= work.byte_end
        if work is None or span.byte_start < work.byte_start or is_behind:
            return f"part {part.part_id} was cut with another `range_bytes`"
    if known == (item.stat.size, item.stat.stamp):
        return None
    for part in parts:
        if part.supersedes is not None:
            continue
        span = part.input
        if span_digest(item.whole, span.byte_start, span.byte_end, config.max_line_bytes) != span.digest:
            return f"its bytes {span.byte_start} to {span.byte_end} are not those part {part.part_id} was made from"
    return None


def _left(
    config: SourceConfig, ranges: Sequence[InputRange], parts: Sequence[PartManifest], max_rows: int | None
) -> Iterable[ConvertTask]:
    """A task for every range that is not whole, from behind its unbroken first parts on."""
    rolls: dict[int, dict[int, PartManifest]] = defaultdict(dict)
    for part in parts:
        if part.supersedes is None:
            rolls[part.identity.range_index][part.identity.roll] = part
    for work in ranges:
        done = rolls[work.range_index]
        last, next_roll = None, 0
        while next_roll in done:
            last, next_roll = done[next_roll], next_roll + 1
        if last is None:
            yield ConvertTask(source=config, work=work, max_rows=max_rows)
        elif not last.is_last_of_range:
            num_read = sum(done[roll].num_read for roll in range(next_roll))
            left = None if max_rows is None else max(max_rows - num_read, 0)
            yield ConvertTask(source=config, work=work, next_roll=next_roll, resume_at=last.input.byte_end, max_rows=left)


def drop_parts(storage: Storage, parts: Iterable[PartManifest]) -> None:
    """Remove parts, each manifest before its files, so that no reader sees a manifest without them."""
    for part in sorted(parts, key=lambda part: part.identity, reverse=True):
        storage.remove(layout.part_file(part.source, part.part_id, layout.MANIFEST_SUFFIX))
        for file_name in part.files:
            storage.remove(f"{layout.source_dir(part.source)}/{file_name}")


def check_coverage(inputs: Sequence[InputFile], manifests: Iterable[PartManifest]) -> list[str]:
    """Prove that the parts of every file tile it: what lies between two parts, or behind the last one, is listed."""
    by_file = _by_file(manifest for manifest in manifests if manifest.supersedes is None)
    problems = []
    for item in inputs:
        position = 0
        parts = sorted(by_file.get(item.file, []), key=lambda part: part.identity)
        for part in parts:
            if part.input.byte_start != position:
                problems.append(f"{item.file}: part {part.part_id} begins at byte {part.input.byte_start}, expected {position}")
            position = part.input.byte_end
        if item.stat.size and not (parts and parts[-1].is_last_of_range):
            problems.append(f"{item.file}: nothing is committed behind byte {position}")
        elif parts and not _is_compressed(item) and position != item.stat.size:
            problems.append(f"{item.file}: its parts end at byte {position}, the file at {item.stat.size}")
    return problems


def changed_meanwhile(ledger: SourceLedger, inputs: Sequence[InputFile]) -> list[str]:
    """Inputs of this run's tasks that were written to while it ran: their parts may hold both states."""
    worked_on = {task.work.file for task in ledger.tasks}

    def look(item: InputFile) -> str | None:
        try:
            now = stat_url(item.stat.name)
        except FileNotFoundError:
            return None  # its parts were made in time
        if (now.size, now.stamp) == (item.stat.size, item.stat.stamp):
            return None
        return f"{item.file}: it changed while it was packed: run again with `--replace-changed` when it is at rest"

    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(look, [item for item in inputs if item.file in worked_on])
        return [problem for problem in found if problem is not None]


def _is_compressed(item: InputFile) -> bool:
    return Compression.of(item.stat.name) is not Compression.NONE


def whole_file(config: SourceConfig, inputs: Mapping[str, InputFile], part: PartManifest) -> InputRange:
    """The file a part was made from, as it is now.

    Raises:
        InputError: when it is gone.
    """
    item = inputs.get(part.input.file)
    if item is None:
        raise InputError(
            f"{part.input.file}: found no such file among the inputs of source {config.name!r}; it is needed for a retry"
        )
    return item.whole
