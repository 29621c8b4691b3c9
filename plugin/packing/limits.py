"""What a pack may hold, what a sample is to the packer, and which samples fit no pack. Nothing is packed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

IntArray = npt.NDArray[np.int64]

ALGORITHM = 1
"""Raised whenever the same samples and limits would give other packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """Hard limits of one pack."""

    sequence_length: int
    """LLM tokens, padding of samples included."""
    alignment: int = 1
    """Each sample is padded to a multiple of it (context and sequence parallel)."""
    max_images: int | None = None
    max_patches: int | None = None
    """The memory of the vision encoder."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None and name.startswith("max_"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"found {name} {value!r}, expected a whole number of at least 1")
        if self.sequence_length % self.alignment:
            raise UsageError(
                f"found sequence_length {self.sequence_length} with alignment {self.alignment}: the last "
                f"{self.sequence_length % self.alignment} tokens of a pack could never be used; "
                f"take {self.sequence_length // self.alignment * self.alignment or self.alignment}"
            )

    def state(self) -> dict[str, int | None]:
        """What identifies a plan made with these limits: to be stored with it, JSON-like."""
        return {"algorithm": ALGORITHM} | asdict(self)

    def refuse_other(self, found: Mapping[str, object]) -> None:
        """Raises:
        UsageError: when a plan or state was made with other limits; the message shows each field that differs.
        """
        expected = self.state()
        names = [name for name in sorted(expected | dict(found)) if expected.get(name) != found.get(name)]
        if names:
            fields = ", ".join(f"{name} {found.get(name)!r} instead of {expected.get(name)!r}" for name in names)
            raise UsageError(f"packs were made with other limits: found {fields}; keep to those, or start anew")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Columns of equal length, one value a sample, in the order of the buffer."""

    num_tokens: IntArray
    num_images: IntArray
    num_patches: IntArray
    age: IntArray
    """Calls of `pack` that handed the sample back so far."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            column = getattr(self, name)
            if column.dtype != np.int64 or column.shape != (len(self),):
                raise UsageError(
                    f"samples: found {name} as {column.dtype} of shape {column.shape}, expected int64 of shape ({len(self)},)"
                )
            if len(column) and column.min() < 0:
                raise UsageError(f"samples: found {name} {column.min()} at {column.argmin()}, expected 0 or more")

    def __len__(self) -> int:
        return len(self.num_tokens)

    @classmethod
    def of(
        cls,
        num_tokens: npt.ArrayLike,
        *,
        num_images: npt.ArrayLike | None = None,
        num_patches: npt.ArrayLike | None = None,
        age: npt.ArrayLike | None = None,
    ) -> Self:
        """From anything that holds whole numbers; zeros for what is left out."""
        tokens = _integers("num_tokens", num_tokens)
        columns = {"num_images": num_images, "num_patches": num_patches, "age": age}
        return cls(
            num_tokens=tokens,
            **{name: np.zeros_like(tokens) if given is None else _integers(name, given) for name, given in columns.items()},
        )


class Refusal(IntEnum):
    """Why a sample fits no pack; the first reason that holds."""

    NONE = 0
    EMPTY = 1
    OVER_LONG = 2
    TOO_MANY_IMAGES = 3
    TOO_MANY_PATCHES = 4

    def detail(self, samples: Samples, index: int, limits: PackLimits) -> str:
        """The value and the limit in a few words; the caller knows the sample's id."""
        found = f"{samples.num_tokens[index]} tokens, {samples.num_images[index]} images, {samples.num_patches[index]} patches"
        match self:
            case Refusal.EMPTY:
                return f"{found}: nothing to train on"
            case Refusal.OVER_LONG:
                return f"{found}: longer than a pack of {limits.sequence_length} tokens"
            case Refusal.TOO_MANY_IMAGES:
                return f"{found}: above max_images {limits.max_images}"
            case Refusal.TOO_MANY_PATCHES:
                return f"{found}: above max_patches {limits.max_patches}"
        return found


def refusals(samples: Samples, limits: PackLimits) -> npt.NDArray[np.uint8]:
    """One `Refusal` a sample. Takes a whole index as well as a buffer, so that it is known before training."""
    tokens = samples.num_tokens
    # The capacity is a multiple of the alignment, so padding never makes a sample over-long.
    found = np.where(tokens == 0, Refusal.EMPTY, np.where(tokens > limits.sequence_length, Refusal.OVER_LONG, Refusal.NONE))
    for column, limit, reason in (
        (samples.num_images, limits.max_images, Refusal.TOO_MANY_IMAGES),
        (samples.num_patches, limits.max_patches, Refusal.TOO_MANY_PATCHES),
    ):
        if limit is not None:
            found[(found == Refusal.NONE) & (column > limit)] = reason
    return found.astype(np.uint8)


def _integers(name: str, values: npt.ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"samples: found {name} as {array.dtype}, expected whole numbers")
    return array.astype(np.int64)
