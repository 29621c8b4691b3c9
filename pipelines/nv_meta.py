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
    """Publish the files. `profiles` are those the source is counted by; `held_out` is the share kept for validation."""
    shards = {f"{part.part_id}{layout.RECORDS_SUFFIX}": part.num_written for part in parts if part.num_written}
    info = {"energon_version": _ENERGON_VERSION, "shard_counts": shards}
    split = {"split_parts": {"train": list(shards), "val": list(shards)}, "exclude": []}
    storage.publish_bytes(layout.nv_meta_file(source, ".info.json"), orjson.dumps(info, option=orjson.OPT_INDENT_2))
    storage.publish_bytes(layout.nv_meta_file(source, "split.yaml"), yaml.safe_dump(split, sort_keys=False).encode())
    for number, profile in enumerate(sorted(profiles)):
        data = _loader(profile, held_out)
        storage.publish_bytes(layout.nv_meta_file(source, f"{profile}.yaml"), data)
        if not number:  # what Energon takes when no `dataset_config` is named
            storage.publish_bytes(layout.nv_meta_file(source, "dataset.yaml"), data)


def _loader(profile: str, val: float) -> bytes:
    document = {
        "__module__": "plugin.dataset",
        "__class__": "IndexedSource",
        "sample_type": {"__module__": "megatron.energon", "__class__": "CrudeSample"},
        "profile": profile,
        "val": val,
    }
    return (_HEAD + yaml.safe_dump(document, sort_keys=False)).encode()
