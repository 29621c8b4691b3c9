"""Image rules against rows that the models' own processors gave, and properties that hold for every size.

`data/image_tokens.json` is an excerpt of runs of transformers 5.24, mistral-common 1.13.1, qwen-vl-utils 0.0.14 and vendors'
code on blank images; per rule its columns, rows, and refusals with the processor's message.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.image_rules import PRESETS, ImageCount, ImageCounts, ImageSizes, count_one, count_sample, image_counts, image_rule
from indexer.image_rules.numeric import int_of_round7
from indexer.image_rules.tiling import grids_up_to
from packer.format.errors import UsageError

ORACLE = json.loads((Path(__file__).parent / "data" / "image_tokens.json").read_text())
COLUMNS: dict[str, Callable[[ImageCount], int]] = {
    "llm_image_tokens": lambda count: count.num_image_tokens,
    "llm_image_tokens_with_wrappers": lambda count: count.num_image_tokens + count.num_wrapper_tokens,
    "encoder_patches": lambda count: count.num_patches,
    "encoder_patches_incl_padding": lambda count: count.num_padded_patches,
    "encoder_rows_incl_padding": lambda count: count.num_padded_patches,
    "grid_h": lambda count: count.grid_rows,
    "grid_w": lambda count: count.grid_columns,
    "tiles_h": lambda count: count.grid_rows,
    "tiles_w": lambda count: count.grid_columns,
    "windows": lambda count: count.num_segments,
    "sum_window_len_sq": lambda count: count.sum_squared_attention,
    "newline_runs": lambda count: count.num_newline_runs,
    "text_chars_added": lambda count: count.num_text_chars,
    "tiles_incl_thumbnail": lambda count: count.num_segments,
    "tiles_incl_base": lambda count: count.num_segments,
    "tiles_incl_global": lambda count: count.num_segments,
    "slices_incl_source": lambda count: count.num_segments,
    "crops_incl_global": lambda count: count.num_segments,
    "images_incl_crops": lambda count: count.num_segments,
}
MOST_TOKENS = {
    "qwen2_5_vl": 16384,
    "qwen2_5_vl_max1280": 1280,
    "qwen2_5_vl_via_qwen_vl_utils": 16384,
    "qwen3_vl": 16384,
    "qwen3_vl_via_qwen_vl_utils": 16384,
    "glm4_1v": 6144,
    "internvl3": 3328,
    "internvl3_max6": 1792,
    "nemotron_nano_vl_v2": 3328,
    "llava_next": 2928,
    "hyperclovax_seed_vision_3b": 891,
    "deepseek_vl2": 2101,
    "pixtral_hf": 4096,
    "mistral3_hf": 3025,
    "gemma3_pan_and_scan": 1280,
    "llama4": 2448,
    "idefics3_8b": 2873,
    "smolvlm_2b": 1377,
    "smolvlm_256m_500m": 1088,
    "siglip2_naflex_256": 256,
    "siglip2_naflex_1024": 1024,
    "minicpmv_2_6": 640,
    "nemotron3_nano_omni": 3328,
    "phi3_5_vision_crops4": 781,
    "phi3_5_vision_crops16": 2653,
}
SYMMETRIC = [name for name in PRESETS if name.startswith(("qwen", "glm", "kimi", "siglip", "gemma", "llama4", "idefics", "smol"))]
sides = st.integers(1, 20000)
lists_of_sizes = st.lists(st.tuples(sides, sides), min_size=1, max_size=6)
every_rule = pytest.mark.parametrize("name", PRESETS)


def read_as(column: str, count: ImageCount, name: str) -> int:
    """A column of the oracle; sizes in pixels after resizing are the grid times the patch."""
    if column in ("out_h", "out_w"):
        patch_size: int = getattr(PRESETS[name].rule, "patch_size")  # noqa: B009
        return (count.grid_rows if column == "out_h" else count.grid_columns) * patch_size
    return COLUMNS[column](count)


def test_every_rule_is_in_the_oracle() -> None:
    assert list(PRESETS) == list(ORACLE)
    assert {name for name, entry in ORACLE.items() if entry["errors"]} == {
        *[name for name in PRESETS if name.startswith(("qwen", "glm"))],
        *["pixtral_hf", "mistral3_hf", "minicpmv_2_6", "phi4_multimodal"],
        *["phi3_5_vision_crops4", "kimi_vl_a3b", "kimi_vl_thinking_2506"],
    }


@every_rule
def test_counts_are_those_of_the_processor(name: str) -> None:
    columns, rows = ORACLE[name]["columns"], ORACLE[name]["rows"]
    counts = PRESETS[name].rule(ImageSizes.of([(row[0], row[1]) for row in rows]))
    found = [
        [*row[:2], *(read_as(column, counts.at(position), name) for column in columns[2:])] for position, row in enumerate(rows)
    ]
    assert found == rows
    assert counts.refusals == {}


@every_rule
def test_refusals_are_those_of_the_processor(name: str) -> None:
    for width, height, reason in ORACLE[name]["errors"]:
        count = count_one(PRESETS[name].rule, width, height)
        assert count.refusal == reason
        assert (count.num_image_tokens, count.num_patches, count.sum_squared_attention) == (0, 0, 0)


@every_rule
@given(sizes=lists_of_sizes)
@example(sizes=[(1, 1), (1, 20000), (20000, 1), (20000, 20000), (2, 3)])
def test_many_are_counted_as_each_alone_and_columns_fit_together(name: str, sizes: list[tuple[int, int]]) -> None:
    rule = PRESETS[name].rule
    counts = rule(ImageSizes.of(sizes))
    for position, size in enumerate(sizes):
        one = counts.at(position)
        assert one == count_one(rule, *size)
        if one.refusal is not None:
            continue
        assert 1 <= one.num_image_tokens <= MOST_TOKENS.get(name, 20000)
        assert one.num_segments >= 1
        assert one.num_padded_patches >= one.num_patches
        assert one.num_patches**2 <= one.sum_squared_attention * one.num_segments <= one.num_patches**2 * one.num_segments
        if one.grid_unit == "patches":
            assert one.grid_rows * one.grid_columns == one.num_patches


@pytest.mark.parametrize("name", SYMMETRIC)
@given(width=sides, height=sides)
def test_an_image_on_its_side_costs_the_same(name: str, width: int, height: int) -> None:
    upright, lying = (count_one(PRESETS[name].rule, *size) for size in [(width, height), (height, width)])
    assert lying.num_image_tokens == upright.num_image_tokens
    assert lying.sum_squared_attention == upright.sum_squared_attention
    assert (lying.refusal is None) == (upright.refusal is None)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "pixtral_mistral_common", "kimi_k25", "glm4_1v"])
@given(data=st.data())
def test_within_the_limits_a_larger_image_costs_no_less(name: str, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(300, 900)), data.draw(st.integers(300, 900))
    larger = data.draw(st.integers(width, 1000)), data.draw(st.integers(height, 1000))
    rule = PRESETS[name].rule
    assert count_one(rule, width, height).num_image_tokens <= count_one(rule, *larger).num_image_tokens


@pytest.mark.parametrize("name", ["nemotron3_nano_omni", "qwen3_vl"])
@given(width=st.integers(1, 3000), height=st.integers(1, 3000))
def test_small_images_are_enlarged_to_the_least(name: str, width: int, height: int) -> None:
    count = count_one(PRESETS[name].rule, width, height)
    assert count.refusal is not None or count.num_patches >= 256


@given(st.integers(0, 30000), st.floats(-2e-7, 2e-7))
@example(5, -5e-8)
@example(1, -4.9999999e-8)
def test_int_of_a_number_rounded_to_seven_digits(whole: int, off: float) -> None:
    values = [abs(whole + off), math.nextafter(whole, math.inf), abs(math.nextafter(whole, 0.0)), whole + abs(off) * 1e6]
    assert int_of_round7(np.array(values)).tolist() == [int(round(value, 7)) for value in values]


def test_grids_are_ordered_by_area_then_columns() -> None:
    assert grids_up_to(4) == ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (2, 2), (4, 1))
    assert grids_up_to(3, min_tiles=2) == ((1, 2), (2, 1), (1, 3), (3, 1))


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("qwen2_5_vl", (10, 1400), 24),
        ("qwen2_5_vl_via_qwen_vl_utils", (10, 1400), 50),
        ("qwen2_5_vl", (168, 14), 7),
        ("qwen2_5_vl_via_qwen_vl_utils", (168, 14), 6),
        ("pixtral_hf", (359, 2852), 512),
        ("pixtral_mistral_common", (359, 2852), 576),
    ],
)
def test_two_stacks_of_one_model_differ(name: str, size: tuple[int, int], expected: int) -> None:
    assert count_one(PRESETS[name].rule, *size).num_image_tokens == expected


@pytest.mark.parametrize(
    ("name", "size", "segments", "tokens"),
    [
        ("qwen2_5_vl_max1280", (1110, 890), 80, 1280),  # rounds to exactly max_pixels: not shrunk
        ("nemotron3_nano_omni", (1656, 2024), 1, 3328),  # 127 x 104 patches; 128 x 104 are exactly the budget
        ("phi4_multimodal", (2300, 2600), 37, 8529),  # exactly 36 crops: the grid stays
        ("kimi_vl_thinking_2506", (28, 7140), 1, 255),
        ("kimi_vl_thinking_2506", (28, 7168), 0, 0),  # exactly 512 patches a side are refused
    ],
)
def test_sizes_exactly_at_a_limit(name: str, size: tuple[int, int], segments: int, tokens: int) -> None:
    count = count_one(PRESETS[name].rule, *size)
    assert (count.num_segments, count.num_image_tokens) == (segments, tokens)


def test_a_long_image_may_be_refused_at_its_second_resize_only() -> None:
    assert count_one(PRESETS["qwen2_5_vl"].rule, 95, 17308).refusal is None
    counts = PRESETS["qwen2_5_vl_via_qwen_vl_utils"].rule(ImageSizes.of([(1, 3000), (95, 17308), (95, 1730)]))
    ratios = {0: "3000.0", 1: "206.0"}
    assert counts.refusals == {at: f"absolute aspect ratio must be smaller than 200, got {ratio}" for at, ratio in ratios.items()}


def test_a_strip_that_shrinks_to_nothing_is_refused() -> None:
    assert "division by zero" in str(count_one(PRESETS["nemotron3_nano_omni"].rule, 300_000, 1).refusal)


def test_onevision_gives_each_of_several_images_one_view() -> None:
    rule = PRESETS["llava_onevision"].rule
    assert count_one(rule, 1920, 1080).num_image_tokens == 7269
    for count in count_sample(rule, [(1920, 1080), (30, 20)]):
        assert (count.num_image_tokens, count.num_patches, count.sum_squared_attention) == (730, 729, 729**2)
        assert (count.grid_rows, count.grid_columns, count.num_segments) == (1, 1, 1)


def test_deepseek_takes_no_tiles_of_more_than_two_images() -> None:
    rule = PRESETS["deepseek_vl2"].rule
    alone = count_one(rule, 1920, 1080)
    assert count_sample(rule, [(1920, 1080)] * 2) == [alone] * 2
    assert [(one.num_image_tokens, one.num_patches) for one in count_sample(rule, [(1920, 1080)] * 3)] == [(421, 1458)] * 3


def test_samples_in_one_array_do_not_mix() -> None:
    rule = PRESETS["llava_onevision"].rule
    counts = rule(ImageSizes.of([(1920, 1080)] * 4, [1, 0, 2, 1]))
    assert counts.num_image_tokens.tolist() == [7269, 730, 730, 7269]
    assert len(rule(ImageSizes.of([]))) == 0


def test_windows_are_a_parameter() -> None:
    whole = image_rule("qwen2_5_vl", {"window_patches": None})
    windowed, full = count_one(PRESETS["qwen2_5_vl"].rule, 800, 600), count_one(whole, 800, 600)
    assert full.num_patches == windowed.num_patches == 2436
    assert (full.sum_squared_attention, full.num_segments) == (2436**2, 1)
    assert windowed.sum_squared_attention == 146448


def test_parameters_replace_published_values() -> None:
    capped = image_rule("qwen2_5_vl", {"max_pixels": 1280 * 28**2})
    assert capped == PRESETS["qwen2_5_vl_max1280"].rule
    assert image_rule("internvl3", {"max_tiles": 6}) == PRESETS["internvl3_max6"].rule
    one_tile = image_rule("internvl3", {"crop_to_patches": False})
    assert count_one(one_tile, 4000, 3000).num_image_tokens == 256
    assert image_rule("gemma3", {"min_ratio": 1}) is not None


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("qwen3vl", {}, "unknown image rule 'qwen3vl', neither a preset nor module:function; did you mean 'qwen3_vl'?"),
        ("zzz", {}, "expected one of qwen2_5_vl, "),
        ("qwen3_vl", {"max_pixel": 1}, "image rule 'qwen3_vl' has no parameter 'max_pixel'; did you mean 'max_pixels'?"),
        ("qwen3_vl", {"max_pixels": "1"}, "max_pixels is '1', expected int"),
        ("qwen3_vl", {"max_pixels": True}, "max_pixels is True, expected int"),
        ("qwen3_vl", {"window_patches": 1.5}, "window_patches is 1.5, expected int or none"),
        ("qwen3_vl", {"patch_size": 0}, "patch_size is 0, expected more than 0"),
        ("gemma3", {"min_ratio": math.nan}, "min_ratio is nan, expected more than 0"),
        ("llava_next", {"candidates": [[1, 2]]}, "candidates cannot be changed; write your own rule as module:function"),
        ("no.such.module:rule", {}, "image rule no.such.module:rule cannot be loaded"),
        ("math:no_such", {}, "image rule math:no_such cannot be loaded"),
        ("math:pi", {}, "image rule math:pi is of type float, expected a function of ImageSizes"),
        ("builtins:len", {"a": 1}, "image rule builtins:len cannot be called with the parameters {'a': 1}"),
    ],
)
def test_wrong_names_and_parameters_say_the_way_out(name: str, parameters: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        image_rule(name, parameters)(ImageSizes.of([(1, 1)]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("builtins:len", "image rule builtins:len returned int, expected ImageCounts of 1 images"),
        ("builtins:int", "image rule builtins:int raised TypeError: int() argument must be"),
    ],
)
def test_a_function_that_is_no_rule_refuses_every_image(name: str, message: str) -> None:
    counts = image_rule(name)(ImageSizes.of([(1, 1), (2, 2)]))
    assert set(counts.refusals) == {0, 1}
    assert counts.refusals[1].startswith(message)
    assert count_one(image_rule(name), 1, 1).num_image_tokens == 0


FAULTS = """
import dataclasses
import numpy as np
from indexer.image_rules import image_counts

def faults(sizes):
    width = sizes.widths
    if (width == 13).any():
        raise ValueError("thirteen")
    tokens = np.where(width == 14, -1, np.where(width == 15, 2**31, width))
    unit = "patches" if (width == 16).any() else "rooms" if (width == 17).any() else "tiles"
    counts = image_counts(sizes, image_tokens=tokens, patches=1, grid=(1, 1), grid_unit=unit, refusals=
        {k: "too plain" for k in np.flatnonzero(width == 18).tolist()})
    if (width == 19).any():
        counts = dataclasses.replace(counts, num_patches=counts.num_patches[1:])
    return dataclasses.replace(counts, grid_rows=counts.grid_rows / 2) if (width == 20).any() else counts
"""
FAULTY = {
    13: "image rule rule_with_faults:faults raised ValueError: thirteen",
    14: "image rule rule_with_faults:faults returned num_image_tokens -1, expected 0 or more and less than 2^31",
    15: "image rule rule_with_faults:faults returned num_image_tokens 2147483648, expected 0 or more and less than 2^31",
    17: "image rule rule_with_faults:faults returned grid_unit 'rooms', expected one of patches, tiles",
    18: "too plain",
    19: "image rule rule_with_faults:faults returned num_patches of int64 of shape (1,), expected 2 integers",
    20: "image rule rule_with_faults:faults returned grid_rows of float64 of shape (2,), expected 2 integers",
}


@pytest.mark.parametrize("width", FAULTY)
def test_your_own_rule_costs_the_samples_it_fails_for(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rule_with_faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    rule = image_rule("rule_with_faults:faults")
    counts = rule(ImageSizes.of([(5, 9), (width, 9), (6, 9), (7, 9)], [1, 0, 2, 1]))
    expected = {1: FAULTY[width]} if width == 18 else dict.fromkeys((1, 2), FAULTY[width])
    assert counts.refusals == expected
    assert counts.num_image_tokens.tolist() == [5, 0, 6 if width == 18 else 0, 7]


@pytest.mark.parametrize(
    ("sizes", "lengths", "message"),
    [
        ([(0, 5)], None, "an image has width 0, expected 1 to 16,777,216"),
        ([(5, 2**24 + 1)], None, "an image has height 16777217"),
        ([(1.5, 2)], None, "widths are float64, expected whole numbers"),
        ([(10**30, 2)], None, "widths are object, expected whole numbers"),
        ([(1, 1)], [2], "the samples hold 2 images, but 1 sizes are given"),
        ([(1, 1)], [2, -1], "the samples hold 1 images, but 1 sizes are given"),
    ],
)
def test_sizes_that_no_image_has_are_refused(sizes: list[tuple[int, int]], lengths: list[int] | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ImageSizes.of(sizes, lengths)


def test_columns_must_be_flat_and_equally_long() -> None:
    for widths, heights in [([1, 2], [1]), ([[1]], [[1]])]:
        with pytest.raises(UsageError, match="must be flat and equally long"):
            ImageSizes.of_arrays(widths, heights)


def test_your_own_rule_plugs_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rule_of_test.py").write_text(
        "from indexer.image_rules import image_counts\n"
        "def squares(sizes, side=10):\n"
        "    rows, columns = -(-sizes.heights // side), -(-sizes.widths // side)\n"
        "    return image_counts(sizes, image_tokens=rows * columns, patches=rows * columns, grid=(rows, columns),\n"
        "                        grid_unit='patches')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rule = image_rule("own_rule_of_test:squares", {"side": 5})
    assert count_one(rule, 11, 20).num_image_tokens == 12
    assert count_one(image_rule("own_rule_of_test:squares"), 11, 20).sum_squared_attention == 16
    again = pickle.loads(pickle.dumps(rule))
    assert count_one(again, 11, 20) == count_one(rule, 11, 20)


def test_samples_asked_for_alone_must_agree_on_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rule_with_faults.py").write_text(FAULTS)
    monkeypatch.syspath_prepend(tmp_path)
    counts = image_rule("rule_with_faults:faults")(ImageSizes.of([(5, 9), (16, 9), (13, 9)]))
    unit = "image rule rule_with_faults:faults returned grid_unit 'patches', and 'tiles' for another sample"
    assert counts.refusals == {1: unit, 2: FAULTY[13]}


@every_rule
def test_rules_travel_and_presets_say_their_source(name: str) -> None:
    preset = PRESETS[name]
    assert pickle.loads(pickle.dumps(preset.rule)) == preset.rule
    assert preset.models
    assert preset.source


def test_one_image_has_the_columns_of_many() -> None:
    one, many = {item.name for item in fields(ImageCount)}, {item.name for item in fields(ImageCounts)}
    assert one - {"refusal"} == many - {"refusals"}


def test_constants_and_columns_make_counts() -> None:
    counts = image_counts(
        ImageSizes.of([(1, 1), (2, 2)]),
        image_tokens=np.array([3, 4]),
        patches=9,
        grid=(3, 3),
        grid_unit="patches",
        refusals={1: "too plain"},
    )
    assert counts.num_image_tokens.tolist() == [3, 0]
    assert counts.sum_squared_attention.tolist() == [81, 0]
    assert counts.at(1).refusal == "too plain"


def test_the_table_of_the_document_is_that_of_the_presets() -> None:
    document = (Path(__file__).parents[2] / "docs" / "image-rules.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (ran|derived) \|$", document, re.MULTILINE)
    assert rows == [(name, preset.models, preset.source, preset.exactness) for name, preset in PRESETS.items()]
