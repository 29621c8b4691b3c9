"""Where a rank's stream stands, by the packs its trainer was given. What Energon's workers say of themselves is held to it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from megatron.energon.savable_loader import SavableDatasetCheckpoint

from plugin.loader_workers import worker_states


class Position:
    """Of one Energon loader, from when it was opened or restored on."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.begin(None, [0] * max(1, loader.num_workers))

    def begin(self, restored: Any, packs_of_epoch: Sequence[int]) -> None:
        """Args:
        restored: the state that was restored; None: of a loader that had not begun.
        packs_of_epoch: by worker, those given in its epoch so far.
        """
        self._restored = restored
        self._first = self._counts()
        self._of_epoch = [count - given for count, given in zip(self._first, packs_of_epoch, strict=True)]
        self._num_given = 0
        self._has_ended_epoch = False

    def give(self) -> None:
        """The trainer has a pack more, or one was skipped."""
        self._num_given += 1

    def end_epoch(self) -> None:
        """The trainer was told that no pack comes."""
        self._of_epoch = self._counts()
        self._has_ended_epoch = True
        self.begin_at_first_worker()

    def begin_at_first_worker(self) -> None:
        """torch begins an epoch with its first worker, which in a restored loader is not Energon's: a state must say so."""
        if self._loader.num_workers:
            self._loader._next_worker_id = self._loader.dataset._worker_offset

    @property
    def packs_of_epoch(self) -> list[int]:
        """By worker, given in this epoch."""
        return [count - before for count, before in zip(self._counts(), self._of_epoch, strict=True)]

    @property
    def is_whole(self) -> bool:
        """Whether the trainer has every pack that the loader takes for given."""
        return sum(self._counts()) - sum(self._first) == self._num_given

    def state(self) -> Any:
        """Energon's, of `save_state_rank`.

        Workers begin one after another, and one that has not begun answers with what it was forked with, or never: of those that
        gave nothing, what was restored stands.
        """
        if not self._loader.num_workers:
            return self._loader.save_state_rank()
        if not self._num_given and not self._has_ended_epoch:
            return deepcopy(self._restored)
        state = worker_states(self._loader)
        if not self._has_ended_epoch:
            for worker, (count, before) in enumerate(zip(self._counts(), self._first, strict=True)):
                if count == before:
                    state.worker_states[worker] = self._restored_of(worker)
        return state

    def _restored_of(self, worker: int) -> Any:
        if self._restored is None:
            return SavableDatasetCheckpoint(state=None, offset=0)
        return deepcopy(self._restored.worker_states[worker])

    def _counts(self) -> list[int]:
        """By worker, packs that came of it, from some number on."""
        if not self._loader.num_workers:
            return [self._loader.dataset._sample_index]
        return list(self._loader._worker_sample_counters)
