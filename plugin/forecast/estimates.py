"""A number found in several independent replicates: their mean, and how far that may be off."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean and standard error of a few values."""

    value: float
    error: float | None
    """Standard error of the mean; nothing where there was one value only."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        found = np.array(list(values), np.float64)
        error = float(found.std(ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else None
        return cls(value=float(found.mean()), error=error)
