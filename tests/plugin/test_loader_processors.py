"""Packs of the real stream against transformers' own processors on the same samples: ids, pixels bit for bit, and features.

The prompt a processor gets is written here, from the record; its images are the stored bytes. Neither goes through the encoder.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import processors
import pytest
import torch
import transformers
import yaml
from in_process import index_in_process
from packed import Packed
from PIL import Image, ImageOps
from tokenizers import Tokenizer

from plugin.batch import PackSample
from plugin.batch.images import pixels_of
from plugin.loader import PackLoader
from plugin.settings import PackSettings

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

TOKENIZER = Path(__file__).parents[2] / "examples" / "corpus" / "tokenizer.json"
SETTINGS = PackSettings(sequence_length=4096, max_patches_per_pack=16_000, buffer_size=60, num_threads=2)
NUM_PACKS = 12
EXPECTED_SOURCES = {"gimp-help", "handbook", "clipart", "icons", "photos", "wordnet"}
MAX_TILES = 6
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A profile, and the processor that its packs must equal."""

    profile: str
    rule: dict[str, Any]
    processor: Callable[[], Any]
    placeholder: str
    """Of one image in a prompt."""
    image_token: str
    values: dict[str, Any]
    rows_per_feature: float
    """Of `pixel_values`."""


def corpus_tokenizer(named_tokens: dict[str, str]) -> transformers.PreTrainedTokenizerFast:
    """The corpus's own, with what a processor asks for beside it."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    extra = {name: token for name, token in named_tokens.items() if name not in ("pad_token", "eos_token")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=extra, pad_token=named_tokens["pad_token"]
    )


def qwen_processor() -> Any:
    return transformers.Qwen2_5_VLProcessor(
        image_processor=processors.qwen2_vl_images(),
        tokenizer=corpus_tokenizer(processors.QWEN_TOKENS),
        video_processor=processors.NoVideos(),
    )


def internvl_processor() -> Any:
    images = processors.internvl_images()
    images.max_patches = MAX_TILES
    return transformers.InternVLProcessor(
        image_processor=images,
        tokenizer=corpus_tokenizer(processors.INTERNVL_TOKENS),
        video_processor=processors.NoVideos(),
        image_seq_length=256,
    )


FAMILIES = {
    "qwen2_5_vl": Family(
        profile="qwen25vl",
        rule={},
        processor=qwen_processor,
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        image_token="<|image_pad|>",
        values=CLIP,
        rows_per_feature=4,
    ),
    "internvl3": Family(
        profile="internvl3",
        rule={"name": "internvl3", "parameters": {"max_tiles": MAX_TILES}},
        processor=internvl_processor,
        placeholder="<IMG_CONTEXT>",
        image_token="<IMG_CONTEXT>",
        values=IMAGENET,
        rows_per_feature=1 / 256,
    ),
}


@pytest.fixture(scope="module")
def url(corpus: Packed, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A copy of the corpus, counted for tiles as well."""
    dataset = tmp_path_factory.mktemp("processors") / "dataset"
    shutil.copytree(corpus.url, dataset)
    recipe = yaml.safe_load((Path(corpus.url).parent / "recipe.yaml").read_text())
    (profile,) = recipe["profiles"].values()
    tokenizer = {"file": str(TOKENIZER), "special_tokens": ["<img>", "</img>", "<IMG_CONTEXT>"]}
    family = FAMILIES["internvl3"]
    recipe["profiles"][family.profile] = profile | {"tokenizer": tokenizer, "image_rule": family.rule}
    recipe["output"] = str(dataset)
    path = dataset.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    assert index_in_process(dataset, recipe=path).exit_code == 0
    return str(dataset)


@pytest.mark.parametrize("name", FAMILIES)
def test_packs_hold_what_the_processor_makes_of_the_same_samples(name: str, url: str, corpus: Packed) -> None:
    family, seen = FAMILIES[name], set()
    processor = family.processor()
    stored = {
        (row.source, record["id"]): (record, images)
        for row, record, images in zip(corpus.rows, corpus.records, corpus.images, strict=True)
    }
    assert len(stored) == len(corpus.rows), "the ids of a source are its own"
    with PackLoader.open(url, family.profile, SETTINGS, num_workers=0, shuffle_buffer_size=200) as loader:
        for _ in range(NUM_PACKS):
            for sample in next(loader).batch.unpack():
                compare(family, processor, loader, sample, *stored[sample.source, sample.sample_id])
                seen.add(sample.source)
    assert seen == EXPECTED_SOURCES


def compare(
    family: Family, processor: Any, loader: PackLoader, sample: PackSample, record: dict[str, Any], images: list[bytes]
) -> None:
    where = f"{sample.sample_id} of {sample.source}"
    prompt, order = prompt_of(record, family.placeholder)
    pictures = [upright(images[index]) for index in order]
    out = processor(text=[prompt], images=[pictures] if pictures else None, return_tensors="np", images_kwargs=family.values)
    assert sample.encoded.ids.tolist() == out["input_ids"][0].tolist(), where
    image_token = processor.tokenizer.convert_tokens_to_ids(family.image_token)
    assert np.array_equal(sample.encoded.feature_mask, out["input_ids"][0] == image_token), where
    assert [span.index for span in sample.encoded.image_spans] == order, where
    if not pictures:
        assert not sample.images, where
        return
    found = normalised(loader, sample)
    assert bits(found) == bits(out["pixel_values"]), where
    assert sample.num_image_tokens * family.rows_per_feature == len(found), where
    if "image_grid_thw" in out:
        assert [image.grid_thw for image in sample.images] == [tuple(grid) for grid in out["image_grid_thw"].tolist()], where


def prompt_of(record: dict[str, Any], placeholder: str) -> tuple[str, list[int]]:
    """A record as the profile writes it, and its images in reading order."""
    order: list[int] = []

    def written(parts: list[dict[str, Any]]) -> str:
        order.extend(part["image"] for part in parts if part["type"] == "image")
        return "".join(placeholder if part["type"] == "image" else part["text"] for part in parts)

    if "content" in record:
        return written(record["content"]) + "<|endoftext|>", order
    turns = [f"<|im_start|>{turn['role']}\n{written(turn['content'])}<|im_end|>\n" for turn in record["messages"]]
    return "".join(turns), order


def upright(data: bytes) -> Image.Image:
    """What a training script hands to a processor."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def normalised(loader: PackLoader, sample: PackSample) -> npt.NDArray[Any]:
    pixels = [pixels_of(image) for image in sample.images]
    assert loader.normalise is not None
    made = loader.normalise(torch.from_numpy(np.concatenate([part for part in pixels if part is not None])))
    return made.numpy()


def bits(values: npt.NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(values.dtype), values.shape, values.tobytes()
