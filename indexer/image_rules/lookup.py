"""From a name to a rule: a preset, a preset with other parameters, or a user's own function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from indexer.image_rules.core import GridUnit, ImageCounts, ImageRule, ImageSizes, image_counts
from indexer.image_rules.presets import PRESETS
from packer.format.errors import UsageError

_COLUMNS = tuple(item.name for item in fields(ImageCounts) if item.name not in ("grid_unit", "refusals"))


def image_rule(name: str, parameters: Mapping[str, Any] | None = None) -> ImageRule:
    """The rule of a preset's name or of `module:function`; `parameters` replace a preset's values or go to the function.

    Raises:
        UsageError: unknown name or parameter (with the nearest one), a value of the wrong type, or no such function.
    """
    parameters = parameters or {}
    if ":" in name:
        return _own_rule(name, parameters)
    if name not in PRESETS:
        raise UsageError(f"unknown image rule {name!r}, neither a preset nor module:function{nearest(name, PRESETS)}")
    rule: Any = PRESETS[name].rule
    _check_parameters(name, rule, parameters)
    return typing.cast(ImageRule, replace(rule, **parameters))


def _check_parameters(name: str, rule: Any, parameters: Mapping[str, Any]) -> None:
    types = typing.get_type_hints(type(rule))
    known = [item.name for item in fields(rule)]
    for key, value in parameters.items():
        if key not in known:
            raise UsageError(f"image rule {name!r} has no parameter {key!r}{nearest(key, known)}")
        kinds = typing.get_args(types[key]) or (types[key],)
        if typing.get_origin(types[key]) is tuple:
            raise UsageError(f"image rule {name!r}: {key} cannot be changed; write your own rule as module:function")
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            expected = " or ".join("none" if kind is type(None) else kind.__name__ for kind in kinds)
            raise UsageError(f"image rule {name!r}: {key} is {value!r}, expected {expected}")
        if type(value) in (int, float) and not value > 0 and key != "wrapper_tokens":
            raise UsageError(f"image rule {name!r}: {key} is {value}, expected more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRule:
    """A user's function, its result checked. Where it fails, each sample is asked for alone, and only those that fail then are
    refused: one odd size must not cost the others."""

    name: str
    function: Callable[..., object]
    parameters: Mapping[str, Any]

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        found = self._counts(sizes)
        if isinstance(found, ImageCounts):
            return found
        samples = [sample for sample in _samples(sizes) if len(sample)]
        return _joined(self.name, samples, [found] if len(samples) == 1 else [self._counts(sample) for sample in samples])

    def _counts(self, sizes: ImageSizes) -> ImageCounts | str:
        """What the function returns, or what is wrong with it."""
        try:
            counts = self.function(sizes, **self.parameters)
        except Exception as error:
            return f"image rule {self.name} raised {type(error).__name__}: {str(error)[:200]}"
        if not isinstance(counts, ImageCounts):
            return f"image rule {self.name} returned {type(counts).__name__}, expected ImageCounts of {len(sizes)} images"
        problem = _problem(counts, len(sizes))
        return counts if problem is None else f"image rule {self.name} returned {problem}"


def _problem(counts: ImageCounts, num_images: int) -> str | None:
    """Why these are no counts of so many images."""
    if counts.grid_unit not in typing.get_args(GridUnit):
        return f"grid_unit {counts.grid_unit!r}, expected one of {', '.join(typing.get_args(GridUnit))}"
    for name in _COLUMNS:
        column: object = getattr(counts, name)
        if not isinstance(column, np.ndarray) or column.dtype.kind not in "iu" or column.shape != (num_images,):
            what = f"{column.dtype} of shape {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
            return f"{name} of {what}, expected {num_images} integers"
        limit = 2**63 if name == "sum_squared_attention" else 2**31
        wrong = [value for value in (int(column.min()), int(column.max())) if not 0 <= value < limit] if num_images else []
        if wrong:
            return f"{name} {wrong[0]}, expected 0 or more and less than 2^{limit.bit_length() - 1}"
    return None


def _samples(sizes: ImageSizes) -> Iterator[ImageSizes]:
    ends = np.cumsum(sizes.sample_lengths).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield ImageSizes.of_arrays(sizes.widths[start:end], sizes.heights[start:end], [end - start])


def _joined(name: str, samples: Sequence[ImageSizes], each: Sequence[ImageCounts | str]) -> ImageCounts:
    """The counts of all samples; every image of one that has none is refused."""
    grid_unit: GridUnit = next((found.grid_unit for found in each if isinstance(found, ImageCounts)), "tiles")
    columns: list[ImageCounts] = []
    refusals: dict[int, str] = {}
    first = 0
    for sample, found in zip(samples, each, strict=True):
        if isinstance(found, ImageCounts) and found.grid_unit != grid_unit:
            found = f"image rule {name} returned grid_unit {found.grid_unit!r}, and {grid_unit!r} for another sample"
        if isinstance(found, str):
            reason = found
            found = image_counts(sample, image_tokens=0, patches=0, grid=(0, 0), grid_unit=grid_unit)
            refusals |= dict.fromkeys(range(first, first + len(sample)), reason)
        refusals |= {first + position: reason for position, reason in found.refusals.items()}
        columns.append(found)
        first += len(sample)
    joined = {column: np.concatenate([getattr(found, column) for found in columns]) for column in _COLUMNS}
    return ImageCounts(**joined, grid_unit=grid_unit, refusals=refusals)


def _own_rule(name: str, parameters: Mapping[str, Any]) -> OwnRule:
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(f"image rule {name} cannot be loaded: {error}: put the module on PYTHONPATH") from error
    if not callable(function):
        raise UsageError(f"image rule {name} is of type {type(function).__name__}, expected a function of ImageSizes")
    try:
        inspect.signature(function).bind(None, **parameters)
    except TypeError as error:
        raise UsageError(f"image rule {name} cannot be called with the parameters {parameters!r}: {error}") from error
    except ValueError:  # compiled, without a signature
        pass
    return OwnRule(name=name, function=function, parameters=dict(parameters))


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message on an unknown word: the most similar known one, or all of them."""
    near = difflib.get_close_matches(word.lower(), known := list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"
