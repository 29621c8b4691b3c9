"""A row of the index with its record and images -> a sample of a pack, exactly as long as the index promised.

No reading here. What is wrong with a sample is said by an error; what takes its place is here too: grey images of the promised
grid, or, where not even the record is to be had, a sample of the promised length without text. Both are out of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from indexer.encode import EncodedSample, ImageSpan, SampleEncoder
from indexer.table import IndexRow
from packer.format.errors import BayplanError, FormatError
from plugin.batch import EnsuredImage, ImageForm, ImageState, PackImage, PackSample, Patches, PatchImage, TileImage
from plugin.cost import CostModel
from plugin.tensors import ImagePatches, ImageTensors, Promise

_NOT_AS_PACKED = (LookupError, TypeError, ValueError, AttributeError, AssertionError)
"""What comes of a record with the right id and number of images, and other things in it than were packed."""
_ENSURED_SIDE = 56
"""Pixels: about the least that any rule scales up from."""


class Chosen(Protocol):
    """A sample that was chosen for a pack."""

    @property
    def row(self) -> IndexRow: ...

    @property
    def number(self) -> int:
        """Of the row, in the index of its source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBuilder:
    """Encoder and pixels of one profile. Without state: any number of threads may share it."""

    encoder: SampleEncoder
    tensors: ImageTensors | None
    """None: the profile has no image rule."""
    pad_id: int
    with_pixels: bool = True
    cost: CostModel | None = None

    @property
    def form(self) -> ImageForm | None:
        return None if self.tensors is None else self.tensors.form

    def encode(self, rows: Sequence[IndexRow], records: Sequence[Mapping[str, Any]]) -> list[EncodedSample | BayplanError]:
        """The ids of records, all at once, which is faster; an error where one is not what was counted."""
        try:
            found: Sequence[EncodedSample | BayplanError] = self.encoder.encode_all(records)
        except _NOT_AS_PACKED:
            found = [self._encoded_alone(row, record) for row, record in zip(rows, records, strict=True)]
        return [
            encoded if isinstance(encoded, BayplanError) else _as_counted(row, record, encoded)
            for row, record, encoded in zip(rows, records, found, strict=True)
        ]

    def _encoded_alone(self, row: IndexRow, record: Mapping[str, Any]) -> EncodedSample | BayplanError:
        try:
            return self.encoder.encode_all([record])[0]
        except _NOT_AS_PACKED as error:
            return FormatError(
                f"{row.record_file}, sample {record['id']!r}: found a record that cannot be encoded ({type(error).__name__}: "
                f"{error}), expected it as it was packed: the file was changed or is damaged; verify the dataset"
            )

    def image(self, row: IndexRow, index: int, data: bytes | None) -> PackImage:
        """One image of a row.

        Args:
            data: its file; None where no pixels are asked for.

        Raises:
            RowError, FormatError: it does not decode, or is not what was counted.
        """
        assert self.tensors is not None, "a row with images was counted with an image rule"
        known = row.images[index]
        if data is None or not self.with_pixels:
            return self._blank(known.width, known.height, ImageState.REAL)
        promise = Promise(width=known.width, height=known.height, num_patches=known.num_patches)
        return self._placed(self.tensors.patches(data, promise), ImageState.REAL)

    def blank(self, row: IndexRow, index: int) -> PackImage:
        """What stands for an image that could not be had."""
        known = row.images[index]
        return self._blank(known.width, known.height, ImageState.BLANK)

    def lost(self, chosen: Chosen) -> PackSample:
        """What stands for a sample whose record could not be had: its images as far as they fit, grey, and padding."""
        row = chosen.row
        ids = np.full(row.num_tokens, self.pad_id, np.int32)
        features = np.zeros(row.num_tokens, np.bool_)
        spans: tuple[ImageSpan, ...] = ()
        if row.images:
            only = self.encoder.encode(_record_of([(image.width, image.height) for image in row.images]))
            if len(only.ids) <= len(ids):
                ids[: len(only.ids)], features[: len(only.ids)], spans = only.ids, only.feature_mask, only.image_spans
        encoded = EncodedSample(ids=ids, loss_mask=np.zeros_like(features), feature_mask=features, image_spans=spans)
        return self.sample(chosen, row.name, encoded, [self.blank(row, span.index) for span in spans])

    def sample(self, chosen: Chosen, sample_id: str, encoded: EncodedSample, images: Sequence[PackImage]) -> PackSample:
        """The sample; out of the loss if an image of it is blank."""
        row = chosen.row
        if any(image.state == ImageState.BLANK for image in images):
            encoded = replace(encoded, loss_mask=np.zeros_like(encoded.loss_mask))
        encoder_cost, llm_cost = self._costs(row)
        return PackSample(
            sample_id=sample_id,
            source=row.source,
            row=chosen.number,
            encoded=encoded,
            images=tuple(images),
            num_text_tokens=min(row.num_text_tokens, row.num_tokens - int(encoded.feature_mask.sum())),
            num_patches=row.num_patches,
            encoder_cost=encoder_cost,
            llm_cost=llm_cost,
        )

    def _costs(self, row: IndexRow) -> tuple[int, int]:
        """Of the row as it was counted, blank or not: peers must agree on them."""
        if self.cost is None:
            return 0, 0
        patches = [image.num_patches for image in row.images]
        squared = [image.sum_squared_attention for image in row.images]
        encoder = self.cost.encoder_cost_of_images(np.array(patches, np.int64), np.array(squared, np.int64), [len(patches)])
        return int(encoder[0]), int(self.cost.llm_cost([row.num_tokens])[0])

    def ensured_image(self) -> EnsuredImage | None:
        """The smallest image as this profile writes it; None for one without images."""
        if self.tensors is None:
            return None
        encoded = self.encoder.encode(_record_of([(_ENSURED_SIDE, _ENSURED_SIDE)]))
        (span,) = encoded.image_spans
        where = slice(span.start, span.end)
        return EnsuredImage(
            ids=tuple(encoded.ids[where].tolist()),
            feature_mask=tuple(encoded.feature_mask[where].tolist()),
            image=self._blank(_ENSURED_SIDE, _ENSURED_SIDE, ImageState.REAL),
        )

    def _blank(self, width: int, height: int, state: ImageState) -> PackImage:
        assert self.tensors is not None
        if self.with_pixels:
            return self._placed(self.tensors.blank(width, height), state)
        target = self.tensors.target(width, height)
        if isinstance(self.form, Patches):
            return PatchImage(grid_thw=target.grid, pixels=None, state=state)
        return TileImage(num_tiles=target.shape[0], tiles=None, state=state)

    def _placed(self, made: ImagePatches, state: ImageState) -> PackImage:
        if isinstance(self.form, Patches):
            return PatchImage(grid_thw=made.grid, pixels=made.pixels, state=state)
        return TileImage(num_tiles=len(made.pixels), tiles=made.pixels, state=state)


def _as_counted(row: IndexRow, record: Mapping[str, Any], encoded: EncodedSample) -> EncodedSample | FormatError:
    if len(encoded.ids) == row.num_tokens:
        return encoded
    return FormatError(
        f"sample {record['id']!r}: found {len(encoded.ids)} tokens, the index promised {row.num_tokens}: this release or "
        "machine encodes otherwise than the one that counted; index again"
    )


def _record_of(sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """A document of images alone."""
    return {
        "id": "",
        "content": [{"type": "image", "image": place} for place in range(len(sizes))],
        "images": [{"width": width, "height": height} for width, height in sizes],
    }
