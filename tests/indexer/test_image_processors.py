"""Rules and layouts against processors of transformers and mistral-common, run here on sizes that are new in every run.

Blank images: only their sizes matter. Configurations are explicit (`tests/support/processors.py`). A failure names the
seed, the preset and the size.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import processors
import pytest
import torch
from mistral_common.protocol.instruct.chunk import ImageChunk
from mistral_common.tokens.tokenizers import image as mistral_image
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from indexer.image_layouts import default_layout, image_layout
from indexer.image_rules import PRESETS, ImageCount, count_one, count_sample, image_rule
from indexer.segments import Features, Piece, Text, Token
from packer.images import ImageLimits, inspect

SEED = random.SystemRandom().randrange(2**32)
Size = tuple[int, int]


def random_sizes(name: str, count: int, *, most_pixels: int = 1_500_000, most_ratio: float = math.inf) -> list[Size]:
    """Half of them with sides of all magnitudes, half as photos and pages are."""
    source = random.Random(f"{SEED} {name}")
    sizes: list[Size] = []
    while len(sizes) < count:
        least = source.choice([0, 8])
        width, height = (round(2 ** source.uniform(least, 11.5)) for _ in range(2))
        if width * height <= most_pixels and max(width, height) <= most_ratio * min(width, height):
            sizes.append((width, height))
    return sizes


def blank(size: Size) -> Image.Image:
    return Image.new("RGB", size)


# --- image processors: patches, tiles and refusals


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """How to build one, what to read off its output, and the same of our count."""

    build: Callable[[], Any]
    read: Callable[[Any], object]
    ours: Callable[[ImageCount], object]
    options: dict[str, Any] = field(default_factory=dict)
    num_sizes: int = 16
    most_ratio: float = math.inf


def patch_grid(count: ImageCount) -> object:
    return count.grid_rows, count.grid_columns, count.num_patches


def read_thw(out: Any) -> object:
    _, rows, columns = (int(value) for value in out["image_grid_thw"][0])
    return rows, columns, len(out["pixel_values"])


def read_pixels(patch_size: int) -> Callable[[Any], object]:
    def read(out: Any) -> object:
        height, width = out["image_sizes"][0]
        return height // patch_size, width // patch_size, height * width // patch_size**2

    return read


def read_minicpm(out: Any) -> object:
    areas = np.prod(out["target_sizes"], axis=-1)
    return *out["grids"][0], int(areas.sum()), int(areas[0]) // 16, int((areas**2).sum())


def tile_grid(count: ImageCount) -> object:
    return count.grid_rows, count.grid_columns, count.num_segments


IMAGE_PROCESSORS = {
    "qwen2_5_vl": ImageProcessor(build=processors.qwen2_vl_images, read=read_thw, ours=patch_grid),
    "qwen2_5_vl_max1280": ImageProcessor(
        build=lambda: processors.qwen2_vl_images(max_pixels=1003520), read=read_thw, ours=patch_grid
    ),
    "qwen3_vl": ImageProcessor(
        build=lambda: processors.qwen2_vl_images(65536, 16777216, patch_size=16), read=read_thw, ours=patch_grid
    ),
    "glm4_1v": ImageProcessor(build=processors.glm4v_images, read=read_thw, ours=patch_grid),
    "pixtral_hf": ImageProcessor(build=processors.pixtral_images, read=read_pixels(16), ours=patch_grid),
    "mistral3_hf": ImageProcessor(build=lambda: processors.pixtral_images(1540, 28), read=read_pixels(14), ours=patch_grid),
    "siglip2_naflex_256": ImageProcessor(
        build=lambda: processors.siglip2_images(256),
        read=lambda out: (*map(int, out["spatial_shapes"][0]), len(out["pixel_values"][0])),
        ours=lambda count: (count.grid_rows, count.grid_columns, count.num_padded_patches),
        num_sizes=60,
    ),
    "siglip2_naflex_1024": ImageProcessor(
        build=lambda: processors.siglip2_images(1024),
        read=lambda out: (*map(int, out["spatial_shapes"][0]), sum(map(int, out["pixel_attention_mask"][0]))),
        ours=patch_grid,
    ),
    "idefics3_8b": ImageProcessor(
        build=processors.idefics3_images,
        read=lambda out: (out["rows"][0][0], out["cols"][0][0], out["pixel_values"].shape[1]),
        ours=tile_grid,
        options={"return_row_col_info": True},
    ),
    "smolvlm_256m_500m": ImageProcessor(
        build=lambda: processors.idefics3_images(2048, 512),
        read=lambda out: (out["rows"][0][0], out["cols"][0][0], out["pixel_values"].shape[1]),
        ours=tile_grid,
        options={"return_row_col_info": True},
        num_sizes=8,
    ),
    "gemma3": ImageProcessor(
        build=processors.gemma3_images,
        read=lambda out: (out["num_crops"][0], len(out["pixel_values"])),
        ours=lambda count: (0, count.num_segments),
    ),
    "gemma3_pan_and_scan": ImageProcessor(
        build=lambda: processors.gemma3_images(pan_and_scan=True),
        read=lambda out: (out["num_crops"][0] + 1, len(out["pixel_values"])),
        ours=lambda count: (count.num_segments, count.num_segments),
    ),
    "internvl3": ImageProcessor(
        build=processors.internvl_images,
        read=lambda out: int(out["num_patches"][0]),
        ours=lambda count: count.num_segments,
    ),
    "llava_1_5": ImageProcessor(
        build=processors.llava_images,
        read=lambda out: tuple(side // 14 for side in out["pixel_values"][0].shape[1:]),
        ours=lambda count: (count.grid_rows, count.grid_columns),
        most_ratio=20,  # it scales the shorter side, strips become huge
    ),
    "llava_next": ImageProcessor(
        build=processors.llava_next_images,
        read=lambda out: len(out["pixel_values"][0]),
        ours=lambda count: count.num_segments,
    ),
    "llava_onevision": ImageProcessor(
        build=processors.llava_onevision_images,
        read=lambda out: len(out["pixel_values"][0]),
        ours=lambda count: count.num_segments,
    ),
    "minicpmv_4_6": ImageProcessor(
        build=processors.minicpm_images,
        read=read_minicpm,
        ours=lambda count: (*patch_grid(count), count.num_overview_tokens, count.sum_squared_attention),
    ),
}


@pytest.mark.parametrize("name", IMAGE_PROCESSORS)
def test_a_rule_counts_as_the_image_processor(name: str) -> None:
    case = IMAGE_PROCESSORS[name]
    processor = case.build()
    strips = [(1, 1), (3, 2), (1, 199), (201, 1), (1, 1500), (700, 2), (1030, 3), (1702, 1)]
    for size in [
        *random_sizes(name, case.num_sizes, most_ratio=case.most_ratio),
        *strips[: None if case.most_ratio > 1500 else 2],
    ]:
        count = count_one(PRESETS[name].rule, *size)
        found, refusal = run(case, processor, size)
        message = f"seed {SEED}, {name}, {size}: ours {count}, the processor's {found}"
        assert (count.refusal is None) == (refusal is None), f"{message} {refusal}"
        if count.refusal is None:
            assert case.ours(count) == found, message
        else:
            # Classes of one processor write more or fewer fields of a size.
            assert str(refusal).startswith(count.refusal.removesuffix(")")), message


def run(case: ImageProcessor, processor: Any, size: Size) -> tuple[object, str | None]:
    """What the processor makes of a size, or why it refuses it."""
    try:
        return case.read(processor([blank(size)], **case.options)), None
    except ValueError as error:
        return None, str(error)


# --- EXIF orientation


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_sizes_are_those_the_processor_sees(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = io.BytesIO()
    blank((140, 420)).save(data, "JPEG", exif=exif)
    path = tmp_path / "turned.jpg"
    path.write_bytes(data.getvalue())
    facts = inspect(data.getvalue(), ImageLimits())
    assert facts.orientation == orientation
    upright = load_image(str(path))
    assert (facts.width, facts.height) == upright.size == ((420, 140) if orientation >= 5 else (140, 420))
    count = count_one(PRESETS["qwen2_5_vl"].rule, facts.width, facts.height)
    assert patch_grid(count) == read_thw(processors.qwen2_vl_images()(upright))
    stored = count_one(PRESETS["qwen2_5_vl"].rule, 140, 420)
    assert (patch_grid(count) == patch_grid(stored)) == (orientation < 5)


# --- whole processors: ids of prompts with images


@dataclass(frozen=True, kw_only=True)
class WholeProcessor:
    build: Callable[[], Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of the image rule."""
    preset: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    samples: int = 6
    most_ratio: float = math.inf


WHOLE_PROCESSORS = {
    "qwen2_5_vl": WholeProcessor(build=processors.qwen2_5_vl_processor),
    "glm4_1v": WholeProcessor(build=processors.glm4v_processor),
    "internvl3": WholeProcessor(build=processors.internvl_processor),
    "pixtral_hf": WholeProcessor(build=processors.pixtral_processor),
    "mistral3_hf": WholeProcessor(build=lambda: processors.pixtral_processor(1540, 14, 2)),
    "gemma3": WholeProcessor(build=processors.gemma3_processor),
    "gemma3_pan_and_scan": WholeProcessor(build=processors.gemma3_processor, options={"do_pan_and_scan": True}),
    "idefics3_8b": WholeProcessor(build=processors.idefics3_processor),
    "idefics3_8b, tags are text": WholeProcessor(
        preset="idefics3_8b", build=lambda: processors.idefics3_processor(tags=False), samples=3
    ),
    "smolvlm_2b": WholeProcessor(build=lambda: processors.idefics3_processor(1536, 384, 81), samples=3),
    "smolvlm_256m_500m": WholeProcessor(build=lambda: processors.idefics3_processor(2048, 512, 64), samples=3),
    "smolvlm_256m_500m, one tile": WholeProcessor(
        preset="smolvlm_256m_500m",
        parameters={"longest_edge": 512},
        build=lambda: processors.idefics3_processor(512, 512, 64),
    ),
    "smolvlm_256m_500m, two tiles": WholeProcessor(
        preset="smolvlm_256m_500m",
        parameters={"longest_edge": 1024},
        build=lambda: processors.idefics3_processor(1024, 512, 64),
    ),
    "llava_1_5": WholeProcessor(build=processors.llava_processor, most_ratio=20),
    "llava_next": WholeProcessor(build=processors.llava_next_processor),
    "llava_onevision": WholeProcessor(build=processors.llava_onevision_processor),
    "minicpmv_4_6": WholeProcessor(build=processors.minicpm_processor, samples=12),
}


def ids_of(pieces: Iterable[Piece], tokenizer: Any) -> list[int]:
    """Neighbouring texts joined, then the ids of each piece; the tokenizer knows no special token in text here."""
    ids: list[int] = []
    text = ""
    for piece in [*pieces, Features(0, "")]:
        if isinstance(piece, Text):
            text += piece.text
            continue
        ids += tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []
        text = ""
        length = piece.num_tokens if isinstance(piece, Features) else 1
        ids += [tokenizer.convert_tokens_to_ids(piece.token)] * length
    return ids


def prompt_of(placeholder: str, source: random.Random, num_images: int) -> str:
    """Texts whose ends could be merged with what a processor adds: blanks, newlines, digits, letters."""
    ends = ["", " ", "\n", "\n\n", "Here is", "the 3", " image:\n", "그림 "]
    return source.choice(ends) + "".join(placeholder + source.choice(ends) for _ in range(num_images))


@pytest.mark.parametrize("name", WHOLE_PROCESSORS)
def test_layouts_give_the_ids_of_the_processor(name: str) -> None:
    case = WHOLE_PROCESSORS[name]
    preset = case.preset or name
    processor = case.build()
    tokenizer = processor.tokenizer
    rule = image_rule(preset, case.parameters)
    layout = image_layout(None, preset, {}, tokenizer.all_special_tokens)
    placeholder = default_layout(preset).placeholder
    source = random.Random(f"{SEED} prompts {name}")
    for number in range(case.samples):
        found = random_sizes(f"{name} {number}", 24, most_ratio=case.most_ratio)
        sizes = [size for size in found if count_one(rule, *size).refusal is None][: 1 + number % 3]
        prompt = prompt_of(placeholder, source, len(sizes))
        out = processor(text=[prompt], images=[[blank(size) for size in sizes]], **case.options)
        images = [layout.pieces(count, index) for index, count in enumerate(count_sample(rule, sizes))]
        pieces = expanded(prompt, placeholder, images)
        message = f"seed {SEED}, {name}, {sizes}, {prompt!r}"
        assert ids_of(pieces, tokenizer) == [int(token) for token in out["input_ids"][0]], message


def expanded(prompt: str, placeholder: str, images: Sequence[Sequence[Piece]]) -> list[Piece]:
    """The prompt with the pieces of each image in place of its placeholder."""
    texts = [Text(text, loss=False) for text in prompt.split(placeholder)]
    pieces: list[Piece] = [texts[0]]
    for image, text in zip(images, texts[1:], strict=True):
        pieces += [*image, text]
    return pieces


# --- processors of which only the text can be run, and mistral-common


def written(pieces: Iterable[Piece]) -> str:
    """The string a processor would tokenize."""
    return "".join(
        piece.text if isinstance(piece, Text) else piece.token * (piece.num_tokens if isinstance(piece, Features) else 1)
        for piece in pieces
    )


def llama4_text(count: ImageCount) -> str:
    pixels = [np.zeros((count.num_segments, 3, 336, 336), np.uint8)]
    grid = [(count.grid_rows, count.grid_columns)]
    text: str = processors.llama4_processor().replace_image_token({"pixel_values": pixels, "aspect_ratios": grid}, 0)
    return text


def nemotron_text(count: ImageCount) -> str:
    grid = torch.tensor([[count.grid_rows, count.grid_columns]])
    text: str = processors.nemotron_omni_processor().replace_image_token({"image_grid_hw": grid}, 0)
    return text


def kimi_text(count: ImageCount) -> str:
    """The template's words around what the processor writes."""
    grid = np.array([[1, count.grid_rows, count.grid_columns]])
    image = processors.kimi_k25_processor().replace_image_token({"image_grid_thw": grid}, 0)
    return f"<|media_begin|>image<|media_content|>{image}<|media_end|>"


def smolvlm_text(count: ImageCount) -> str:
    names = {"image_token": "<image>", "global_image_token": "<global-img>"}
    text: str = get_image_prompt_string(
        count.grid_rows, count.grid_columns, 81, fake_token_around_image="<fake_token_around_image>", **names
    )
    return text


@pytest.mark.parametrize(
    ("preset", "tokens", "text_of"),
    [
        ("llama4", processors.LLAMA4_TOKENS, llama4_text),
        ("nemotron3_nano_omni", processors.NEMOTRON_TOKENS, nemotron_text),
        ("kimi_k25", processors.KIMI_TOKENS, kimi_text),
        ("smolvlm_2b", processors.IDEFICS_TOKENS, smolvlm_text),
    ],
)
def test_layouts_write_what_the_processor_writes(
    preset: str, tokens: dict[str, str], text_of: Callable[[ImageCount], str]
) -> None:
    layout = image_layout(None, preset, {}, tokens.values())
    for size in [(100, 100), (1000, 1000), (336, 2000), *random_sizes(preset, 12, most_pixels=10**7)]:
        count = count_one(PRESETS[preset].rule, *size)
        assert written(layout.pieces(count, 0)) == text_of(count), f"seed {SEED}, {preset}, {size}"


@pytest.mark.parametrize(
    ("preset", "config"),
    [("pixtral_mistral_common", (16, 1024, 1)), ("mistral3_mistral_common", (14, 1540, 2))],
)
def test_mistral_common_writes_the_same_tokens(
    preset: str, config: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mistral_image, "transform_image", lambda image, size: np.zeros((3, *size[::-1])))  # it needs OpenCV
    patch_size, longest, merge = config
    ids = mistral_image.SpecialImageIDs(img=1, img_break=2, img_end=3)
    encoder = mistral_image.ImageEncoder(mistral_image.ImageConfig(patch_size, longest, merge), ids)
    layout = image_layout(None, preset, {}, processors.PIXTRAL_TOKENS.values())
    names = {"[IMG]": 1, "[IMG_BREAK]": 2, "[IMG_END]": 3}
    for size in [(1024, 1024), (359, 2852), *random_sizes(preset, 40, most_pixels=4 * 10**6)]:
        if max(size) > longest * min(size):
            continue  # sides that vanish: releases of mistral-common before 1.13 fail on them
        pieces = layout.pieces(count_one(PRESETS[preset].rule, *size), 0)
        ours = [
            names[piece.token]
            for piece in pieces
            if isinstance(piece, Token | Features)
            for _ in range(piece.num_tokens if isinstance(piece, Features) else 1)
        ]
        assert ours == encoder(ImageChunk(image=blank(size))).tokens, f"seed {SEED}, {preset}, {size}"
