"""The example model keeps the samples of a pack apart, and the example's training is exact: resumed, on several ranks."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_training
import torch
import yaml
from hypothesis import given, settings
from in_process import index_in_process, pack_in_process
from pack_samples import FEATURE, PATCHES, pack_sample, patch_image, samples_of
from tiny_training import PacksInMemory, new_model, normalise, packed, some_packs
from tiny_vlm import TinyVlm, VlmSizes
from train_tiny_vlm import Settings, main, train

import plugin
from indexer.encode import EncodedSample, ImageSpan
from indexer.profile import open_stored
from indexer.table import open_index
from packer.format.errors import UsageError
from plugin import BundleReader
from plugin.batch import EnsuredImage, PackedBatch, PackSample, Patches, PatchImage, TileImage, Tiles, build
from plugin.tensors import image_tensors

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
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


# Training


def test_the_loss_falls_and_only_because_images_are_seen() -> None:
    """Eight images that differ in nothing but pixels, each with a word of its own: without them 1 of 8 is right."""
    samples = [pack_sample([1, patch_image(2, 4, seed), 1], str(seed)) for seed in range(8)]
    for word, sample in enumerate(samples):
        sample.encoded.ids[0], sample.encoded.ids[-1] = 1, 10 + word
        sample.encoded.loss_mask[:-1] = False
    losses = train(PacksInMemory([packed(samples)]), new_model(), Settings(steps=60, learning_rate=3e-3))
    assert losses[0] > math.log(8)
    assert losses[-1] < 0.5
    blind = [replace(sample, images=(patch_image(2, 4),)) for sample in samples]
    losses = train(PacksInMemory([packed(blind)]), new_model(), Settings(steps=60, learning_rate=3e-3))
    assert losses[-1] > 0.99 * math.log(8)


def test_stopped_and_resumed_at_any_step_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    at_once = Settings(steps=9, accumulation=2, save=tmp_path / "all", save_every=1)
    losses = train(PacksInMemory(some_packs(12)), new_model(), at_once)
    assert len(set(losses)) == 9
    for stop in range(1, 9):
        save = tmp_path / str(stop)
        first = Settings(steps=stop, accumulation=2, save=save, losses=tmp_path / "losses")
        assert train(PacksInMemory(some_packs(12)), new_model(), first) == losses[:stop]
        resumed = replace(first, steps=9, resume=True)
        torch.manual_seed(stop)
        other_weights = TinyVlm(tiny_training.SIZES, normalise)
        assert train(PacksInMemory(some_packs(12)), other_weights, resumed) == losses[stop:]
        lines = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
        assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(losses, start=1))


def test_steps_after_the_checkpoint_are_taken_again(tmp_path: Path) -> None:
    """A run that was killed has written more losses than it has saved, and maybe half a checkpoint."""
    run = Settings(steps=4, save=tmp_path / "save", save_every=2, losses=tmp_path / "losses")
    losses = train(PacksInMemory(some_packs(12)), new_model(), run)
    (newest,) = (tmp_path / "save" / "step-000004").iterdir()
    newest.rename(newest.with_suffix(".tmp"))
    assert train(PacksInMemory(some_packs(12)), new_model(), replace(run, steps=5, resume=True))[:2] == losses[2:]
    assert [json.loads(line)["step"] for line in (tmp_path / "losses").read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    for save in (None, tmp_path):
        with pytest.raises(UsageError, match="found no checkpoint of 1 ranks in"):
            train(PacksInMemory(some_packs(1)), new_model(), Settings(steps=1, save=save, resume=True))


def test_each_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        (loss,) = train(PacksInMemory(some_packs(2)), new_model(), Settings(steps=1, accumulation=2))
    number = sum(pack.num_loss_tokens for pack in some_packs(2))
    assert [record.message for record in caplog.records] == [f"step 1: loss {loss:.4f} of {number} tokens; 2 packs"]


def on_ranks(number: int, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    command += [tiny_training.__file__, *map(str, arguments)]
    path = os.pathsep.join([str(CORPUS.parents[1]), str(Path(tiny_training.__file__).parent)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def losses_in(path: Path, first: int = 1) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(first, first + len(lines)))
    return [line["loss"] for line in lines]


def test_two_ranks_train_as_one_and_resume(tmp_path: Path) -> None:
    """The same global batches of four packs; in one step a rank has no image, and ranks differ in loss tokens."""
    packs, save = some_packs(12), tmp_path / "save"
    assert packs[5].num_images == packs[7].num_images == 0, "the second rank's packs of the second step"
    alone = train(PacksInMemory(packs), new_model(), Settings(steps=8, accumulation=4))
    common = ("--steps", 8, "--accumulation", 2, "--save", save, "--save-every", 5)
    on_ranks(2, *common, "--losses", tmp_path / "at once")
    at_once = losses_in(tmp_path / "at once")
    # Sums are of another order, and steps amplify their last bits.
    assert at_once == pytest.approx(alone, rel=1e-5)
    assert {path.name for path in (save / "step-000005").iterdir()} == {"rank-0-of-2.pt", "rank-1-of-2.pt"}
    shutil.rmtree(save / "step-000008")
    on_ranks(2, *common, "--losses", tmp_path / "resumed", "--resume")
    assert losses_in(tmp_path / "resumed", first=6) == at_once[5:]
    with pytest.raises(UsageError, match="of 1 ranks"):
        train(PacksInMemory(packs), new_model(), Settings(steps=9, save=save, resume=True))


# The example corpus


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some conversations about several images, and texts, packed and indexed."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = yaml.safe_load((CORPUS / "recipe.yaml").read_text())
    recipe["output"] = str(folder / "dataset")
    recipe["sources"] = [source for source in recipe["sources"] if source["name"] in {"clipart", "wordnet"}]
    for source in recipe["sources"]:
        files = source["files"] if isinstance(source["files"], list) else [source["files"]]
        source["files"] = [str(CORPUS / name) for name in files]
        if "image_root" in source:
            source["image_root"] = str(CORPUS / source["image_root"])
    recipe["profiles"] = {"qwen25vl": {**recipe["profiles"]["qwen25vl"], "tokenizer": str(CORPUS / "tokenizer.json")}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    pack_in_process(folder / "recipe.yaml", limit=12)
    url = f"{recipe['output']}.limit-12"
    assert index_in_process(Path(url)).exit_code == 0
    return url


def corpus_packs(url: str, sequence_length: int = 2048) -> list[PackedBatch]:
    """Shuffled, one sample after the other until no more fit."""
    encoder, tensors = open_stored(url, "qwen25vl").encoder, image_tensors("qwen2_5_vl")
    table, reader = open_index(url, "qwen25vl"), BundleReader(url)
    packs: list[list[PackSample]] = [[]]
    for place in np.random.default_rng(0).permutation(table.num_rows).tolist():
        row = table.row(place)
        record = reader.read_record(row)
        encoded = encoder.encode(record)
        images = []
        for span in encoded.image_spans:
            entry = record["images"][span.index]
            made = tensors.patches(reader.read(row.source, entry["bundle"], entry))
            images.append(PatchImage(grid_thw=made.grid, pixels=made.pixels))
        sample = replace(SAMPLES[0], sample_id=record["id"], source=row.source, encoded=encoded, images=tuple(images))
        if sum(len(one.encoded.ids) for one in [*packs[-1], sample]) > sequence_length:
            packs.append([])
        packs[-1].append(replace(sample, num_text_tokens=row.num_text_tokens))
    form = Patches(patch_bytes=588, merge_size=2)
    return [build(samples, form=form, sequence_length=sequence_length, pad_id=0) for samples in packs]


@pytest.fixture(scope="module")
def packs(dataset: str) -> list[PackedBatch]:
    return corpus_packs(dataset)


def test_samples_of_the_corpus_do_not_see_each_other(packs: list[PackedBatch]) -> None:
    torch.manual_seed(0)
    model = TinyVlm(VlmSizes(vocab_size=8192), image_tensors("qwen2_5_vl").normalise_torch)
    assert any(len(set(pack.sources)) == 2 for pack in packs)
    assert max(difference_to_alone(model, pack) for pack in packs) < 1e-4


class CorpusLoader(PacksInMemory):
    """Opened as `PackLoader` is."""

    packs: list[PackedBatch]
    opened: Mapping[str, Any]

    @classmethod
    def open(cls, dataset: str, profile: str, **settings: Any) -> CorpusLoader:
        made = cls(cls.packs)
        made.normalise = image_tensors("qwen2_5_vl").normalise_torch
        cls.opened = {"dataset": dataset, "profile": profile, **settings}
        return made


@pytest.fixture
def _deterministic() -> Iterator[None]:
    """The script's own setting, which lasts."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
def test_the_script_trains_on_the_corpus_and_resumes(
    dataset: str, packs: list[PackedBatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "PackLoader", CorpusLoader, raising=False)
    CorpusLoader.packs = packs
    words = ["--dataset", dataset, "--profile", "qwen25vl", "--sequence-length", "2048"]
    words += ["--learning-rate", "3e-3", "--hidden", "32"]
    at_once, resumed = ([*words, "--losses", str(tmp_path / name), "--save", str(tmp_path / f"{name}-save")] for name in "ab")
    main([*at_once, "--steps", "40"])
    main([*resumed, "--steps", "20"])
    main([*resumed, "--steps", "40", "--resume"])
    losses = losses_in(tmp_path / "a")
    assert losses == losses_in(tmp_path / "b")
    assert len(losses) == 40
    assert losses[0] > math.log(8192) - 0.5
    assert np.mean(losses[-len(packs) :]) < 0.75 * np.mean(losses[: len(packs)])
    assert CorpusLoader.opened == {
        "dataset": dataset,
        "profile": "qwen25vl",
        "sequence_length": 2048,
        "max_patches_per_pack": 8192,
        "rank": 0,
        "world_size": 1,
        "num_workers": 2,
        "buffer_size": 1000,
        "seed": 0,
        "on_failure": "stop",
    }
