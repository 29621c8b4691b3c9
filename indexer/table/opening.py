"""Opening an index: every file is checked against its profile, every table against the manifests of its source, all at once."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from indexer.exclusion import ExclusionReport, read_exclusions
from indexer.table.files import KIND_IDS, KIND_TABLE
from indexer.table.index import IndexTable, Origin
from indexer.table.local_copy import local_file, version_of
from indexer.table.mapped import MappedFile, MappedSource, map_file
from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import PartKey, decode_part_keys, parse_document
from packer.storage import FileStat, Storage, is_local, join_url, open_storage

_SHOWN = 10


def open_index(
    dataset_url: str,
    profile: str,
    *,
    sources: Sequence[str] | None = None,
    exclude: bool = True,
    cache_dir: str | None = None,
    check: bool = True,
) -> IndexTable:
    """The index of a dataset under a profile, mapped into memory.

    Args:
        dataset_url: folder or URL of the dataset. The files of a remote index are copied to this machine once.
        sources: all sources of the dataset when None.
        exclude: whether the lists in `exclude/` are applied.
        cache_dir: where copies of remote files go; the user's cache folder when None.
        check: compare with `source.json` of every source, about half a second for 50,000 parts. Without it, a part that was
            packed again after it was counted goes unnoticed.

    Raises:
        UsageError: when the dataset has no such profile or source.
        FormatError: naming every file that is damaged or foreign, and every part that is stale, foreign or missing.
    """
    storage = open_storage(dataset_url)
    fingerprint = _profile_fingerprint(storage, profile)
    files = {posixpath.basename(file.name): file for file in storage.list_dir(layout.index_dir(profile))}
    indexed = sorted(source for name in files if (source := layout.table_source_of(name)))
    problems: list[str] = []
    mapped = []
    for source in _chosen(storage, profile, indexed, sources, check, problems):
        try:
            found = _open_source(storage, profile, source, files, cache_dir)
        except FormatError as error:
            problems.append(str(error))
            continue
        if found.profile_fingerprint != fingerprint:
            problems.append(
                f"{_where(storage, profile, source)}: found counts of profile fingerprint {found.profile_fingerprint}, "
                f"expected {fingerprint}: the profile changed; index again"
            )
        elif check:
            problems += _part_problems(storage, source, found.parts)
        mapped.append(found)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN:,} more" if len(problems) > _SHOWN else ""
        raise FormatError(f"index {profile!r} of {storage.url} cannot be used:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
    origin = Origin(
        dataset_url=storage.url, profile=profile, profile_fingerprint=fingerprint, cache_dir=cache_dir, reopen=_reopen
    )
    table = IndexTable(origin, mapped)
    if exclude:
        table.exclude(read_exclusions(storage))
    return table


def _reopen(origin: Origin, digests: tuple[tuple[str, str], ...], exclusion: ExclusionReport | None) -> IndexTable:
    """The same table in another process.

    Raises:
        FormatError: when it was indexed again since.
    """
    names = [name for name, _ in digests]
    table = open_index(origin.dataset_url, origin.profile, sources=names, exclude=False, cache_dir=origin.cache_dir, check=False)
    if table.digests != digests:
        changed = [name for (name, old), (_, new) in zip(digests, table.digests, strict=True) if old != new]
        raise FormatError(
            f"index {origin.profile!r} of {origin.dataset_url}: sources {', '.join(changed)} were indexed again since this "
            "process's parent opened it: start again"
        )
    table._set_exclusion(exclusion)
    return table


def _profile_fingerprint(storage: Storage, profile: str) -> str:
    name = layout.profile_file(profile)
    where = join_url(storage.url, name)
    try:
        data = storage.read_bytes(name)
    except FileNotFoundError as error:
        known = ", ".join(storage.list_dirs(layout.INDEX_DIR)) or "none"
        raise UsageError(
            f"{where}: found no file, expected the index of a profile (this dataset has: {known}): index it first"
        ) from error
    fingerprint = parse_document(data, where, kind="profile").get("fingerprint")
    if not isinstance(fingerprint, str):
        raise FormatError(f"{where}: found fingerprint {fingerprint!r}, expected text: the file is damaged; index again")
    return fingerprint


def _chosen(
    storage: Storage, profile: str, indexed: Sequence[str], sources: Sequence[str] | None, check: bool, problems: list[str]
) -> list[str]:
    """The sources to open, by name. Without a choice, sources of the dataset that have no index are problems."""
    if sources is not None:
        if unknown := sorted(set(sources) - set(indexed)):
            raise UsageError(
                f"index {profile!r} of {storage.url}: found no source {', '.join(map(repr, unknown))}, expected some of: "
                f"{', '.join(indexed) or 'none'}"
            )
        return sorted(set(sources))
    if check:
        for source in sorted(set(storage.list_dirs(layout.SOURCES_DIR)) - set(indexed)):
            problems.append(
                f"{_where(storage, profile, source)}: found no file, but the dataset has source {source!r}: index it, or name "
                "the sources you want"
            )
    return list(indexed)


def _where(storage: Storage, profile: str, source: str) -> str:
    return join_url(storage.url, layout.index_table_file(profile, source))


def _open_source(
    storage: Storage, profile: str, source: str, files: Mapping[str, FileStat], cache_dir: str | None
) -> MappedSource:
    def mapped(kind: str, name: str) -> MappedFile:
        where = join_url(storage.url, name)
        stat = files.get(posixpath.basename(name))
        if stat is None:
            raise FormatError(f"{where}: found no file, expected it beside the table: index again")
        try:
            file = _map(storage, stat, cache_dir, kind)
        except FileNotFoundError as error:
            raise FormatError(f"{where}: removed while it was opened; open the index again") from error
        if (identity := (file.header.profile, file.header.source)) != (profile, source):
            raise FormatError(f"{where}: found profile, source {identity}, expected {profile, source}: the file was moved here")
        return file

    table = mapped(KIND_TABLE, layout.index_table_file(profile, source))
    ids = mapped(KIND_IDS, layout.index_ids_file(profile, source))
    return MappedSource(table, ids, _where(storage, profile, source))


def _map(storage: Storage, stat: FileStat, cache_dir: str | None, kind: str) -> MappedFile:
    """Map a published file. A copy that cannot be used may have been damaged on this machine: it is made once more."""
    where = join_url(storage.url, stat.name)
    path = local_file(storage, stat, cache_dir)
    if is_local(storage.url):
        return map_file(path, where, kind)
    version = version_of(path)
    try:
        return map_file(path, where, kind)
    except (FormatError, FileNotFoundError):
        path = local_file(storage, stat, cache_dir, damaged=version)
    try:
        return map_file(path, where, kind)
    except FormatError as error:
        raise FormatError(f"{error}; its copy was made anew and is no better: {path}") from error


def _part_problems(storage: Storage, source: str, counted: Sequence[PartKey]) -> list[str]:
    """How the parts of a table differ from those of its source now; one line for each kind, up to ten parts named."""
    name = layout.source_file(source)
    where = join_url(storage.url, name)
    try:
        packed = decode_part_keys(storage.read_bytes(name), where)
    except FileNotFoundError:
        return [f"{where}: found no file, but source {source!r} has an index: pack the source, or remove its index"]
    except FormatError as error:
        return [str(error)]
    if packed == counted:
        return []
    old, new = ({key.part_id: key for key in keys} for keys in (counted, packed))
    kinds = {
        "missing (packed, not counted)": [part for part in new if part not in old],
        "foreign (counted, not in the source)": [part for part in old if part not in new],
        "stale (packed again after they were counted)": [part for part in new if part in old and old[part] != new[part]],
        "in another order": [] if old != new else list(new),
    }
    return [
        f"source {source!r}: {len(parts):,} parts are {kind}: {', '.join(parts[:_SHOWN])}"
        f"{' ...' if len(parts) > _SHOWN else ''}: index again"
        for kind, parts in kinds.items()
        if parts
    ]
