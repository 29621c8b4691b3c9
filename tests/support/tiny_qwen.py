"""Qwen's vision language models with random weights, small enough for a step in milliseconds, over the byte tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from byte_tokenizer import QWEN_TOKENS
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

IDS = {token: 256 + number for number, token in enumerate(QWEN_TOKENS)}
TEXT: dict[str, Any] = {
    "vocab_size": 256 + len(QWEN_TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHARED: dict[str, Any] = {
    "image_token_id": IDS["<|image_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "video_token_id": 255,
    "attn_implementation": "sdpa",
}
VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 14, "temporal_patch_size": 2, "in_channels": 3}


def tiny_qwen2(seed: int = 0) -> Qwen2VLForConditionalGeneration:
    """Its loss takes the number of tokens of all packs of a step."""
    vision = VISION | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "spatial_merge_size": 2}
    torch.manual_seed(seed)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT, vision_config=vision, **SHARED))


def tiny_qwen25(seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """It says that its loss does not."""
    vision = VISION | {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [0]}
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **SHARED))
