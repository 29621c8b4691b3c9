"""A source under one profile as a native Energon dataset. A sample here is a row of the index: no record and no image is read.

Sharding, slices, epochs, saving and restoring are Energon's own; this adds which rows there are and what a row says. Positions
are those of the split's usable rows, so a changed exclusion list is another dataset: see `config`.
"""

# No `from __future__ import annotations`: Energon reads the constructor's annotations as types, `Optional` among them.

import inspect
from typing import Any, Dict, Optional, Type  # noqa: UP035

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from megatron.energon import CrudeSample, SavableDataset, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.flavors.webdataset.empty_dataset_error import EmptyDatasetError
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData, WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset, ShardInfo
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.map_dataset import MapDataset

from indexer.rows import as_numpy
from indexer.splits import held_out
from indexer.table import IndexRow, IndexTable, open_index
from packer.format.errors import UsageError
from plugin.row_sample import RowSample
from plugin.selection import Selection

SLICE_SAMPLES = 256
"""Rows that follow each other in training: small, since a row costs microseconds wherever it stands."""
PARALLEL_SLICES = 16
_SPLITS = ("train", "val")


class NoTestSplit(UsageError, EmptyDatasetError):  # type: ignore[misc]
    """Sources have no split `test`. Energon's commands ask for it unless told otherwise, and pass over a split that is empty."""


class RowReader:
    """What Energon's sample loader reads from: position -> crude sample."""

    def __init__(self, path: EPath, table: IndexTable, source: str, selection: Selection) -> None:
        self._path = path
        self._table = table
        self._first_row = table.rows_of_source(source).start
        self._selection = selection

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, position: int) -> dict[str, Any]:
        number = self._selection.row_at(position)
        row = self._table.row(self._first_row + number)
        name = f"{row.part_id}.jsonl"
        source = SourceInfo(
            dataset_path=str(self._path), index=position, shard_name=name, file_names=(f"{row.part_id}/{row.line}",)
        )
        return {
            "__key__": row.name,
            "__shard__": name,
            "__restore_key__": ("Webdataset", position),
            "__sources__": (source,),
            "row": row,
            "number": number,
        }


class IndexedSource(BaseCoreDatasetFactory[CrudeSample], Sharder):  # type: ignore[misc]
    """The factory that `.nv-meta/<profile>.yaml` of a source names. Its samples are `RowSample`s: each holds one `row`, and the
    row's `number` in the source's index.
    """

    __sample_type__ = CrudeSample

    # Energon converts what is annotated here from YAML, so what it hands over as objects goes through `options`.
    def __init__(
        self,
        path: EPath,
        *,
        profile: str,
        val: float = 0.0,
        subflavors: Optional[Dict[str, Any]] = None,  # noqa: UP006, UP045
        sample_type: Type[CrudeSample] = CrudeSample,  # noqa: UP006
        **options: Any,
    ) -> None:
        """Open the source's part of the index.

        Args:
            path: `<dataset>/sources/<source>`. profile: which index.
            val: share of the samples, by their ids, that only the split `val` has; 0: `val` reads the training samples.
            sample_type: `energon info` looks for it; not used. options: see `_take`.

        Raises:
            UsageError: no such profile, source or split, or an option that means nothing here.
            FormatError: the index is damaged, or its parts are not those of the source now.
        """
        self.path, self.paths = path, [path]
        self.subflavors = subflavors or {}
        self._profile, self._val, self._source = profile, val, path.name
        for name in ("decoder", "part_filter", "split_config"):  # of datasets that hold files
            options.pop(name, None)
        if unknown := sorted(set(options) - set(inspect.signature(self._take).parameters)):
            raise UsageError(f"{path}: found options that sources of bayplan do not have: {', '.join(unknown)}; remove them")
        self._take(**options)
        self._table = open_index(str(path.parent.parent), profile, sources=[self._source])
        self._selection = Selection(self._mask())

    def _take(
        self,
        *,
        training: bool,
        worker_config: WorkerConfig,
        split_part: str = "train",
        shuffle_over_epochs: int | None = 1,
        parallel_shard_iters: int | None = None,
        max_samples_per_sequence: int | None = None,
        subset: DatasetSubset | None = None,
    ) -> None:
        """What Energon asks of every dataset; meanings are Energon's."""
        if split_part not in _SPLITS:
            refusal = NoTestSplit if split_part == "test" else UsageError
            raise refusal(f"{self.path}: found the split {split_part!r}, expected one of {', '.join(_SPLITS)}")
        self.training, self.worker_config, self.subset = training, worker_config, subset
        self._split_part = split_part
        self._shuffle_over_epochs = shuffle_over_epochs
        self._parallel = parallel_shard_iters or (PARALLEL_SLICES if training else 1)
        self._slice_samples = max_samples_per_sequence or SLICE_SAMPLES

    def _mask(self) -> npt.NDArray[np.bool_]:
        """Usable rows of the split. Not `IndexTable.usable`, which the table would keep beside the selection."""

        def in_split(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
            if not self._val:
                return np.ones(batch.num_rows, np.bool_)
            return np.asarray(held_out(as_numpy(batch.column("id_hash")), self._val) == (self._split_part == "val"))

        return self._table.select(in_split)

    def __len__(self) -> int:
        return len(self._selection)

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset[CrudeSample]:
        """The stream of this source's samples, sharded over ranks and workers."""
        shards = [ShardInfo(name=self._source, path=self.path, count=len(self))]
        offsets = self.shard_workers(
            shards,
            worker_config=self.worker_config,
            max_samples_per_sequence=self._slice_samples,
            rotation_offset=worker_rotation_offset,
            subset=self.subset,
        )
        reader: Any = RowReader(self.path, self._table, self._source, self._selection)
        loader = WebdatasetSampleLoaderDataset(
            join_readers=[reader],
            workers_sample_slice_offsets=offsets,
            worker_config=self.worker_config,
            shuffle_over_epochs=self._shuffle_over_epochs if self.training else None,
            parallel_slice_iters=self._parallel,
        )
        return MapDataset(loader, self._crude, stateless_map_fn=True, map_fn_config=self.config, worker_config=self.worker_config)

    def _crude(self, raw: RawSampleData) -> CrudeSample:
        (sample,) = raw.data
        assert sample is not None
        return RowSample({**sample, "__subflavors__": self.subflavors})

    def config(self) -> dict[str, Any]:
        """What decides which samples come in which order."""
        return {
            "type": type(self).__qualname__,
            "_path": str(self.path),  # the name under which `energon analyze-debug` looks for it
            "profile": self._profile,
            "rows": self._table.fingerprint,
            "split_part": self._split_part,
            "val": self._val,
            "training": self.training,
            "shuffle_over_epochs": self._shuffle_over_epochs,
            "parallel_shard_iters": self._parallel,
            "max_samples_per_sequence": self._slice_samples,
            "subset": self.subset.config() if self.subset is not None else None,
        }

    def as_file_store(self) -> Any:
        raise UsageError(f"{self.path}: a source of bayplan cannot be an auxiliary dataset of Energon; name it in the blend")


def crude_row(sample: CrudeSample) -> IndexRow:
    """The index row of a crude sample."""
    row = sample["row"]
    assert isinstance(row, IndexRow)
    return row
