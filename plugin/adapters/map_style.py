"""Samples by number, as they were packed: `RawSamples`, for trainers that want rows and samplers, such as TRL's GRPO.

No tokens and no packs here. Needs neither Energon nor torch, and works with torch's `DataLoader`, forked or spawned.
"""

from __future__ import annotations

import operator
import os
from typing import Any, Literal, get_args

import numpy as np
import yaml
from PIL import Image

from indexer.rows import as_numpy
from indexer.splits import held_out
from indexer.table import IndexTable, open_index
from packer.format import layout
from packer.format.errors import BayplanError, UsageError
from packer.storage import Storage, open_storage
from plugin.failures import SampleFailed
from plugin.reader import BundleReader
from plugin.selection import Selection
from plugin.tensors import Alpha, decode

Split = Literal["train", "val", "all"]


class RawSamples:
    """The usable samples of a profile's index, in the order of their sources' names. A map-style dataset; nothing is kept."""

    def __init__(
        self,
        dataset_url: str | os.PathLike[str],
        profile: str,
        *,
        sources: list[str] | None = None,
        split: Split = "train",
        check_crc: bool = True,
        alpha: Alpha = "white",
    ) -> None:
        """Open the index; no sample is read.

        Args:
            profile: decides which samples are usable: counted, and in no list of `exclude/`.
            sources: all of them when None.
            split: `val` is what the recipe's `val` holds out; a source that holds nothing out has all its samples in both.
            alpha: see `plugin.tensors.decode`.

        Raises:
            UsageError: no such profile, source or split. FormatError: a damaged index.
        """
        if split not in get_args(Split):
            raise UsageError(f"found the split {split!r}, expected one of {', '.join(get_args(Split))}")
        dataset_url = os.fspath(dataset_url)
        self._alpha = alpha
        self._table = open_index(dataset_url, profile, sources=sources)
        self._selection = _selected(self._table, open_storage(dataset_url), split)
        self._reader = BundleReader(dataset_url, check_crc=check_crc)

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """One sample; any thread and any forked process may ask.

        Returns:
            `id` and `source`; `prompt`: the record's messages, or its content, whose image parts are numbers into `images`;
            `images`: upright pictures in mode RGB; `image`: the picture of a sample that has just one; `extra`: the carried
            fields, which stand beside these keys too wherever their names are free.

        Raises:
            SampleFailed: it cannot be read or decoded.
        """
        row = self._table.row(self._selection.row_at(self._position(number)))
        try:
            read = self._reader.read_sample(row)
            images = [self._decoded(data) for data in read.images]
        except BayplanError as error:
            raise SampleFailed(f"sample {row.name}: {error}; a list in `exclude/` leaves it out") from error
        record = read.record
        made = {
            "id": record["id"],
            "source": row.source,
            "prompt": record["messages"] if "messages" in record else record["content"],
            "images": images,
            "extra": record["extra"],
        }
        if len(images) == 1:
            made["image"] = images[0]
        return {**record["extra"], **made}

    def _position(self, number: int) -> int:
        position = operator.index(number)
        if not -len(self) <= position < len(self):
            raise IndexError(f"found sample {position}, expected one of {len(self):,}")
        return position % len(self)

    def _decoded(self, data: bytes) -> Image.Image:
        return decode(data, alpha=self._alpha).convert("RGB")


def _selected(table: IndexTable, storage: Storage, split: Split) -> Selection:
    mask = table.usable
    if split != "all":
        mask = mask.copy()
        for source in table.sources:
            if share := _held_out_share(storage, source, table.profile):
                rows = table.rows_of_source(source)
                hashes = table.column("id_hash").slice(rows.start, len(rows)).combine_chunks()
                mask[rows.start : rows.stop] &= held_out(as_numpy(hashes), share) == (split == "val")
    return Selection(np.asarray(mask))


def _held_out_share(storage: Storage, source: str, profile: str) -> float:
    """As the packed stream takes it: from the loader file that Energon reads."""
    name = layout.nv_meta_file(source, layout.nv_meta_profile(profile))
    try:
        return float(yaml.safe_load(storage.read_bytes(name))["val"])
    except FileNotFoundError as error:
        raise UsageError(f"{storage.url}/{name}: found no file, expected the split of source {source!r}: index again") from error
