"""What each rank does in tests that train on reordered packs: packs that show a mix-up, and gradients of global batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from exchange_scenarios import COST, LENGTH, PROFILE, Sorted, Source, plan_of
from pack_samples import PATCHES, pack_sample
from tiny_training import new_model, normalise
from train_tiny_vlm import accumulate, reduce_gradients

from plugin.balance import Topology
from plugin.batch import PackSample, PatchImage, build
from plugin.batch.torch_batch import TorchBatch
from plugin.reorder import Assigned, BalancedLoader, Parallel, Planner

NUM_MICROBATCHES, NUM_STEPS = 4, 2


def marked_sample(number: int, *, side: int, num_text: int, num_loss: int | None = None) -> PackSample:
    """Id, pixels, text ids and row are functions of one number; `num_loss` of its tokens are predicted."""
    pixels = np.full((side * side, PATCHES.patch_bytes), number % 251, np.uint8)
    pieces = [num_text] if not side else [PatchImage(grid_thw=(1, side, side), pixels=pixels), num_text]
    made = pack_sample(pieces, f"sample {number}", seed=number, row=number, num_patches=side**2)
    mask = made.encoded.loss_mask
    if num_loss is not None:
        mask = np.arange(len(mask)) >= len(mask) - num_loss
    costs = {"encoder_cost": 100 * side**4, "llm_cost": 40 * len(mask)}
    return replace(made, encoded=replace(made.encoded, loss_mask=mask), **costs)


def marked_pack(numbers: Sequence[int], *, side: int | None = None, num_loss: int | None = None) -> TorchBatch:
    """A sample of each number; their sizes are functions of it too, where nothing is said."""
    samples = [
        marked_sample(
            number,
            side=2 * int(np.random.default_rng(number).integers(4)) if side is None else side,
            num_text=7 + number * 5 % 17,
            num_loss=num_loss,
        )
        for number in numbers
    ]
    return build(samples, form=PATCHES, sequence_length=LENGTH, alignment=8, pad_id=0, fingerprint=PROFILE).to_torch()


def mixed_up(pack: TorchBatch) -> list[str]:
    """Samples of which not all is what their id says; made anew and compared, pixel by pixel and token by token."""
    found = []
    for sample in pack.batch.unpack():
        number = int(sample.sample_id.removeprefix("sample "))
        side = sample.images[0].grid_thw[1] if sample.images else 0
        num_text = int((~sample.encoded.feature_mask).sum()) - (2 if side else 0)
        expected = marked_sample(number, side=side, num_text=num_text)
        same = np.array_equal(sample.encoded.ids, expected.encoded.ids) and sample.row == number
        for one, other in zip(sample.images, expected.images, strict=True):
            same = same and np.array_equal(one.pixels, other.pixels)
        if not same:
            found.append(sample.sample_id)
    return found


class Marked(Source):
    """Packs of one or two marked samples, each number once over all streams."""

    def __next__(self) -> TorchBatch:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return marked_of_stream(self.stream, self.position - 1)


def marked_of_stream(stream: int, position: int) -> TorchBatch:
    first = 2 * (1000 * stream + position)
    # The streams differ: those of higher ranks hold more images and fewer samples.
    return marked_pack([first, first + 1] if (position + stream) % 3 else [first])


class Given(Source):
    """These packs."""

    def __init__(self, packs: Sequence[TorchBatch]) -> None:
        super().__init__(0, len(packs))
        self.packs = packs

    def __next__(self) -> TorchBatch:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return self.packs[self.position - 1]


@dataclass
class Permuted:
    """Any permutation."""

    seed: int
    name: str = "permuted"

    def __call__(self, encoder: np.ndarray, llm: np.ndarray, num_bytes: np.ndarray) -> Any:
        return plan_of(np.random.default_rng(self.seed).permutation(encoder.size).reshape(encoder.shape))


def loader_of(source: Any, planner: Planner, **changes: Any) -> BalancedLoader:
    """Over the whole world."""
    arguments: dict[str, Any] = {"num_microbatches": NUM_MICROBATCHES, "profile": PROFILE, "cost": COST} | changes
    return BalancedLoader(
        source,
        parallel=Parallel.world(),
        planner=planner,
        sequence_length=LENGTH,
        slice_bytes=20_000,
        timeout_seconds=30,
        **arguments,
    )


def assigned(mode: str) -> Assigned:
    """Expert groups of two ranks."""
    size = dist.get_world_size()
    return Assigned(topology=Topology(num_ranks=size, expert_group=np.arange(size) // 2, synchronises="microbatch"), mode=mode)


def gradients(mode: str, micro_batch_size: int) -> dict[str, Any]:
    """Two global batches, dealt and in order of arrival: what was trained on, and the loss and gradient of each."""
    rank = dist.get_rank()
    torch.set_num_threads(1)
    model = new_model(hidden=16, heads=2, vision_layers=1, layers=1).double()
    model.normalise = lambda pixels: normalise(pixels).double()
    number = NUM_MICROBATCHES // micro_batch_size
    several = {} if micro_batch_size == 1 else {"micro_batch_size": micro_batch_size, "loss_per_token": True}
    balanced = loader_of(Marked(rank, 40), assigned(mode), num_microbatches=number, **several)
    found: dict[str, Any] = {"ids": [], "mixed_up": [], "moved": [], "loss_tokens": []}
    for name, packs in (("balanced", balanced), ("arrival", Marked(rank, 40))):
        watched = _Watched(packs)
        found[name] = []
        for _ in range(NUM_STEPS):
            found[name].append(_step(model, watched, number, micro_batch_size))
            if packs is balanced:
                found["moved"].append(balanced.counters.num_moved)
                found["loss_tokens"].append(balanced.num_loss_tokens)
        found["mixed_up"] += watched.mixed_up
        found["ids"].append(watched.ids)
    balanced.close()
    return found


class _Watched:
    def __init__(self, packs: Iterator[TorchBatch]) -> None:
        self.packs = packs
        self.ids: list[tuple[str, ...]] = []
        self.mixed_up: list[str] = []

    def __iter__(self) -> Iterator[TorchBatch]:
        return self

    def __next__(self) -> TorchBatch:
        pack = next(self.packs)
        self.ids.append(pack.batch.sample_ids)
        self.mixed_up += mixed_up(pack)
        return pack


def _step(model: Any, packs: Iterator[TorchBatch], number: int, micro_batch_size: int) -> tuple[float, int, list[float]]:
    """Loss per token, loss tokens and gradient of a global batch, as the example trainer computes them."""
    trained = model
    if micro_batch_size > 1:
        trained = SimpleNamespace(loss=lambda several: tuple(map(sum, zip(*map(model.loss, several), strict=True))))
        packs = zip(*[packs] * micro_batch_size, strict=True)
    model.zero_grad()
    loss, num_loss_tokens = accumulate(trained, packs, number)
    reduce_gradients(model, num_loss_tokens)
    return loss, num_loss_tokens, torch.cat([one.grad.flatten() for one in model.parameters()]).tolist()


def unequal_losses(planner: Planner) -> dict[str, Any]:
    """Packs of 5 loss tokens on rank 0, of 1 on rank 1: loss per token of the global batch, and the mean of means per rank."""
    rank = dist.get_rank()
    torch.set_num_threads(1)
    packs = [marked_pack([10 * rank + number], num_loss=(5, 1)[rank]) for number in range(2)]
    loader = loader_of(Given(packs), planner, num_microbatches=2)
    model = new_model(hidden=16, heads=2, vision_layers=1, layers=1).double()
    model.normalise = lambda pixels: normalise(pixels).double()
    losses = [model.loss(next(loader)) for _ in range(2)]
    own = torch.tensor([sum(loss.item() for loss, _ in losses), sum(number for _, number in losses)], dtype=torch.float64)
    means = own[:1] / own[1:]
    counted = own[1].item()
    dist.all_reduce(own)
    dist.all_reduce(means)
    total = loader.num_loss_tokens
    loader.close()
    return {"loss": own[0].item() / total, "tokens": total, "own": counted, "mean of means": means.item() / 2}


def four_samples() -> list[tuple[tuple[str, ...], tuple[int, ...], int, list[str]]]:
    """A sample a pack, each of another size, two on either rank; what was trained on, in order."""
    rank = dist.get_rank()
    packs = [marked_pack([number], side=2 * (number + 1)) for number in (2 * rank, 2 * rank + 1)]
    loader = loader_of(Given(packs), Sorted(), num_microbatches=2)
    found = [
        (pack.batch.sample_ids, tuple(np.unique(pack.batch.pixels).tolist()), len(pack.batch.pixels), mixed_up(pack))
        for pack in loader
    ]
    loader.close()
    return found


def unequal_streams(num_packs: tuple[int, int], num_microbatches: tuple[int, int]) -> dict[str, Any]:
    """So many packs and microbatches on either rank."""
    rank = dist.get_rank()
    source = Given([marked_pack([100 * rank + number]) for number in range(num_packs[rank])])
    loader = loader_of(source, Sorted(), num_microbatches=num_microbatches[rank])
    try:
        trained = [pack.batch.sample_ids for pack in loader]
        return {"trained": trained, "dropped": loader.dropped, "read": source.position}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "read": source.position}
    finally:
        loader.close()
