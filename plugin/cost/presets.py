"""Published shapes of vision encoders and language models. What was not found published is not here; use a file for it.

The class defaults of libraries often differ from what models publish, so each value is written out.
"""

from __future__ import annotations

from dataclasses import dataclass

from plugin.cost.shapes import EncoderShape, LlmShape, Projector


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPreset:
    shape: EncoderShape
    models: str
    source: str
    """Where the values are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmPreset:
    shape: LlmShape
    models: str
    source: str
    """Where the values are from."""


_INTERNVL = Projector(patches_per_feature=4, inner=(None,))
_MODULES = "modules as in transformers 5.24"


def _intern_vit(num_layers: int, hidden: int, mlp: int) -> EncoderShape:
    return EncoderShape(num_layers=num_layers, hidden=hidden, mlp=mlp, patch_size=14, projector=_INTERNVL)


def _qwen3_vit(num_layers: int, hidden: int, mlp: int) -> EncoderShape:
    # One merger behind the last layer, three behind inner ones (deepstack).
    merger = Projector(patches_per_feature=4, inner=(4 * hidden,), count=4)
    return EncoderShape(num_layers=num_layers, hidden=hidden, mlp=mlp, patch_size=16, temporal_patch_size=2, projector=merger)


ENCODERS: dict[str, EncoderPreset] = {
    "qwen2_vl_vit": EncoderPreset(
        shape=EncoderShape(
            num_layers=32,
            hidden=1280,
            mlp=5120,
            patch_size=14,
            temporal_patch_size=2,
            # Its image rule is that of Qwen2.5-VL and counts windows, which this encoder does not have.
            num_full_layers=32,
            projector=Projector(patches_per_feature=4, inner=(5120,)),
        ),
        models="Qwen2-VL 2B, 7B, 72B",
        source="transformers 5.24 Qwen2VLVisionConfig, as published",
    ),
    "qwen2_5_vl_vit": EncoderPreset(
        shape=EncoderShape(
            num_layers=32,
            hidden=1280,
            mlp=3420,
            patch_size=14,
            temporal_patch_size=2,
            gated_mlp=True,
            num_full_layers=4,
            projector=Projector(patches_per_feature=4, inner=(5120,)),
        ),
        models="Qwen2.5-VL 3B, 7B, 72B",
        source=f"config.json of Qwen/Qwen2.5-VL-7B-Instruct; {_MODULES}, whose default hidden_size is another",
    ),
    "qwen3_vl_vit": EncoderPreset(
        shape=_qwen3_vit(27, 1152, 4304),
        models="Qwen3-VL 8B, 30B-A3B and larger",
        source="transformers 5.24 Qwen3VLVisionConfig and Qwen3VLMoeVisionConfig, as config.json of Qwen/Qwen3-VL-8B-Instruct",
    ),
    "qwen3_vl_vit_small": EncoderPreset(
        shape=_qwen3_vit(24, 1024, 4096),
        models="Qwen3-VL 2B, 4B",
        source=f"config.json of Qwen/Qwen3-VL-4B-Instruct; {_MODULES}",
    ),
    "siglip_so400m_patch14": EncoderPreset(
        shape=EncoderShape(num_layers=27, hidden=1152, mlp=4304, patch_size=14),
        models="SigLIP so400m, without head and without a projector",
        source="config.json of google/siglip-so400m-patch14-384",
    ),
    "internvit_300m": EncoderPreset(
        shape=_intern_vit(24, 1024, 4096),
        models="InternViT-300M-448px: InternVL2, 2.5 and 3 up to 14B",
        source="transformers 5.24 InternVLVisionConfig, as published with OpenGVLab/InternVL3-1B-hf",
    ),
    "internvit_6b": EncoderPreset(
        shape=_intern_vit(45, 3200, 12800),
        models="InternViT-6B-448px: InternVL 1.5, InternVL2, 2.5 and 3 from 26B on",
        source=f"vision_config in config.json of the InternVL chat models; {_MODULES}",
    ),
}


def _llm(num_layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocab: int) -> LlmShape:
    return LlmShape(
        num_layers=num_layers, hidden=hidden, num_heads=heads[0], num_kv_heads=heads[1], head_dim=128, ffn=ffn, vocab=vocab
    )


def _qwen3_moe(num_layers: int, hidden: int, heads: tuple[int, int], ffn: int) -> LlmShape:
    return LlmShape(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=128,
        ffn=ffn,
        experts_per_token=8,
        num_experts=128,
        vocab=151936,
    )


LLMS: dict[str, LlmPreset] = {
    "qwen2_5_7b": LlmPreset(
        shape=_llm(28, 3584, (28, 4), 18944, 152064),
        models="Qwen2.5-7B, Qwen2-7B; Qwen2.5-VL-7B",
        source="config.json of Qwen/Qwen2.5-VL-7B-Instruct",
    ),
    "qwen2_5_72b": LlmPreset(
        shape=_llm(80, 8192, (64, 8), 29568, 152064),
        models="Qwen2.5-72B; Qwen2.5-VL-72B",
        source="transformers 5.24 Qwen2_5_VLTextConfig, as published for 72B",
    ),
    "qwen3_4b": LlmPreset(
        shape=_llm(36, 2560, (32, 8), 9728, 151936),
        models="Qwen3-4B; Qwen3-VL-4B",
        source="config.json of Qwen/Qwen3-VL-4B-Instruct",
    ),
    "qwen3_8b": LlmPreset(
        shape=_llm(36, 4096, (32, 8), 12288, 151936),
        models="Qwen3-8B; Qwen3-VL-8B",
        source="config.json of Qwen/Qwen3-8B",
    ),
    "qwen3_30b_a3b": LlmPreset(
        shape=_qwen3_moe(48, 2048, (32, 4), 768),
        models="Qwen3-30B-A3B; Qwen3-VL-30B-A3B",
        source="config.json of Qwen/Qwen3-30B-A3B",
    ),
    "qwen3_235b_a22b": LlmPreset(
        shape=_qwen3_moe(94, 4096, (64, 4), 1536),
        models="Qwen3-235B-A22B; Qwen3-VL-235B-A22B",
        source="config.json of Qwen/Qwen3-235B-A22B",
    ),
    "llama_3_1_8b": LlmPreset(
        shape=_llm(32, 4096, (32, 8), 14336, 128256),
        models="Llama-3-8B, Llama-3.1-8B",
        source="config.json of meta-llama/Llama-3.1-8B",
    ),
    "llama_3_1_70b": LlmPreset(
        shape=_llm(80, 8192, (64, 8), 28672, 128256),
        models="Llama-3-70B, Llama-3.1-70B",
        source="config.json of meta-llama/Llama-3.1-70B",
    ),
}
