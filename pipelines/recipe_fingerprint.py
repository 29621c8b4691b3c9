"""What of a source decides its output's bytes, and one digest of it: a part is redone only when that changed.

Paths count as the user wrote them, so a recipe moved together with its data keeps its fingerprints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from blake3 import blake3

from pipelines.recipe_models import Source

_KEYS = (
    "fields",
    "placeholder",
    "literal_placeholders",
    "image_root",
    "archive",
    "allow_hosts",
    "keep",
    "non_finite",
    "max_line_bytes",
    "target_bundle_bytes",
    "images",
)


def fingerprint_keys(source: Source) -> dict[str, Any]:
    """Give the keys that change output bytes, as plain JSON values; `schema_digest` is that of a python schema's file."""
    plain = source.model_dump(mode="json")
    keys: dict[str, Any] = {"schema": source.schema_name} | {key: plain[key] for key in _KEYS}
    keys |= {str(key): written for key, written in source.as_written.items()}
    keys["allow_hosts"] = sorted(set(source.allow_hosts))
    if source.schema_name.startswith("python:"):
        keys["schema_digest"] = _module_digest(source.schema_name.split(":")[1])
    return keys


def source_fingerprint(source: Source) -> str:
    """Give 128 bits of blake3, as 32 hex digits, over the canonical JSON of `fingerprint_keys`."""
    canonical = json.dumps(fingerprint_keys(source), sort_keys=True, separators=(",", ":"))
    return blake3(canonical.encode()).hexdigest(length=16)


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Name the keys in which two results of `fingerprint_keys` differ, sorted; inner keys as in `images.max_pixels`."""
    names: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            names += [f"{key}.{inner}" for inner in differing_fields(before, after)]
        elif before != after or (key in old) != (key in new):
            names.append(key)
    return names


def _module_digest(module: str) -> str | None:
    """Digest a module's source without running any of it (`find_spec` of a dotted name would import the parents)."""
    path: list[str] | None = None
    name = ""
    origin = None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        origin = spec.origin if spec.has_location else None
        path = list(spec.submodule_search_locations or ())
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        return blake3(Path(origin).read_bytes()).hexdigest(length=16)
    except OSError:
        return None
