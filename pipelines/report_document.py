"""What a statistics report shows, as one plain JSON document: from the tables' own statistics; only cards read records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from indexer.facts import PackFacts
from indexer.image_rules.lookup import nearest
from indexer.mixture import MixtureRow
from indexer.profile import StoredProfile, profile_names, read_profile
from indexer.rows import as_numpy
from indexer.stats import OverLong, Stats, over_long
from indexer.stats_json import stats_dict
from indexer.table import IndexRow, IndexTable, open_index
from packer.format import layout
from packer.format.errors import BayplanError, UsageError
from packer.format.manifest import PartManifest
from packer.format.record import decode_record
from packer.format.version import FORMAT_VERSION
from packer.storage import Storage
from pipelines import dataset
from pipelines.blend import mixture
from pipelines.index_tasks import source_stats
from pipelines.recipe import Recipe
from pipelines.report_cards import card, choose

Document = dict[str, Any]
Manifests = Mapping[str, Sequence[PartManifest]]


def report_document(storage: Storage, profiles: Sequence[str], *, num_cards: int, seed: int) -> Document:
    """All figures of a dataset under the given profiles (all when none are given), and `num_cards` samples of each source.

    Raises:
        UsageError: no dataset, no such profile, nothing counted yet. FormatError: an index that does not fit the dataset.
    """
    identity = dataset.require_identity(storage)
    recipe = dataset.read_recipe(storage)
    if recipe is None:
        raise UsageError(f"{storage.url}: found no {layout.RECIPE_FILE}: its first run has not ended; run `bayplan pack` again")
    names = _wanted(storage, recipe, profiles)
    notes: list[str] = []
    manifests = _manifests(storage, list(identity.fingerprints), notes)
    tables = {name: open_index(storage.url, name, sources=_counted(storage, name, manifests, notes)) for name in names}
    first = tables[names[0]]
    return {
        "dataset": {
            "name": identity.name,
            "url_shown": storage.url,
            "tool_version": version("bayplan"),
            "format_version": FORMAT_VERSION,
            "num_sources": len(identity.fingerprints),
        },
        "profiles": {name: _profile(storage, recipe, table, manifests, notes) for name, table in tables.items()},
        "sources": {name: _source(name, recipe, manifests) for name in identity.fingerprints},
        "excluded": _excluded(first),
        "cards": {source: _cards(storage, tables, source, num_cards, seed) for source in first.sources},
        "forecast": {"packing": None, "balance": None},
        "notes": notes,
    }


def _wanted(storage: Storage, recipe: Recipe, profiles: Sequence[str]) -> list[str]:
    """Those asked for, or all, in the order of the recipe."""
    found = profile_names(storage)
    known = [name for name in recipe.profiles if name in found]
    known += [name for name in found if name not in known]
    if not known:
        raise UsageError(f"{storage.url}: found no index, expected at least one profile: run `bayplan index` first")
    if unknown := [name for name in dict.fromkeys(profiles) if name not in known]:
        raise UsageError(
            "\n".join(f"{storage.url}: found no profile {name!r} in its index{nearest(name, known)}" for name in unknown)
        )
    return list(dict.fromkeys(profiles)) or known


def _manifests(storage: Storage, sources: Sequence[str], notes: list[str]) -> dict[str, list[PartManifest]]:
    found = {}
    for source in sources:
        try:
            found[source] = dataset.read_source(storage, source)
        except BayplanError as error:
            notes.append(f"not in this report: {error}")
    return found


def _counted(storage: Storage, profile: str, manifests: Manifests, notes: list[str]) -> list[str]:
    """Sources that have a table."""
    counted = [name for name in manifests if storage.stat(layout.index_table_file(profile, name)) is not None]
    if not counted:
        raise UsageError(f"{storage.url}: found no counted source of profile {profile!r}: run `bayplan index` first")
    if missing := [name for name in manifests if name not in counted]:
        notes.append(f"profile {profile!r}: not counted yet: {', '.join(missing)}; run `bayplan index`")
    return counted


def _profile(storage: Storage, recipe: Recipe, table: IndexTable, manifests: Manifests, notes: list[str]) -> Document:
    stored = read_profile(storage, table.profile)
    assert stored is not None  # the table was opened with it
    stats = {source: source_stats(storage, table.profile, source) for source in table.sources}
    facts = {source: PackFacts.of(manifests[source]) for source in table.sources}
    long = {source: _over_long(table, source, stored.profile.sequence_lengths) for source in table.sources}
    rows: dict[str, MixtureRow] = {}
    try:
        mixed = mixture(recipe, stats, table.exclusion.sources if table.exclusion else {})
    except UsageError as error:
        notes.append(f"profile {table.profile!r}: {error}")
    else:
        rows = {row.name: row for row in mixed.rows}
        notes += [f"profile {table.profile!r}: {note}" for note in mixed.notes]
    whole = stats_dict(Stats.merged(stats.values()), PackFacts.merged(facts.values()), OverLong.merged(long.values()), None)
    return {
        "fingerprint": stored.fingerprint,
        **_description(stored),
        "sequence_lengths": list(stored.profile.sequence_lengths),
        "all": whole,
        "sources": {name: stats_dict(stats[name], facts[name], long[name], rows.get(name)) for name in table.sources},
    }


def _description(stored: StoredProfile) -> dict[str, str]:
    profile = stored.profile
    return {
        "tokenizer": stored.tokenizer_origin.rpartition("/")[2],
        "template": profile.template.name,
        "image_rule": profile.images.rule or "none",
    }


def _over_long(table: IndexTable, source: str, lengths: Sequence[int]) -> OverLong:
    rows = table.rows_of_source(source)
    columns = [table.column(name).slice(rows.start, len(rows)) for name in ("num_tokens", "status")]
    chunks = zip(*(column.chunks for column in columns), strict=True)
    counts = [over_long(as_numpy(tokens), as_numpy(status), lengths) for tokens, status in chunks]
    return OverLong.merged(counts) if counts else over_long(np.empty(0, np.int32), np.empty(0, np.uint8), lengths)


def _source(name: str, recipe: Recipe, manifests: Manifests) -> Document:
    source = next((source for source in recipe.sources if source.name == name), None)
    checks = sorted({part.check for part in manifests.get(name, ())})
    return {
        "schema": source.schema_name if source else None,
        "weight": source.weight if source else None,
        "token_share": source.token_share if source else None,
        "check": ", ".join(checks),
        "failure": None if name in manifests else "its packing has not ended",
    }


def _excluded(table: IndexTable) -> Document:
    report = table.exclusion
    if report is None or not report.lists:
        return {"lists": {}, "sources": {}}
    lists = {
        effect.name: {
            "num_ids": effect.num_ids,
            "num_matched": effect.num_matched,
            "num_rows": effect.num_rows,
            "unmatched": list(effect.unmatched),
        }
        for effect in report.lists
    }
    sources = {name: {"num_rows": effect.num_rows, "num_tokens": effect.num_tokens} for name, effect in report.sources.items()}
    return {"lists": lists, "sources": {name: effect for name, effect in sources.items() if effect["num_rows"]}}


def _cards(storage: Storage, tables: Mapping[str, IndexTable], source: str, count: int, seed: int) -> list[Document]:
    """Cards of some records: with the numbers of the first profile, and `by_profile` with those of the others."""
    first = next(iter(tables.values()))
    rows = first.rows_of_source(source)
    cards = []
    for place in choose(source, len(rows), count, seed):
        row = first.row(rows.start + place)
        others = {name: _numbers(table, row) for name, table in tables.items() if table is not first and source in table.sources}
        cards.append(_card(storage, row) | {"by_profile": others})
    return cards


def _numbers(table: IndexTable, like: IndexRow) -> Document:
    """What another profile counts for the same record."""
    row = table.row(table.row_of(like.source, like.part_id, like.line))
    counts = {name: getattr(row, name) for name in ("num_tokens", "num_text_tokens", "num_image_tokens")}
    return {**counts, "image_tokens": [image.num_image_tokens for image in row.images]}


def _card(storage: Storage, row: IndexRow) -> Document:
    with storage.open_read(row.record_file) as file:
        file.seek(row.record_offset)
        record = decode_record(file.read(row.record_size), f"{row.record_file}, line {row.line}")

    def read_image(entry: Mapping[str, Any]) -> bytes:
        with storage.open_read(f"{layout.source_dir(row.source)}/{entry['bundle']}") as bundle:
            bundle.seek(entry["offset"])
            return bundle.read(entry["size"])

    numbers = {
        "num_tokens": row.num_tokens,
        "num_text_tokens": row.num_text_tokens,
        "num_image_tokens": row.num_image_tokens,
        "images": [{"num_image_tokens": image.num_image_tokens} for image in row.images],
    }
    return card(record, numbers, read_image, part=row.part_id, line=row.line)
