"""`PackingTaskEncoder`: Energon's hooks over the pure parts. Index rows come in, packs of one flat buffer go out.

What is chosen, what is handed back and what is restored is `carry_over`'s; what a pack is made of is `pack_builder`'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from megatron.energon import (
    Cooker,
    CrudeSample,
    Sample,
    SavableDataset,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    stateless,
)

from indexer.table import IndexRow
from packer.format.errors import UsageError
from plugin.batch.torch_batch import TorchBatch
from plugin.carry_over import CarryOverPackingDataset
from plugin.dataset import crude_row
from plugin.failures import Failure
from plugin.pack_builder import PackBuilder
from plugin.packing import Packing, Refusal, Samples, pack, shuffled
from plugin.settings import PackSettings, Peers
from plugin.tensors import ImageTensors

logger = logging.getLogger(__name__)


@edataclass
class IndexedSample(Sample):  # type: ignore[misc]
    """What a sample is until it has been chosen: integers."""

    row: IndexRow
    number: int
    """Of the row, in the index of its source."""


@edataclass
class Pack(Sample):  # type: ignore[misc]
    """What leaves a loader worker."""

    packed: TorchBatch | None
    """None: every sample of it was skipped. `PackLoader` does not hand it out."""
    failures: tuple[Failure, ...] = ()
    """Of its samples."""
    refused: dict[str, int] | None = None
    """Samples that fit no pack, by reason: of this worker, so far."""
    reading: dict[str, float] | None = None
    """Of this worker's prefetch pool, so far: see `PrefetchPool.counters`."""
    worker: int = 0


@stateless  # type: ignore[untyped-decorator]
def cook_row(sample: CrudeSample) -> IndexedSample:
    """Integers only: restoring a buffer cooks each of its samples again."""
    return IndexedSample(**basic_sample_keys(sample), row=crude_row(sample), number=sample["number"])


class PackingTaskEncoder(TaskEncoder[IndexedSample, IndexedSample, Pack, Pack]):  # type: ignore[misc]
    """Hand it to `get_train_dataset` with the `dataset.yaml` of the profile it was made for."""

    # Rows that do not cook are a defect of the index or of ours, never one row's: the first one ends the run.
    __default_failure_tolerance__ = 1
    cookers = (Cooker(cook_row),)
    decoder = None

    def __init__(
        self,
        dataset_url: str | os.PathLike[str],
        profile: str,
        settings: PackSettings,
        *,
        peers: Peers | None = None,
        tensors: ImageTensors | None = None,
    ) -> None:
        """As `PackBuilder`: everything that can be refused is refused here, before a worker starts."""
        self.builder = PackBuilder(dataset_url, profile, settings, peers, tensors=tensors)
        self.settings = settings
        self.limits = self.builder.planning_limits
        self._shuffle_size = 1
        self._told: set[tuple[str, Refusal]] = set()

    def plan_packs(self, samples: Sequence[IndexedSample], ages: Sequence[int], *, flush: bool) -> Packing:
        """Which of the samples go together now."""
        rows = [sample.row for sample in samples]
        columns = Samples.of(
            [row.num_tokens for row in rows],
            num_images=[row.num_images for row in rows],
            num_patches=[row.num_patches for row in rows],
            age=ages,
        )
        packing = pack(columns, self.limits, flush=flush, max_age=self.settings.max_age)
        for place, reason in zip(packing.refused.tolist(), map(Refusal, packing.refusal.tolist()), strict=True):
            self._tell(rows[place], reason, reason.detail(columns, place, self.limits))
        return packing

    def _tell(self, row: IndexRow, reason: Refusal, detail: str) -> None:
        if (row.source, reason) not in self._told:
            self._told.add((row.source, reason))
            logger.warning(
                "source %r: samples that fit no pack are left out and counted, the first is %s: %s",
                row.source,
                row.name,
                detail,
            )

    def shuffle_packs(self, packing: Packing) -> Sequence[Sequence[int]]:
        """In the order to emit them: the plan makes the packs of large samples first."""
        active = WorkerConfig.active_worker_config
        packs = shuffled(packing.packs, worker_seed=active.worker_seed(), sample_index=self.current_sample_index)
        return [one.tolist() for one in packs]

    def fetch_ahead(self, samples: Sequence[IndexedSample]) -> None:
        """Begin to read the samples of a pack that is built later."""
        self.builder.fetch_ahead(samples)

    def select_samples_to_pack(self, samples: list[IndexedSample]) -> list[list[IndexedSample]]:
        """All of them at once, for callers that hand nothing back; the stream itself plans through `plan_packs`."""
        packing = self.plan_packs(samples, [0] * len(samples), flush=True)
        return [[samples[place] for place in one] for one in self.shuffle_packs(packing)]

    @stateless  # type: ignore[untyped-decorator]
    def pack_selected_samples(self, samples: list[IndexedSample]) -> Pack:
        """Read, tokenize, decode and pack; the same pack for the same samples, whenever."""
        built = self.builder.build(samples)
        active = WorkerConfig.active_worker_config
        return Pack(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
            packed=built.batch.to_torch() if built.batch is not None else None,
            failures=built.failures,
            reading=self.builder.counters(),
            worker=active.rank_worker_id() if active is not None else 0,
        )

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: list[Pack]) -> Pack:
        """A microbatch is one pack."""
        (one,) = samples
        return one

    def build_train_datasets(self, *, shuffle_buffer_size: int | None = None, **arguments: Any) -> SavableDataset[Pack]:
        """As Energon's, with the shuffle buffer in `CarryOverPackingDataset`: Energon's own restores wrongly as an epoch ends."""
        self._shuffle_size = max(1, shuffle_buffer_size or 1)
        try:
            return super().build_train_datasets(shuffle_buffer_size=None, **arguments)
        finally:
            self._shuffle_size = 1

    def build_batch(
        self,
        dataset: SavableDataset[IndexedSample],
        *,
        batch_size: int | None,
        batch_drop_last: bool = False,
        packing_buffer_size: int | None = None,
        worker_config: WorkerConfig,
    ) -> SavableDataset[Pack]:
        """What `get_train_dataset` calls; `packing_buffer_size` overrides the settings' `buffer_size`."""
        if batch_size not in (None, 1):
            raise UsageError(
                f"found batch_size {batch_size}, expected None or 1: a microbatch is one pack, one row of "
                f"{self.limits.sequence_length} tokens; for more tokens a microbatch raise sequence_length"
            )
        packed = CarryOverPackingDataset(
            dataset,
            packer=self,
            settings=self.settings,
            buffer_size=packing_buffer_size or self.settings.buffer_size,
            shuffle_size=self._shuffle_size,
            worker_config=worker_config,
        )
        return super().build_batch(
            packed, batch_size=batch_size, batch_drop_last=batch_drop_last, packing_buffer_size=None, worker_config=worker_config
        )
