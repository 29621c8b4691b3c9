"""A loader of a few packs made by hand, with a state: what stands behind a stream where reading is not the question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugin.batch import PackedBatch
from plugin.batch.torch_batch import TorchBatch


class HandMadeLoader:
    """An epoch is the packs in their order; the next call after its end begins another, as a `PackLoader` does it."""

    def __init__(self, packs: Sequence[PackedBatch]) -> None:
        self.packs = packs
        self.place = 0
        self.num_packs = 0

    def __iter__(self) -> HandMadeLoader:
        return self

    def __next__(self) -> TorchBatch:
        if self.place == len(self.packs):
            self.place = 0
            raise StopIteration
        self.place += 1
        self.num_packs += 1
        return self.packs[self.place - 1].to_torch()

    def save_state(self) -> Any:
        return {"place": self.place}

    def restore_state(self, state: Any) -> None:
        self.place = state["place"]

    def counters(self) -> Mapping[str, Any]:
        return {"packs": self.num_packs}

    def log_line(self) -> str:
        return f"{self.num_packs} packs"

    def close(self) -> None:
        self.packs = ()
