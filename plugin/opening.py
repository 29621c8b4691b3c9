"""What a trainer says -> Energon's dataset. What cannot be is refused by name before anything is built; refusals of Energon's own
come with what to do.
"""

from __future__ import annotations

import os
from typing import Any, Literal, get_args

import multistorageclient
from megatron.energon import SavableDataset, WorkerConfig, get_train_dataset, get_val_dataset

from packer.format.errors import BayplanError, UsageError
from packer.storage import is_local, local_path
from plugin.loader_state import sources_of
from plugin.settings import refuse_not_whole

Split = Literal["train", "val"]


def worker_config_of(*, rank: int, world_size: int, num_workers: int, seed: int) -> WorkerConfig:
    """Raises:
    UsageError: no such rank, or what is no number.
    """
    refuse_not_whole("world_size", world_size, 1)
    way_out = ": of the data-parallel ranks alone; those of one replica share a rank"
    refuse_not_whole("rank", rank, 0, most=world_size - 1, way_out=way_out)
    refuse_not_whole("num_workers", num_workers, 0)
    refuse_not_whole("seed", seed, 0)
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, seed_offset=seed)


def refuse_unfit(*, split: str, shuffle_buffer_size: int | None, prefetch_factor: int) -> None:
    """Raises:
    UsageError: of the arguments that are none of settings.
    """
    if split not in get_args(Split):
        raise UsageError(f"found the split {split!r}, expected 'train' or 'val'")
    if shuffle_buffer_size is not None:
        refuse_not_whole("shuffle_buffer_size", shuffle_buffer_size, 0, way_out=", or None (samples are not mixed)")
    refuse_not_whole("prefetch_factor", prefetch_factor, 1)


def energon_path(url: str) -> str:
    """Of a folder or a file: as Energon takes it, which knows paths and the URLs of NVIDIA's multi-storage client alone.

    Raises:
        UsageError: for a store that this client does not know.
    """
    if is_local(url):
        return os.path.abspath(os.path.expanduser(local_path(url)))
    if url.startswith("msc://"):
        return url
    try:
        client, path = multistorageclient.resolve_storage_client(url)
    except ValueError as error:
        raise UsageError(
            f"{url}: {error}: expected a folder or a URL that Energon's storage client reads; name the store in its "
            "configuration and give msc://<profile>/<path>, or give a `blend` that lies on this machine"
        ) from error
    return f"msc://{client.profile}/{path}"


def open_dataset(
    path: str, split: Split, config: WorkerConfig, encoder: Any, *, shuffle_buffer_size: int | None
) -> SavableDataset[Any]:
    """The packs of a blend.

    Raises:
        UsageError: Energon does not open it. Errors of ours pass as they are.
    """
    try:
        dataset = _energon_dataset(path, split, config, encoder, shuffle_buffer_size)
        _refuse_weights(dataset)
    except BayplanError:
        raise
    except (AssertionError, ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: Energon does not open this blend ({type(error).__name__}: {error}): expected a `dataset.yaml` with the "
            f"split {split!r} whose sources are there and whose weights are numbers above 0; to give a source none, leave it out"
        ) from error
    return dataset


def _energon_dataset(
    path: str, split: Split, config: WorkerConfig, encoder: Any, shuffle_buffer_size: int | None
) -> SavableDataset[Any]:
    if split == "val":
        return get_val_dataset(path, worker_config=config, batch_size=None, task_encoder=encoder)
    return get_train_dataset(
        path,
        worker_config=config,
        batch_size=None,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=None,
        task_encoder=encoder,
    )


def _refuse_weights(dataset: Any) -> None:
    """Energon looks at them when the first sample is asked for, in a loader worker."""
    for inner, weight in getattr(dataset, "dataset_weights", ()):
        if not weight > 0:
            names = ", ".join(name.partition(":")[2] for name in sources_of(inner.config()))
            raise ValueError(f"weight {weight} of {names}")
    for inner in getattr(dataset, "datasets", ()):
        _refuse_weights(inner)
