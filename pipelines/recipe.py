"""The recipe: the one YAML file a data engineer writes. Read it, write it resolved, describe it to an editor.

Reading finds every mistake at once and touches no file of a source; listing the files is another step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from packer.format.errors import RecipeError, UsageError
from pipelines.recipe_errors import Reporter
from pipelines.recipe_fingerprint import differing_fields, fingerprint_keys, source_fingerprint
from pipelines.recipe_models import (
    LLAVA_ONLY,
    Conversion,
    Defaults,
    ImagePolicy,
    Limits,
    Recipe,
    Resources,
    Source,
    mixture_problems,
)
from pipelines.recipe_paths import is_below, resolve_path, resolve_pattern, source_root, written_form
from pipelines.recipe_profiles import resolve_profile_paths
from pipelines.recipe_yaml import dump_yaml, parse_yaml

__all__ = [
    "Conversion",
    "Defaults",
    "ImagePolicy",
    "Limits",
    "Pin",
    "Recipe",
    "Resources",
    "Source",
    "differing_fields",
    "dump_recipe",
    "fingerprint_keys",
    "load_recipe",
    "recipe_schema",
    "source_fingerprint",
    "source_root",
]

RECIPE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """What a run settled for one source and later runs must keep: part names hang on both."""

    root: str
    range_bytes: int


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe: defaults merged, paths resolved against its folder.

    Raises:
        RecipeError: the file cannot be read, or what it says is wrong; `problems` has every mistake, one line each.
    """
    name = os.fspath(path)
    document = parse_yaml(_read_text(name), name)
    raw = document.data
    if not isinstance(raw, dict):
        found = "an empty file" if raw is None else "a list" if isinstance(raw, list) else "a single value"
        raise RecipeError([f"recipe {name!r}: found {found}, expected a mapping that begins with `version: 1`"])
    _refuse_newer(raw.get("version"))
    reporter = Reporter(document)
    resolved = {key: value for key, value in raw.items() if key != "defaults"}
    folder = os.path.dirname(os.path.abspath(name))
    if isinstance(output := raw.get("output"), str) and output:
        resolved["output"] = resolve_path(output, folder)
    if isinstance(raw.get("sources"), list):
        defaults = _usable_defaults(raw["defaults"], reporter) if "defaults" in raw else {}
        resolved["sources"] = _resolved_sources(raw["sources"], defaults, folder, reporter)
    if isinstance(profiles := raw.get("profiles"), dict):
        resolved["profiles"] = {name: dict(value) if isinstance(value, dict) else value for name, value in profiles.items()}
        for profile in resolved["profiles"].values():
            if isinstance(profile, dict):
                resolve_profile_paths(profile, folder)
    try:
        recipe = Recipe.model_validate(resolved)
    except ValidationError as error:
        reporter.add_validation(error, resolved)
        reporter.raise_if_any()
        raise
    reporter.raise_if_any()
    return recipe


def dump_recipe(recipe: Recipe, pins: Mapping[str, Pin]) -> str:
    """Write a recipe with nothing left to work out: every default, absolute paths, and the pins by source name."""
    if unknown := sorted(pins.keys() - {source.name for source in recipe.sources}):
        raise UsageError(f"pins for {', '.join(map(repr, unknown))}, expected names of the recipe's sources")
    plain = recipe.model_dump(by_alias=True, exclude={"defaults", "sources"})
    sources = [_plain_source(source, pins.get(source.name)) for source in recipe.sources]
    first = {key: plain.pop(key) for key in ("version", "name", "output")}
    return dump_yaml(first | {"sources": sources} | plain)


def recipe_schema() -> dict[str, Any]:
    """Give the JSON schema of a recipe, for editors; what `load_recipe` accepts passes it."""
    schema = Recipe.model_json_schema()
    schema["$defs"]["Source"]["required"].remove("schema")  # `defaults` may give it
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": "bayplan recipe"}


def _read_text(name: str) -> str:
    try:
        with open(name, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise RecipeError([f"recipe {name!r}: no such file; give the path of a recipe"]) from None
    except IsADirectoryError:
        raise RecipeError([f"recipe {name!r}: found a folder, expected a YAML file"]) from None
    except OSError as error:
        raise RecipeError([f"recipe {name!r}: cannot be read: {error.strerror}"]) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        found = f"found the byte 0x{data[error.start]:02x} in line {line}"
        raise RecipeError([f"recipe {name!r}: {found}, expected UTF-8; save the file as UTF-8"]) from None


def _refuse_newer(version: object) -> None:
    # Alone: the other keys may mean something else there.
    if type(version) is int and version > RECIPE_VERSION:
        message = f"version: found {version}, expected {RECIPE_VERSION}; the recipe needs a newer bayplan, upgrade it"
        raise RecipeError([message])


def _usable_defaults(raw: object, reporter: Reporter) -> dict[str, Any]:
    """Check the defaults by themselves and leave out what is wrong, so that no source repeats the mistake."""
    try:
        Defaults.model_validate(raw)
    except ValidationError as error:
        bad = reporter.add_validation(error, raw, ("defaults",))
    else:
        bad = []
    if not isinstance(raw, dict):
        return {}
    usable = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    for path in bad:
        key = str(path[0])
        if key == "images" and len(path) > 1 and isinstance(usable.get(key), dict):
            usable[key].pop(path[1], None)
        else:
            usable.pop(key, None)
    return usable


def _resolved_sources(sources: list[Any], defaults: dict[str, Any], folder: str, reporter: Reporter) -> list[Any]:
    mappings = [source if isinstance(source, dict) else {} for source in sources]
    for index, message in mixture_problems(mappings):
        reporter.add(("sources",) if index is None else ("sources", index, "name"), message)
    by_samples = all(source.get("token_share") is None for source in mappings)
    resolved = [_merged(source, defaults) if isinstance(source, dict) else source for source in sources]
    for k, source in enumerate(resolved):
        if isinstance(source, dict):
            if by_samples and source.get("weight") is None:
                source["weight"] = 1.0
            _resolve_paths(source, folder)
            _check_root(source, k, reporter)
    return resolved


def _merged(source: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    merged = defaults | source
    if isinstance(source.get("images"), dict) and isinstance(defaults.get("images"), dict):
        merged["images"] = defaults["images"] | source["images"]
    if merged.get("schema") != "llava":
        for key in LLAVA_ONLY:
            if key not in source:
                merged.pop(key, None)
    return merged


def _resolve_paths(source: dict[str, Any], folder: str) -> None:
    files = source.get("files")
    if isinstance(files, str) and files:
        source["files"] = resolve_pattern(files, folder)
    elif isinstance(files, list):
        source["files"] = [resolve_pattern(f, folder) if isinstance(f, str) and f else f for f in files]
    for key in ("root", "image_root", "archive"):
        written = source.get(key)
        if not isinstance(written, str) or not written:
            continue
        source[key] = resolve_path(written, folder)
        if key != "root" and written_form(written) != source[key]:
            given = source.get("as_written")
            source["as_written"] = (given if isinstance(given, dict) else {}) | {key: written_form(written)}


def _check_root(source: dict[str, Any], index: int, reporter: Reporter) -> None:
    files = [source["files"]] if isinstance(source.get("files"), str) else source.get("files")
    if not isinstance(files, list) or not files or not all(isinstance(file, str) and file for file in files):
        return  # told by the models
    root = source.get("root")
    try:
        if root is None:
            source_root(files)
        elif isinstance(root, str) and root:
            outside = next((file for file in files if "::" not in file and not is_below(file, root)), None)
            if outside is not None:
                reporter.add(("sources", index, "root"), f"found {root!r}, expected a folder above {outside!r}")
    except RecipeError as error:
        for message in error.problems:
            reporter.add(("sources", index, "files"), message)


def _plain_source(source: Source, pin: Pin | None) -> dict[str, Any]:
    plain = source.model_dump(by_alias=True)
    if pin is not None:
        plain |= {"root": pin.root, "range_bytes": pin.range_bytes}
    if source.schema_name != "llava":
        for key in LLAVA_ONLY:
            del plain[key]
    if not source.as_written:
        del plain["as_written"]
    return {"name": plain["name"], "files": plain["files"]} | plain
