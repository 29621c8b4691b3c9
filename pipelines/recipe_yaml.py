"""YAML text -> plain values, with the line of every key, every mistake of the text kept.

Stricter than `yaml.safe_load`: a key given twice and a key that is not text are mistakes (it keeps the last, silently).
Closer to YAML 1.2 where 1.1 surprises and an editor disagrees: `1e-3` is a number and `2024-01-01` is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from packer.format.errors import RecipeError

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # PyYAML built without libyaml: the same values, about eight times slower.
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]

Path = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map"))
_SHORT_FLOAT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
_RARE_BREAKS = re.compile("[\r\x85\u2028\u2029]")
# Aliases can make a short file stand for a huge one; a recipe of 1,000 sources has about 30,000 values.
_MAX_VALUES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake: where it is in the document, and what to say of it after the place."""

    path: Path
    message: str
    line: int | None = None
    has_no_value: bool = False
    """Nothing could be read there, so what the models say of that place means nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The values of one YAML file and where they stand; `written` holds scalars letter by letter."""

    data: Any
    lines: Mapping[Path, int]
    written: Mapping[Path, str]
    problems: tuple[Problem, ...]


class _Loader(_BaseLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # As a key in single quotes PyYAML writes the rarer line breaks bare, where they are read back as a space.
        return self.represent_scalar(_TAG + "str", data, style='"' if _RARE_BREAKS.search(data) else None)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_TAG + "timestamp", _TAG + "value")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Dumper.add_representer(str, _Dumper.represent_str)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_TAG + "float", re.compile(rf"^(?:{_SHORT_FLOAT.pattern})$"), list("-+0123456789"))


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML document; raises RecipeError only where the text cannot be read at all (line and column said)."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.YAMLError as error:
        raise RecipeError([_syntax_message(error, name)]) from None
    builder = _Builder(loader)
    data = None if node is None else builder.build(node, ())
    return Document(data=data, lines=builder.lines, written=builder.written, problems=tuple(builder.problems))


def dump_yaml(data: object) -> str:
    """Write plain values so that `parse_yaml` reads them back; the order of keys is kept, no line is folded."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30, default_flow_style=False)


class _Builder:
    """Turns nodes into values; on a mistake notes it, leaves the value out and goes on."""

    def __init__(self, loader: _Loader) -> None:
        self.lines: dict[Path, int] = {}
        self.written: dict[Path, str] = {}
        self.problems: list[Problem] = []
        self._loader = loader
        self._open: set[int] = set()
        self._values_left = _MAX_VALUES

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, _line(node))
        self._values_left -= 1
        if self._values_left < 0:
            message = f"the aliases stand for more than {_MAX_VALUES:,} values; write them out"
            raise RecipeError([f"recipe: {message} (line {_line(node)})"])
        if node.tag not in _PLAIN_TAGS:
            return self._no_value(path, f"found the YAML tag {node.tag!r}, expected a plain value; remove the tag", node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            return self._no_value(path, "found an alias that contains itself; write the value out", node)
        self._open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self._open.discard(id(node))
        return value

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        self.written[path] = node.value
        if node.tag == _TAG + "float" and _SHORT_FLOAT.fullmatch(node.value):
            return float(node.value)
        try:
            return self._loader.construct_object(node)
        except (ValueError, KeyError):  # `!!int abc` and the like
            return self._no_value(path, f"found {node.value[:80]!r}, which is no {node.tag.removeprefix(_TAG)}", node)

    def _sequence(self, node: yaml.Node, path: Path) -> list[Any]:
        return [self.build(item, (*path, k)) for k, item in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in self._pairs(node, path):
            self.lines[(*path, key_node.value)] = _line(key_node)
            values[key_node.value] = self.build(value_node, (*path, key_node.value))
        return values

    def _pairs(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """Give every key once: the mapping's own, then those of `<<: *other` that it does not have itself."""
        first: dict[str, yaml.Node] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            elif not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                found = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or a mapping"
                self._problem(path, f"found the key {found}, expected text; put it in quotes", key_node)
            elif key_node.value in first:
                lines = f"lines {_line(first[key_node.value])} and {_line(key_node)}"
                self._problem((*path, key_node.value), f"the key is given twice ({lines}); keep one of them", key_node)
            else:
                first[key_node.value] = key_node
                yield key_node, value_node
        for other in merged:
            yield from self._merged_pairs(other, first, path)

    def _merged_pairs(
        self, other: yaml.Node, first: dict[str, yaml.Node], path: Path
    ) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        if not isinstance(other, yaml.MappingNode) or id(other) in self._open:
            self._problem(path, "found `<<` with something else, expected the alias of a mapping", other)
            return
        self._open.add(id(other))
        for key_node, value_node in self._pairs(other, path):
            if key_node.value not in first:
                first[key_node.value] = key_node
                yield key_node, value_node
        self._open.discard(id(other))

    def _no_value(self, path: Path, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(path=path, message=message, line=_line(node), has_no_value=True))

    def _problem(self, path: Path, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(path=path, message=message, line=_line(node)))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _syntax_message(error: yaml.YAMLError, name: str) -> str:
    """Put PyYAML's several lines into one."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"recipe {name!r}: not valid YAML: {' '.join(str(error).split())}"
    mark = error.problem_mark
    said = " ".join(part for part in (error.context, error.problem) if part)
    return f"recipe {name!r} line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {said}"
