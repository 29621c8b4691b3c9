"""What each of several real processes of a Megatron job sees of its data. A module of its own, so spawned children find it."""

from __future__ import annotations

import hashlib
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bridge_classes

RANK_SECONDS = 240
NUM_PACKS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a job are grouped; what is left over is data-parallel."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    """Ranks that share the tensors of an expert; None: those that share the model's."""
    sequence_parallel: bool = False
    num_workers: int = 0
    balance: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One microbatch, so far as ranks must or must not agree on it."""

    tokens: str
    """Digest of everything about the sequence."""
    grids: tuple[tuple[int, ...], ...]
    has_pixels: bool
    starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """By one rank."""

    dp_rank: int
    dp_size: int
    stage: int
    before: tuple[Microbatch, ...]
    after: tuple[Microbatch, ...]
    """Went on from the state that was saved behind `before`."""
    resumed: tuple[Microbatch, ...]
    """The same, by a new provider that was given the state from the checkpoint."""
    error: str
    """Of a new provider that was given the state of another number of data-parallel ranks."""


def run_job(
    dataset: str, folder: Path, layouts: Sequence[Layout], num_ranks: int, see: Callable[[str, Path, Layout], Any] | None = None
) -> list[list[Any]]:
    """For each layout, what each rank saw.

    Args:
        see: a function of a module, called on each rank with the dataset, a folder and a layout; None: `streams`.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(dataset, folder, layouts, rank, num_ranks, see or streams, queue))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < num_ranks:
            rank, seen = queue.get(timeout=RANK_SECONDS)
            assert isinstance(seen, list), f"rank {rank} failed:\n{seen}"
            found[rank] = seen
    finally:
        for process in ranks:
            if len(found) < num_ranks:
                process.kill()  # it waits for the one that failed
            process.join(RANK_SECONDS)
    assert [process.exitcode for process in ranks] == [0] * num_ranks
    return [[found[rank][place] for rank in range(num_ranks)] for place in range(len(layouts))]


def _rank(
    dataset: str, folder: Path, layouts: Sequence[Layout], rank: int, num_ranks: int, see: Callable[..., Any], queue: Any
) -> None:
    try:
        queue.put((rank, _see_all(dataset, folder, layouts, rank, num_ranks, see)))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise


def _see_all(
    dataset: str, folder: Path, layouts: Sequence[Layout], rank: int, num_ranks: int, see: Callable[..., Any]
) -> list[Any]:
    warnings.simplefilter("ignore")
    bridge_classes.prepare()
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = []
    for place, layout in enumerate(layouts):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            context_parallel_size=layout.context,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            expert_tensor_parallel_size=layout.expert_tensor,
        )
        found.append(see(dataset, folder / f"layout-{place}", layout))
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    return found


def streams(dataset: str, folder: Path, layout: Layout) -> Seen:
    """A rank's stream as it is read, saved and resumed."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    functions = bridge_classes.checkpointing()
    first = _iterator(dataset, layout, groups)
    before = tuple(digest(next(first)) for _ in range(NUM_PACKS))
    functions.maybe_save_dataloader_state([], first, NUM_PACKS, str(folder), pg_collection=groups)
    torch.distributed.barrier()
    after = tuple(digest(next(first)) for _ in range(NUM_PACKS))
    # The groups given and Megatron's own must come to the same.
    second = _iterator(dataset, layout, None)
    functions.maybe_load_dataloader_state(second, NUM_PACKS, str(folder), pg_collection=groups)
    resumed = tuple(digest(next(second)) for _ in range(NUM_PACKS))
    for each in (first, second):
        each.iterable.loader.close()
    return Seen(
        dp_rank=groups.dp.rank(),
        dp_size=groups.dp.size(),
        stage=groups.pp.rank(),
        before=before,
        after=after,
        resumed=resumed,
        error=_refusal(dataset, layout, groups, folder.parent),
    )


def _refusal(dataset: str, layout: Layout, groups: Any, folder: Path) -> str:
    """Of the first layout's state, which is of more data-parallel ranks and so has a file for each of these."""
    from packer.format.errors import UsageError

    functions = bridge_classes.checkpointing()
    iterator = _iterator(dataset, layout, groups)
    try:
        functions.maybe_load_dataloader_state(iterator, NUM_PACKS, str(folder / "layout-0"), pg_collection=groups)
    except UsageError as error:
        return str(error)
    return ""


def _iterator(dataset: str, layout: Layout, groups: Any) -> Any:
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.core.rerun_state_machine import RerunDataIterator

    from plugin.adapters.bridge import BayplanDatasetProvider

    provider = BayplanDatasetProvider(
        dataset_url=dataset,
        profile="qwen25vl",
        sequence_length=2048,
        sequence_parallel=layout.sequence_parallel,
        settings={"max_patches_per_pack": 4096, "buffer_size": 100},
        num_workers=layout.num_workers,
    )
    context = DatasetBuildContext(train_samples=1, valid_samples=0, test_samples=0, pg_collection=groups)
    return RerunDataIterator(provider.build_datasets(context)[0])


def digest(microbatch: dict[str, Any]) -> Microbatch:
    digest = hashlib.sha256()
    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens_q"):
        digest.update(microbatch[name].numpy().tobytes())
    visual = microbatch["visual_inputs"]
    grids = () if visual is None else tuple(map(tuple, visual.image_grid_thw.tolist()))
    starts = microbatch.get("cu_seqlens_q_padded", microbatch["cu_seqlens_q"])
    return Microbatch(
        tokens=digest.hexdigest(),
        grids=grids,
        has_pixels=visual is not None and visual.pixel_values is not None,
        starts=tuple(starts.tolist()),
    )
