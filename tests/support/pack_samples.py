"""Samples to pack: by hand from pieces, at random for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from indexer.encode import EncodedSample, ImageSpan
from plugin.batch import ImageForm, ImageState, PackImage, PackSample, Patches, PatchImage, TileImage, Tiles

START, END, FEATURE = 92, 93, 90
PATCHES = Patches(patch_bytes=12, merge_size=2)
TILES = Tiles(side=4, features_per_tile=5)

Piece = int | PackImage
"""So many text tokens, or an image."""


def patch_image(height: int, width: int, seed: int = 0, **fields: object) -> PatchImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height * width, PATCHES.patch_bytes), np.uint8)
    return replace(PatchImage(grid_thw=(1, height, width), pixels=pixels), **fields)


def tile_image(number: int, seed: int = 0, **fields: object) -> TileImage:
    tiles = np.random.default_rng(seed).integers(0, 256, (number, 3, TILES.side, TILES.side), np.uint8)
    return replace(TileImage(num_tiles=number, tiles=tiles), **fields)


def num_features(image: PackImage) -> int:
    if isinstance(image, TileImage):
        return image.num_tiles * 5
    return image.grid_thw[0] * image.grid_thw[1] * image.grid_thw[2] // 4


def pack_sample(pieces: Sequence[Piece], name: str = "a", seed: int = 0, **fields: object) -> PackSample:
    """Text is random ids that are predicted; an image stands between two wrapper tokens."""
    numbers = np.random.default_rng(seed)
    ids: list[int] = []
    features: list[bool] = []
    loss: list[bool] = []
    spans: list[ImageSpan] = []
    images = [piece for piece in pieces if not isinstance(piece, int)]
    for piece in pieces:
        start = len(ids)
        if isinstance(piece, int):
            ids += numbers.integers(0, 80, piece).tolist()
            features += [False] * piece
            loss += [True] * piece
            continue
        number = num_features(piece)
        ids += [START, *[FEATURE] * number, END]
        features += [False, *[True] * number, False]
        loss += [False] * (number + 2)
        spans.append(ImageSpan(index=len(images) - 1 - len(spans), start=start, end=len(ids)))
    encoded = EncodedSample(
        ids=np.array(ids, np.int32),
        loss_mask=np.array(loss, bool),
        feature_mask=np.array(features, bool),
        image_spans=tuple(spans),
    )
    text = sum(piece for piece in pieces if isinstance(piece, int))
    made = PackSample(
        sample_id=name, source="web", row=0, encoded=encoded, images=tuple(images), num_text_tokens=text, num_patches=len(images)
    )
    return replace(made, **fields)


def same(one: PackSample, other: PackSample) -> bool:
    """Whether every field of both is equal, dtypes too."""
    return _plain(one) == _plain(other)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    slots = getattr(type(value), "__slots__", ())
    return [_plain(getattr(value, name)) for name in slots] if slots else value


def images_of(form: ImageForm, *, with_pixels: bool = True) -> st.SearchStrategy[PackImage]:
    seeds = st.integers(0, 99)
    common = {
        "seed": seeds,
        "size": st.none() | st.tuples(st.integers(1, 999), st.integers(1, 999)),
        "state": st.sampled_from([ImageState.REAL, ImageState.REAL, ImageState.BLANK]),
    }
    if isinstance(form, Tiles):
        return st.builds(tile_image, st.integers(1, 3), **common, **({} if with_pixels else {"tiles": st.none()}))
    sides = st.sampled_from([2, 4, 6, 10])
    return st.builds(patch_image, sides, sides, **common, **({} if with_pixels else {"pixels": st.none()}))


@st.composite
def samples_of(draw: st.DrawFn, form: ImageForm | None, *, with_pixels: bool = True) -> PackSample:
    text = st.integers(1, 20)
    pieces = st.lists(text if form is None else text | images_of(form, with_pixels=with_pixels), min_size=1, max_size=6)
    made = pack_sample(draw(pieces), draw(st.text(max_size=5)), draw(st.integers(0, 99)))
    masked = draw(st.sampled_from(["as encoded", "none", "random"]))
    mask = made.encoded.loss_mask
    if masked == "none":
        mask = np.zeros_like(mask)
    elif masked == "random":
        mask = np.array(draw(st.lists(st.booleans(), min_size=len(mask), max_size=len(mask))), bool)
    big = st.integers(0, 1 << 50)
    return replace(
        made,
        source=draw(st.sampled_from(["web", "ocr", "책", ""])),
        row=draw(big),
        encoded=replace(made.encoded, loss_mask=mask),
        encoder_cost=draw(big),
        llm_cost=draw(big),
    )


@st.composite
def packs(draw: st.DrawFn) -> tuple[list[PackSample], dict[str, object]]:
    """Samples, and arguments of `build` that they fit: some exactly."""
    form = draw(st.sampled_from([PATCHES, TILES, None]))
    with_pixels = draw(st.booleans())
    samples = draw(st.lists(samples_of(form, with_pixels=with_pixels), min_size=1, max_size=5))
    alignment = draw(st.sampled_from([1, 8, 16]))
    needed = sum(-(-len(sample.encoded.ids) // alignment) * alignment for sample in samples)
    spare = draw(st.sampled_from([0, 0, alignment, 5 * alignment]))
    return samples, {
        "form": form,
        "sequence_length": needed + spare,
        "alignment": alignment,
        "pad_id": draw(st.integers(0, 99)),
        "fingerprint": draw(st.text(max_size=5)),
        "fill": draw(st.booleans()),
    }
