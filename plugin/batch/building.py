"""`build`: samples -> one flat buffer. Everything is written once, straight to its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from packer.format.errors import UsageError
from plugin.batch import format as buffer_format
from plugin.batch.core import PackedBatch
from plugin.batch.facts import IGNORED, Cost, Count, Fact, Form
from plugin.batch.images import EnsuredImage, ImageForm, ImageState, PackImage, Patches, PatchImage, Tiles, pixels_of
from plugin.batch.samples import PackSample
from plugin.packing.limits import PackLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """An image and where it stands."""

    image: PackImage
    sample: int
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where everything goes."""

    samples: Sequence[PackSample]
    ensured: EnsuredImage | None
    limits: PackLimits
    lengths: list[int]
    """Of the segments."""
    starts: list[int]
    """Of the segments, and the end of the last."""
    images: list[_Placed]
    sources: list[str]
    has_pixels: bool

    @property
    def num_tokens(self) -> int:
        return self.starts[-1]


def build(
    samples: Sequence[PackSample],
    *,
    form: ImageForm | None,
    sequence_length: int,
    alignment: int = 1,
    pad_id: int,
    fingerprint: str = "",
    ensure_image: EnsuredImage | None = None,
    fill: bool = True,
) -> PackedBatch:
    """One pack of whole samples, in their order.

    Args:
        form: how the model takes images; None for a model that takes none.
        alignment: each sample starts at a multiple of it.
        pad_id: the token of padding.
        fingerprint: of the profile the samples were encoded with.
        ensure_image: what to add if no sample has an image.
        fill: pad up to `sequence_length`; else the pack ends with its last segment.

    Raises:
        UsageError: no sample, one that contradicts itself or `form`, or more than fits.
    """
    limits = PackLimits(sequence_length=sequence_length, alignment=alignment)
    plan = _planned(samples, form, limits, ensure_image, fill)
    texts = ["".join(sample.sample_id for sample in samples).encode(), "".join(plan.sources).encode(), fingerprint.encode()]
    fields, num_bytes = buffer_format.planned(_shapes(plan, form, [len(text) for text in texts]))
    buffer = buffer_format.new_buffer(num_bytes)
    views = buffer_format.views(buffer, fields)
    for name, text in zip(("sample_id_bytes", "source_name_bytes", "fingerprint_bytes"), texts, strict=True):
        views[name][:] = np.frombuffer(text, np.uint8)
    _write_sequence(views, plan, pad_id)
    _write_samples(views, plan)
    _write_images(views, plan)
    views["facts"][:] = _facts(plan, form, pad_id)
    buffer_format.seal(buffer, fields)
    return PackedBatch.written(buffer, fields)


def _planned(
    samples: Sequence[PackSample], form: ImageForm | None, limits: PackLimits, ensure_image: EnsuredImage | None, fill: bool
) -> _Plan:
    if not samples:
        raise UsageError("found no sample, expected at least one: a pack is never empty")
    if limits.sequence_length >= 1 << 31:
        raise UsageError(f"found sequence_length {limits.sequence_length:,}, expected less than 2^31: cu_seqlens are int32")
    for sample in samples:
        sample.refuse_unfit(form)
    ensured = None if any(sample.images for sample in samples) else ensure_image
    lengths = [len(sample.encoded.ids) for sample in samples] + ([ensured.num_tokens] if ensured else [])
    starts = [0, *accumulate(-(-length // limits.alignment) * limits.alignment for length in lengths)]
    if starts[-1] > limits.sequence_length:
        for_ensured = f", {lengths[-1]} of them for an ensured image: keep them free when packing" if ensured else ""
        raise UsageError(
            f"found {len(samples)} samples of {starts[-1]:,} tokens, each a multiple of {limits.alignment}, expected at most "
            f"{limits.sequence_length:,}{for_ensured}"
        )
    if fill:
        starts[-1] = limits.sequence_length
    images = [
        _Placed(image=image, sample=place, index=span.index, start=starts[place] + span.start, end=starts[place] + span.end)
        for place, sample in enumerate(samples)
        for span, image in zip(sample.encoded.image_spans, sample.images, strict=True)
    ]
    if ensured:
        images.append(_ensured(ensured, form, starts[len(samples)]))
    with_pixels = sum(pixels_of(placed.image) is not None for placed in images)
    if with_pixels not in (0, len(images)):
        raise UsageError(f"found {len(images)} images, {with_pixels} of them with pixels, expected all or none")
    return _Plan(
        samples=samples,
        ensured=ensured,
        limits=limits,
        lengths=lengths,
        starts=starts,
        images=images,
        sources=list(dict.fromkeys(sample.source for sample in samples)),
        has_pixels=with_pixels > 0,
    )


def _ensured(ensured: EnsuredImage, form: ImageForm | None, start: int) -> _Placed:
    if form is None:
        raise UsageError("found an ensured image, expected none, since the pack was given no image form")
    expected, found = form.num_features(ensured.image), sum(ensured.feature_mask)
    if expected is not None and expected != found:
        raise UsageError(f"ensured image: found {found} features among its ids, expected {expected}, as its pixels give")
    return _Placed(image=ensured.image, sample=-1, index=-1, start=start, end=start + ensured.num_tokens)


def _shapes(plan: _Plan, form: ImageForm | None, text_bytes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    return shapes(
        form,
        num_tokens=plan.num_tokens,
        num_segments=len(plan.lengths),
        num_samples=len(plan.samples),
        num_images=len(plan.images),
        num_units=sum(_num_units(placed.image) for placed in plan.images) if plan.has_pixels else 0,
        num_sources=len(plan.sources),
        text_bytes=text_bytes,
    )


def shapes(
    form: ImageForm | None,
    *,
    num_tokens: int,
    num_segments: Any,
    num_samples: Any,
    num_images: Any,
    num_units: Any,
    num_sources: Any,
    text_bytes: Sequence[Any],
) -> dict[str, tuple[Any, ...]]:
    """Of the fields of a pack with such counts; of many packs at once, where counts are arrays.

    Args:
        num_units: patches or tiles with pixels. text_bytes: of all ids, of all names of sources, of the fingerprint.
    """
    of_tiles = isinstance(form, Tiles)
    found: dict[str, tuple[Any, ...]] = dict.fromkeys(
        ("tokens", "labels", "position_ids", "loss_mask", "feature_mask"), (num_tokens,)
    )
    found |= dict.fromkeys(("cu_seqlens", "cu_seqlens_padded"), (num_segments + 1,))
    found |= dict.fromkeys(("sample_row", "sample_source"), (num_samples,))
    found |= dict.fromkeys(("image_sample", "image_index", "image_state"), (num_images,))
    found |= dict.fromkeys(("image_span", "image_size"), (num_images, 2))
    return found | {
        "sample_counts": (num_samples, len(Count)),
        "sample_costs": (num_samples, len(Cost)),
        "sample_id_bytes": (text_bytes[0],),
        "sample_id_offsets": (num_samples + 1,),
        "source_name_bytes": (text_bytes[1],),
        "source_name_offsets": (num_sources + 1,),
        "fingerprint_bytes": (text_bytes[2],),
        "image_grid_thw": (0 if of_tiles else num_images, 3),
        "num_tiles": (num_images if of_tiles else 0,),
        "facts": (len(Fact),),
        "pixels": (num_units, form.patch_bytes) if isinstance(form, Patches) else (0, 0),
        "tiles": (num_units, form.channels, form.side, form.side) if isinstance(form, Tiles) else (0, 0, 0, 0),
    }


def _write_sequence(views: buffer_format.Views, plan: _Plan, pad_id: int) -> None:
    views["tokens"][:] = pad_id
    views["labels"][:] = IGNORED
    for start, end in pairwise(plan.starts):
        views["position_ids"][start:end] = np.arange(end - start)
    for start, sample in zip(plan.starts, plan.samples, strict=False):
        encoded = sample.encoded
        where = slice(start, start + len(encoded.ids))
        views["tokens"][where] = encoded.ids
        views["loss_mask"][where] = encoded.loss_mask
        views["feature_mask"][where] = encoded.feature_mask
        predicted = np.flatnonzero(encoded.loss_mask[1:]) + 1
        views["labels"][start + predicted] = encoded.ids[predicted]
    if plan.ensured:
        where = slice(plan.starts[len(plan.samples)], plan.starts[len(plan.samples)] + plan.ensured.num_tokens)
        views["tokens"][where] = plan.ensured.ids
        views["feature_mask"][where] = plan.ensured.feature_mask
    views["cu_seqlens"][1:] = np.cumsum(plan.lengths)
    views["cu_seqlens_padded"][:] = plan.starts


def _write_samples(views: buffer_format.Views, plan: _Plan) -> None:
    source_index = {name: place for place, name in enumerate(plan.sources)}
    for place, sample in enumerate(plan.samples):
        text, image = sample.num_text_tokens, sample.num_image_tokens
        other = len(sample.encoded.ids) - text - image
        views["sample_row"][place] = sample.row
        views["sample_source"][place] = source_index[sample.source]
        views["sample_counts"][place] = (text, image, other, sample.num_loss_tokens, sample.num_patches)
        views["sample_costs"][place] = (sample.encoder_cost, sample.llm_cost)
    views["sample_id_offsets"][1:] = np.cumsum([len(sample.sample_id.encode()) for sample in plan.samples])
    views["source_name_offsets"][1:] = np.cumsum([len(name.encode()) for name in plan.sources])


def _write_images(views: buffer_format.Views, plan: _Plan) -> None:
    first = 0
    for place, placed in enumerate(plan.images):
        image, number = placed.image, _num_units(placed.image)
        views["image_sample"][place] = placed.sample
        views["image_index"][place] = placed.index
        views["image_span"][place] = (placed.start, placed.end)
        views["image_state"][place] = image.state if placed.sample >= 0 else ImageState.ENSURED
        views["image_size"][place] = image.size or (0, 0)
        if isinstance(image, PatchImage):
            views["image_grid_thw"][place] = image.grid_thw
        else:
            views["num_tiles"][place] = number
        if plan.has_pixels:
            store = views["pixels" if isinstance(image, PatchImage) else "tiles"]
            store[first : first + number] = pixels_of(image)
            first += number


def _num_units(image: PackImage) -> int:
    """Patches or tiles."""
    if isinstance(image, PatchImage):
        time, height, width = image.grid_thw
        return time * height * width
    return image.num_tiles


def _facts(plan: _Plan, form: ImageForm | None, pad_id: int) -> list[int]:
    facts = {
        Fact.SEQUENCE_LENGTH: plan.limits.sequence_length,
        Fact.ALIGNMENT: plan.limits.alignment,
        Fact.PAD_ID: pad_id,
        Fact.MAX_SEQLEN: max(np.diff(plan.starts).tolist()),
        Fact.FORM: Form.PATCHES if isinstance(form, Patches) else Form.TILES if isinstance(form, Tiles) else Form.NONE,
        Fact.MERGE_SIZE: (form.merge_size or 0) if isinstance(form, Patches) else 0,
        Fact.HAS_PIXELS: int(plan.has_pixels),
    }
    return [facts[fact] for fact in Fact]
