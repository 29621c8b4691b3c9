"""The files at the top of a dataset: who it is, the resolved recipe, the interop view, and the totals of its sources."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from packer.format import layout
from packer.format.errors import FormatError, RecipeError, UsageError
from packer.format.manifest import PartManifest, decode_source, encode_document, encode_source, parse_document
from packer.storage import Storage, join_url
from pipelines.ledger import read_manifests
from pipelines.recipe import Pin, Recipe, dump_recipe, load_recipe, source_fingerprint

MAX_STOCK_PARTS = 500
"""Stock Energon opens one file per part: beyond this many a usual limit of open files is near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What `bayplan.json` says."""

    name: str
    fingerprints: Mapping[str, str]
    """Recipe fingerprint of every source."""
    limit: int | None
    """Rows per source of a trial dataset; None for a whole one."""
    kept_pins: Mapping[str, Pin]
    """Pins of sources that are in the dataset but not in its recipe any more."""


def read_identity(storage: Storage) -> Identity | None:
    """Who the dataset is; None when there is no dataset.

    Raises:
        FormatError: when `bayplan.json` is damaged or of another version.
    """
    try:
        data = storage.read_bytes(layout.DATASET_FILE)
    except FileNotFoundError:
        return None
    document = parse_document(data, join_url(storage.url, layout.DATASET_FILE), kind="dataset")
    name, sources, limit = document.get("name"), document.get("sources"), document.get("limit")
    if not isinstance(name, str) or not isinstance(sources, dict) or not isinstance(limit, int | None):
        raise FormatError(f"{join_url(storage.url, layout.DATASET_FILE)}: found no name or sources: the file is damaged")
    kept = document.get("kept_pins", {})
    pins = {source: Pin(root=pin["root"], range_bytes=pin["range_bytes"]) for source, pin in kept.items()}
    return Identity(name=name, fingerprints=sources, limit=limit, kept_pins=pins)


def require_identity(storage: Storage) -> Identity:
    """Who the dataset is.

    Raises:
        UsageError: when there is no dataset.
    """
    identity = read_identity(storage)
    if identity is None:
        raise UsageError(
            f"{storage.url}: found no {layout.DATASET_FILE}, expected a dataset: give the `output` folder of a recipe"
        )
    return identity


def check_output(storage: Storage, recipe: Recipe, limit: int | None) -> None:
    """Refuse an output that holds something else.

    Raises:
        UsageError: naming what is there.
    """
    identity = read_identity(storage)
    if identity is None:
        others = [file.name for file in storage.list_dir("")] + storage.list_dirs("")
        if others:
            shown = ", ".join(others[:5])
            raise UsageError(
                f"{storage.url}: found a folder with other files ({shown}), expected an empty or new one, or a dataset"
            )
        return
    if identity.name != recipe.name:
        raise UsageError(
            f"{storage.url}: found dataset {identity.name!r}, expected {recipe.name!r}: give the recipe another `output`"
        )
    if identity.limit != limit:
        found = "a whole dataset" if identity.limit is None else f"a trial of {identity.limit} rows a source"
        raise UsageError(f"{storage.url}: found {found}, expected {'a whole one' if limit is None else f'a trial of {limit}'}")


def write_identity(
    storage: Storage, recipe: Recipe, limit: int | None, kept: Mapping[str, str], kept_pins: Mapping[str, Pin]
) -> None:
    """Publish `bayplan.json`. `kept` and `kept_pins` are of sources of the dataset that the recipe no longer names."""
    fingerprints = {**kept, **{source.name: source_fingerprint(source) for source in recipe.sources}}
    content: dict[str, Any] = {"tool_version": version("bayplan"), "name": recipe.name}
    if limit is not None:
        content["limit"] = limit
    content["sources"] = dict(sorted(fingerprints.items()))
    if kept_pins:
        content["kept_pins"] = {name: dataclasses.asdict(pin) for name, pin in sorted(kept_pins.items())}
    storage.publish_bytes(layout.DATASET_FILE, encode_document("dataset", content))


def read_recipe(storage: Storage) -> Recipe | None:
    """The resolved recipe of a dataset; None before its first run got that far."""
    try:
        data = storage.read_bytes(layout.RECIPE_FILE)
    except FileNotFoundError:
        return None
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        path = Path(folder) / layout.RECIPE_FILE
        path.write_bytes(data)
        try:
            return load_recipe(path)
        except RecipeError as error:
            raise FormatError(
                f"{join_url(storage.url, layout.RECIPE_FILE)}: not a recipe this release reads: {error.problems[0]}"
            ) from error


def read_pins(recipe: Recipe | None) -> dict[str, Pin]:
    """The roots and range sizes that the runs so far settled."""
    if recipe is None:
        return {}
    return {
        source.name: Pin(root=source.root, range_bytes=source.range_bytes)
        for source in recipe.sources
        if source.root is not None and source.range_bytes is not None
    }


def write_recipe(storage: Storage, recipe: Recipe, pins: Mapping[str, Pin]) -> None:
    """Publish the resolved recipe."""
    names = {source.name for source in recipe.sources}
    pinned = {name: pin for name, pin in pins.items() if name in names}
    storage.publish_bytes(layout.RECIPE_FILE, dump_recipe(recipe, pinned).encode())


def consolidate(storage: Storage, source: str) -> list[PartManifest]:
    """Write `source.json` from all manifests of a source and return them."""
    manifests = read_manifests(storage, source)
    storage.publish_bytes(layout.source_file(source), encode_source(source, manifests))
    return manifests


def read_source(storage: Storage, source: str) -> list[PartManifest]:
    """The manifests of a source, from `source.json`.

    Raises:
        UsageError: when the dataset has no such source or its first run has not ended. FormatError: when it is damaged.
    """
    name = layout.source_file(source)
    where = join_url(storage.url, name)
    try:
        manifests = decode_source(storage.read_bytes(name), where)
        if other := next((part.source for part in manifests if part.source != source), None):
            raise FormatError(f"{where}: found parts of source {other!r}, expected {source!r}: the file was moved here")
        return manifests
    except FileNotFoundError:
        known = ", ".join(storage.list_dirs(layout.SOURCES_DIR)) or "none"
        raise UsageError(f"found no source {source!r} with a finished run in {storage.url}; its sources: {known}") from None


def stock_view(recipe: Recipe, parts: Mapping[str, Sequence[PartManifest]]) -> tuple[bytes, int]:
    """The Energon metadataset over the plain record files, and how many it names.

    A part's weight is its share of its source's records times the source's weight, so the blend draws every sample of a
    source alike. Parts without records are left out.
    """
    blend: list[dict[str, Any]] = []
    for source in recipe.sources:
        manifests = parts.get(source.name, ())
        num_records = sum(manifest.num_written for manifest in manifests)
        weight = source.token_share if source.token_share is not None else source.weight if source.weight is not None else 1.0
        blend.extend(
            {
                "path": layout.part_file(source.name, manifest.part_id, layout.RECORDS_SUFFIX),
                "weight": weight * manifest.num_written / num_records,
                "subflavors": {"source": source.name},
            }
            for manifest in manifests
            if manifest.num_written
        )
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}}
    head = "# Stock Energon reads the record files through this, without bayplan. Images: see packer/format/README.md.\n"
    return (head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).encode(), len(blend)
