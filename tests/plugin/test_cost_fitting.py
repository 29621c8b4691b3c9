from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import ENCODER, LLM, measured

from packer.format.errors import UsageError
from plugin.cost import EncoderCost, LlmCost, Timings, Unit, fit_timings, non_negative_least_squares

floats = st.floats(-3, 3, width=32)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    values = draw(st.lists(floats, min_size=rows * (columns + 1), max_size=rows * (columns + 1)))
    numbers = np.array(values, np.float64).reshape(rows, columns + 1)
    return numbers[:, :-1], numbers[:, -1]


@given(problems())
def test_no_coefficient_is_negative_and_none_can_be_improved(problem: tuple[np.ndarray, np.ndarray]) -> None:
    """The conditions of Karush, Kuhn and Tucker: where a coefficient is above 0 the slope is 0, elsewhere it does not fall."""
    matrix, target = problem
    found = non_negative_least_squares(matrix, target)
    assert (found >= 0).all()
    slope = matrix.T @ (matrix @ found - target)
    lengths = np.linalg.norm(matrix, axis=0)
    tiny = 1e-4 * (1 + np.linalg.norm(target)) * (1 + lengths)
    assert (slope >= -tiny).all()
    assert (np.abs(slope[found > 0]) <= tiny[found > 0]).all()


@given(problems(), st.integers(-30, 30))
def test_columns_of_any_size_are_solved_alike(problem: tuple[np.ndarray, np.ndarray], power: int) -> None:
    matrix, target = problem
    scaled = matrix.copy()
    scaled[:, 0] *= 2.0**power
    found, other = non_negative_least_squares(matrix, target), non_negative_least_squares(scaled, target)
    np.testing.assert_allclose(scaled @ other, matrix @ found, atol=1e-9)


def test_a_plain_solution_that_is_not_negative_is_kept() -> None:
    numbers = np.random.default_rng(1)
    matrix = numbers.random((50, 6))
    truth = np.array([1e-9, 0.0, 3.0, 0.0, 5e3, 1e-3])
    np.testing.assert_allclose(non_negative_least_squares(matrix, matrix @ truth), truth, atol=2e-9, rtol=1e-9)


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(UsageError, match="found 11 columns, expected at most 10"):
        non_negative_least_squares(np.ones((3, 11)), np.ones(3))
    with pytest.raises(UsageError, match="of finite numbers"):
        non_negative_least_squares(np.ones((3, 1)), np.array([1, np.nan, 1]))


def test_planted_coefficients_are_found() -> None:
    fit = fit_timings(measured(60, full=False))
    assert [part.part for part in fit.parts] == ["encoder", "llm"]
    for part, planted in zip(fit.parts, (ENCODER, LLM), strict=True):
        assert {column.name: column.seconds for column in part.columns} == pytest.approx(planted, rel=1e-6)
        assert part.r_squared == pytest.approx(1)
        assert part.worst_error < 1e-6
        assert sum(column.share for column in part.columns) == pytest.approx(1)
        assert not any(column.note for column in part.columns)
    assert fit.warnings == ()
    model = fit.model("mine", "somewhere")
    assert (model.name, model.source, model.unit) == ("mine", "somewhere", Unit.FEMTOSECOND)
    assert model.encoder == EncoderCost(linear=6_600_000_000, quadratic=930_000, fixed=50_000_000_000)
    assert model.llm == LlmCost(linear=110_000_000_000, quadratic=2_200_000)
    # What the model says of a microbatch, in nanoseconds, is what was measured less the constants.
    row = measured(60, full=False).rows[3]
    costs = model.encoder_cost([row.num_patches], [row.sum_squared_attention], [row.num_images])
    assert row.encoder_seconds is not None
    assert int(costs[0]) == pytest.approx((row.encoder_seconds - ENCODER["constant"]) * 1e9, rel=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([0.01, 0.03]))
def test_noise_moves_coefficients_by_what_their_errors_say(seed: int, noise: float) -> None:
    fit = fit_timings(measured(300, full=False, noise=noise, seed=seed))
    for part, planted in zip(fit.parts, (ENCODER, LLM), strict=True):
        for column in part.columns:
            assert column.seconds >= 0
            # Errors assume the same noise in every row; here it grows with the time.
            deviation = column.error or planted[column.name]
            assert abs(column.seconds - planted[column.name]) < 8 * deviation
        assert part.r_squared > 0.9


@settings(max_examples=20)
@given(st.sets(st.sampled_from(["num_patches", "sum_squared_attention", "num_images"]), min_size=1), st.integers(0, 100))
def test_coefficients_that_are_zero_are_found_to_be_small_and_never_negative(zero: set[str], seed: int) -> None:
    planted = {name: 0.0 if name in zero else seconds for name, seconds in ENCODER.items()}
    exact = fit_timings(measured(80, encoder=planted, full=False, seed=seed)).parts[0]
    assert {column.name: column.seconds for column in exact.columns} == pytest.approx(planted, rel=1e-6, abs=1e-14)
    noisy = fit_timings(measured(80, encoder=planted, full=False, noise=0.02, seed=seed)).parts[0]
    assert min(column.seconds for column in noisy.columns) >= 0
    assert sum(column.share for column in noisy.columns if column.name in zero) < 0.1


def test_windows_and_whole_images_have_coefficients_of_their_own() -> None:
    planted = ENCODER | {"sum_squared_patches": 3e-10}
    fit = fit_timings(measured(100, encoder=planted, windows=True, full=False))
    assert {column.name: column.seconds for column in fit.parts[0].columns} == pytest.approx(planted, rel=1e-5)
    assert fit.model("a", "").encoder.full_quadratic == 300_000


def test_whole_microbatches_are_fitted_at_once() -> None:
    fit = fit_timings(measured(100, whole=True, full=False))
    found = {column.name: column.seconds for column in fit.parts[0].columns}
    planted = ENCODER | LLM | {"constant": ENCODER["constant"] + LLM["constant"]}
    assert fit.parts[0].part == "microbatch"
    assert found == pytest.approx(planted, rel=1e-5)


def test_full_sequences_give_the_constant_to_the_tokens_and_say_so() -> None:
    llm = fit_timings(measured(60, full=True)).parts[1]
    columns = {column.name: column for column in llm.columns}
    assert columns["constant"].note.startswith("left out: num_tokens varies by 0.1% only")
    assert columns["num_tokens"].seconds == pytest.approx(LLM["num_tokens"] + LLM["constant"] / 8182, rel=0.01)


def edited(timings: Timings, **fields: Any) -> Timings:
    """With fields set in all rows: values, or functions of the row."""
    rows = [
        msgspec.structs.replace(row, **{name: value(row) if callable(value) else value for name, value in fields.items()})
        for row in timings.rows
    ]
    return replace(timings, rows=tuple(rows))


def test_columns_that_rise_together_are_named() -> None:
    """Tiles are all alike: 1024 patches each."""
    tiles = edited(
        measured(60, full=False),
        num_patches=lambda row: 1024 * row.num_images,
        sum_squared_attention=lambda row: 1024**2 * row.num_images,
        encoder_seconds=lambda row: 2e-3 + 0.01 * row.num_images,
    )
    fit = fit_timings(tiles)
    columns = {column.name: column for column in fit.parts[0].columns}
    assert columns["num_patches"].note == "cannot be told from sum_squared_attention, num_images"
    assert columns["num_patches"].error is None
    assert columns["constant"].note == ""
    assert fit.parts[0].worst_error < 1e-6
    assert [line for line in fit.warnings if "rise and fall together" in line] == [
        "encoder: num_patches, sum_squared_attention, num_images rise and fall together: any split between them fits as well, "
        "and holds only for data of this kind"
    ]
    # However it was split, tiles cost what was measured.
    assert fit.model("a", "").encoder_cost([2048], [2 * 1024**2], [2]).tolist() == pytest.approx([20_000_000], rel=1e-6)


def test_columns_without_a_number_are_named() -> None:
    texts = edited(
        measured(60, full=False), num_patches=0, sum_squared_attention=0, num_images=0, encoder_seconds=lambda row: 1e-3
    )
    encoder = fit_timings(texts).parts[0]
    assert {column.name: column.note for column in encoder.columns} == {
        "num_patches": "no line has any",
        "sum_squared_attention": "no line has any",
        "num_images": "no line has any",
        "constant": "",
    }
    assert encoder.seconds("constant") == pytest.approx(1e-3)


def test_coefficients_held_at_zero_are_named() -> None:
    cheaper = edited(measured(60, full=False), encoder_seconds=lambda row: 1.0 + 1e-6 * row.num_patches - 1e-3 * row.num_images)
    columns = {column.name: column for column in fit_timings(cheaper).parts[0].columns}
    assert (columns["num_images"].seconds, columns["num_images"].note) == (0.0, "zero: the best would be negative")


def test_doubtful_fits_warn_and_impossible_ones_are_refused() -> None:
    assert (
        fit_timings(measured(12, full=False))
        .warnings[0]
        .startswith("encoder: 12 lines for 4 coefficients: 10 lines for each would be sound")
    )
    with pytest.raises(UsageError, match="encoder: found 3 lines for 4 coefficients, expected 10 lines for each"):
        fit_timings(measured(3, full=False))
    numbers = np.random.default_rng(0)
    random = edited(measured(60, full=False), llm_seconds=lambda row: float(numbers.random() + 0.1))
    assert any(line.startswith("llm: R^2 ") for line in fit_timings(random).warnings)
    with pytest.raises(UsageError, match="found lines with encoder_seconds or llm_seconds alone"):
        fit_timings(edited(measured(60), llm_seconds=None))


def test_times_that_no_column_explains_make_no_model_of_nothing() -> None:
    empty = edited(measured(60, full=False), num_tokens=0, sum_squared_tokens=0)
    fit = fit_timings(empty)
    assert any(line.startswith("llm: no column explains the times, so it would cost nothing") for line in fit.warnings)
    assert fit.model(name="text apart", source="").llm.linear == 0
    nothing = edited(empty, num_patches=0, sum_squared_attention=0, num_images=0)
    with pytest.raises(UsageError, match="found times that no column explains, expected some: every pack would cost nothing"):
        fit_timings(nothing).model(name="nothing", source="")


def test_parts_that_leave_a_backward_out_are_noticed() -> None:
    short = edited(measured(60, full=False), seconds=lambda row: 3 * (row.encoder_seconds + row.llm_seconds))
    assert fit_timings(short).warnings[0].startswith("encoder and llm are 33% of a microbatch")


def test_the_worst_line_is_named() -> None:
    timings = measured(60, full=False)
    rows = list(timings.rows)
    rows[17] = msgspec.structs.replace(rows[17], llm_seconds=2 * (rows[17].llm_seconds or 0))
    llm = fit_timings(replace(timings, rows=tuple(rows))).parts[1]
    assert llm.worst_place == "made.jsonl line 18"
    assert llm.median_error < llm.worst_error
