"""Counts that add up: merged field by field, in any order and grouping, to exactly the same value and the same JSON.

So one value per part can be kept, and the total of a source is right after any stop, rerun or new file. Merging is not
idempotent: keep one value per part id and merge the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from packer.format.errors import FormatError

Ints = npt.NDArray[np.int64]

_MERGED_AT_ONCE = 64
"""Values held while many are merged from an iterator: memory stays flat over 100,000 parts."""
_LARGEST_JSON_INT = 2**63 - 1
"""What every JSON library reads back exactly; larger sums are written as strings of digits."""


class Mergeable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all statistics. Every field has a default; together they are the value of no parts at all."""

    @classmethod
    def merged(cls, many: Iterable[Self]) -> Self:
        """The total of all of them; of none, the empty value."""
        held: list[Self] = []
        for item in many:
            held.append(item)
            if len(held) == _MERGED_AT_ONCE:
                held = [cls._total(held)]
        return cls._total(held) if held else cls()

    def merge(self, other: Self) -> Self:
        """The total of the two."""
        return self._total([self, other])

    @classmethod
    def _total(cls, items: list[Self]) -> Self:
        names = cls.__struct_fields__
        return cls(**{name: _sum_of([getattr(item, name) for item in items]) for name in names})

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal value."""
        document = _without_large_ints(msgspec.to_builtins(self, str_keys=True))
        assert isinstance(document, dict)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any], where: str) -> Self:
        """The value that `to_json` wrote.

        Raises:
            FormatError: naming `where`, when it is cut, foreign or does not add up.
        """
        try:
            return msgspec.convert(document, cls, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise FormatError(f"{where}: not the JSON of {cls.__name__}: {error}") from error


def counted(counts: Mapping[str, int]) -> dict[str, int]:
    """The one form of a table of counts: sorted by name, without zeros."""
    return {name: count for name, count in sorted(counts.items()) if count}


def exact_sum(values: npt.NDArray[np.integer[Any]]) -> int:
    """The sum of a column, where 64 bits may not be enough for it."""
    if values.dtype.itemsize < 8:
        return int(values.sum(dtype=np.int64))
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def sum_of_sparse(parts: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Adds up sparse counts, each (rising keys, their counts)."""
    columns = [(np.array(keys, np.int64), np.array(counts, np.int64)) for keys, counts in parts if keys]
    dense = np.zeros(max((int(keys[-1]) for keys, _ in columns), default=-1) + 1, np.int64)
    for keys, counts in columns:
        dense[keys] += counts
    return sparse(dense)


def sparse(dense: npt.NDArray[np.integer[Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The keys that are not zero, and their counts."""
    keys = np.flatnonzero(dense)
    return tuple(keys.tolist()), tuple(dense[keys].tolist())


def check_sparse(keys: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Refuses parallel lists that no sketch writes.

    Raises:
        ValueError: which msgspec turns into its own ValidationError.
    """
    if len(keys) != len(counts):
        raise ValueError(f"{len(keys)} keys, but {len(counts)} counts")
    if any(k >= later for k, later in pairwise(keys)) or (keys and keys[0] < 0):
        raise ValueError("keys do not rise")
    if counts and min(counts) < 1:
        raise ValueError(f"found a count of {min(counts)}, expected 1 or more")


def _sum_of(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mergeable):
        return type(first).merged(values)
    if isinstance(first, dict):
        counter: Counter[str] = Counter()
        for value in values:
            counter.update(value)
        return counted(counter)
    return sum(values)


def _without_large_ints(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_large_ints(item) for key, item in value.items()}
    if isinstance(value, int) and abs(value) > _LARGEST_JSON_INT:
        return str(value)
    return value
