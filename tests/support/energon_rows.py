"""Energon over counted sources, not batched unless asked: what each sample is, and from where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from megatron import energon


@energon.stateless
def cook(sample: Any) -> Any:
    row = sample["row"]
    return energon.TextSample(**energon.basic_sample_keys(sample), text=f"{row.source} {row.num_tokens}")


class Rows(energon.DefaultTaskEncoder):
    cookers = (energon.Cooker(cook),)


def config(rank: int = 0, world_size: int = 1, num_workers: int = 0) -> Any:
    return energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)


def train(path: Path, worker_config: Any | None = None, batch_size: int | None = None, **options: Any) -> Any:
    """The split `train`, shuffled and endless."""
    return energon.get_train_dataset(
        path,
        worker_config=worker_config or config(),
        batch_size=batch_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Rows(),
        **options,
    )


def one_pass(path: Path, split: str, worker_config: Any | None = None, **options: Any) -> Iterator[Any]:
    """Every sample of a split once, in order."""
    found = energon.get_val_dataset(
        path, split_part=split, worker_config=worker_config or config(), batch_size=None, task_encoder=Rows(), **options
    )
    return iter(energon.get_loader(found))


def write_metadataset(path: Path, split: str, content: dict[str, Any]) -> Path:
    """A user's own metadataset with one split."""
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {split: content}}
    path.write_text(yaml.safe_dump(document))
    return path
