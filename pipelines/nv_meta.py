"""`.nv-meta/` of a source: what makes its folder a native Energon dataset, with one loader setting for each profile."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
import yaml

from packer.format import layout
from packer.format.manifest import PartManifest
from packer.storage import Storage

_ENERGON_VERSION = "7.4.1"
"""The release these files were tried with; Energon asks for one."""
_HEAD = "# Made by `bayplan index`. Energon loads the class below; bayplan must be importable in the trainer.\n"


def write_nv_meta(storage: Storage, source: str, parts: Sequence[PartManifest], profiles: Sequence[str], held_out: float) -> None:
    """Publish the files.

    Args:
        profiles: those the source is counted by, the one Energon takes by default first. held_out: share kept for `val`.
    """
    shards = {f"{part.part_id}{layout.RECORDS_SUFFIX}": part.num_written for part in parts if part.num_written}
    info = {"energon_version": _ENERGON_VERSION, "shard_counts": shards}
    split = {"split_parts": {"train": list(shards), "val": list(shards)}, "exclude": []}
    storage.publish_bytes(layout.nv_meta_file(source, ".info.json"), orjson.dumps(info, option=orjson.OPT_INDENT_2))
    storage.publish_bytes(layout.nv_meta_file(source, "split.yaml"), orjson.dumps(split))  # JSON is YAML, and quick to write
    # `dataset.yaml` is what Energon takes when no `dataset_config` is named.
    files = {"dataset.yaml": profiles[0], **{layout.nv_meta_profile(profile): profile for profile in profiles}}
    for name, profile in files.items():
        storage.publish_bytes(layout.nv_meta_file(source, name), _loader(profile, held_out))
    for file in storage.list_dir(layout.nv_meta_file(source, "").rstrip("/")):
        name = file.name.rpartition("/")[2]
        if name.startswith(layout.nv_meta_profile("").partition(".")[0]) and name not in files:
            storage.remove(file.name)


def _loader(profile: str, val: float) -> bytes:
    document = {
        "__module__": "plugin.dataset",
        "__class__": "IndexedSource",
        "sample_type": {"__module__": "megatron.energon", "__class__": "CrudeSample"},
        "profile": profile,
        "val": val,
    }
    return (_HEAD + yaml.safe_dump(document, sort_keys=False)).encode()
