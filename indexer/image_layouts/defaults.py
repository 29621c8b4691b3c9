"""The layout of every preset of the image rules, with the string that the models' chat templates write for an image."""

from __future__ import annotations

from dataclasses import dataclass

from indexer.image_layouts.core import StringLayout
from indexer.image_layouts.kinds import KINDS, Gemma3, Idefics3, Llama4, MiniCPM, Rows, Wrapped
from indexer.image_rules.lookup import nearest
from packer.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDefault:
    """The layout of some models' own processor."""

    layout: StringLayout
    placeholder: str
    """What a chat template writes for an image; the whole layout, wrappers included, replaces it."""
    source: str
    """Where the strings are from."""
    is_checked: bool
    """Whether the strings stand in a library's source; their places are the processor's in any case where it could be run."""

    @property
    def kind(self) -> str:
        """The name of the layout's kind."""
        return next(name for name, kind in KINDS.items() if type(self.layout) is kind)


def _around(
    before: tuple[str, ...], token: str, after: tuple[str, ...], source: str, *, is_checked: bool = True, placeholder: str = ""
) -> LayoutDefault:
    """Wrappers that the chat template writes too, unless it writes `placeholder`."""
    texts = tuple(string for string in before + after if not string.startswith("<"))
    return LayoutDefault(
        layout=Wrapped(before=before, token=token, after=after, texts=texts),
        placeholder=placeholder or "".join((*before, token, *after)),
        source=source,
        is_checked=is_checked,
    )


_MODELS = "transformers 5.24 models"
_QWEN = _around(
    ("<|vision_start|>",),
    "<|image_pad|>",
    ("<|vision_end|>",),
    f"{_MODELS}/qwen2_5_vl/processing_qwen2_5_vl.py; the wrappers, its template's, as in models/colqwen2/",
)
_INTERNVL = _around(
    ("<img>",),
    "<IMG_CONTEXT>",
    ("</img>",),
    f"attributes of the tokenizer in {_MODELS}/internvl/; named as in models/qianfan_ocr/",
    is_checked=False,
    placeholder="<IMG_CONTEXT>",
)
_NEMOTRON = _around(
    ("<img>",), "<image>", ("</img>",), "vLLM's port of the vendor's code", is_checked=False, placeholder="<image>"
)
_PIXTRAL = LayoutDefault(
    layout=Rows(token="[IMG]", row_break="[IMG_BREAK]", end="[IMG_END]"),
    placeholder="[IMG]",
    source=f"{_MODELS}/pixtral/processing_pixtral.py",
    is_checked=True,
)
_MISTRAL = LayoutDefault(
    layout=_PIXTRAL.layout,
    placeholder="[IMG]",
    source="mistral-common, tokens/tokenizers/base.py and image.py",
    is_checked=True,
)
_IDEFICS3 = LayoutDefault(
    layout=Idefics3(
        token="<image>", fake="<fake_token_around_image>", global_tag="<global-img>", tile_tag="<row_{row}_col_{column}>"
    ),
    placeholder="<image>",
    source=f"{_MODELS}/idefics3/processing_idefics3.py",
    is_checked=True,
)
_SMOLVLM = LayoutDefault(
    layout=_IDEFICS3.layout, placeholder="<image>", source=f"{_MODELS}/smolvlm/processing_smolvlm.py", is_checked=True
)
_GEMMA3 = LayoutDefault(
    layout=Gemma3(token="<image_soft_token>", start="<start_of_image>", end="<end_of_image>"),
    placeholder="<start_of_image>",
    source=f"texts in {_MODELS}/gemma3/processing_gemma3.py; the tokens are attributes of the tokenizer, as generally known",
    is_checked=False,
)
_LLAMA4 = LayoutDefault(
    layout=Llama4(
        token="<|patch|>",
        start="<|image_start|>",
        end="<|image_end|>",
        image="<|image|>",
        column_separator="<|tile_x_separator|>",
        row_separator="<|tile_y_separator|>",
    ),
    placeholder="<|image|>",
    source=f"{_MODELS}/llama4/processing_llama4.py",
    is_checked=True,
)
_GLM = _around(
    ("<|begin_of_image|>",), "<|image|>", ("<|end_of_image|>",), f"{_MODELS}/glm4v/processing_glm4v.py, the wrappers of a frame"
)
_KIMI_K25 = _around(
    ("<|media_begin|>", "image", "<|media_content|>"),
    "<|media_pad|>",
    ("<|media_end|>",),
    f"{_MODELS}/kimi_k25/processing_kimi_k25.py, as for a video; the word as vLLM's port writes it",
    is_checked=False,
)
_KIMI_VL = _around(
    ("<|media_start|>", "image", "<|media_content|>"),
    "<|media_pad|>",
    ("<|media_end|>",),
    "prompts of vLLM's examples",
    is_checked=False,
)


def _minicpm(token: str, placeholder: str, source: str) -> LayoutDefault:
    layout = MiniCPM(
        token=token,
        id_start="<image_id>",
        id_end="</image_id>",
        image_start="<image>",
        image_end="</image>",
        slice_start="<slice>",
        slice_end="</slice>",
    )
    return LayoutDefault(layout=layout, placeholder=placeholder, source=source, is_checked=False)


def _bare(token: str, source: str, *, is_checked: bool) -> LayoutDefault:
    return _around((), token, (), source, is_checked=is_checked)


_PHI3 = _bare("<|image|>", "the token of vLLM's port; prompts of the vendor number their images", is_checked=False)
_NAFLEX = _bare("<image>", "an encoder alone, no prompt of its own: chosen", is_checked=False)

DEFAULTS: dict[str, LayoutDefault] = {
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_max1280": _QWEN,
    "qwen2_5_vl_via_qwen_vl_utils": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_via_qwen_vl_utils": _QWEN,
    "internvl3": _INTERNVL,
    "internvl3_max6": _INTERNVL,
    "nemotron_nano_vl_v2": _NEMOTRON,
    "llava_1_5": _bare("<image>", f"{_MODELS}/llava/processing_llava.py", is_checked=True),
    "llava_next": _bare("<image>", f"{_MODELS}/llava_next/processing_llava_next.py", is_checked=True),
    "llava_onevision": _bare("<image>", f"{_MODELS}/llava_onevision/processing_llava_onevision.py", is_checked=True),
    "pixtral_hf": _PIXTRAL,
    "mistral3_hf": _PIXTRAL,
    "pixtral_mistral_common": _MISTRAL,
    "mistral3_mistral_common": _MISTRAL,
    "gemma3": _GEMMA3,
    "gemma3_pan_and_scan": _GEMMA3,
    "llama4": _LLAMA4,
    "idefics3_8b": _IDEFICS3,
    "smolvlm_2b": _SMOLVLM,
    "smolvlm_256m_500m": _SMOLVLM,
    "kimi_k25": _KIMI_K25,
    "glm4_1v": _GLM,
    "siglip2_naflex_256": _NAFLEX,
    "siglip2_naflex_1024": _NAFLEX,
    "minicpmv_2_6": _minicpm("<unk>", "(<image>./</image>)", "the vendor's processing_minicpmv.py, as generally known"),
    "minicpmv_4_6": _minicpm(
        "<|image_pad|>", "<|image_pad|>", f"attributes of the tokenizer in {_MODELS}/minicpmv4_6/; named as in ports"
    ),
    "nemotron3_nano_omni": _around(
        ("<img>",),
        "<image>",
        ("</img>",),
        f"{_MODELS}/nemotron_h_omni/processing_nemotron_h_omni.py",
        placeholder="<image>",
    ),
    "phi4_multimodal": _bare(
        "<|endoftext10|>", "transformers' conversion script; prompts of the vendor number their images", is_checked=False
    ),
    "phi3_5_vision_crops4": _PHI3,
    "phi3_5_vision_crops16": _PHI3,
    "deepseek_vl2": _bare("<image>", "the vendor's processing_deepseek_vl_v2.py, as generally known", is_checked=False),
    "kimi_vl_a3b": _KIMI_VL,
    "kimi_vl_thinking_2506": _KIMI_VL,
    "llama_nemotron_nano_vl_8b_v1": _NEMOTRON,
    "hyperclovax_seed_vision_3b": _bare("<|dummy3|>", "vLLM's port", is_checked=False),
}


def default_layout(preset: str) -> LayoutDefault:
    """The default of a preset of `indexer.image_rules`.

    Raises:
        UsageError: there is no such preset.
    """
    if preset not in DEFAULTS:
        raise UsageError(f"unknown image rule {preset!r}, neither a preset nor module:function{nearest(preset, DEFAULTS)}")
    return DEFAULTS[preset]
