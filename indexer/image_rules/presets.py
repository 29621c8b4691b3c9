"""Published parameters by model. Class defaults of the libraries often differ from what models publish, so each value is here.

`exactness`: "ran" where the counts were compared with the real processor, "derived" where only its formula was known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from indexer.image_rules.core import ImageRule
from indexer.image_rules.deepseek import DeepSeekVL2
from indexer.image_rules.gemma3 import Gemma3
from indexer.image_rules.idefics3 import Idefics3
from indexer.image_rules.internvl import InternVL
from indexer.image_rules.kimi import KimiK25, KimiVL
from indexer.image_rules.llama4 import Llama4
from indexer.image_rules.llava import AnyResolution, FixedSize
from indexer.image_rules.minicpm import MiniCPMV
from indexer.image_rules.naflex import NaFlex
from indexer.image_rules.nemotron import NemotronOmni
from indexer.image_rules.phi import Phi3, Phi4
from indexer.image_rules.pixtral import Pixtral
from indexer.image_rules.smart_resize import SmartResize
from indexer.image_rules.tiling import grids_up_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One rule with the values of some models."""

    rule: ImageRule
    models: str
    source: str
    """Where the values are from."""
    exactness: Literal["ran", "derived"] = "ran"


def _qwen(min_pixels: int, max_pixels: int, patch_size: int, window: int | None = None, fetch_image: bool = False) -> SmartResize:
    return SmartResize(
        patch_size=patch_size,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        window_patches=window,
        fetch_image=fetch_image,
    )


_HYPERCLOVAX = AnyResolution(
    tile=378,
    candidates=tuple((rows, columns) for columns, rows in grids_up_to(9)),
    tokens_per_side=9,
    patches_per_tile=729,
    rounds_unpadding=False,
)
_ONEVISION = AnyResolution(
    tile=384,
    candidates=tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)),
    tokens_per_side=27,
    patches_per_tile=729,
    max_tokens_in_tiles=9,
    single_view_in_multi_image=True,
)
_NEXT = AnyResolution(tile=336, candidates=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), tokens_per_side=24, patches_per_tile=576)
_NANO_V2 = InternVL(tile=512, patch_size=16, tokens_per_tile=256, max_tiles=12)
_NANO_8B = InternVL(tile=512, patch_size=16, tokens_per_tile=256, max_tiles=12, fill_area=True)
_PUBLISHED = "published preprocessor_config.json"
_DEFAULTS = "transformers 5.24 class defaults; published file not read"
_TEKKEN = "the image entry of tekken_240911.json in mistral-common 1.13.1"

PRESETS: dict[str, Preset] = {
    "qwen2_5_vl": Preset(rule=_qwen(3136, 12845056, 14, 8), models="Qwen2.5-VL; Qwen2-VL without windows", source=_PUBLISHED),
    "qwen2_5_vl_max1280": Preset(
        rule=_qwen(3136, 1003520, 14, 8),
        models="Qwen2.5-VL (Qwen2-VL without windows) with the usual training cap",
        source="transformers 5.24 class default, 1280 tokens",
    ),
    "qwen2_5_vl_via_qwen_vl_utils": Preset(
        rule=_qwen(3136, 12845056, 14, 8, fetch_image=True),
        models="Qwen2.5-VL, images through qwen_vl_utils.fetch_image first",
        source=f"qwen-vl-utils 0.0.14 defaults, then {_PUBLISHED}",
    ),
    "qwen3_vl": Preset(rule=_qwen(65536, 16777216, 16), models="Qwen3-VL, Qwen3.5", source=_PUBLISHED),
    "qwen3_vl_via_qwen_vl_utils": Preset(
        rule=_qwen(65536, 16777216, 16, fetch_image=True),
        models="Qwen3-VL, images through qwen_vl_utils.fetch_image(image_patch_size=16) first",
        source=f"qwen-vl-utils 0.0.14 defaults, then {_PUBLISHED}",
    ),
    "internvl3": Preset(
        rule=InternVL(tile=448, patch_size=14, tokens_per_tile=256, max_tiles=12),
        models="InternVL2, 2.5, 3",
        source="transformers 5.24: GotOcr2 class defaults 1 to 12, InternVLProcessor crops; 448 as InternS1-mini publishes",
    ),
    "internvl3_max6": Preset(
        rule=InternVL(tile=448, patch_size=14, tokens_per_tile=256, max_tiles=6),
        models="InternVL2, 2.5, 3 with 6 tiles at most",
        source="as internvl3, 6 chosen",
    ),
    "nemotron_nano_vl_v2": Preset(
        rule=_NANO_V2,
        models="Nemotron-Nano-12B-v2-VL",
        source="defaults of the vendor's image_processing.py",
        exactness="derived",
    ),
    "llava_1_5": Preset(
        rule=FixedSize(num_image_tokens=576, grid_side=24), models="LLaVA-1.5", source="published processor_config.json"
    ),
    "llava_next": Preset(rule=_NEXT, models="LLaVA-NeXT (1.6)", source=f"{_DEFAULTS}; 336 as generally published"),
    "llava_onevision": Preset(rule=_ONEVISION, models="LLaVA-OneVision", source=_DEFAULTS),
    "pixtral_hf": Preset(
        rule=Pixtral(longest_edge=1024, patch_size=16, merge_size=1, rounds=False),
        models="Pixtral 12B through transformers",
        source=_DEFAULTS,
    ),
    "mistral3_hf": Preset(
        rule=Pixtral(longest_edge=1540, patch_size=14, merge_size=2, rounds=False),
        models="Mistral-Small-3.1 and 3.2 through transformers",
        source="published preprocessor_config.json and processor_config.json",
    ),
    "pixtral_mistral_common": Preset(
        rule=Pixtral(longest_edge=1024, patch_size=16, merge_size=1, rounds=True),
        models="Pixtral 12B through mistral-common",
        source=_TEKKEN,
    ),
    "mistral3_mistral_common": Preset(
        rule=Pixtral(longest_edge=1540, patch_size=14, merge_size=2, rounds=True),
        models="Mistral-Small-3.1 and 3.2 through mistral-common",
        source="the values of mistral3_hf",
    ),
    "gemma3": Preset(rule=Gemma3(), models="Gemma-3", source=f"{_PUBLISHED}; the class default of 224 is another"),
    "gemma3_pan_and_scan": Preset(
        rule=Gemma3(pan_and_scan=True),
        models="Gemma-3 with pan-and-scan",
        source=f"{_PUBLISHED}; pan-and-scan values are Gemma3Processor's defaults (null there)",
    ),
    "llama4": Preset(rule=Llama4(), models="Llama-4 Scout, Maverick", source="transformers 5.24 class defaults, as published"),
    "idefics3_8b": Preset(
        rule=Idefics3(longest_edge=1456, tile=364, patch_size=14, tokens_per_tile=169), models="Idefics3-8B", source=_DEFAULTS
    ),
    "smolvlm_2b": Preset(
        rule=Idefics3(longest_edge=1536, tile=384, patch_size=14, tokens_per_tile=81), models="SmolVLM 2B", source=_PUBLISHED
    ),
    "smolvlm_256m_500m": Preset(
        rule=Idefics3(longest_edge=2048, tile=512, patch_size=16, tokens_per_tile=64),
        models="SmolVLM 256M, 500M",
        source="published preprocessor_config.json and processor_config.json",
    ),
    "kimi_k25": Preset(
        rule=KimiK25(max_patches=16384),
        models="Kimi-K2.5",
        source="transformers 5.24 class defaults, as the published media_proc_cfg",
    ),
    "glm4_1v": Preset(
        rule=SmartResize(patch_size=14, min_pixels=12544, max_pixels=9633792, frames=2, enlarge_small=True),
        models="GLM-4.1V, 4.5V, 4.6V",
        source="published preprocessor_config.json; the class default of 28*28*15000 is another",
    ),
    "siglip2_naflex_256": Preset(rule=NaFlex(max_patches=256), models="SigLIP2 NaFlex", source=_DEFAULTS),
    "siglip2_naflex_1024": Preset(rule=NaFlex(max_patches=1024), models="SigLIP2 NaFlex", source="1024 chosen"),
    "minicpmv_2_6": Preset(
        rule=MiniCPMV(multiple=14, tokens_per_view=64, refuses_flat=True),
        models="MiniCPM-V 2.6, o-2.6, 4.5",
        source=_PUBLISHED,
    ),
    "minicpmv_4_6": Preset(
        rule=MiniCPMV(multiple=56, tokens_per_view=None),
        models="MiniCPM-V 4.6 (16x)",
        source="transformers 5.24 class defaults, as published",
    ),
    "nemotron3_nano_omni": Preset(
        rule=NemotronOmni(),
        models="Nemotron-3-Nano-Omni, context 16,384",
        source="transformers 5.24 class defaults, as published",
    ),
    "phi4_multimodal": Preset(rule=Phi4(), models="Phi-4-multimodal", source=_DEFAULTS),
    "phi3_5_vision_crops4": Preset(rule=Phi3(num_crops=4), models="Phi-3.5-vision", source=_PUBLISHED),
    "phi3_5_vision_crops16": Preset(
        rule=Phi3(num_crops=16), models="Phi-3-vision; Phi-3.5-vision with 16 crops", source=f"{_PUBLISHED} of Phi-3-vision"
    ),
    "deepseek_vl2": Preset(
        rule=DeepSeekVL2(candidates=tuple((rows, columns) for columns, rows in grids_up_to(9))),
        models="DeepSeek-VL2 tiny, small, base",
        source="published processor_config.json",
    ),
    "kimi_vl_a3b": Preset(
        rule=KimiVL(max_patches=4096), models="Kimi-VL-A3B Instruct, Thinking", source=_PUBLISHED, exactness="derived"
    ),
    "kimi_vl_thinking_2506": Preset(
        rule=KimiVL(max_patches=16384),
        models="Kimi-VL-A3B-Thinking-2506",
        source="16384 inferred from the model card's 3.2 million pixels",
        exactness="derived",
    ),
    "llama_nemotron_nano_vl_8b_v1": Preset(
        rule=_NANO_8B,
        models="Llama-3.1-Nemotron-Nano-VL-8B-V1",
        source="tile rule of vLLM's port; sizes as known, published file not read",
        exactness="derived",
    ),
    "hyperclovax_seed_vision_3b": Preset(
        rule=_HYPERCLOVAX,
        models="HyperCLOVAX-SEED-Vision-Instruct-3B",
        source="published preprocessor_config.json; unpadding is assumed",
        exactness="derived",
    ),
}
