"""Packing inside Energon that hands unfilled packs back to the buffer. Exact restore at every pack, in training and at its end.

Energon's own wrapper empties its buffer into every plan and drops what is not returned; it and Energon's shuffle buffer restore
wrongly while they flush the end of an epoch. Here the samples that are mixed, those that wait, their ages, the packs that were
planned and not yet built, and whether the source has ended are all part of the state. A sample is an index row, so a buffer is
restored without reading a record.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Protocol

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.flavors.base_dataset import FlexState, set_sample_restore_key
from megatron.energon.rng import WorkerRng
from megatron.energon.wrappers.base import BaseWrapperDataset, SampleIndex
from megatron.energon.wrappers.buffer import SavableSampleBuffer

from packer.format.errors import UsageError
from plugin.failures import Failure, TooManyFailures, refuse_too_many
from plugin.loader_workers import begin_worker
from plugin.packing import Packing
from plugin.packing.limits import Refusal
from plugin.settings import PackSettings, is_running_low

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 64
"""Rows that come in one after another take half the time of as many that come between packs. At most so many, some milliseconds'
worth, or an eighth of the buffer."""
_BUFFERS_IN_VAIN = 10
"""Buffers' worth of samples that fit no pack, or of which every pack was skipped, before the stream gives up."""


class Packer(Protocol):
    """What the task encoder does for this dataset; nothing of a run is kept in it."""

    def plan_packs(self, samples: Sequence[Any], ages: Sequence[int], *, flush: bool) -> Packing:
        """Which samples go together, which are handed back."""

    def shuffle_packs(self, packing: Packing) -> Sequence[Sequence[int]]:
        """The packs of one plan in the order to emit them."""

    def fetch_ahead(self, samples: Sequence[Any]) -> None:
        """Begin to read the samples of a pack."""

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Build one pack. One without a batch keeps its place: a state counts packs, and what failed may be back by then."""


class Buffer(SavableSampleBuffer[Any]):  # type: ignore[misc]
    """Energon's, saved without copying every key: keys are tuples, and a state is made for every few packs."""

    def save_state(self) -> FlexState:
        return FlexState(__class__=type(self).__name__, _restore_keys=list(self._restore_keys))


class CarryOverPackingDataset(BaseWrapperDataset[Any, Any]):  # type: ignore[misc]
    """Samples -> packs. Samples that wait and packs that are planned together are at most `buffer_size` samples."""

    _savable_fields = (
        "_mixing",
        "_rng",
        "_waiting",
        "_ages",
        "_planned",
        "_planned_lengths",
        "_plan_index",
        "_pack_index",
        "_source_has_ended",
        "_has_ended",
        "_num_samples",
        "_num_failed",
        "_num_refused",
    )

    def __init__(
        self,
        dataset: SavableDataset[Any],
        *,
        packer: Packer,
        settings: PackSettings,
        buffer_size: int,
        shuffle_size: int = 1,
        worker_config: WorkerConfig,
    ) -> None:
        super().__init__(dataset, worker_config=worker_config)
        self.packer = packer
        self._settings = settings
        self._buffer_size = buffer_size
        self._shuffle_size = shuffle_size
        self.is_changing = False
        """Samples are between two places; where an error strikes then, what is saved of them is not whole."""
        self.num_replayed: dict[int, int] = {}
        """By worker: packs that Energon's loader builds again after a restore and does not hand out. Set by `PackLoader`."""
        self.trainer: int | None = None
        """The process that forks the workers. Set by `PackLoader`."""
        self.in_next_epoch: frozenset[int] = frozenset()
        """Workers whose state is of the end of an epoch while the trainer stands in the one after it. Set by `PackLoader`."""
        self._failures: deque[Failure] = deque(maxlen=8)
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._mixing = Buffer(self.dataset, worker_config=self.worker_config)
        """Samples are drawn from these at random."""
        self._rng = WorkerRng(self.worker_config)
        self._waiting = Buffer(self.dataset, worker_config=self.worker_config)
        self._ages: list[int] = []
        """Of the waiting samples: how often each was handed back."""
        self._planned = Buffer(self.dataset, worker_config=self.worker_config)
        """The samples of the packs to build next, one pack after another."""
        self._planned_lengths: list[int] = []
        self._plan_index = SampleIndex(self.worker_config, src=self)
        self._pack_index = SampleIndex(self.worker_config, src=self)
        self._source_has_ended = False
        """It gave its last sample of this epoch: asked again, it would begin the next."""
        self._has_ended = False
        """The last pack of an epoch is out, and the next epoch has not begun."""
        self._was_restored = False
        self._num_since_restore = 0
        self._num_in_vain = 0
        """Samples of the packs since the last one with a batch."""
        self._num_samples = 0
        self._num_failed = 0
        self._num_refused: dict[str, int] = {}
        """Samples that fit no pack, by reason."""

    def restore_state(self, state: FlexState) -> None:
        # Energon takes lists from it as they are, and the stream changes them: the caller may restore from it once more.
        super().restore_state(deepcopy(state))
        self._was_restored = True
        self._num_since_restore = 0

    def __iter__(self) -> Iterator[Any]:
        was_at_end = self._has_ended and self._was_restored and self.worker_config.rank_worker_id() not in self.in_next_epoch
        self._was_restored, self.in_next_epoch = False, frozenset()
        if was_at_end:
            return  # the others of this rank's workers are still in that epoch, and this one stays at its end
        self._has_ended = False
        begin_worker(self.trainer)
        for buffer in (self._mixing, self._waiting, self._planned):
            buffer.worker_start()
        num_ahead = 0
        source: Iterator[Any] | None = None
        while True:
            if source is None and not self._source_has_ended:
                source = iter(self.dataset)
            self.is_changing = True
            self._fill(source)
            if self._is_running_low():
                self._plan()
            self.is_changing = False
            if not self._planned_lengths:
                if self._is_exhausted and not self._waiting.buffer:
                    break
                continue
            num_ahead = self._fetch_ahead(num_ahead)
            num_ahead -= 1
            pack = self._build()
            self._refuse_none_comes(pack)
            self._num_since_restore += 1
            yield pack
        self._source_has_ended = False
        self._has_ended = True
        # Energon's loader asks again at once where all that came was replayed, and would hand out the next epoch.
        replayed = self.num_replayed.pop(self.worker_config.rank_worker_id(), 0)
        self._was_restored = 0 < replayed == self._num_since_restore

    @property
    def _is_exhausted(self) -> bool:
        """Nothing more comes in this epoch; what waits leaves without being handed back."""
        return self._source_has_ended and not self._mixing.buffer

    def _fill(self, source: Iterator[Any] | None) -> None:
        """So many samples come in as went out: some packs' worth at once; before a plan all of them, so no plan depends on it."""
        room = self._buffer_size - len(self._waiting.buffer) - len(self._planned.buffer)
        if room < min(_ROWS_AT_ONCE, self._buffer_size // 8) and not self._is_running_low():
            return
        while len(self._waiting.buffer) + len(self._planned.buffer) < self._buffer_size:
            while not self._source_has_ended and len(self._mixing.buffer) < self._shuffle_size:
                assert source is not None
                try:
                    self._mixing.append(next(source))
                except StopIteration:
                    self._source_has_ended = True
                except AssertionError as error:
                    self._refuse_no_sample(error)
                    raise
            number = len(self._mixing.buffer)
            if not number:
                return
            self._waiting.append(self._mixing.pop(self._rng.randbelow(number) if number > 1 else 0))
            self._ages.append(0)

    def _refuse_no_sample(self, error: AssertionError) -> None:
        """Energon's word for it is that it cannot repeat an empty dataset."""
        config = self.worker_config
        if not self.dataset.worker_has_samples():
            raise UsageError(
                f"found no usable sample for loader worker {config.rank_worker_id()} of rank {config.rank}, expected at least "
                f"one for each of {config.world_size} ranks x {max(1, config.num_workers)} workers; take fewer ranks or loader "
                "workers, or add data"
            ) from error

    def _is_running_low(self) -> bool:
        """Time for a plan: before the last packs of the one before are built, so that its first ones are read in time, but not
        while that would leave little to choose from. Not by `packs_ahead`: which samples share a pack must not depend on reading.
        """
        return is_running_low(len(self._planned.buffer), self._buffer_size)

    def _plan(self) -> None:
        if not self._waiting.buffer:
            return
        samples = self._waiting.buffer.copy()
        with self._plan_index.ctx():
            packing = self.packer.plan_packs(samples, self._ages, flush=self._is_exhausted)
            packs = self.packer.shuffle_packs(packing)
        self._waiting.clear()
        self._waiting.extend([samples[place] for place in packing.leftovers])
        self._ages = packing.leftover_age.tolist()
        for pack in packs:
            self._planned.extend([samples[place] for place in pack])
            self._planned_lengths.append(len(pack))
        for reason in packing.refusal.tolist():
            name = Refusal(reason).name.lower()
            self._num_refused[name] = self._num_refused.get(name, 0) + 1
        self._refuse_nothing_fits()

    def _refuse_nothing_fits(self) -> None:
        num_refused = sum(self._num_refused.values())
        if not self._num_samples and not self._planned_lengths and num_refused >= _BUFFERS_IN_VAIN * self._buffer_size:
            raise UsageError(
                f"none of the first {num_refused} samples fits a pack ({self._num_refused}): expected some within "
                f"{self._settings}; raise the limits, or take the profile that was made for them"
            )

    def _fetch_ahead(self, num_ahead: int) -> int:
        """Begin to read the next packs, but for the first `num_ahead`, which were begun before; how many are begun now."""
        lengths = self._planned_lengths[: self._settings.packs_ahead]
        start = sum(lengths[:num_ahead])
        self.packer.fetch_ahead(self._planned.buffer[start : sum(lengths)])
        return max(num_ahead, len(lengths))

    def _build(self) -> Any:
        length = self._planned_lengths[0]
        samples = self._planned.buffer[:length]
        keys = tuple(sample.__restore_key__ for sample in samples)
        with self._pack_index.ctx() as index:
            pack = self.packer.pack_selected_samples(samples)
        num_samples, num_failed = self._num_samples + length, self._num_failed + len(pack.failures)
        self._failures.extend(pack.failures)
        if pack.failures:
            # Before anything is taken away: a state saved after this error builds the same pack again.
            refuse_too_many(self._settings, num_failed, num_samples, tuple(self._failures))
        self.is_changing = True
        del self._planned[:length]
        del self._planned_lengths[0]
        self._num_samples, self._num_failed = num_samples, num_failed
        self.is_changing = False
        pack.refused = dict(self._num_refused)
        return set_sample_restore_key(pack, index, *keys, src=self)

    def _refuse_none_comes(self, pack: Any) -> None:
        self._num_in_vain = self._num_in_vain + len(pack.failures) if pack.packed is None else 0
        if self._num_in_vain >= _BUFFERS_IN_VAIN * self._buffer_size:
            raise TooManyFailures(
                f"{self._num_in_vain} samples of this loader worker in a row could not be used, so no pack comes any more; the "
                f"latest: {pack.failures[-1]}. Check the dataset with `bayplan verify`"
            )

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        """One pack again, by its key, from the samples' own."""
        kind, index, *keys = restore_key
        if kind != type(self).__name__:
            raise UsageError(f"found the restore key of a {kind!r}, expected one of a {type(self).__name__}")
        samples = [self.dataset.restore_sample(key) for key in keys]
        with self._pack_index.ctx(index):
            pack = self.packer.pack_selected_samples(samples)
        return set_sample_restore_key(pack, index, *keys, src=self)

    @property
    def rows_waiting(self) -> int:
        """At most: to be mixed, and to be packed."""
        return self._shuffle_size + self._buffer_size

    def identity(self) -> dict[str, int]:
        """What decides which samples share a pack, beside the limits: a restored stream builds packs again by these."""
        return {"buffer_size": self._buffer_size, "shuffle_size": self._shuffle_size, "max_age": self._settings.max_age}

    def len_worker(self, worker_idx: int | None = None) -> int:
        """Samples, not packs: how many packs they make is known when they are made."""
        length: int = self.dataset.len_worker(worker_idx)
        return length

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            **self.identity(),
            "worker_config": self.worker_config.config(),
            "dataset": self.dataset.config(),
        }
