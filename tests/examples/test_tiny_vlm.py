"""The example model keeps the samples of a pack apart, and all of its weights learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from pack_samples import FEATURE, PATCHES, pack_sample, patch_image, samples_of
from tiny_training import new_model, normalise, packed
from tiny_vlm import TinyVlm, VlmSizes

from indexer.encode import EncodedSample, ImageSpan
from plugin.batch import EnsuredImage, PackedBatch, PackSample, Patches, TileImage, Tiles, build

ENSURED = EnsuredImage(ids=(FEATURE,), feature_mask=(True,), image=PATCHES.smallest())
SAMPLES = [
    pack_sample([5, patch_image(2, 4, 1), 3, patch_image(4, 6, 2), 4], "two images", 1),
    pack_sample([9], "text", 2),
    pack_sample([2, patch_image(6, 2, 3), 6], "one image", 3),
    pack_sample([patch_image(2, 2, 4), 7], "image first", 4),
]


def logits_of_each(model: TinyVlm, batch: PackedBatch) -> list[torch.Tensor]:
    """Without padding."""
    with torch.no_grad():
        logits = model(batch.to_torch())
    lengths = np.diff(batch.cu_seqlens)[: batch.num_samples]
    return [logits[start : start + length] for start, length in zip(batch.cu_seqlens_padded, lengths, strict=False)]


def difference_to_alone(model: TinyVlm, batch: PackedBatch) -> float:
    """The largest of any logit, against each sample packed alone."""
    settings = {"form": form_of(batch), "sequence_length": batch.sequence_length, "pad_id": 0, "fill": False}
    alone = [logits_of_each(model, build([sample], **settings))[0] for sample in batch.unpack()]
    pairs = zip(logits_of_each(model, batch), alone, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def form_of(batch: PackedBatch) -> Patches | Tiles:
    if len(batch.tiles):
        return Tiles(side=batch.tiles.shape[-1], features_per_tile=None)
    return Patches(patch_bytes=batch.pixels.shape[1] or 12, merge_size=2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Faster for a model of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> TinyVlm:
    """Weights so large that whatever leaks shows."""
    made = new_model()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_a_packed_sample_is_computed_as_if_it_were_alone(model: TinyVlm, alignment: int) -> None:
    assert difference_to_alone(model, packed(SAMPLES, alignment=alignment)) < 1e-4


@given(one=samples_of(PATCHES), other=samples_of(PATCHES))
@settings(max_examples=15)
def test_any_two_packed_samples_are_computed_as_if_they_were_alone(model: TinyVlm, one: PackSample, other: PackSample) -> None:
    assert difference_to_alone(model, packed([one, other], sequence_length=512, fill=False)) < 1e-4


def test_a_sample_does_not_see_its_neighbours(model: TinyVlm) -> None:
    """Neighbours of the same lengths and grids, all their tokens and pixels others: not a bit of it changes."""
    others = [
        pack_sample([5, patch_image(2, 4, 11), 3, patch_image(4, 6, 12), 4], "two images", 21),
        *SAMPLES[1:3],
        pack_sample([patch_image(2, 2, 14), 7], "image first", 24),
    ]
    before, after = (logits_of_each(model, packed(samples, alignment=8)) for samples in (SAMPLES, others))
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [False, True, True, False]


def test_a_model_that_forgets_the_boundaries_is_found_out(model: TinyVlm, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would see if samples, or the images of a sample, were not kept apart."""
    batch = packed(SAMPLES, alignment=8)
    for blocks in (model.blocks, model.vision.blocks):
        with monkeypatch.context() as patch:
            for block in blocks:
                forward = partial(forget, block.forward)
                patch.setattr(block, "forward", forward)
            assert difference_to_alone(model, batch) > 0.1


def forget(forward: Any, hidden: torch.Tensor, angles: torch.Tensor, boundaries: list[int], *, causal: bool) -> torch.Tensor:
    return forward(hidden, angles, [0, boundaries[-1]], causal=causal)


def test_the_loss_of_a_pack_is_that_of_its_samples(model: TinyVlm) -> None:
    batch = packed(SAMPLES, alignment=8)
    loss, number = model.loss(batch.to_torch())
    expected = 0.0
    for sample, logits in zip(SAMPLES, logits_of_each(model, batch), strict=True):
        chances = logits.double().log_softmax(dim=1)
        predicted = np.flatnonzero(sample.encoded.loss_mask[1:])
        expected -= sum(float(chances[place, sample.encoded.ids[place + 1]]) for place in predicted)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert number == batch.num_loss_tokens == sum(sample.num_loss_tokens for sample in SAMPLES)


def gradients(model: TinyVlm, batch: PackedBatch) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss, _ = model.loss(batch.to_torch())
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def test_every_weight_learns_from_an_image_and_its_text(model: TinyVlm) -> None:
    found = gradients(model, packed(SAMPLES))
    assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []


def test_a_pack_without_images_needs_no_encoder(model: TinyVlm) -> None:
    texts = [pack_sample([9], "a", 1), pack_sample([7], "b", 2)]
    found = gradients(model, packed(texts))
    assert all((gradient is None) == name.startswith("vision.") for name, gradient in found.items())
    blind = TinyVlm(VlmSizes(vocab_size=100), normalise=None)
    assert blind.loss(packed(texts, form=None).to_torch())[0].isfinite()


def test_an_ensured_image_changes_nothing(model: TinyVlm) -> None:
    texts = [pack_sample([9], "a", 1), pack_sample([7], "b", 2)]
    plain, ensured = packed(texts), packed(texts, ensure_image=ENSURED)
    assert len(ensured.image_sample) == 1
    before, after = gradients(model, plain), gradients(model, ensured)
    for name, gradient in after.items():
        assert gradient is not None
        assert torch.allclose(gradient, before[name], atol=1e-6) if before[name] is not None else not gradient.any()


def tiles_sample(number: int, num_text: int, seed: int) -> PackSample:
    """Tiles of 8 x 8 pixels with four features each."""
    random = np.random.default_rng(seed)
    features = np.arange(4 * number + num_text) < 4 * number
    encoded = EncodedSample(
        ids=np.where(features, FEATURE, random.integers(0, 80, len(features))).astype(np.int32),
        loss_mask=~features,
        feature_mask=features,
        image_spans=(ImageSpan(index=0, start=0, end=4 * number),),
    )
    tiles = random.integers(0, 256, (number, 3, 8, 8), np.uint8)
    image = TileImage(num_tiles=number, tiles=tiles)
    return replace(SAMPLES[0], sample_id=str(seed), encoded=encoded, images=(image,), num_text_tokens=num_text)


def test_tiles_are_images_of_their_own(model: TinyVlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "normalise", lambda pixels: pixels.float() / 127.5 - 1)
    samples = [tiles_sample(3, 5, 1), tiles_sample(1, 6, 2)]
    batch = packed(samples, form=Tiles(side=8, features_per_tile=4))
    assert difference_to_alone(model, batch) < 1e-4
    with torch.no_grad():
        tiles = model.normalise(torch.from_numpy(batch.tiles.copy()))
        features = model.vision.of_tiles(tiles)
        # A tile cut up by hand, in the order of Qwen's patches: those of one feature follow one another.
        cut = [
            tiles[place, :, top + row : top + row + 2, left + column : left + column + 2].flatten()
            for place in range(4)
            for top in (0, 4)
            for left in (0, 4)
            for row in (0, 2)
            for column in (0, 2)
        ]
        assert torch.equal(features, model.vision(torch.stack(cut), [(1, 4, 4)] * 4))


def test_an_image_knows_where_its_patches_stand(model: TinyVlm) -> None:
    """Two patches of other features exchanged; without positions the features would only be exchanged too."""
    image = patch_image(2, 8, 1)
    order = np.r_[4:8, 0:4, 8:16]
    moved = replace(image, pixels=image.pixels[order])
    with torch.no_grad():
        one, other = (model.vision(normalise(torch.from_numpy(item.pixels)), [(1, 2, 8)]) for item in (image, moved))
    assert (one[[1, 0, 2, 3]] - other).abs().max() > 0.01


def test_what_the_model_cannot_take_is_refused(model: TinyVlm) -> None:
    blind = [replace(sample, images=tuple(replace(image, pixels=None) for image in sample.images)) for sample in SAMPLES]
    with pytest.raises(ValueError, match="found images without pixels"):
        model(packed(blind).to_torch())
    with pytest.raises(ValueError, match="found 1 image features, expected 4"):
        new_model(merge_size=4)(packed([pack_sample([patch_image(4, 4), 3])]).to_torch())
