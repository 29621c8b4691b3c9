"""The example model and packs of it, held in memory behind a loader's interface."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pack_samples import PATCHES, pack_sample, patch_image

from plugin.batch import PackedBatch, PackSample, build
from plugin.batch.torch_batch import TorchBatch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
from tiny_vlm import TinyVlm, VlmSizes  # noqa: E402
from train_tiny_vlm import Settings, main, train  # noqa: E402

SIZES = VlmSizes(vocab_size=100, patch_size=2, hidden=32)


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """Each channel once for either of two frames, as Qwen's processors do."""
    values = pixels.float() / 127.5 - 1
    return values.reshape(-1, 3, 1, 4).expand(-1, 3, 2, 4).reshape(-1, 24)


def packed(samples: Sequence[PackSample], **changes: Any) -> PackedBatch:
    return build(samples, **({"form": PATCHES, "sequence_length": 128, "pad_id": 0} | changes))


def new_model(**changes: Any) -> TinyVlm:
    """The same weights at every call."""
    torch.manual_seed(0)
    return TinyVlm(VlmSizes(**({name: getattr(SIZES, name) for name in SIZES.__slots__} | changes)), normalise)


def some_packs(number: int) -> list[PackedBatch]:
    """Of one to five samples, so each has other numbers of loss tokens; some hold no image."""
    made = []
    for place in range(number):
        random = np.random.default_rng(place)
        samples = []
        for sample in range(int(random.integers(1, 6))):
            image = [] if place in (2, 5, 7) else [patch_image(2, 4, place), int(random.integers(1, 5))]
            samples.append(pack_sample([int(random.integers(2, 8)), *image], f"{place}-{sample}", sample))
        made.append(packed(samples, alignment=4))
    return made


class PacksInMemory:
    """Deals packs to ranks in turn, for ever; its state is how many this rank has taken."""

    def __init__(self, packs: Sequence[PackedBatch], *, rank: int = 0, world_size: int = 1) -> None:
        self.packs, self.rank, self.world_size = packs, rank, world_size
        self.taken = 0
        self.normalise = normalise

    def __iter__(self) -> Iterator[TorchBatch]:
        return self

    def __next__(self) -> TorchBatch:
        place = self.taken * self.world_size + self.rank
        self.taken += 1
        return self.packs[place % len(self.packs)].to_torch()

    def save_state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def restore_state(self, state: dict[str, int]) -> None:
        assert self.taken == 0, "restored after the first pack"
        self.taken = state["taken"]

    def counters(self) -> dict[str, int]:
        return {"packs": self.taken}

    def log_line(self) -> str:
        return f"{self.taken} packs"


def train_in_memory(settings: Settings) -> list[float]:
    """On this rank, in a world that stands."""
    torch.set_num_threads(1)
    loader = PacksInMemory(some_packs(12), rank=dist.get_rank(), world_size=dist.get_world_size())
    return train(loader, new_model(), settings)


def train_on_dataset(words: list[str]) -> None:
    """The script on this rank, in a world that stands; threads of several ranks would be in each other's way."""
    torch.set_num_threads(1)
    main(words)
