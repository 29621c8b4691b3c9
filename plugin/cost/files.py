"""Cost models in files: JSON or YAML, read strictly, written as JSON. docs/cost.md describes the keys."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from indexer.image_rules.lookup import nearest
from packer.format.errors import BayplanError, FormatError, UsageError
from plugin.cost.core import CostModel, EncoderCost, LlmCost, Unit
from plugin.cost.presets import ENCODERS, LLMS
from plugin.cost.shapes import EncoderShape, LlmShape, Projector, Work, from_shapes

SUFFIXES = (".json", ".yaml", ".yml")
VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """A file with coefficients."""

    bayplan_cost: int
    unit: str
    encoder: dict[str, Any]
    llm: dict[str, Any]
    name: str = ""
    source: str = ""
    fit: dict[str, Any] | None = None
    """How it was fitted; for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """Under `shapes` of a file: names of presets, or shapes of one's own."""

    encoder: str | dict[str, Any]
    llm: str | dict[str, Any]
    work: dict[str, Any] | None = None
    fixed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShapesFile:
    bayplan_cost: int
    shapes: dict[str, Any]
    name: str = ""
    source: str = ""


def read_cost_model(path: str | os.PathLike[str]) -> CostModel:
    """A cost model from a local file.

    Raises:
        FormatError: not JSON or YAML, a key that is unknown, missing or of another type, another version.
    """
    where = os.fspath(path)
    content = _parsed(Path(where).read_bytes(), where)
    if not isinstance(content, dict):
        raise FormatError(f"{where}: found a {type(content).__name__}, expected a mapping with the key bayplan_cost")
    if (version := content.get("bayplan_cost")) != VERSION or isinstance(version, bool):
        raise FormatError(f"{where}: found bayplan_cost {version!r}, expected {VERSION}: the version of these files")
    try:
        return _from_shapes(content, where) if "shapes" in content else _from_numbers(content, where)
    except UsageError as error:  # a value that its type allows and the model does not
        raise FormatError(f"{where}: {error}") from error


def _from_numbers(content: Mapping[str, Any], where: str) -> CostModel:
    found = _strict(_Numbers, content, where)
    if found.unit not in list(Unit):
        raise FormatError(f"{where}: found unit {found.unit!r}, expected one of {', '.join(Unit)}{_or_nothing(found.unit)}")
    return CostModel(
        name=found.name or Path(where).stem,
        unit=Unit(found.unit),
        encoder=_strict(EncoderCost, found.encoder, f"{where}: encoder"),
        llm=_strict(LlmCost, found.llm, f"{where}: llm"),
        source=found.source,
    )


def _or_nothing(unit: str) -> str:
    return " (costs are a million of it)" if unit.lower() in ("mflop", "ns", "nanosecond") else ""


def _from_shapes(content: Mapping[str, Any], where: str) -> CostModel:
    found = _strict(_ShapesFile, content, where)
    shapes = _strict(_Shapes, found.shapes, f"{where}: shapes")
    return from_shapes(
        _encoder_shape(shapes.encoder, f"{where}: shapes.encoder"),
        _llm_shape(shapes.llm, f"{where}: shapes.llm"),
        _strict(Work, shapes.work, f"{where}: shapes.work") if shapes.work is not None else None,
        name=found.name or Path(where).stem,
        source=found.source,
        fixed=shapes.fixed,
    )


def _encoder_shape(value: str | dict[str, Any], where: str) -> EncoderShape:
    if isinstance(value, str):
        if value not in ENCODERS:
            raise FormatError(f"{where}: found no encoder {value!r}{nearest(value, ENCODERS)}")
        return ENCODERS[value].shape
    if isinstance(projector := value.get("projector"), dict):
        _refuse_keys(Projector, projector, f"{where}.projector")
    return _strict(EncoderShape, value, where)


def _llm_shape(value: str | dict[str, Any], where: str) -> LlmShape:
    if isinstance(value, str):
        if value not in LLMS:
            raise FormatError(f"{where}: found no language model {value!r}{nearest(value, LLMS)}")
        return LLMS[value].shape
    return _strict(LlmShape, value, where)


def _strict(kind: type[T], value: Mapping[str, Any], where: str) -> T:
    """A dataclass from a mapping: no unknown key, none missing, each of its type."""
    _refuse_keys(kind, value, where)
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, BayplanError):
            raise error.__cause__ from None
        raise FormatError(f"{where}: {_lowered(str(error))}") from error


def _refuse_keys(kind: type[Any], value: Mapping[str, Any], where: str) -> None:
    known = [field.name for field in fields(kind)]
    for key in value:
        if key not in known:
            raise FormatError(f"{where}: found the key {key!r}{nearest(str(key), known)}")
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := [name for name in needed if name not in value]:
        raise FormatError(f"{where}: found no {', '.join(missing)}, expected {', '.join(needed)}")


def _lowered(message: str) -> str:
    return message[0].lower() + message[1:].replace("`", "").replace("$.", "")


def cost_file(model: CostModel, fit: Mapping[str, Any] | None = None) -> bytes:
    """The content of a file that `read_cost_model` reads, as JSON."""
    content: dict[str, Any] = {
        "bayplan_cost": VERSION,
        "name": model.name,
        "source": model.source,
        "unit": str(model.unit),
        "encoder": asdict(model.encoder),
        "llm": asdict(model.llm),
    }
    if fit is not None:
        content["fit"] = dict(fit)
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _parsed(data: bytes, where: str) -> Any:
    suffix = Path(where).suffix.lower()
    if suffix not in SUFFIXES:
        raise FormatError(f"{where}: found a file ending in {suffix!r}, expected {', '.join(SUFFIXES)}")
    try:
        if suffix == ".json":
            return json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
        return yaml.load(data, _StrictLoader)
    except _DoubleKey as error:
        raise FormatError(f"{where}: {error}") from None
    except yaml.YAMLError as error:
        raise FormatError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from error


class _DoubleKey(Exception):
    """One key twice in one mapping: readers disagree on which one counts."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DoubleKey(f"found the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) != len(keys):
            raise _DoubleKey(f"found the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
        return super().construct_mapping(node, deep)
