"""From a name to a rule: a preset, a preset with other parameters, or a user's own function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from indexer.image_rules.core import ImageCounts, ImageRule, ImageSizes
from indexer.image_rules.presets import PRESETS
from packer.format.errors import UsageError


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
    """A user's function, its result checked."""

    name: str
    function: Callable[..., object]
    parameters: Mapping[str, Any]

    def __call__(self, sizes: ImageSizes, /) -> ImageCounts:
        try:
            counts = self.function(sizes, **self.parameters)
        except Exception as error:
            raise UsageError(f"image rule {self.name} raised {type(error).__name__}: {str(error)[:200]}") from error
        if not isinstance(counts, ImageCounts) or len(counts) != len(sizes):
            found = f"{len(counts)} ImageCounts" if isinstance(counts, ImageCounts) else type(counts).__name__
            raise UsageError(f"image rule {self.name} returned {found}, expected ImageCounts of {len(sizes)} images")
        return counts


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
