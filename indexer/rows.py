"""One row of counts for every record line of a part, as columns, and the same as Arrow. Files of rows are `indexer.table`'s.

Columns are numpy arrays that share their memory with Arrow's buffers both ways: a mapped file is read without a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import blake3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from indexer.status import EXPLANATIONS as EXPLANATIONS
from indexer.status import Status as Status
from packer.format.errors import FormatError, UsageError

Ints = npt.NDArray[Any]
"""One column: a one-dimensional integer array."""


MAX_COUNT = 2**31 - 1
"""The largest number a 32-bit column holds."""
COUNTS = ("num_text_tokens", "num_image_tokens", "num_tokens", "num_loss_tokens", "num_images", "num_patches")
_PLACES = {"record_offset": np.int64, "record_size": np.int64, "id_hash": np.uint64, "status": np.uint8}
IMAGE_FIELDS = {
    "width": "image_width",
    "height": "image_height",
    "num_image_tokens": "image_num_tokens",
    "num_patches": "image_num_patches",
    "sum_squared_attention": "image_sum_squared_attention",
}
"""Field of the Arrow struct -> column of `Rows`."""
_IMAGE_TYPES = {**dict.fromkeys(IMAGE_FIELDS.values(), np.int32), "image_sum_squared_attention": np.int64}
_ROW_TYPES = {**dict.fromkeys(COUNTS, np.int32), **_PLACES}
_TYPES: dict[str, Any] = {**_ROW_TYPES, **_IMAGE_TYPES}

IMAGE_TYPE = pa.struct(
    [pa.field(field, pa.from_numpy_dtype(_IMAGE_TYPES[column]), nullable=False) for field, column in IMAGE_FIELDS.items()]
)
IMAGES_TYPE = pa.list_(pa.field("item", IMAGE_TYPE, nullable=False))
SCHEMA = pa.schema(
    [pa.field(name, pa.int32(), nullable=False) for name in COUNTS]
    + [pa.field("images", IMAGES_TYPE, nullable=False)]
    + [pa.field(name, pa.from_numpy_dtype(kind), nullable=False) for name, kind in _PLACES.items()]
)
"""The columns of every index file that holds rows, in order."""


def id_hashes(sample_ids: Iterable[str]) -> npt.NDArray[np.uint64]:
    """`id_hash` of many ids, in order; about a microsecond each."""
    joined = b"".join(blake3.blake3(sample_id.encode()).digest(8) for sample_id in sample_ids)
    return np.frombuffer(joined, "<u8").astype(np.uint64, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Counts of consecutive records, one value per record line, checked when made.

    The `image_` columns are flat: `num_images[i]` values for row i, row after row. A row whose status is not USABLE has zero in
    every count and no images.
    """

    num_text_tokens: Ints
    num_image_tokens: Ints
    num_tokens: Ints
    """All positions of the sequence: text, images, image wrappers, special tokens."""
    num_loss_tokens: Ints
    num_images: Ints
    num_patches: Ints
    record_offset: Ints
    """First byte of the record's line in the part's record file."""
    record_size: Ints
    """Bytes of the line, LF included."""
    id_hash: Ints
    status: Ints
    image_width: Ints
    image_height: Ints
    image_num_tokens: Ints
    image_num_patches: Ints
    image_sum_squared_attention: Ints

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            column = getattr(self, name)
            if column.dtype != kind or column.ndim != 1:
                raise UsageError(f"{name}: found {column.dtype} with {column.ndim} dimensions, expected {np.dtype(kind)} with 1")
        for names, expected in ((_ROW_TYPES, len(self)), (_IMAGE_TYPES, self.num_all_images)):
            for name in names:
                if (found := len(getattr(self, name))) != expected:
                    raise UsageError(f"{name}: found {found:,} values, expected {expected:,}")
        self._check_values()

    def _check_values(self) -> None:
        for name, kind in _TYPES.items():
            column = getattr(self, name)
            if np.issubdtype(kind, np.signedinteger) and len(column) and column.min() < 0:
                raise self._wrong(column < 0, name, "expected 0 or more")
        known = self.num_text_tokens + self.num_image_tokens.astype(np.int64)
        self._refuse(self.num_tokens < known, "num_tokens", "expected at least num_text_tokens + num_image_tokens")
        self._refuse(self.num_loss_tokens > self.num_tokens, "num_loss_tokens", "expected at most num_tokens")
        offsets = self.image_offsets
        for name, column in (("num_image_tokens", self.image_num_tokens), ("num_patches", self.image_num_patches)):
            sums = np.concatenate(([0], np.cumsum(column, dtype=np.int64)))[offsets]
            self._refuse(getattr(self, name) != np.diff(sums), name, "expected the sum over the row's images")
        unusable = self.status != Status.USABLE
        if unusable.any():
            for name in ("num_tokens", "num_loss_tokens", "num_images"):
                self._refuse(unusable & (getattr(self, name) != 0), name, "expected 0 in a row that is not usable")

    def _refuse(self, wrong: npt.NDArray[np.bool_], name: str, expected: str) -> None:
        if wrong.any():
            raise self._wrong(wrong, name, expected)

    def _wrong(self, wrong: npt.NDArray[np.bool_], name: str, expected: str) -> UsageError:
        position = int(np.argmax(wrong))
        return UsageError(f"{name}[{position}]: found {getattr(self, name)[position]}, {expected}")

    def __len__(self) -> int:
        return len(self.num_tokens)

    @property
    def num_all_images(self) -> int:
        """Images of all rows together."""
        return int(self.num_images.sum(dtype=np.int64))

    @property
    def image_offsets(self) -> npt.NDArray[np.int64]:
        """n + 1 positions: the images of row i are `[image_offsets[i], image_offsets[i + 1])` of the flat columns."""
        return np.concatenate(([0], np.cumsum(self.num_images, dtype=np.int64)))

    def slice(self, start: int, stop: int) -> Rows:
        """Rows `[start, stop)`, sharing memory."""
        first = int(self.num_images[:start].sum(dtype=np.int64))
        last = first + int(self.num_images[start:stop].sum(dtype=np.int64))
        return _unchecked(
            {name: getattr(self, name)[start:stop] for name in _ROW_TYPES}
            | {name: getattr(self, name)[first:last] for name in _IMAGE_TYPES}
        )

    def to_batch(self, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
        """The rows as one Arrow batch over the same memory.

        Raises:
            UsageError: for more images than an Arrow list of 32-bit offsets holds (2**31 - 1).
        """
        if self.num_all_images > np.iinfo(np.int32).max:
            raise UsageError(f"found {self.num_all_images:,} images in one batch, expected fewer than 2**31: split the rows")
        fields = [as_arrow(getattr(self, column)) for column in IMAGE_FIELDS.values()]
        images = pa.StructArray.from_buffers(IMAGE_TYPE, self.num_all_images, [None], children=fields)
        offsets = pa.py_buffer(self.image_offsets.astype(np.int32))
        lists = pa.ListArray.from_buffers(IMAGES_TYPE, len(self), [None, offsets], children=[images])
        columns = [lists if name == "images" else as_arrow(getattr(self, name)) for name in SCHEMA.names]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch, where: str) -> Rows:
        """The rows of an Arrow batch, over its memory.

        Raises:
            FormatError: naming `where`, when the batch is of another schema or its counts contradict each other.
        """
        check_schema(batch.schema, where)
        columns, offsets = batch_columns(batch)
        try:
            if (np.diff(offsets) != columns["num_images"]).any():
                raise UsageError("num_images: not the lengths of the lists of `images`")
            return cls(**columns)
        except UsageError as error:
            raise FormatError(f"{where}: {error}: the file is damaged; remove it and index again") from error

    @classmethod
    def concatenate(cls, pieces: Sequence[Rows]) -> Rows:
        """All rows of some pieces, in order."""
        if len(pieces) == 1:
            return pieces[0]
        empty = [np.empty(0, kind) for kind in _TYPES.values()]
        return _unchecked(
            {
                name: np.concatenate([getattr(piece, name) for piece in pieces] or [nothing])
                for name, nothing in zip(_TYPES, empty, strict=True)
            }
        )


def _unchecked(columns: dict[str, Ints]) -> Rows:
    """Rows made of rows that were checked before."""
    rows = object.__new__(Rows)
    for name in (field.name for field in dataclasses.fields(Rows)):
        object.__setattr__(rows, name, columns[name])
    return rows


def as_arrow(column: Ints) -> pa.Array:
    """A column as Arrow, over its memory."""
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])


def batch_columns(batch: pa.RecordBatch) -> tuple[dict[str, Ints], Ints]:
    """All columns of a batch by their names in `Rows`, and its image offsets, over its memory."""
    columns = {name: as_numpy(batch.column(name)) for name in _ROW_TYPES}
    lists = batch.column("images")
    offsets = as_numpy(lists.offsets) if len(lists) else np.zeros(1, np.int32)
    structs = lists.values
    for number, column in enumerate(IMAGE_FIELDS.values()):
        columns[column] = as_numpy(structs.field(number))[offsets[0] : offsets[-1]]
    return columns, offsets - offsets[0] if offsets[0] else offsets


def as_numpy(array: pa.Array) -> Ints:
    """An Arrow array of integers without nulls as numpy, over its memory. (`Array.to_numpy` would load pandas.)"""
    kind = array.type.to_pandas_dtype()
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.empty(0, kind)
    return np.frombuffer(data, kind, count=len(array), offset=array.offset * np.dtype(kind).itemsize)


def check_schema(schema: pa.Schema, where: str) -> None:
    """Refuse other columns than those of the index.

    Raises:
        FormatError: naming the first difference.
    """
    for position, field in enumerate(SCHEMA):
        found = schema.field(position) if position < len(schema) else None
        if found is None or found != field:
            raise FormatError(
                f"{where}: found column {_shown(found)}, expected {_shown(field)}: not an index of format version 1"
            )
    if len(schema) != len(SCHEMA):
        raise FormatError(f"{where}: found {len(schema)} columns, expected {len(SCHEMA)}: not an index of format version 1")


def _shown(field: pa.Field | None) -> str:
    return "none" if field is None else f"{field.name} ({field.type}{', nulls allowed' if field.nullable else ''})"
