"""Layouts against the columns of the image rules, for every preset and any size, and what a profile may say of them.

That the strings and their order are the processors' own is in `test_image_processors.py`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.image_layouts import DEFAULTS, KINDS, Wrapped, default_layout, image_layout
from indexer.image_rules import PRESETS, ImageCount, count_one, count_sample, image_rule
from indexer.segments import Features, Piece, Text, Token
from packer.format.errors import UsageError

QWEN = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|im_start|>"]
sides = st.integers(1, 20000)
samples = st.lists(st.tuples(sides, sides), min_size=1, max_size=3)
every_preset = pytest.mark.parametrize("name", PRESETS)


def tokens_of(name: str) -> list[str]:
    """All special tokens that the default layout of a preset writes, tags of tiles included."""
    layout: Any = DEFAULTS[name].layout
    tags = (
        [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
        if "idefics3" in DEFAULTS[name].kind
        else []
    )
    return [*layout.required(), *tags, *([layout.global_tag] if tags else [])]


def num_wrappers(name: str, pieces: Collection[Piece]) -> int:
    """As the rules count: special tokens, and Kimi's word for one."""
    words = [piece for piece in pieces if isinstance(piece, Text) and name.startswith("kimi")]
    return len(words) + sum(isinstance(piece, Token) for piece in pieces)


def joined_texts(pieces: Collection[Piece]) -> list[str]:
    """The runs of text, neighbours joined."""
    written = [piece.text if isinstance(piece, Text) else "\0" for piece in pieces]
    return [text for text in "".join(written).split("\0") if text]


def num_newline_runs(pieces: Collection[Piece]) -> int:
    return sum(len(re.findall(r"\n+", text)) for text in joined_texts(pieces))


@every_preset
@given(sizes=samples)
@example(sizes=[(1, 1)])
@example(sizes=[(4000, 4000), (20000, 100)])
def test_pieces_are_what_the_rule_counts(name: str, sizes: list[tuple[int, int]]) -> None:
    layout = image_layout(None, name, {}, tokens_of(name))
    for index, count in enumerate(count_sample(PRESETS[name].rule, sizes)):
        if count.refusal is not None:
            with pytest.raises(ValueError, match="nothing stands for it"):
                layout.pieces(count, index)
            continue
        pieces = layout.pieces(count, index)
        features = [piece for piece in pieces if isinstance(piece, Features)]
        assert sum(piece.num_tokens for piece in features) == count.num_image_tokens
        assert {piece.token for piece in features} == {DEFAULTS[name].layout.token}
        assert all(piece.num_tokens > 0 for piece in features)
        assert num_wrappers(name, pieces) == count.num_wrapper_tokens
        assert num_newline_runs(pieces) == count.num_newline_runs
        if name.startswith("gemma3"):
            assert sum(map(len, joined_texts(pieces))) == count.num_text_chars
        assert not any(piece.loss for piece in pieces if not isinstance(piece, Features))


@every_preset
def test_every_preset_has_a_default(name: str) -> None:
    default = default_layout(name)
    assert DEFAULTS.keys() == PRESETS.keys()
    assert type(default.layout) is KINDS[default.kind]
    assert default.placeholder
    assert default.source
    resolved = image_layout(None, name, None, tokens_of(name))
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_equal_counts_share_their_pieces() -> None:
    layout = image_layout(None, "smolvlm_2b", {}, tokens_of("smolvlm_2b"))
    first, again = (layout.pieces(count_one(PRESETS["smolvlm_2b"].rule, *size), 0) for size in [(1000, 500), (2000, 1000)])
    assert first is again


def test_the_number_in_the_sample_is_text() -> None:
    layout = image_layout(None, "minicpmv_2_6", {}, tokens_of("minicpmv_2_6"))
    count = count_one(PRESETS["minicpmv_2_6"].rule, 300, 300)
    assert layout.pieces(count, 12)[:3] == (Token("<image_id>", False), Text("12", False), Token("</image_id>", False))
    bare = image_layout(None, "minicpmv_2_6", {"is_numbered": False}, tokens_of("minicpmv_2_6"))
    assert bare.pieces(count, 12) == layout.pieces(count, 0)[3:]


def test_the_whole_image_and_its_slices_take_their_own_numbers() -> None:
    layout = image_layout(None, "minicpmv_4_6", {}, tokens_of("minicpmv_4_6"))
    count = count_one(PRESETS["minicpmv_4_6"].rule, 700, 400)
    features = [piece.num_tokens for piece in layout.pieces(count, 0) if isinstance(piece, Features)]
    assert (count.num_image_tokens, count.num_overview_tokens) == (192, 66)
    assert features == [66, 63, 63]


@pytest.mark.parametrize(("longest_edge", "grid"), [(384, (0, 0)), (768, (1, 2)), (1536, (2, 4))])
def test_idefics_may_have_one_view_alone(longest_edge: int, grid: tuple[int, int]) -> None:
    count = count_one(image_rule("smolvlm_2b", {"longest_edge": longest_edge}), 400, 200)
    assert (count.grid_rows, count.grid_columns) == grid
    pieces = image_layout(None, "smolvlm_2b", {}, tokens_of("smolvlm_2b")).pieces(count, 0)
    assert num_wrappers("smolvlm_2b", pieces) == count.num_wrapper_tokens
    assert num_newline_runs(pieces) == count.num_newline_runs == grid[0]


def test_tags_that_the_tokenizer_does_not_have_are_text() -> None:
    specials = ["<image>", "<fake_token_around_image>", "<row_1_col_1>", "<row_1_col_2>"]
    pieces = image_layout(None, "smolvlm_2b", {}, specials).pieces(count_one(PRESETS["smolvlm_2b"].rule, 400, 200), 0)
    tags = [piece for piece in pieces if not isinstance(piece, Features) and re.search("row|global", str(piece))]
    assert tags[:2] == [Token("<row_1_col_1>", False), Token("<row_1_col_2>", False)]
    assert tags[2:4] == [Text("<row_1_col_3>", False), Text("<row_1_col_4>", False)]
    assert tags[-1] == Text("<global-img>", False)


def test_a_fingerprint_can_be_made_of_it() -> None:
    tags = ["<row_1_col_1>", "<global-img>"]
    specials = ["<image>", "<fake_token_around_image>", "<pad>"]
    with_tags = {repr(image_layout(None, "smolvlm_2b", {}, order)) for order in ([*specials, *tags], [*tags[::-1], *specials])}
    assert len(with_tags) == 1
    assert "tag_tokens=('<global-img>', '<row_1_col_1>')" in with_tags.pop()
    assert repr(image_layout(None, "smolvlm_2b", {}, specials)).endswith("tag_tokens=())")


def count_of(num_image_tokens: int) -> ImageCount:
    return replace(count_one(PRESETS["llava_1_5"].rule, 1, 1), num_image_tokens=num_image_tokens)


def test_strings_of_a_preset_can_be_replaced() -> None:
    layout = image_layout(None, "qwen3_vl", {"before": ["Picture: ", "<|im_start|>"], "after": []}, QWEN)
    assert layout.pieces(count_of(5), 0) == (
        Text("Picture: ", False),
        Token("<|im_start|>", False),
        Features(5, "<|image_pad|>"),
    )
    assert image_layout("wrapped", "qwen3_vl", {}, QWEN) == image_layout(None, "qwen3_vl", {}, QWEN)


def test_markup_is_text_only_if_the_profile_says_so() -> None:
    layout = image_layout("wrapped", None, {"token": "<|image_pad|>", "before": ["<img>"], "texts": ["<img>"]}, QWEN)
    assert layout == Wrapped(token="<|image_pad|>", before=("<img>",), texts=("<img>",))


def test_a_word_that_the_layout_calls_text_stays_text() -> None:
    specials = [*tokens_of("kimi_vl_a3b"), "image"]
    count = count_one(PRESETS["kimi_vl_a3b"].rule, 100, 100)
    assert image_layout(None, "kimi_vl_a3b", {}, specials).pieces(count, 0)[1] == Text("image", False)


@pytest.mark.parametrize("rule", [None, "module:function", "pixtral_hf", "idefics3_8b"])
def test_wrapped_fits_every_rule(rule: str | None) -> None:
    layout = image_layout("wrapped", rule, {"token": "<|image_pad|>"}, QWEN)
    assert layout.pieces(count_of(7), 3) == (Features(7, "<|image_pad|>"),)


@pytest.mark.parametrize(
    ("kind", "preset", "parameters", "message"),
    [
        ("wraped", "qwen3_vl", {}, "unknown image layout 'wraped'; did you mean 'wrapped'?"),
        (None, "qwen3vl", {}, "unknown image rule 'qwen3vl', neither a preset nor module:function; did you mean 'qwen3_vl'?"),
        (None, None, {}, "an image rule of your own needs an image layout: kind 'wrapped' with token"),
        (None, "module:function", {}, "an image rule of your own needs an image layout"),
        ("wrapped", None, {}, "image layout 'wrapped' needs token"),
        ("wrapped", "llama4", {"after": []}, "image layout 'wrapped' needs token"),
        ("rows", "qwen3_vl", {}, "'rows' does not fit the counts of image rule 'qwen3_vl'; expected 'wrapped'"),
        ("rows", "llama4", {}, "expected 'llama4', or 'wrapped' with a token of your own"),
        ("gemma3", "module:function", {}, "'gemma3' does not fit the counts of image rule 'module:function'; expected 'wrapped'"),
        (None, "qwen3_vl", {"befor": []}, "image layout 'wrapped' has no parameter 'befor'; did you mean 'before'?"),
        (None, "smolvlm_2b", {"tag_tokens": []}, "image layout 'idefics3' has no parameter 'tag_tokens'"),
        (None, "qwen3_vl", {"before": "<img>"}, "before is '<img>', expected a list of strings"),
        (None, "qwen3_vl", {"before": [1]}, "before is [1], expected a list of strings"),
        (None, "qwen3_vl", {"token": 7}, "token is 7, expected str"),
        (None, "minicpmv_2_6", {"is_numbered": "no"}, "is_numbered is 'no', expected bool"),
        (
            None,
            "qwen3_vl",
            {"after": ["<|vision_ende|>"]},
            "image layout 'wrapped' needs the special token '<|vision_ende|>', which the tokenizer does not have (it has "
            "'<|vision_end|>'); name another in the layout, or add it with special_tokens of the tokenizer",
        ),
        (
            None,
            "pixtral_hf",
            {},
            "needs the special token '[IMG]', '[IMG_BREAK]', '[IMG_END]', which the tokenizer does not have;",
        ),
        ("wrapped", None, {"token": "image"}, "needs the special token 'image', which the tokenizer does not have"),
    ],
)
def test_wrong_profiles_say_the_way_out(
    kind: str | None, preset: str | None, parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        image_layout(kind, preset, parameters, QWEN)


def test_the_table_of_the_document_is_that_of_the_defaults() -> None:
    document = (Path(__file__).parents[2] / "docs" / "image-rules.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| (\w+) \| `(.*?)` \| (.*?) \| (yes|no) \|$", document, re.MULTILINE)
    expected: dict[tuple[str, ...], list[str]] = {}
    for name, default in DEFAULTS.items():
        row = (default.kind, default.placeholder.replace("|", r"\|"), default.source, "yes" if default.is_checked else "no")
        expected.setdefault(row, []).append(f"`{name}`")
    assert rows == [(", ".join(names), *row) for row, names in expected.items()]
