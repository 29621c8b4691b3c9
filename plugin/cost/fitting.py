"""From measured microbatches to a cost model in femtoseconds, and what can be said of how well it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.cost.core import CostModel, EncoderCost, LlmCost, Unit
from plugin.cost.nnls import Floats, non_negative_least_squares
from plugin.cost.timings import Timings

PER_SECOND = 10**15
_ENOUGH_ROWS = 10
"""A column, below which a fit is doubtful."""
_GOOD = 0.05
"""Median relative error, below which a fit is good whatever its R^2."""
_STEADY = 0.01
"""Tokens that vary by less (deviation / mean) tell nothing apart from a constant."""
_COLLINEAR = 1e-3
"""Share of a column that the others do not explain, below which its coefficient is arbitrary."""

PartName = Literal["encoder", "llm", "microbatch"]
_ENCODER = ("num_patches", "sum_squared_attention", "sum_squared_patches", "num_images")
_LLM = ("num_tokens", "sum_squared_tokens")
_CONSTANT = "constant"
_PARTS: dict[PartName, tuple[str, tuple[str, ...]]] = {
    "encoder": ("encoder_seconds", (*_ENCODER, _CONSTANT)),
    "llm": ("llm_seconds", (*_LLM, _CONSTANT)),
    "microbatch": ("seconds", (*_ENCODER, *_LLM, _CONSTANT)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One coefficient."""

    name: str
    seconds: float
    """Per unit of the column."""
    error: float | None
    """Standard error; None where the coefficient is zero or arbitrary."""
    share: float
    """Of the mean measured time."""
    note: str = ""
    """Why it is zero or not to be trusted alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFit:
    part: PartName
    num_rows: int
    columns: tuple[Column, ...]
    r_squared: float
    median_error: float
    """Relative."""
    worst_error: float
    """Relative."""
    worst_place: str
    """File and line."""

    def seconds(self, name: str) -> float:
        """Of a coefficient; 0 for one that was not fitted."""
        return next((column.seconds for column in self.columns if column.name == name), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    parts: tuple[PartFit, ...]
    warnings: tuple[str, ...]

    def model(self, name: str, source: str) -> CostModel:
        """Coefficients rounded to femtoseconds. Constants stay out: they are the same for every pack.

        Raises:
            UsageError: all of them are 0.
        """

        def of(column: str) -> int:
            return round(sum(part.seconds(column) for part in self.parts) * PER_SECOND)

        encoder = EncoderCost(
            linear=of("num_patches"),
            quadratic=of("sum_squared_attention"),
            full_quadratic=of("sum_squared_patches"),
            fixed=of("num_images"),
        )
        llm = LlmCost(linear=of("num_tokens"), quadratic=of("sum_squared_tokens"))
        if not any(asdict(encoder).values()) and not any(asdict(llm).values()):
            raise UsageError(
                "found times that no column explains, expected some: every pack would cost nothing; measure packs that differ"
            )
        return CostModel(name=name, unit=Unit.FEMTOSECOND, encoder=encoder, llm=llm, source=source)

    def state(self) -> dict[str, Any]:
        """All of it, JSON-like: for the file of the model."""
        return {"parts": [asdict(part) for part in self.parts], "warnings": list(self.warnings)}


def fit_timings(timings: Timings) -> Fit:
    """Encoder and language model apart where lines time both, else all of the microbatch at once.

    Raises:
        UsageError: fewer lines than coefficients.
    """
    names: tuple[PartName, ...] = ("encoder", "llm") if _has_parts(timings) else ("microbatch",)
    warnings: list[str] = []
    parts = []
    for name in names:
        part, found = _fitted(timings, name)
        parts.append(part)
        warnings += found
    if len(names) > 1:
        warnings += _missing_time(timings)
    return Fit(parts=tuple(parts), warnings=tuple(warnings))


def _has_parts(timings: Timings) -> bool:
    timed = [np.isfinite(timings.column(name)) for name in ("encoder_seconds", "llm_seconds")]
    both, whole = timed[0] & timed[1], np.isfinite(timings.column("seconds"))
    if not both.any() and not whole.any():
        raise UsageError("found lines with encoder_seconds or llm_seconds alone, expected both in a line, or seconds")
    return bool(both.any())


def _missing_time(timings: Timings) -> list[str]:
    """Says if the parts are not most of the microbatch."""
    parts = timings.column("encoder_seconds") + timings.column("llm_seconds")
    share = parts / timings.column("seconds")
    share = share[np.isfinite(share)]
    if not share.size or (typical := float(np.median(share))) >= 0.9:
        return []
    return [
        f"encoder and llm are {typical:.0%} of a microbatch: what they leave out (a backward?) is in no cost; "
        "time parts with their backwards, or leave encoder_seconds and llm_seconds out to fit the whole"
    ]


def _fitted(timings: Timings, part: PartName) -> tuple[PartFit, list[str]]:
    target_name, names = _PARTS[part]
    target = timings.column(target_name)
    columns = {name: np.ones(len(target)) if name == _CONSTANT else timings.column(name) for name in names}
    rows = np.isfinite(target)
    notes: dict[str, str] = {}
    if not np.isfinite(columns.get("sum_squared_patches", target)[rows]).all():
        del columns["sum_squared_patches"]  # an encoder without windows
    columns = {name: column[rows] for name, column in columns.items()}
    target = target[rows]
    for name, column in columns.items():
        if not column.any():
            notes[name] = "no line has any"
    tokens = columns.get("num_tokens", np.zeros(1))
    if tokens.any() and (spread := tokens.std() / tokens.mean()) < _STEADY:
        notes[_CONSTANT] = f"left out: num_tokens varies by {spread:.1%} only, and stands for it"
    fitted = [name for name in columns if name not in notes]
    if len(target) < len(fitted):
        raise UsageError(
            f"{part}: found {len(target)} lines for {len(fitted)} coefficients, expected {_ENOUGH_ROWS} lines for each"
        )
    matrix = np.column_stack([columns[name] for name in fitted])
    solution = non_negative_least_squares(matrix, target)
    notes |= _notes(matrix, solution, fitted)
    errors = _standard_errors(matrix, target, solution)
    found = dict(zip(fitted, zip(solution.tolist(), errors, strict=True), strict=True))
    fits = tuple(
        Column(
            name=name,
            seconds=found.get(name, (0.0, None))[0],
            error=None if name in notes else found[name][1],
            share=found.get(name, (0.0, None))[0] * float(column.mean()) / float(target.mean()),
            note=notes.get(name, ""),
        )
        for name, column in columns.items()
    )
    result = _measured(part, timings, rows, fits, target, matrix @ solution)
    return result, _warnings(part, result, len(fitted))


def _measured(
    part: PartName,
    timings: Timings,
    rows: npt.NDArray[np.bool_],
    columns: tuple[Column, ...],
    target: Floats,
    predicted: Floats,
) -> PartFit:
    residual = target - predicted
    spread = float(((target - target.mean()) ** 2).sum())
    relative = np.abs(residual) / target
    return PartFit(
        part=part,
        num_rows=len(target),
        columns=columns,
        r_squared=1.0 - float(residual @ residual) / spread if spread > 0 else 0.0,
        median_error=float(np.median(relative)),
        worst_error=float(relative.max()),
        worst_place=timings.places[int(np.flatnonzero(rows)[relative.argmax()])],
    )


def _notes(matrix: Floats, solution: Floats, names: list[str]) -> dict[str, str]:
    """Which coefficients are zero, and which cannot be told from others."""
    notes = {}
    scaled = matrix / np.linalg.norm(matrix, axis=0)
    for place, name in enumerate(names):
        others = np.delete(scaled, place, axis=1)
        weights = np.linalg.lstsq(others, scaled[:, place], rcond=None)[0] if others.shape[1] else np.zeros(0)
        rest = scaled[:, place] - others @ weights
        if float(rest @ rest) < _COLLINEAR:
            like = [other for other, weight in zip(np.delete(names, place), weights, strict=True) if abs(weight) > 0.05]
            notes[name] = f"cannot be told from {', '.join(like)}"
        elif solution[place] == 0:
            notes[name] = "zero: the best would be negative"
    return notes


def _standard_errors(matrix: Floats, target: Floats, solution: Floats) -> list[float | None]:
    """Of the coefficients that are not zero, the others held at zero."""
    taken = np.flatnonzero(solution)
    errors: list[float | None] = [None] * len(solution)
    free = len(target) - len(taken)
    if free < 1 or not taken.size:
        return errors
    lengths = np.linalg.norm(matrix[:, taken], axis=0)
    residual = target - matrix @ solution
    inverse = np.linalg.pinv(np.linalg.qr(matrix[:, taken] / lengths, mode="r"))
    deviations = np.sqrt(float(residual @ residual) / free * (inverse**2).sum(axis=1)) / lengths
    for place, deviation in zip(taken.tolist(), deviations.tolist(), strict=True):
        errors[place] = deviation
    return errors


def _warnings(part: PartName, fit: PartFit, num_fitted: int) -> list[str]:
    found = []
    if fit.num_rows < _ENOUGH_ROWS * num_fitted:
        found.append(f"{part}: {fit.num_rows} lines for {num_fitted} coefficients: {_ENOUGH_ROWS} lines for each would be sound")
    if not any(column.seconds for column in fit.columns if column.name != _CONSTANT):
        found.append(f"{part}: no column explains the times, so it would cost nothing in any pack; measure packs that differ")
    arbitrary = [column for column in fit.columns if column.note.startswith("cannot be told")]
    if arbitrary:
        names = ", ".join(column.name for column in arbitrary)
        found.append(
            f"{part}: {names} rise and fall together: any split between them fits as well, and holds only for data of this kind"
        )
    if fit.r_squared < 0.9 and fit.median_error > _GOOD:  # times that hardly vary leave nothing to explain
        found.append(
            f"{part}: R^2 {fit.r_squared:.3f}, median error {fit.median_error:.0%}: these columns do not explain the times; "
            "are other jobs on the machine, or do the times hold waits for other ranks?"
        )
    return found
