"""Megatron Bridge's own classes where its models cannot be imported: without a GPU there is no transformer_engine.

The package's `__init__` imports every model, so it is put aside. Functions of modules that need transformer_engine themselves
are compiled from their file, unchanged. A module of its own, so spawned children find it.
"""

from __future__ import annotations

import ast
import os
import sys
import types
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_BARE = ("megatron.bridge", "megatron.bridge.data")


def prepare() -> None:
    """Make what needs no transformer_engine importable; before anything of Megatron is imported."""
    if _BARE[0] in sys.modules:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed
        import megatron
        import megatron.core

        for name in _BARE:
            package = types.ModuleType(name)
            package.__path__ = [str(folder / name.split(".", 1)[1].replace(".", "/")) for folder in _folders(megatron)]
            sys.modules[name] = package
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, package)
        import megatron.bridge.data.base
        import megatron.core.parallel_state


def _folders(megatron: Any) -> list[Path]:
    return [Path(folder) for folder in megatron.__path__ if (Path(folder) / "bridge").is_dir()]


def from_file(module: str, names: tuple[str, ...], uses: Mapping[str, Any]) -> types.SimpleNamespace:
    """Functions and constants of a module, from its file.

    Args:
        uses: what they use of the rest of the module.
    """
    import megatron

    file = _folders(megatron)[0].parent / (module.replace(".", "/") + ".py")
    found = {name: node for node in ast.parse(file.read_text()).body for name in _defined(node) if name in names}
    if missing := set(names) - set(found):
        raise LookupError(f"{file} has no {', '.join(sorted(missing))}: another release?")
    chosen = sorted(set(found.values()), key=lambda node: node.lineno)
    flags = annotations.compiler_flag
    code = compile(ast.Module(body=chosen, type_ignores=[]), str(file), "exec", flags=flags, dont_inherit=True)
    space: dict[str, Any] = dict(uses)
    exec(code, space)
    return types.SimpleNamespace(**{name: space[name] for name in names})


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    return [each.id for each in node.targets if isinstance(each, ast.Name)] if isinstance(node, ast.Assign) else []


@cache
def checkpointing() -> types.SimpleNamespace:
    """`maybe_save_dataloader_state` and `maybe_load_dataloader_state`."""
    import torch
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.bridge.utils.common_utils import print_rank_0
    from megatron.bridge.utils.safe_pickle import energon_torch_load
    from megatron.core.msc_utils import MultiStorageClientFeature
    from megatron.core.utils import get_pg_rank

    folders = from_file(
        "megatron.bridge.training.utils.checkpoint_utils",
        ("ensure_directory_exists", "get_checkpoint_name"),
        {"os": os, "MultiStorageClientFeature": MultiStorageClientFeature, "join_paths": os.path.join},
    )
    uses = {
        "os": os,
        "torch": torch,
        "get_pg_collection": get_pg_collection,
        "get_pg_rank": get_pg_rank,
        "print_rank_0": print_rank_0,
        "energon_torch_load": energon_torch_load,
    } | vars(folders)
    return from_file(
        "megatron.bridge.training.checkpointing", ("maybe_save_dataloader_state", "maybe_load_dataloader_state"), uses
    )


@cache
def batches() -> types.SimpleNamespace:
    """`get_batch_from_iterator` of `vlm_step`, and the keys it hands to attention."""
    from copy import copy

    names = ("_VISUAL_PAYLOAD_FIELDS", "_PACKED_SEQ_DEVICE_KEYS", "_PACKED_SEQ_HOST_KEYS", "_PACKED_SEQ_PARAM_KEYS")
    names += ("_project_visual_inputs_for_pp_stage", "get_batch_from_iterator")
    return from_file("megatron.bridge.training.vlm_step", names, {"copy": copy})


@cache
def providing() -> types.SimpleNamespace:
    """`get_dataset_provider`, of datasets that are not Bridge's own."""
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider

    uses = {"_REGISTRY": {}, "DatasetBuildContext": DatasetBuildContext, "DatasetProvider": DatasetProvider}
    return from_file("megatron.bridge.data.utils", ("get_dataset_provider",), uses)


def iterators(config: Any, build: Any) -> tuple[Any, Any, Any]:
    """Train, valid and test iterators as `build_train_valid_test_data_iterators` makes them.

    Args:
        build: makes the three datasets; between them and the iterators stands `build_pretraining_data_loader` alone.
    """
    from megatron.bridge.data.samplers import build_pretraining_data_loader
    from megatron.core.rerun_state_machine import RerunDataIterator

    def loaders(**_: Any) -> tuple[Any, ...]:
        made = build()
        kind = config.dataset.dataloader_type
        return tuple(build_pretraining_data_loader(each, 0, kind, 1, 0, data_sharding=False) for each in made)

    uses = {
        "build_train_valid_test_data_loaders": loaders,
        "RerunDataIterator": RerunDataIterator,
        "GPTDatasetConfig": type("NoGPTDataset", (), {}),
    }
    made = from_file("megatron.bridge.data.loaders", ("build_train_valid_test_data_iterators",), uses)
    found: tuple[Any, Any, Any] = made.build_train_valid_test_data_iterators(config, None, None, None)
    return found
