"""Processors of real models from transformers, built offline: explicit configurations, and a small tokenizer of our own.

The image processors are the Pil classes, which need no torchvision. The tokenizer is byte-level BPE with Qwen2's split and a
few hundred merges; it holds the special tokens of the model it stands in for. Videos are not processed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.processing_utils import transformers_module
from transformers.video_processing_utils import BaseVideoProcessor, VideoProcessorMixin

if not hasattr(transformers_module, "VideoProcessorMixin"):
    # Listed only where torchvision is installed, and yet what a processor checks its video processor's type against.
    transformers_module.VideoProcessorMixin = VideoProcessorMixin

QWEN_TOKENS = {
    "pad_token": "<|endoftext|>",
    "im_start": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
GLM_TOKENS = {
    "pad_token": "<|endoftext|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
}
INTERNVL_TOKENS = {
    "pad_token": "<|endoftext|>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
PIXTRAL_TOKENS = {"pad_token": "<pad>", "image_token": "[IMG]", "image_break": "[IMG_BREAK]", "image_end": "[IMG_END]"}
GEMMA_TOKENS = {
    "pad_token": "<pad>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
IDEFICS_TOKENS = {
    "pad_token": "<pad>",
    "fake": "<fake_token_around_image>",
    "image_token": "<image>",
    "end": "<end_of_utterance>",
    "global": "<global-img>",
    **{f"tile_{row}_{column}": f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)},
}
IDEFICS_TOKENS_WITHOUT_TAGS = {name: IDEFICS_TOKENS[name] for name in ("pad_token", "fake", "image_token", "end")}
LLAVA_TOKENS = {"pad_token": "<pad>", "image_token": "<image>", "video_token": "<video>"}
MINICPM_TOKENS = {
    "pad_token": "<|endoftext|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
LLAMA4_TOKENS = {
    "pad_token": "<|finetune_right_pad|>",
    "start": "<|image_start|>",
    "end": "<|image_end|>",
    "image_token": "<|image|>",
    "patch": "<|patch|>",
    "tile_x": "<|tile_x_separator|>",
    "tile_y": "<|tile_y_separator|>",
}
KIMI_TOKENS = {
    "pad_token": "<|endoftext|>",
    "start": "<|media_begin|>",
    "content": "<|media_content|>",
    "image_token": "<|media_pad|>",
    "end": "<|media_end|>",
    "video_token": "<|kimi_k25_video_placeholder|>",
}
NEMOTRON_TOKENS = {"pad_token": "<pad>", "start": "<img>", "end": "</img>", "image_token": "<image>", "video_token": "<video>"}

_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = [
    "You are a helpful assistant. What is in the picture? The picture shows a table, and here is the answer.\n\n",
    "system\nuser\nassistant\nHere are the images: the first one, the second one and the last one.\n\n\n",
    "그림에 무엇이 있습니까? 그림에는 표가 있습니다. image, slice, row, column.\n",
]


def byte_level_tokenizer(special_tokens: Iterable[str], vocab_size: int = 400) -> Tokenizer:
    """Byte-level BPE of a fixed corpus, merges across newlines among them; special tokens after the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer


@lru_cache
def _tokenizer_json(special_tokens: tuple[str, ...]) -> str:
    return byte_level_tokenizer(special_tokens).to_str()


def write_tokenizer(folder: Path, special_tokens: Iterable[str] = tuple(QWEN_TOKENS.values())) -> Path:
    """The `tokenizer.json` of the tokenizer that the processors here use, by default Qwen's stand-in."""
    path = folder / "tokenizer.json"
    path.write_text(_tokenizer_json(tuple(special_tokens)), encoding="utf-8")
    return path


def hugging_face_tokenizer(named_tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    """The same as transformers takes it, with the names by which processors ask for special tokens."""
    own = {name: token for name, token in named_tokens.items() if name in ("pad_token", "eos_token")}
    extra = {name: token for name, token in named_tokens.items() if name not in own}
    tokenizer = Tokenizer.from_str(_tokenizer_json(tuple(named_tokens.values())))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=extra, **own)


class NoVideos(BaseVideoProcessor):
    """Some processors want a video processor to be there; it is never called."""

    merge_size = 2
    slice_mode = True
    downsample_mode = "16x"


def qwen2_vl_images(min_pixels: int = 3136, max_pixels: int = 12845056, patch_size: int = 14) -> Qwen2VLImageProcessorPil:
    size = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    return Qwen2VLImageProcessorPil(size=size, patch_size=patch_size, merge_size=2, temporal_patch_size=2)


def qwen2_5_vl_processor(**size: int) -> transformers.Qwen2_5_VLProcessor:
    """As the models publish it; `min_pixels`, `max_pixels` otherwise."""
    return transformers.Qwen2_5_VLProcessor(
        image_processor=qwen2_vl_images(**size), tokenizer=hugging_face_tokenizer(QWEN_TOKENS), video_processor=NoVideos()
    )


def glm4v_images() -> Glm4vImageProcessorPil:
    return Glm4vImageProcessorPil(
        size={"shortest_edge": 12544, "longest_edge": 9633792}, patch_size=14, merge_size=2, temporal_patch_size=2
    )


def glm4v_processor() -> transformers.Glm4vProcessor:
    return transformers.Glm4vProcessor(
        image_processor=glm4v_images(), tokenizer=hugging_face_tokenizer(GLM_TOKENS), video_processor=NoVideos()
    )


def internvl_images() -> GotOcr2ImageProcessorPil:
    return GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True, min_patches=1, max_patches=12)


def internvl_processor() -> transformers.InternVLProcessor:
    return transformers.InternVLProcessor(
        image_processor=internvl_images(),
        tokenizer=hugging_face_tokenizer(INTERNVL_TOKENS),
        video_processor=NoVideos(),
        image_seq_length=256,
    )


def pixtral_images(longest_edge: int = 1024, patch_size: int = 16) -> PixtralImageProcessorPil:
    """`patch_size` is that of merged patches: what the image is padded to."""
    return PixtralImageProcessorPil(size={"longest_edge": longest_edge}, patch_size={"height": patch_size, "width": patch_size})


def pixtral_processor(longest_edge: int = 1024, patch_size: int = 16, merge_size: int = 1) -> Any:
    """transformers' own class: the one function that its module would import torchvision for is taken from the Pil module."""
    torchvision_module = "transformers.models.pixtral.image_processing_pixtral"
    with patch.dict(sys.modules):
        sys.modules.setdefault(torchvision_module, importlib.import_module(PixtralImageProcessorPil.__module__))
        processing = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return processing.PixtralProcessor(
        image_processor=pixtral_images(longest_edge, patch_size * merge_size),
        tokenizer=hugging_face_tokenizer(PIXTRAL_TOKENS),
        patch_size=patch_size,
        spatial_merge_size=merge_size,
    )


def gemma3_images(pan_and_scan: bool = False) -> Gemma3ImageProcessorPil:
    return Gemma3ImageProcessorPil(
        size={"height": 896, "width": 896},
        do_pan_and_scan=pan_and_scan,
        pan_and_scan_min_crop_size=256,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )


def gemma3_processor() -> transformers.Gemma3Processor:
    """Pan-and-scan is off unless the call says `do_pan_and_scan=True`."""
    return transformers.Gemma3Processor(
        image_processor=gemma3_images(), tokenizer=hugging_face_tokenizer(GEMMA_TOKENS), image_seq_length=256
    )


def idefics3_images(longest_edge: int = 1456, tile: int = 364) -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(size={"longest_edge": longest_edge}, max_image_size={"longest_edge": tile})


def idefics3_processor(
    longest_edge: int = 1456, tile: int = 364, tokens_per_tile: int = 169, *, tags: bool = True
) -> transformers.Idefics3Processor:
    """Without `tags` the tokenizer has no tokens for the places of tiles: they are text."""
    tokens = IDEFICS_TOKENS if tags else IDEFICS_TOKENS_WITHOUT_TAGS
    return transformers.Idefics3Processor(
        image_processor=idefics3_images(longest_edge, tile),
        tokenizer=hugging_face_tokenizer(tokens),
        image_seq_len=tokens_per_tile,
    )


def llava_images() -> LlavaImageProcessorPil:
    return LlavaImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, do_center_crop=True)


def llava_processor() -> transformers.LlavaProcessor:
    return transformers.LlavaProcessor(
        image_processor=llava_images(),
        tokenizer=hugging_face_tokenizer(LLAVA_TOKENS),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava_next_images() -> LlavaNextImageProcessorPil:
    return LlavaNextImageProcessorPil(
        size={"shortest_edge": 336},
        crop_size={"height": 336, "width": 336},
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    )


def llava_next_processor() -> transformers.LlavaNextProcessor:
    return transformers.LlavaNextProcessor(
        image_processor=llava_next_images(),
        tokenizer=hugging_face_tokenizer(LLAVA_TOKENS),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava_onevision_images() -> LlavaOnevisionImageProcessorPil:
    pinpoints = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    return LlavaOnevisionImageProcessorPil(size={"height": 384, "width": 384}, image_grid_pinpoints=pinpoints)


def llava_onevision_processor() -> transformers.LlavaOnevisionProcessor:
    return transformers.LlavaOnevisionProcessor(
        image_processor=llava_onevision_images(),
        tokenizer=hugging_face_tokenizer(LLAVA_TOKENS),
        video_processor=NoVideos(),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
    )


def minicpm_images() -> MiniCPMV4_6ImageProcessorPil:
    return MiniCPMV4_6ImageProcessorPil(max_slice_nums=9, scale_resolution=448, patch_size=14, downsample_mode="16x")


def minicpm_processor() -> transformers.MiniCPMV4_6Processor:
    return transformers.MiniCPMV4_6Processor(
        image_processor=minicpm_images(), tokenizer=hugging_face_tokenizer(MINICPM_TOKENS), video_processor=NoVideos()
    )


def siglip2_images(max_patches: int) -> Siglip2ImageProcessorPil:
    return Siglip2ImageProcessorPil(max_num_patches=max_patches, patch_size=16)


def kimi_k25_processor() -> Any:
    """Its text only: its image processor needs torchvision, another with the same merging stands in its place."""
    return transformers.Kimi_K25Processor(
        image_processor=qwen2_vl_images(), tokenizer=hugging_face_tokenizer(KIMI_TOKENS), video_processor=NoVideos()
    )


def llama4_processor() -> transformers.Llama4Processor:
    """Its text only: its image processor needs torchvision, another stands in its place."""
    return transformers.Llama4Processor(image_processor=llava_images(), tokenizer=hugging_face_tokenizer(LLAMA4_TOKENS))


def nemotron_omni_processor() -> Any:
    """Its text only: its image processor needs torchvision, another with the same merging stands in its place."""
    images = llava_images()
    images.downsample_ratio = 0.5
    return transformers.NemotronH_Omni_Reasoning_V3Processor(
        image_processor=images,
        video_processor=NoVideos(),
        tokenizer=hugging_face_tokenizer(NEMOTRON_TOKENS),
        feature_extractor=transformers.SequenceFeatureExtractor(feature_size=1, sampling_rate=1, padding_value=0.0),
    )
