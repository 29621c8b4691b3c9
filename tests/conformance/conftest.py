"""A small packed dataset, and Megatron's process groups of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bridge_classes
import pytest
import torch
import yaml
from in_process import index_in_process, pack_in_process

bridge_classes.prepare()

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
PROFILE = "qwen25vl"
SOURCES = {"handbook", "gimp-help", "icons", "wordnet"}
"""Interleaved with images, small images, and text alone."""
EXPECTED_WARNINGS = (
    "ignore:'pin_memory' argument is set as true",  # Energon's loader always asks for it
    "ignore:This process .* is multi-threaded, use of fork",  # loader workers are forked beside gloo's threads
    "ignore:TypedStorage is deprecated",  # Bridge's allow-list reads tensors of a state so
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for warning in EXPECTED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a packed and counted part of the example corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = yaml.safe_load((CORPUS / "recipe.yaml").read_text())
    recipe["output"] = str(folder / "dataset")
    recipe["sources"] = [source for source in recipe["sources"] if source["name"] in SOURCES]
    for source in recipe["sources"]:
        files = source["files"] if isinstance(source["files"], list) else [source["files"]]
        source["files"] = [str(CORPUS / name) for name in files]
        if "image_root" in source:
            source["image_root"] = str(CORPUS / source["image_root"])
    recipe["profiles"] = {PROFILE: {**recipe["profiles"][PROFILE], "tokenizer": str(CORPUS / "tokenizer.json")}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    pack_in_process(folder / "recipe.yaml")
    assert index_in_process(folder / "dataset").exit_code == 0
    return str(folder / "dataset")


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The `ProcessGroupCollection` of a process alone."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture
def provider(dataset: str) -> Any:
    """The provider of that dataset, packs built in this process."""
    from plugin.adapters.bridge import BayplanDatasetProvider

    return BayplanDatasetProvider(
        dataset_url=dataset,
        profile=PROFILE,
        sequence_length=2048,
        settings={"max_patches_per_pack": 4096, "buffer_size": 100},
        num_workers=0,
    )
