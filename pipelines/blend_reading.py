"""Reading `index/<profile>/dataset.yaml` as Energon does: sources, weights, and what each holds out of training."""

from __future__ import annotations

import posixpath
from typing import Any

import yaml

from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.storage import Storage, join_url
from plugin.forecast import SourceWeight

_MOST_WEIGHT = 1e100
"""Their sum and its shares must be numbers."""


def read_blend(storage: Storage, profile: str) -> list[SourceWeight]:
    """The sources that the split `train` of a profile draws from.

    Raises:
        UsageError: there is no blend, or it is empty. FormatError: it is not one that `bayplan index` writes.
    """
    name = layout.profile_dataset_file(profile)
    where = join_url(storage.url, name)
    content = _yaml(storage, name)
    train = content.get("splits", {}).get("train") if isinstance(content.get("splits"), dict) else None
    entries = train.get("blend") if isinstance(train, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "path" in entry for entry in entries):
        raise FormatError(f"{where}: found no splits.train.blend with a path for each source, expected that: index again")
    if not entries:
        raise UsageError(f"{where}: found no source to train on, expected at least one: every sample is unusable or left out")
    return [_source(storage, profile, entry, where) for entry in entries]


def _source(storage: Storage, profile: str, entry: dict[str, Any], where: str) -> SourceWeight:
    name = posixpath.basename(str(entry["path"]).rstrip("/"))
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= _MOST_WEIGHT:
        raise FormatError(
            f"{where}: found weight {weight!r} of source {name!r}, expected a number above 0 and at most "
            f"{_MOST_WEIGHT:g}: index again"
        )
    val = _yaml(storage, layout.nv_meta_file(name, layout.nv_meta_profile(profile))).get("val", 0.0)
    return SourceWeight(name=name, weight=float(weight), val=float(val))


def _yaml(storage: Storage, name: str) -> dict[str, Any]:
    where = join_url(storage.url, name)
    try:
        content = yaml.safe_load(storage.read_bytes(name))
    except FileNotFoundError:
        raise UsageError(f"{where}: found no file, expected what `bayplan index` writes at its end: run it again") from None
    except yaml.YAMLError as error:
        raise FormatError(f"{where}: not valid YAML: {' '.join(str(error).split())}; index again") from error
    if not isinstance(content, dict):
        raise FormatError(f"{where}: found a {type(content).__name__}, expected a mapping: index again")
    return content
