from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from indexer.image_rules import PRESETS, ImageSizes
from packer.format.errors import FormatError, UsageError
from plugin.cost import (
    ENCODERS,
    LLMS,
    MAX_COST,
    CostModel,
    EncoderCost,
    EncoderShape,
    LlmCost,
    LlmShape,
    Projector,
    Unit,
    Work,
    cost_file,
    cost_model,
    from_shapes,
    sample_costs,
)

ROOT = Path(__file__).parents[2]
WINDOWS = cost_model("qwen2_5_vl_vit+qwen2_5_7b")

coefficients = st.integers(0, 10**11)
models = st.builds(
    CostModel,
    name=st.just("any"),
    unit=st.sampled_from(Unit),
    encoder=st.builds(
        EncoderCost,
        linear=coefficients,
        quadratic=st.integers(0, 10**7),
        full_quadratic=st.integers(0, 10**6),
        fixed=coefficients,
    ),
    llm=st.builds(LlmCost, linear=coefficients, quadratic=st.integers(0, 10**7)),
)
"""As large as those of presets and larger: some samples cost more than is accepted."""
images = st.tuples(st.integers(0, 10**6), st.integers(0, 10**12))
"""Patches and squared attention."""


def of_fraction(terms: list[tuple[int, int]]) -> int:
    """Round half up, by the book."""
    return int(Fraction(sum(weight * value for weight, value in terms), 10**6) + Fraction(1, 2))


def exact_encoder_cost(model: CostModel, sample: list[Any]) -> int:
    e = model.encoder
    terms = [(e.linear, p) for p, _ in sample] + [(e.quadratic, s) for _, s in sample]
    return of_fraction([*terms, *((e.full_quadratic, p * p) for p, _ in sample), (e.fixed, len(sample))])


def exact_llm_cost(model: CostModel, num_tokens: int) -> int:
    return of_fraction([(model.llm.linear, num_tokens), (model.llm.quadratic, num_tokens**2)])


def matches(cost: Callable[[], Any], expected: list[int]) -> bool:
    """Whether it is the expected, and refused where one of these is above the most."""
    if max(expected, default=0) <= MAX_COST:
        found = cost()
        return bool(found.dtype == np.int64 and found.tolist() == expected)
    with pytest.raises(UsageError, match=f"expected at most {MAX_COST:,}"):
        cost()
    return True


@given(models, st.lists(st.lists(images, max_size=3), max_size=4))
def test_cost_of_a_sample_is_the_exact_sum_over_its_images_rounded_once(model: CostModel, samples: list[list[Any]]) -> None:
    flat = [image for sample in samples for image in sample]
    numbers = [len(sample) for sample in samples]
    expected = [exact_encoder_cost(model, sample) for sample in samples]
    assert matches(lambda: model.encoder_cost_of_images([p for p, _ in flat], [s for _, s in flat], numbers), expected)
    # And the same from the sums of each sample.
    columns = np.array(
        [[sum(p for p, _ in s), sum(q for _, q in s), len(s), sum(p * p for p, _ in s)] for s in samples], np.int64
    )
    assert matches(lambda: model.encoder_cost(*columns.reshape(-1, 4).T), expected)


@given(models, st.lists(st.integers(0, 2**20), max_size=5))
def test_cost_of_tokens_is_exact(model: CostModel, tokens: list[int]) -> None:
    assert matches(lambda: model.llm_cost(tokens), [exact_llm_cost(model, number) for number in tokens])


@given(models, st.lists(images, min_size=1, max_size=4), images)
def test_costs_add_up_and_rise(model: CostModel, sample: list[Any], another: Any) -> None:
    def cost(chosen: list[Any]) -> int:
        patches, attention = (list(column) for column in zip(*chosen, strict=True))
        return int(model.encoder_cost_of_images(patches, attention, [len(chosen)])[0])

    larger = [(another[0] + 1, another[1] + 1)]
    assume(max(exact_encoder_cost(model, some) for some in ([*sample, another], larger)) <= MAX_COST)
    parts = [cost([image]) for image in [*sample, another]]
    whole = cost([*sample, another])
    # Each of the parts is off by half a unit at most.
    assert abs(whole - sum(parts)) <= len(parts) / 2 + 0.5
    assert whole >= cost(sample)
    assert cost(larger) >= cost([another])


@given(models, st.integers(0, 2**20), st.integers(0, 2**20))
def test_splitting_a_sample_never_costs_more(model: CostModel, one: int, other: int) -> None:
    assume(exact_llm_cost(model, one + other) <= MAX_COST)
    apart = int(model.llm_cost([one, other]).sum())
    assert apart <= int(model.llm_cost([one + other])[0]) + 1


def test_the_largest_presets_fit_and_leave_room_for_sums() -> None:
    for encoder in ENCODERS:
        for llm in LLMS:
            model = cost_model(f"{encoder}+{llm}")
            costs = [int(model.llm_cost([2**20])[0]), int(model.encoder_cost_of_images([10**6], [10**12], [1])[0])]
            assert 0 < max(costs) <= MAX_COST
    assert 2 * MAX_COST * 524_288 < 2**63


def test_what_does_not_fit_is_refused_and_named() -> None:
    with pytest.raises(
        UsageError, match=r"row 1 with num_patches 100,000,000, .*: found a cost of \d[\d,]+, expected at most 8,796,093,022,207"
    ):
        WINDOWS.encoder_cost_of_images([4, 10**8], [16, 10**15], [1, 1])
    with pytest.raises(UsageError, match=r"row 0 with num_tokens 2,147,483,647: found a cost of"):
        WINDOWS.llm_cost([2**31 - 1, 5])
    with pytest.raises(UsageError, match="found num_tokens 2,147,483,648 in row 0, expected 0 to"):
        WINDOWS.llm_cost([2**31])
    with pytest.raises(UsageError, match="found num_patches 9,223,372,036,854,775,808 in row 1"):
        WINDOWS.encoder_cost(np.array([1, 2**63], np.uint64), [1, 1], [1, 1], [1, 1])
    with pytest.raises(UsageError, match="found a sample of 3 images and an image of 4,611,686,014,132,420,609 pairs"):
        WINDOWS.encoder_cost_of_images([2**31 - 1] * 3, [1] * 3, [3])
    # Exactly at the limit, and one above.
    unit = CostModel(name="a", unit=Unit.FLOP, encoder=EncoderCost(linear=0, quadratic=0), llm=LlmCost(linear=10**6, quadratic=0))
    assert unit.llm_cost([2**31 - 1]).tolist() == [2**31 - 1]
    limit = replace(unit, encoder=EncoderCost(linear=10**6, quadratic=0))
    assert limit.encoder_cost([MAX_COST], [0], [0]).tolist() == [MAX_COST]
    with pytest.raises(UsageError, match=f"found a cost of {MAX_COST + 1:,}, expected at most {MAX_COST:,}"):
        limit.encoder_cost([MAX_COST + 1], [0], [0])


def test_columns_that_are_wrong_are_refused() -> None:
    with pytest.raises(UsageError, match="found num_tokens as float64, expected whole numbers"):
        WINDOWS.llm_cost([1.0])
    with pytest.raises(UsageError, match="found num_tokens -1 in row 1, expected 0 to"):
        WINDOWS.llm_cost([4, -1])
    with pytest.raises(UsageError, match=r"found num_patches of shape \(2,\), sum_squared_attention of shape \(1,\)"):
        WINDOWS.encoder_cost([1, 2], [1], [1, 1], [1, 4])
    with pytest.raises(UsageError, match="found 2 images, expected 3 as num_images says"):
        WINDOWS.encoder_cost_of_images([1, 2], [1, 4], [1, 2])
    with pytest.raises(
        UsageError, match="layers that attend to whole images beside layers with windows: give sum_squared_patches"
    ):
        WINDOWS.encoder_cost([4], [16], [1])
    with pytest.raises(UsageError, match=r"encoder: found linear 1\.5, expected a whole number from 0"):
        EncoderCost(linear=1.5, quadratic=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="llm: found quadratic -1"):
        LlmCost(linear=1, quadratic=-1)
    assert WINDOWS.llm_cost([]).tolist() == []
    assert WINDOWS.encoder_cost_of_images([], [], [0, 0]).tolist() == [0, 0]


# What the coefficients of presets should be, by hand: forward FLOP of each layer, times three.
QWEN25_LINEAR = 2 * (3 * 2 * 14 * 14 * 1280 + 32 * (4 * 1280 * 1280 + 3 * 1280 * 3420)) + 2 * (5120 * 5120 + 5120 * 3584) // 4
QWEN3_LINEAR = 2 * (3 * 2 * 16 * 16 * 1152 + 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)) + 4 * 2 * (4608 * 4608 + 4608 * 2048) // 4
INTERN_LINEAR = 2 * (3 * 14 * 14 * 3200 + 45 * (4 * 3200 * 3200 + 2 * 3200 * 12800)) + 2 * (12800 * 4096 + 4096 * 4096) // 4
MOE_LINEAR = 2 * (48 * (2048 * 128 * (2 * 32 + 2 * 4) + 8 * 3 * 2048 * 768 + 2048 * 128) + 2048 * 151936)
LLAMA_LINEAR = 2 * (32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 4096 * 128256)
GOLDEN = {
    "qwen2_5_vl_vit+qwen2_5_7b": (
        EncoderCost(linear=3 * QWEN25_LINEAR, quadratic=3 * 28 * 4 * 1280, full_quadratic=3 * 4 * 4 * 1280),
        LlmCost(
            linear=3 * 2 * (28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944) + 3584 * 152064),
            quadratic=3 * 2 * 28 * 28 * 128,
        ),
    ),
    "qwen3_vl_vit+qwen3_30b_a3b": (
        EncoderCost(linear=3 * QWEN3_LINEAR, quadratic=3 * 27 * 4 * 1152),
        LlmCost(linear=3 * MOE_LINEAR, quadratic=3 * 2 * 48 * 32 * 128),
    ),
    "internvit_6b+llama_3_1_8b": (
        EncoderCost(linear=3 * INTERN_LINEAR, quadratic=3 * 45 * 4 * 3200),
        LlmCost(linear=3 * LLAMA_LINEAR, quadratic=3 * 2 * 32 * 4096),
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_presets_by_hand(name: str) -> None:
    model = cost_model(name)
    assert (model.encoder, model.llm) == GOLDEN[name]
    assert model.name == name
    assert all(preset.source in model.source for preset in (ENCODERS[name.split("+")[0]], LLMS[name.split("+")[1]]))


@pytest.mark.parametrize(
    ("llm", "billions", "tables"),
    [
        ("qwen2_5_7b", 7.6, 1),
        ("qwen2_5_72b", 72.7, 1),
        ("qwen3_4b", 4.0, 0),
        ("qwen3_8b", 8.2, 1),
        ("qwen3_30b_a3b", 3.3, 1),
        ("qwen3_235b_a22b", 22, 1),
        ("llama_3_1_8b", 8.0, 1),
        ("llama_3_1_70b", 70.6, 1),
    ],
)
def test_linear_cost_is_two_flop_for_each_active_weight(llm: str, billions: float, tables: int) -> None:
    """Against the published numbers of active parameters; the table of inputs, where it is one of its own, takes no FLOP."""
    shape = LLMS[llm].shape
    weights = shape.linear_flop() / 2 + tables * shape.hidden * shape.vocab
    assert weights / 1e9 == pytest.approx(billions, rel=0.02)


def test_attention_equals_the_linear_part_at_the_known_size() -> None:
    model = cost_model("siglip_so400m_patch14+qwen3_8b")
    assert 6600 < model.encoder.linear / model.encoder.quadratic < 6640


def test_windows_are_counted_by_window_and_full_layers_by_image() -> None:
    """24 x 20 patches in windows of 8 x 8: six whole, three of 8 x 4."""
    counts = PRESETS["qwen2_5_vl"].rule(ImageSizes.of([(280, 336)]))
    assert (counts.num_patches.tolist(), counts.sum_squared_attention.tolist()) == ([480], [6 * 64**2 + 3 * 32**2])
    found = int(WINDOWS.encoder_cost_of_images(counts.num_patches, counts.sum_squared_attention, [1])[0])
    layers = 28 * (6 * 64**2 + 3 * 32**2) + 4 * 480**2
    assert found == round((3 * QWEN25_LINEAR * 480 + 3 * 4 * 1280 * layers) / 1e6)
    # Qwen2-VL has the same rule and no windows: the index's windows do not enter its cost.
    plain = cost_model("qwen2_vl_vit+qwen2_5_7b")
    windowed, full = ([27648], [480**2])
    assert plain.encoder_cost_of_images([480], windowed, [1]).tolist() == plain.encoder_cost_of_images([480], full, [1]).tolist()


def test_tiles_cost_the_same_each() -> None:
    model = cost_model("internvit_300m+qwen2_5_7b")
    counts = PRESETS["internvl3"].rule(ImageSizes.of([(448, 448), (1920, 1080)]))
    one, many = model.encoder_cost_of_images(counts.num_patches, counts.sum_squared_attention, [1, 1]).tolist()
    assert counts.num_patches.tolist() == [1024, 9 * 1024]
    assert abs(many - 9 * one) <= 5


def test_work_scales_coefficients_and_rounds_half_up() -> None:
    encoder = EncoderShape(num_layers=2, hidden=8, mlp=16, patch_size=2)
    llm = LlmShape(num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn=16, vocab=32)
    linear, pair = 2 * (3 * 4 * 8 + 2 * (4 * 64 + 2 * 128)), 2 * 4 * 8
    token, square = 2 * (8 * 4 * 6 + 3 * 128 + 8 * 32), 2 * 8
    once = from_shapes(encoder, llm, Work(encoder_passes=1, llm_passes=1))
    assert once.encoder == EncoderCost(linear=linear, quadratic=pair)
    assert once.llm == LlmCost(linear=token, quadratic=square)
    work = Work(encoder_passes=1, llm_passes=4, attention_percent=50, encoder_ranks=3, llm_ranks=8)
    shared = from_shapes(encoder, llm, work, fixed=7)
    assert shared.encoder == EncoderCost(linear=round(linear / 3), quadratic=int(pair / 6 + 0.5), fixed=7)
    assert shared.llm == LlmCost(linear=token * 4 // 8, quadratic=square * 4 // 16)
    assert from_shapes(encoder, llm).llm.linear == 3 * token


def test_shapes_that_are_wrong_are_refused() -> None:
    sizes = {"num_layers": 2, "hidden": 8, "mlp": 16, "patch_size": 2}
    with pytest.raises(UsageError, match="encoder: found hidden 0, expected a whole number of at least 1"):
        EncoderShape(**sizes | {"hidden": 0})
    with pytest.raises(UsageError, match="found num_full_layers 3, expected 0 to 2 layers"):
        EncoderShape(**sizes, num_full_layers=3)
    with pytest.raises(UsageError, match="projector: found inner 0"):
        Projector(patches_per_feature=1, inner=(0,))
    with pytest.raises(UsageError, match="found experts_per_token 2 and num_experts None, expected both or none"):
        LlmShape(num_layers=1, hidden=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn=16, vocab=32, experts_per_token=2)
    with pytest.raises(UsageError, match="work: found attention_percent 0"):
        Work(attention_percent=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "qwen3_vl_vit",
            r"expected ENCODER\+LLM as in qwen3_vl_vit\+qwen3_8b, or a file ending in .json.*encoders: qwen2_vl_vit",
        ),
        ("qwen3_vl_vti+qwen3_8b", r"found no encoder 'qwen3_vl_vti'; did you mean 'qwen3_vl_vit'\?"),
        ("qwen3_vl_vit+qwen3_8B_", r"found no language model 'qwen3_8B_'; did you mean 'qwen3_8b'\?"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cost_model(name)


NUMBERS = """
bayplan_cost: 1
name: mine
unit: flop
encoder: {linear: 2_000_000, quadratic: 300000, fixed: 5}
llm: {linear: 4000000, quadratic: 80000}
"""
OWN_SHAPES = """
bayplan_cost: 1
shapes:
  encoder:
    num_layers: 2
    hidden: 8
    mlp: 16
    patch_size: 2
    projector: {patches_per_feature: 4, inner: [null, 6]}
  llm: qwen3_8b
  work: {encoder_passes: 1}
  fixed: 9
"""


def test_files_give_numbers_or_shapes(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(NUMBERS)
    found = cost_model(tmp_path / "a.yaml")
    encoder = EncoderCost(linear=2_000_000, quadratic=300_000, fixed=5)
    assert found == CostModel(name="mine", unit=Unit.FLOP, encoder=encoder, llm=LlmCost(linear=4_000_000, quadratic=80_000))
    (tmp_path / "b.yml").write_text(OWN_SHAPES)
    shaped = CostModel.from_file(tmp_path / "b.yml")
    projector = Projector(patches_per_feature=4, inner=(None, 6))
    shape = EncoderShape(num_layers=2, hidden=8, mlp=16, patch_size=2, projector=projector)
    assert shaped == from_shapes(shape, LLMS["qwen3_8b"].shape, Work(encoder_passes=1), name="b", fixed=9)
    with pytest.raises(UsageError, match=r"found Work\(.*for the cost model in .*b.yml, expected it in the file: under `shapes`"):
        cost_model(tmp_path / "b.yml", Work())


@given(models)
def test_a_file_gives_back_the_model(model: CostModel) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.json")
        path.write_bytes(cost_file(model, {"anything": [1.5]}))
        assert CostModel.from_file(path) == model


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quadratic: 300000", "quadratc: 300000", r"encoder: found the key 'quadratc'; did you mean 'quadratic'\?"),
        (", quadratic: 300000", "", "encoder: found no quadratic, expected linear, quadratic"),
        ("300000", "0.3", r"encoder: expected int, got float - at quadratic"),
        ("300000", "1e9", r"encoder: expected int, got str - at quadratic"),
        ("300000", "-1", r"encoder: found quadratic -1, expected a whole number from 0"),
        ("300000", "true", r"encoder: expected int, got bool - at quadratic"),
        ("unit: flop", "unit: mflop", r"found unit 'mflop', expected one of flop, femtosecond \(costs are a million of it\)"),
        ("bayplan_cost: 1", "bayplan_cost: 2", "found bayplan_cost 2, expected 1"),
        ("bayplan_cost: 1", "", "found bayplan_cost None, expected 1"),
        ("unit: flop", "unit: flop\nunit: flop", "found the key 'unit' twice"),
        ("unit: flop", "units: flop", r"found the key 'units'; did you mean 'unit'\?"),
        ("unit: flop", "{", "not valid YAML: "),
        (NUMBERS, "- 1", "found a list, expected a mapping"),
        (
            NUMBERS,
            "bayplan_cost: 1\nshapes: {encoder: x, llm: qwen3_8b}",
            r"shapes.encoder: found no encoder 'x'; expected one of",
        ),
        (NUMBERS, "bayplan_cost: 1\nshapes: {encoder: internvit_6b}", "shapes: found no llm, expected encoder, llm"),
    ],
)
def test_files_that_are_wrong_say_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    assert old in NUMBERS
    path.write_text(NUMBERS.replace(old, new))
    with pytest.raises(FormatError, match=message) as error:
        CostModel.from_file(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("inner:", "inne:", r"shapes.encoder.projector: found the key 'inne'; did you mean 'inner'\?"),
        ("[null, 6]", "[null, 0]", "projector: found inner 0, expected a whole number of at least 1"),
        ("encoder_passes: 1", "encoder_passes: 0", "work: found encoder_passes 0"),
        ("llm: qwen3_8b", "llm: qwen3_8", r"shapes.llm: found no language model 'qwen3_8'; did you mean 'qwen3_8b'\?"),
        ("mlp: 16", "mlp: wide", "shapes.encoder: expected int, got str - at mlp"),
        ("fixed: 9", "fixed: -9", "encoder: found fixed -9"),
        ("llm: qwen3_8b", "llm: 7", "shapes: expected str | object, got int - at llm"),
    ],
)
def test_shapes_in_files_that_are_wrong_say_where(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    assert old in OWN_SHAPES
    path.write_text(OWN_SHAPES.replace(old, new))
    with pytest.raises(FormatError, match=message.replace(" | ", r" \| ")) as error:
        CostModel.from_file(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"bayplan_cost": 1, "bayplan_cost": 1}', "found the key 'bayplan_cost' twice"),
        ("a.json", '{"bayplan_cost": NaN}', "not valid JSON: NaN is not a number of JSON"),
        ("a.json", '{"bayplan_cost', "not valid JSON: "),
        ("a.txt", "", "found a file ending in '.txt', expected .json, .yaml, .yml"),
    ],
)
def test_json_is_as_strict(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=message):
        CostModel.from_file(tmp_path / name)


def test_a_fingerprint_says_what_decides_a_cost() -> None:
    assert WINDOWS.fingerprint == replace(WINDOWS, name="other", source="other").fingerprint
    others = [
        replace(WINDOWS, unit=Unit.FEMTOSECOND),
        replace(WINDOWS, encoder=replace(WINDOWS.encoder, fixed=1)),
        replace(WINDOWS, llm=replace(WINDOWS.llm, quadratic=1)),
    ]
    assert len({model.fingerprint for model in [WINDOWS, *others]}) == 4
    assert WINDOWS.fingerprint == "a62fec13a504469434b6b4aa5105bdcb"


def test_costs_and_fingerprints_are_the_same_in_another_process() -> None:
    code = """
from plugin.cost import cost_model
model = cost_model("qwen2_5_vl_vit+qwen2_5_7b")
print([model.fingerprint, *model.encoder_cost_of_images([480, 4], [27648, 16], [2]).tolist(), *model.llm_cost([77777]).tolist()])
import sys
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded & {"torch", "ray", "pyarrow", "pydantic", "tokenizers", "megatron"}))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    expected = [WINDOWS.fingerprint, *WINDOWS.encoder_cost_of_images([480, 4], [27648, 16], [2]).tolist()]
    expected += WINDOWS.llm_cost([77777]).tolist()
    assert done.stdout.splitlines() == [str(expected), "[]"]


def test_published_shapes_are_those_of_transformers() -> None:
    """Where the class defaults are what is published."""
    from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

    qwen3, shape = Qwen3VLVisionConfig(), ENCODERS["qwen3_vl_vit"].shape
    assert (qwen3.depth, qwen3.hidden_size, qwen3.intermediate_size, qwen3.patch_size) == (27, 1152, 4304, 16)
    assert (shape.num_layers, shape.hidden, shape.mlp, shape.patch_size) == (27, 1152, 4304, 16)
    assert shape.projector is not None
    assert shape.projector.count == 1 + len(qwen3.deepstack_visual_indexes)
    qwen2, shape = Qwen2VLVisionConfig(), ENCODERS["qwen2_vl_vit"].shape
    assert (qwen2.depth, qwen2.embed_dim, qwen2.embed_dim * qwen2.mlp_ratio) == (shape.num_layers, shape.hidden, shape.mlp)
    qwen25, shape = Qwen2_5_VLVisionConfig(), ENCODERS["qwen2_5_vl_vit"].shape
    assert (qwen25.depth, qwen25.intermediate_size, len(qwen25.fullatt_block_indexes)) == (32, shape.mlp, shape.num_full_layers)
    assert qwen25.window_size // qwen25.patch_size == 8
    intern, shape = InternVLVisionConfig(), ENCODERS["internvit_300m"].shape
    assert (intern.num_hidden_layers, intern.hidden_size, intern.intermediate_size) == (shape.num_layers, shape.hidden, shape.mlp)
    text, llm = Qwen2_5_VLTextConfig(), LLMS["qwen2_5_72b"].shape
    assert (text.num_hidden_layers, text.hidden_size, text.intermediate_size) == (llm.num_layers, llm.hidden, llm.ffn)
    assert (text.num_attention_heads, text.num_key_value_heads, text.vocab_size) == (llm.num_heads, llm.num_kv_heads, llm.vocab)


def counted_flop(run: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def once(encoder: EncoderShape, llm_hidden: int) -> CostModel:
    llm = LlmShape(num_layers=1, hidden=llm_hidden, num_heads=2, num_kv_heads=1, head_dim=4, ffn=16, vocab=32)
    return from_shapes(encoder, llm, Work(encoder_passes=1, llm_passes=1))


def test_flop_of_encoders_are_those_torch_counts() -> None:
    """Small models of the real classes, run on images of several sizes; windows cut at the right and at the bottom."""
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    sizes = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24}
    grid = torch.tensor([[1, 12, 20], [1, 4, 6]])
    patches = [12 * 20, 4 * 6]

    config = Qwen2_5_VLVisionConfig(**sizes, fullatt_block_indexes=[1])
    config._attn_implementation = "eager"
    model = Qwen2_5_VisionTransformerPretrainedModel(config)
    pixels = torch.zeros(sum(patches), 3 * 2 * 14 * 14)
    shape = replace(
        ENCODERS["qwen2_5_vl_vit"].shape,
        num_layers=4,
        hidden=32,
        mlp=48,
        num_full_layers=1,
        projector=Projector(patches_per_feature=4, inner=(128,)),
    )
    attention = [(8 * 8 + 4 * 4) * (8 * 8 * 2 + 4 * 4), (4 * 6) ** 2]
    e = once(shape, 24).encoder
    expected = e.linear * sum(patches) + e.quadratic * sum(attention) + e.full_quadratic * sum(p * p for p in patches)
    assert counted_flop(lambda: model(pixels, grid_thw=grid)) == expected

    config = Qwen3VLVisionConfig(**sizes, deepstack_visual_indexes=[0, 1, 2])
    config._attn_implementation = "eager"
    tower = Qwen3VLVisionModel(config)
    pixels = torch.zeros(sum(patches), 3 * 2 * 16 * 16)
    projector = Projector(patches_per_feature=4, inner=(128,), count=4)
    shape = replace(ENCODERS["qwen3_vl_vit"].shape, num_layers=4, hidden=32, mlp=48, projector=projector)
    e = once(shape, 24).encoder
    expected = e.linear * sum(patches) + e.quadratic * sum(p * p for p in patches)
    assert counted_flop(lambda: tower(pixels, grid_thw=grid)) == expected


@pytest.mark.parametrize("experts", [False, True])
def test_flop_of_language_models_are_those_torch_counts(experts: bool) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"num_layers": 3, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab": 96}
    if experts:
        config: Any = Qwen3MoeConfig(**sizes, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2)
        llm = LlmShape(**shape, ffn=24, experts_per_token=2, num_experts=6)
    else:
        config = Qwen3Config(**sizes, head_dim=16, intermediate_size=48)
        llm = LlmShape(**shape, ffn=48)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = Qwen3MoeForCausalLM(config) if experts else Qwen3ForCausalLM(config)
    for tokens in (8, 40):
        # Without a kernel for causal attention both halves of the square are computed.
        expected = llm.linear_flop() * tokens + 2 * llm.square_flop() * tokens**2
        assert counted_flop(lambda tokens=tokens: model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)) == expected


def test_presets_are_in_the_document() -> None:
    text = (ROOT / "docs" / "cost.md").read_text()
    for name, preset in [*ENCODERS.items(), *LLMS.items()]:
        assert f"| `{name}` | {preset.models} |" in text
        assert preset.source in text


def test_costs_of_an_index_are_those_of_its_rows(tmp_path: Path) -> None:
    from index_rows import FINGERPRINT, PROFILE, make_rows, write_parts

    from indexer.table import consolidate, open_index
    from packer.storage import LocalStorage

    storage = LocalStorage(str(tmp_path), fsync=False)
    parts = [make_rows([1, 0, 3, 2], unusable=[3]), make_rows([0, 5], seed=1)]
    consolidate(storage, PROFILE, "web", write_parts(storage, parts), FINGERPRINT)
    table = open_index(str(tmp_path), PROFILE)
    for model in (WINDOWS, cost_model("qwen3_vl_vit+qwen3_8b")):
        found = np.concatenate([sample_costs(model, batch) for batch in table.batches()])
        for row in range(table.num_rows):
            images = table.images_of(row)
            columns = [[image.num_patches for image in images], [image.sum_squared_attention for image in images]]
            tokens = table.row(row).num_tokens
            assert found[row].tolist() == [model.encoder_cost_of_images(*columns, [len(images)])[0], model.llm_cost([tokens])[0]]
        assert found[3].tolist() == [0, 0]
        assert (found[[0, 2, 5]] > 0).all()


def test_code_of_the_document_runs() -> None:
    text = (ROOT / "docs" / "cost.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[50785258        0  9819981]\n")
    assert WINDOWS.fingerprint in done.stdout


def test_examples_of_the_document_are_read(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "cost.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    assert len(blocks) == 2
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block)
        assert CostModel.from_file(path).llm.linear > 0
    assert json.loads(cost_file(WINDOWS))["bayplan_cost"] == 1
