"""`CostModel`: coefficients, and the costs of images and samples in whole numbers. Where coefficients come from is not here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.format.errors import UsageError
from plugin.cost.exact import Ints, sums_by_sample, weighted_sum, whole_numbers

COST_VERSION = 1
"""Raised whenever the same coefficients would give other costs."""
PER_COST = 10**6
"""Units of a coefficient in one unit of cost: a pair of patches takes some 100 kFLOP, a pack some 10^15."""
MAX_COST = 2**43 - 1
"""Of one row: 2^19 packs of it, both costs added, still fit int64. 8.8 EFLOP, or 2.4 hours."""
_MAX_COEFFICIENT = 2**62
_MAX_COUNT = 2**31 - 1
"""Patches of an image, tokens of a sample: their squares fit int64, and the index holds no more."""


class Unit(StrEnum):
    """What coefficients count. Costs of two units do not compare."""

    FLOP = "flop"
    """Costs are MFLOP."""
    FEMTOSECOND = "femtosecond"
    """Costs are nanoseconds."""

    @property
    def of_costs(self) -> str:
        return "MFLOP" if self is Unit.FLOP else "ns"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderCost:
    """Coefficients of the vision encoder with its projector."""

    linear: int
    """Per patch."""
    quadratic: int
    """Per pair of patches that attend to each other within a window or tile: goes with `sum_squared_attention`."""
    full_quadratic: int = 0
    """Per pair of patches of an image, in layers that see all of it where the others have windows."""
    fixed: int = 0
    """Per image."""

    def __post_init__(self) -> None:
        _refuse_coefficients("encoder", asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmCost:
    """Coefficients of the language model."""

    linear: int
    """Per token."""
    quadratic: int
    """Per square of a sample's tokens; that attention is causal is in it."""

    def __post_init__(self) -> None:
        _refuse_coefficients("llm", asdict(self))


def _refuse_coefficients(part: str, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COEFFICIENT:
            raise UsageError(f"{part}: found {name} {value!r}, expected a whole number from 0 to 2^62")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of rows, each the exact sum of its terms, rounded half up to a unit of cost once per row.

    The cost of a pack is the sum of the costs of its samples.
    """

    name: str
    unit: Unit
    encoder: EncoderCost
    llm: LlmCost
    source: str = ""
    """Where the coefficients are from."""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> CostModel:
        """As `read_cost_model`."""
        from plugin.cost.files import read_cost_model

        return read_cost_model(path)

    @property
    def fingerprint(self) -> str:
        """Of all that decides a cost; equal ones give equal costs on every rank."""
        return blake3(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()[:32]

    def _identity(self) -> dict[str, Any]:
        return {
            "cost_version": COST_VERSION,
            "unit": str(self.unit),
            "encoder": asdict(self.encoder),
            "llm": asdict(self.llm),
        }

    def encoder_cost(
        self,
        num_patches: npt.ArrayLike,
        sum_squared_attention: npt.ArrayLike,
        num_images: npt.ArrayLike,
        sum_squared_patches: npt.ArrayLike | None = None,
    ) -> Ints:
        """Of rows that are images or samples, given their sums.

        Args:
            sum_squared_patches: the squared patches of each image, summed; needed where `full_quadratic` is not zero.

        Raises:
            UsageError: numbers that are not whole or negative, or a cost above `MAX_COST`.
        """
        if sum_squared_patches is None and self.encoder.full_quadratic:
            raise UsageError(
                f"cost model {self.name!r} has layers that attend to whole images beside layers with windows: "
                "give sum_squared_patches, or use encoder_cost_of_images"
            )
        columns = {
            "num_patches": num_patches,
            "sum_squared_attention": sum_squared_attention,
            "num_images": num_images,
            "sum_squared_patches": np.zeros_like(num_patches) if sum_squared_patches is None else sum_squared_patches,
        }
        checked = {name: whole_numbers(name, values) for name, values in columns.items()}
        _refuse_other_shapes(checked)
        weights = (self.encoder.linear, self.encoder.quadratic, self.encoder.fixed, self.encoder.full_quadratic)
        terms = list(zip(weights, checked.values(), strict=True))
        return weighted_sum(terms, per=PER_COST, most=MAX_COST, names=checked)

    def encoder_cost_of_images(
        self, num_patches: npt.ArrayLike, sum_squared_attention: npt.ArrayLike, num_images: npt.ArrayLike
    ) -> Ints:
        """Of samples, given the columns of their images, sample after sample, and the number of images of each."""
        patches = whole_numbers("num_patches", num_patches, _MAX_COUNT)
        attention = whole_numbers("sum_squared_attention", sum_squared_attention)
        lengths = whole_numbers("num_images", num_images)
        _refuse_other_shapes({"num_patches": patches, "sum_squared_attention": attention})
        if int(lengths.sum()) != len(patches):
            raise UsageError(f"found {len(patches):,} images, expected {int(lengths.sum()):,} as num_images says")
        most = max(int(patches.max(initial=0)) ** 2, int(attention.max(initial=0)))
        if most * int(lengths.max(initial=0)) >= 2**63:
            raise UsageError(
                f"found a sample of {int(lengths.max()):,} images and an image of {most:,} pairs of patches: "
                "their sum may not fit 64 bit; leave such samples out"
            )
        columns = (patches, attention, patches * patches)
        sums = [sums_by_sample(column, lengths) for column in columns]
        return self.encoder_cost(sums[0], sums[1], lengths, sums[2])

    def llm_cost(self, num_tokens: npt.ArrayLike) -> Ints:
        """Of samples. A pack costs the sum of its samples: tokens of one do not see those of another.

        Raises:
            UsageError: numbers that are not whole or negative, or a cost above `MAX_COST`.
        """
        tokens = whole_numbers("num_tokens", num_tokens, _MAX_COUNT)
        terms = [(self.llm.linear, tokens), (self.llm.quadratic, tokens * tokens)]
        return weighted_sum(terms, per=PER_COST, most=MAX_COST, names={"num_tokens": tokens})


def _refuse_other_shapes(columns: dict[str, Ints]) -> None:
    shapes = {name: column.shape for name, column in columns.items()}
    if len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
        raise UsageError(f"found {found}, expected columns of equal length")
