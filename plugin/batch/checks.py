"""Whether the fields of a buffer belong together. A right checksum says that bytes arrived, not that a pack was written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packer.format.errors import FormatError
from plugin.batch.facts import Cost, Count, Fact, Form
from plugin.batch.images import MOST_PATCHES_A_SIDE, MOST_TILES, ImageState

if TYPE_CHECKING:
    from plugin.batch.core import PackedBatch


def texts(blob: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> tuple[str, ...]:
    """The strings between the offsets of a blob of UTF-8."""
    data, places = blob.tobytes(), offsets.tolist()
    return tuple(data[start:end].decode() for start, end in pairwise(places))


def refuse_inconsistent(batch: PackedBatch) -> None:
    """Raises:
    FormatError: when a field contradicts another, so that no view or sample could be made of it. Takes 0.1 ms.
    """
    if len(batch.facts) != len(Fact) or batch.facts[Fact.FORM] not in list(Form):
        raise FormatError(f"pack: found the facts {batch.facts.tolist()}, expected {len(Fact)} and a form of {list(Form)}")
    _refuse_other_shapes(batch)
    # One by one: later ones index with what earlier ones have looked at.
    checks = chain(_of_sequence(batch), _of_samples(batch), _of_images(batch))
    wrong = next((what for what, holds in checks if not holds), None)
    if wrong:
        raise FormatError(f"pack: its {wrong}; it was not written by bayplan, or was changed")


def _refuse_other_shapes(batch: PackedBatch) -> None:
    num_tokens, num_segments = len(batch.tokens), len(batch.cu_seqlens) - 1
    num_samples, num_images = batch.num_samples, len(batch.image_sample)
    of_patches, of_tiles = batch.form == Form.PATCHES, batch.form == Form.TILES
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(("labels", "position_ids", "loss_mask", "feature_mask"), (num_tokens,))
    expected |= {
        "cu_seqlens_padded": (num_segments + 1,),
        "sample_source": (num_samples,),
        "sample_counts": (num_samples, len(Count)),
        "sample_costs": (num_samples, len(Cost)),
        "sample_id_offsets": (num_samples + 1,),
        "image_index": (num_images,),
        "image_span": (num_images, 2),
        "image_state": (num_images,),
        "image_size": (num_images, 2),
        "image_grid_thw": (0 if of_tiles else num_images, 3),
        "num_tiles": (num_images if of_tiles else 0,),
        "pixels": batch.pixels.shape if of_patches else (0, 0),
        "tiles": batch.tiles.shape if of_tiles else (0, 0, 0, 0),
    }
    for name, shape in expected.items():
        found = getattr(batch, name).shape
        if found != shape:
            raise FormatError(f"pack: found {name} of shape {found}, expected {shape}")
    if num_tokens < 1 or num_samples < 1 or num_segments - num_samples not in (0, 1):
        raise FormatError(f"pack: found {num_samples} samples in {num_segments} segments of {num_tokens} tokens")


def _of_sequence(batch: PackedBatch) -> Iterator[tuple[str, bool]]:
    real, physical = np.diff(batch.cu_seqlens), np.diff(batch.cu_seqlens_padded)
    yield "cu_seqlens do not begin with 0", batch.cu_seqlens[0] == 0 == batch.cu_seqlens_padded[0]
    yield "cu_seqlens hold an empty segment, or one longer than its place", bool((real > 0).all() and (physical >= real).all())
    yield "cu_seqlens do not end with the tokens", batch.cu_seqlens_padded[-1] == len(batch.tokens)
    yield "max_seqlen is not the longest segment", batch.max_seqlen == physical.max()


def _of_samples(batch: PackedBatch) -> Iterator[tuple[str, bool]]:
    yield "sample ids are no strings", _are_texts(batch.sample_id_bytes, batch.sample_id_offsets)
    yield "source names are no strings", _are_texts(batch.source_name_bytes, batch.source_name_offsets)
    yield "fingerprint is no string", _is_text(batch.fingerprint_bytes.tobytes())
    num_sources = len(batch.source_name_offsets) - 1
    yield "samples name sources that are not there", _within(batch.sample_source, 0, num_sources)
    lengths = np.diff(batch.cu_seqlens)[: batch.num_samples]
    counts = batch.sample_counts
    counted = counts[:, : Count.LOSS].sum(axis=1)
    yield "token counts are not its lengths", bool((counts >= 0).all() and (counted == lengths).all())


def _of_images(batch: PackedBatch) -> Iterator[tuple[str, bool]]:
    owners = batch.image_sample
    num_owned = int((owners >= 0).sum())
    ensured = batch.image_state == ImageState.ENSURED
    # An ensured image stands last, and has the segment behind the samples.
    yield "images name samples that are not there", _within(owners[:num_owned], 0, batch.num_samples)
    yield "images are not in the order of their samples", bool((np.diff(owners[:num_owned]) >= 0).all())
    yield "images name no known state", _within(batch.image_state, 0, len(ImageState))
    yield "image that belongs to no sample is not marked", bool((ensured == (owners == -1)).all())
    has_segment = len(batch.cu_seqlens) - 1 > batch.num_samples
    yield "ensured image is not alone in its segment", len(owners) - num_owned == has_segment
    starts, ends = batch.image_span.T
    segments = np.where(owners >= 0, owners, batch.num_samples)
    begins = batch.cu_seqlens_padded[segments]
    lasts = begins + batch.cu_seqlens[segments + 1] - batch.cu_seqlens[segments]
    yield "image spans leave their samples", bool(((begins <= starts) & (starts < ends) & (ends <= lasts)).all())
    grid, number = batch.image_grid_thw, batch.num_tiles
    has_pixels = bool(len(owners)) and bool(batch.facts[Fact.HAS_PIXELS])
    yield "facts speak of pixels without images", batch.facts[Fact.HAS_PIXELS] == has_pixels
    small = _within(grid, 1, MOST_PATCHES_A_SIDE + 1) and _within(number, 1, MOST_TILES + 1)
    yield "grids or tiles are no numbers of patches", small or batch.form == Form.NONE
    yield "patches are not those of its grids", len(batch.pixels) == (grid.prod(axis=1).sum() if has_pixels else 0)
    yield "tiles are not those of its images", len(batch.tiles) == (number.sum() if has_pixels else 0)
    yield "images have no form", batch.form != Form.NONE or not len(owners)


def _within(values: npt.NDArray[Any], least: int, end: int) -> bool:
    return bool(((values >= least) & (values < end)).all())


def _are_texts(blob: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> bool:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(blob) or (np.diff(offsets) < 0).any():
        return False
    try:
        texts(blob, offsets)
    except UnicodeDecodeError:
        return False
    return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
