"""What trainers get of a pack: tensors of one buffer, the rows of Megatron Bridge and of transformers; no sample sees another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from megatron.energon import Batch, edataclass
from pack_samples import (
    END,
    FEATURE,
    PATCHES,
    START,
    TILES,
    pack_sample,
    packs,
    patch_image,
    same,
    samples_of,
    tile_image,
)
from torch.utils.data import DataLoader, IterableDataset
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from packer.format.errors import FormatError, UsageError
from plugin.batch import EnsuredImage, PackedBatch, PackSample, build, mrope_positions, to_hf, to_megatron
from plugin.batch.torch_batch import TorchBatch

Model = Qwen2VLForConditionalGeneration

SAMPLES = [
    pack_sample([3, patch_image(4, 6, 1), 2, patch_image(2, 2, 2), 4], "a", 1),
    pack_sample([7], "b", 2),
    pack_sample([patch_image(6, 4, 3), 5], "c", 3),
    pack_sample([1, patch_image(2, 8, 4), 1], "d", 4),
]
ENSURED = EnsuredImage(ids=(START, FEATURE, END), feature_mask=(False, True, False), image=PATCHES.smallest())


def packed(samples: list[PackSample] = SAMPLES, **arguments: Any) -> PackedBatch:
    return build(samples, **({"form": PATCHES, "sequence_length": 96, "pad_id": 0} | arguments))


def normalise(patches: torch.Tensor) -> torch.Tensor:
    """3 channels of 2 x 2 pixels, once -> the same at two points in time."""
    pixels = patches.float() / 127.5 - 1
    return pixels.reshape(-1, 3, 1, 4).expand(-1, 3, 2, 4).reshape(-1, 24)


@pytest.fixture(scope="module")
def model() -> Model:
    text = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    text |= {"bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision | {"temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2},
        image_token_id=FEATURE,
        video_token_id=91,
        vision_start_token_id=START,
        vision_end_token_id=END,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    made = Model(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def as_a_processor_gives_it(sample: PackSample) -> dict[str, Any]:
    """One sample of one row without any position: the model's own."""
    made: dict[str, Any] = {"input_ids": torch.from_numpy(sample.encoded.ids.astype(np.int64))[None], "use_cache": False}
    if sample.images:
        pixels = np.concatenate([image.pixels for image in sample.images])  # type: ignore[union-attr]
        made["pixel_values"] = normalise(torch.from_numpy(pixels))
        made["image_grid_thw"] = torch.tensor([image.grid_thw for image in sample.images])  # type: ignore[union-attr]
        made["mm_token_type_ids"] = torch.from_numpy(sample.encoded.feature_mask.astype(np.int64))[None]
    return made


@torch.no_grad()
def difference_to_alone(model: Model, batch: PackedBatch, arguments: dict[str, Any]) -> float:
    """The largest of any logit of any sample, against the sample alone."""
    logits = model(**arguments).logits[0]
    largest = 0.0
    for sample, start in zip(batch.unpack(), batch.cu_seqlens_padded.tolist(), strict=False):
        alone = model(**as_a_processor_gives_it(sample)).logits[0]
        largest = max(largest, float((logits[start : start + len(alone)] - alone).abs().max()))
    return largest


@pytest.mark.parametrize("alignment", [1, 8, 16])
def test_a_packed_sample_is_computed_as_if_it_were_alone(model: Model, alignment: int) -> None:
    batch = packed(alignment=alignment)
    assert difference_to_alone(model, batch, to_hf(batch, normalise=normalise, mrope=True)) < 1e-5


@given(samples=samples_of(PATCHES).flatmap(lambda first: samples_of(PATCHES).map(lambda second: [first, second])))
@settings(max_examples=6)
def test_any_two_packed_samples_are_computed_as_if_they_were_alone(model: Model, samples: list[PackSample]) -> None:
    batch = packed(samples, sequence_length=512, fill=False)
    assert difference_to_alone(model, batch, to_hf(batch, normalise=normalise, mrope=True)) < 1e-5


def without(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != name}


def leaking_forms() -> Iterator[tuple[str, Any]]:
    yield "three rows of positions", lambda made, types: made | {"position_ids": made["position_ids"][1:]}
    yield "one row of positions", lambda made, types: made | {"position_ids": made["position_ids"][0]}
    yield (
        "no positions",
        lambda made, types: {k: v for k, v in made.items() if k != "position_ids"} | {"mm_token_type_ids": types},
    )
    yield "a mask of ones", lambda made, types: made | {"attention_mask": torch.ones_like(made["input_ids"])}
    yield "a cache", lambda made, types: without("use_cache", made)


@pytest.mark.parametrize("form", [form for _, form in leaking_forms()], ids=[name for name, _ in leaking_forms()])
def test_other_forms_leak_between_samples_without_an_error(model: Model, form: Any) -> None:
    batch = packed()
    types = torch.from_numpy(batch.feature_mask.astype(np.int64))[None]
    assert difference_to_alone(model, batch, form(to_hf(batch, normalise=normalise, mrope=True), types)) > 0.1


def test_the_loss_of_a_pack_is_that_of_its_samples(model: Model) -> None:
    batch = packed(alignment=8)
    with torch.no_grad():
        found = model(**to_hf(batch, normalise=normalise, mrope=True)).loss
        apart = 0.0
        for sample in SAMPLES:
            arguments = as_a_processor_gives_it(sample)
            labels = arguments["input_ids"].masked_fill(~torch.from_numpy(sample.encoded.loss_mask)[None], -100)
            apart += float(model(**arguments, labels=labels).loss) * sample.num_loss_tokens
    assert float(found) == pytest.approx(apart / batch.num_loss_tokens, rel=1e-5)


def test_megatrons_labels_and_mask_give_the_same_loss(model: Model) -> None:
    batch = packed(alignment=8)
    row, made = to_megatron(batch, normalise=normalise), to_hf(batch, normalise=normalise, mrope=True)
    with torch.no_grad():
        output = model(**made)
    losses = torch.nn.functional.cross_entropy(output.logits[0], row["labels"][0].clamp(min=0), reduction="none")
    masked = (losses * row["loss_mask"][0]).sum() / row["loss_mask"].sum()
    assert float(masked) == pytest.approx(float(output.loss), rel=1e-5)
    assert row["loss_mask"].sum() == batch.num_loss_tokens


def test_an_ensured_image_runs_the_encoder_and_changes_nothing(model: Model) -> None:
    samples = [pack_sample([5], "a"), pack_sample([7], "b", 1)]
    plain, ensured = packed(samples), packed(samples, ensure_image=ENSURED)
    losses = []
    encoder_gradients: list[torch.Tensor | None] = []
    for batch in (plain, ensured):
        model.zero_grad()
        loss = model(**to_hf(batch, normalise=normalise, mrope=True)).loss
        loss.backward()
        losses.append(float(loss.detach()))
        encoder_gradients = [parameter.grad for parameter in model.model.visual.parameters()]
        assert all((gradient is None) == (batch is plain) for gradient in encoder_gradients)
    assert losses[0] == losses[1]
    assert all(gradient is not None and not gradient.any() for gradient in encoder_gradients)
    model.zero_grad()


@given(samples_of(PATCHES))
def test_positions_of_a_sample_are_those_of_transformers(model: Model, sample: PackSample) -> None:
    arguments = as_a_processor_gives_it(sample)
    types = torch.from_numpy(sample.encoded.feature_mask.astype(np.int64))[None]
    grids = arguments.get("image_grid_thw")
    expected, _ = model.model.get_rope_index(arguments["input_ids"], types, image_grid_thw=grids)
    found = mrope_positions(packed([sample], sequence_length=512, fill=False))
    assert found.tolist() == expected[:, 0].tolist()


def test_the_row_of_transformers() -> None:
    batch = packed(alignment=8)
    made = to_hf(batch, normalise=normalise, mrope=True, flash_attention=True)
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in made.items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "input_ids": (torch.int64, (1, 96)),
        "labels": (torch.int64, (1, 96)),
        "position_ids": (torch.int64, (4, 1, 96)),
        "pixel_values": (torch.float32, (68, 24)),
        "image_grid_thw": (torch.int64, (4, 3)),
        "cu_seq_lens_q": (torch.int32, (5,)),
        "cu_seq_lens_k": (torch.int32, (5,)),
    }
    assert {name: value for name, value in made.items() if name not in shapes} == {
        "use_cache": False,
        "max_length_q": 48,
        "max_length_k": 48,
    }
    assert made["cu_seq_lens_q"].tolist() == [0, 24, 32, 48, 96]
    assert made["labels"][0, [0, 24, 32, 48]].tolist() == [-100] * 4
    assert to_hf(batch, normalise=normalise, mrope=False)["position_ids"].tolist() == [batch.position_ids.tolist()]


@given(packs())
def test_the_row_of_megatron_is_that_of_each_sample_alone(pack: tuple[list[PackSample], dict[str, Any]]) -> None:
    samples, arguments = pack
    batch = build(samples, **arguments)
    made = to_megatron(batch, normalise=torch.Tensor.float)
    length, sequence = len(batch.tokens), batch.tokens.tolist()
    labels, mask = [-100] * length, [0.0] * length
    for sample, start in zip(samples, batch.cu_seqlens_padded.tolist(), strict=False):
        for place, (id_, loss) in enumerate(zip(sample.encoded.ids.tolist(), sample.encoded.loss_mask.tolist(), strict=True)):
            if place and loss:
                labels[start + place - 1], mask[start + place - 1] = id_, 1.0
    assert made["tokens"].tolist() == [sequence]
    assert made["labels"].tolist() == [labels]
    assert made["loss_mask"].tolist() == [mask]
    assert made["loss_mask"].dtype == torch.float32
    assert made["position_ids"].tolist() == [
        [place for a, b in pairwise(batch.cu_seqlens_padded.tolist()) for place in range(b - a)]
    ]
    assert made["attention_mask"] is None
    lengths = [len(sample.encoded.ids) for sample in samples]
    assert made["cu_seqlens_q"].diff().tolist() == made["cu_seqlens_kv"].diff().tolist() == lengths
    padded = made.get("cu_seqlens_q_padded", made["cu_seqlens_q"])
    assert padded.dtype == made["cu_seqlens_q"].dtype == torch.int32
    assert padded[-1] == made["total_tokens"] == length
    assert made["max_seqlen_q"] == made["max_seqlen_kv"] == padded.diff().max()
    assert (made["max_seqlen_q"].dtype, made["max_seqlen_q"].shape) == (torch.int32, torch.Size([]))
    assert ("cu_seqlens_kv_padded" in made) == (sum(lengths) < length)


def test_visual_inputs_are_moved_and_read_as_bridge_does() -> None:
    # `vlm_step` sets every attribute to what `.cuda()` gives, and asks for the model's arguments.
    visual = to_megatron(packed(), normalise=normalise)["visual_inputs"]
    for name, value in visual.__dict__.items():
        visual.__dict__[name] = value.clone() if value is not None else None
    assert {name: tuple(value.shape) for name, value in visual.normalized_for_model().items()} == {
        "pixel_values": (68, 24),
        "image_grid_thw": (4, 3),
    }
    assert to_megatron(packed([pack_sample([5])]), normalise=None)["visual_inputs"] is None
    assert to_megatron(packed(), normalise=normalise, mrope=True)["position_ids"].shape == (3, 1, 96)


def test_packs_without_pixels_keep_the_grids() -> None:
    blind = [replace(sample, images=tuple(replace(image, pixels=None) for image in sample.images)) for sample in SAMPLES]
    visual = to_megatron(packed(blind), normalise=None)["visual_inputs"]
    assert visual.pixel_values is None
    assert visual.image_grid_thw.shape == (4, 3)


def test_tiles_and_sizes_reach_the_model() -> None:
    samples = [pack_sample([2, tile_image(3, 1, size=(30, 40)), tile_image(1, 2, size=(8, 9))])]
    made = to_hf(packed(samples, form=TILES), normalise=torch.Tensor.float, mrope=False)
    assert made["pixel_values"].shape == (4, 3, 4, 4)
    assert made["image_sizes"].tolist() == [[30, 40], [8, 9]]
    assert "image_grid_thw" not in made


def test_pixels_are_never_given_as_they_are_by_accident() -> None:
    for export in (to_megatron, lambda batch, normalise: to_hf(batch, normalise=normalise, mrope=True)):
        with pytest.raises(UsageError, match="found pixels as uint8 and no `normalise`"):
            export(packed(), normalise=None)


@given(packs())
def test_tensors_are_views_of_one_tensor(pack: tuple[list[PackSample], dict[str, Any]]) -> None:
    samples, arguments = pack
    batch = build(samples, **arguments)
    made = batch.to_torch()
    first, last = made.tensor.data_ptr(), made.tensor.data_ptr() + made.tensor.nbytes
    assert first == batch.buffer.ctypes.data
    for name, view in made.views.items():
        array = getattr(batch, name)
        assert np.array_equal(view.numpy(), array)
        assert view.numpy().dtype == array.dtype
        assert not view.numel() or first <= view.data_ptr() <= last - view.nbytes


def test_tensors_of_bytes_are_a_copy() -> None:
    batch = PackedBatch.from_buffer(packed().buffer.tobytes())
    made = batch.to_torch()
    made.tensor[-1] ^= 1
    assert batch.buffer[-1] == packed().buffer[-1]


class Stream(IterableDataset[TorchBatch]):
    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length

    def __iter__(self) -> Iterator[TorchBatch]:
        for place in range(30):
            sample = pack_sample([5 + place % 7, patch_image(2, 4, place)], str(place), place)
            yield packed([sample], alignment=8, sequence_length=self.sequence_length).to_torch()


@pytest.mark.parametrize(("sequence_length", "is_shared"), [(64, False), (16_384, True)])
def test_a_loader_worker_sends_one_tensor_a_pack_and_small_ones_need_no_descriptor(sequence_length: int, is_shared: bool) -> None:
    stream = Stream(sequence_length)
    descriptors = len(os.listdir("/proc/self/fd"))
    received = list(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert len(os.listdir("/proc/self/fd")) - descriptors <= len(received) * is_shared + 10
    expected = [batch.batch.unpack() for batch in stream]
    for found, (sample,) in zip(received, expected, strict=True):
        assert found.tensor.is_shared() == is_shared
        found.tensor[-1] += 0  # may be written to
        assert found.batch.tokens.ctypes.data == found.views["tokens"].data_ptr()
        assert same(found.batch.unpack()[0], sample)


@edataclass
class Holder(Batch):  # type: ignore[misc]
    pack: TorchBatch


def test_energon_pins_it_as_a_field_of_its_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Page-locked memory needs a GPU; which calls are made does not.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    pack = packed().to_torch()
    held = Holder(__key__="a", __restore_key__=(), __subflavors__=None, __sources__=None, pack=pack)
    pinned = held.pin_memory()
    for made in (pinned.pack, pack.pin_memory()):
        assert isinstance(made, TorchBatch)
        assert made.tensor.data_ptr() != pack.tensor.data_ptr()
        assert made.batch.tokens.ctypes.data == made.views["tokens"].data_ptr()
        assert all(same(one, other) for one, other in zip(made.batch.unpack(), SAMPLES, strict=True))


def test_a_tensor_that_holds_no_pack_is_refused() -> None:
    tensor = packed().to_torch().tensor.clone()
    assert repr(TorchBatch.from_tensor(tensor)).startswith("TorchBatch(PackedBatch(4 samples, 4 images")
    tensor[-1] ^= 1
    with pytest.raises(FormatError, match="damaged on its way"):
        TorchBatch.from_tensor(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_and_copied_to_a_device_as_one_tensor() -> None:
    batch = packed()
    pinned = batch.to_torch().pin_memory()
    assert pinned.tensor.is_pinned()
    on_device = pinned.to("cuda")
    torch.cuda.synchronize()
    made = to_hf(on_device, normalise=normalise, mrope=True)
    expected = to_hf(batch, normalise=normalise, mrope=True)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert made[name].is_cuda
            assert torch.allclose(made[name].cpu(), value)
