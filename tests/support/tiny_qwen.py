"""Qwen's vision language models with random weights, small enough for a step in milliseconds, over the byte tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
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
"""Of the byte tokenizer's special tokens."""
TEXT: dict[str, Any] = {
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
VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 14, "temporal_patch_size": 2, "in_channels": 3}


def _settings(ids: Mapping[str, int], vocab_size: int, vision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"vocab_size": vocab_size},
        "vision_config": {**VISION, **vision},
        "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "video_token_id": vocab_size - 1,
        "attn_implementation": "sdpa",
    }


def tiny_qwen2() -> Qwen2VLForConditionalGeneration:
    """Its loss takes the number of tokens of all packs of a step."""
    vision = {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "spatial_merge_size": 2}
    torch.manual_seed(0)
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(**_settings(IDS, 263, vision)))


def tiny_qwen25(ids: Mapping[str, int] = IDS, vocab_size: int = 263) -> Qwen2_5_VLForConditionalGeneration:
    """It says that its loss does not."""
    vision = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32, "fullatt_block_indexes": [0]}
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**_settings(ids, vocab_size, vision)))
