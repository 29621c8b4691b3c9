"""The wording of a recipe's mistakes: one line each, with source and field, found, expected, the way out, and the line.

What is expected is read from the JSON schema of the models, so a message can never disagree with the check or the editor.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from packer.format.errors import RecipeError
from pipelines.recipe_models import NOT_IN_DEFAULTS, Conversion, ImagePolicy, Limits, Recipe, Resources, Source
from pipelines.recipe_profiles import ProfileModel, TokenizerModel
from pipelines.recipe_yaml import Document, Path, Problem

_PLACES: dict[str, type[BaseModel]] = {
    "the top level": Recipe,
    "a source": Source,
    "images": ImagePolicy,
    "images.convert": Conversion,
    "a profile": ProfileModel,
    "a profile's tokenizer": TokenizerModel,
    "resources": Resources,
    "limits": Limits,
}
_BOUNDS = {
    "exclusiveMinimum": "above {}",
    "minimum": "of at least {}",
    "exclusiveMaximum": "below {}",
    "maximum": "at most {}",
}
_KINDS = {"string": "text", "number": "number", "boolean": "truth value"}
_WORDS = {
    "string": "text that is not empty",
    "integer": "a whole number",
    "number": "a number",
    "array": "a list",
    "object": "a mapping",
}

Node = Mapping[str, Any]


class Reporter:
    """Collects the mistakes of one recipe and words them; `raise_if_any` ends the reading with all of them."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._problems = list(document.problems)
        self._unread = {problem.path for problem in document.problems if problem.has_no_value}
        self._bad_defaults: set[str | int] = set()

    def add(self, path: Path, message: str) -> None:
        """Note a mistake that is already in words."""
        self._problems.append(Problem(path=path, message=message))

    def add_validation(self, error: ValidationError, data: object, prefix: Path = ()) -> list[Path]:
        """Note all that pydantic found wrong in `data`, which stands at `prefix`; gives the paths inside `data`."""
        found: dict[Path, Any] = {}
        for details in error.errors():
            if details["type"] != "mixture":  # the loader words these itself, also when sources are bad on their own
                found.setdefault(_path(details["loc"], data, details["type"]), details)
        inner = {path[:k] for path in found for k in range(len(path))}  # a union or a list above a bad item says nothing new
        for path, details in found.items():
            place = (*prefix, *path)
            if path in inner or place in self._unread or (details["type"] == "missing" and path[-1] in self._bad_defaults):
                continue
            value = _value_at(self._document.data, place, default=details["input"])
            self._problems += self._worded(place, details, value)
        if prefix == ("defaults",):  # what they would have given is then not missing in a source
            self._bad_defaults.update(path[0] for path in found if path)
        return list(found)

    def raise_if_any(self) -> None:
        """Raise RecipeError with every mistake, in the order of the file."""
        if self._problems:
            ordered = sorted(self._problems, key=self._line)
            raise RecipeError([f"{self._place(p.path)}: {p.message} (line {self._line(p)})" for p in ordered])

    def _line(self, problem: Problem) -> int:
        if problem.line is not None:
            return problem.line
        path = problem.path
        while path and path not in self._document.lines:
            path = path[:-1]
        return self._document.lines.get(path, 1)

    def _place(self, path: Path) -> str:
        if path[:1] == ("sources",) and len(path) > 1 and isinstance(path[1], int):
            return " ".join(filter(None, (self._source(path[1]), _dotted(path[2:]))))
        if path[:1] == ("defaults",):
            return " ".join(filter(None, ("defaults", _dotted(path[1:]))))
        return _dotted(path) or "recipe"

    def _source(self, index: int) -> str:
        sources = self._document.data["sources"]
        names = [source.get("name") if isinstance(source, dict) else None for source in sources]
        name = names[index]
        if not isinstance(name, str) or len(name) > 63:
            return f"source {index + 1}"
        return f"source {name!r}" if names.count(name) == 1 else f"source {index + 1} ({name!r})"

    def _worded(self, path: Path, details: Any, value: object) -> Iterator[Problem]:
        kind, context = details["type"], details.get("ctx", {})
        if kind == "problem" and "unknown" in context:
            for key in context["unknown"]:
                message = f"unknown field of the schema {context['schema']}"
                yield Problem(path=(*path, key), message=message + _nearest(key, context["known"]))
        elif kind == "problem":
            yield Problem(path=path, message=context["message"])
        elif kind == "extra_forbidden":
            yield Problem(path=path, message=_unknown_key(path))
        elif kind == "missing":
            yield Problem(path=path, message=f"missing; expected {_expected(path)}")
        elif details["loc"][-1:] == ("[key]",):
            yield Problem(path=path, message=f"found the key {path[-1]!r}, expected {_expected_key(path[:-1])}")
        else:
            message = f"found {self._shown(path, value)}, expected {_expected(path)}{_way_out(path, value)}"
            yield Problem(path=path, message=message)

    def _shown(self, path: Path, value: object) -> str:
        written = self._document.written.get(path, str(value))
        if value is None:
            return "nothing"
        if isinstance(value, dict | list):
            return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
        if isinstance(value, bool) and written.lower() not in ("true", "false"):
            return f"{written} (YAML reads it as {str(value).lower()})"
        json_type = "string" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "number"
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else written
        shown = _cut(shown)
        return shown if json_type in _types(_nodes(path)) else f"{shown} ({_KINDS[json_type]})"


def _expected(path: Path) -> str:
    """Say what may stand at a path of the recipe, as read from its JSON schema."""
    return _phrase(_nodes(path))


def _phrase(nodes: Sequence[Node]) -> str:
    for node in nodes:
        if "errorMessage" in node:
            return str(node["errorMessage"])
    phrases = [_one_phrase(node) for node in nodes if node.get("type") != "null" and "anyOf" not in node]
    return " or ".join(dict.fromkeys(phrases))


def _one_phrase(node: Node) -> str:
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(str(value) for value in node["enum"] if value is not None)
    bounds = [words.format(node[bound]) for bound, words in _BOUNDS.items() if bound in node]
    if "minimum" in node and "maximum" in node:
        bounds = [f"from {node['minimum']} to {node['maximum']}"]
    if node.get("minItems"):
        bounds = ["with at least one entry"]
    return " ".join(filter(None, (_WORDS.get(node.get("type", ""), "a value"), " and ".join(bounds))))


def _expected_key(path: Path) -> str:
    for node in _nodes(path):
        if "propertyNames" in node:
            return _phrase(_alternatives(node["propertyNames"]))
    return _WORDS["string"]


def _unknown_key(path: Path) -> str:
    key = str(path[-1])
    if path[0] == "defaults" and len(path) == 2 and key in NOT_IN_DEFAULTS:
        return "not possible in defaults; give it in each source"
    homes = [place for place, model in _PLACES.items() if key in _keys(model)]
    if homes:
        return f"unknown key here; it belongs to {' or '.join(homes)}"
    known = [name for node in _nodes(path[:-1]) for name in node.get("properties", {})]
    return "unknown key" + _nearest(key, known)


def _nearest(key: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key.lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(known)}"


def _way_out(path: Path, value: object) -> str:
    nodes = _nodes(path)
    types = _types(nodes)
    choices = [str(choice) for node in nodes for choice in node.get("enum", ()) if choice is not None]
    if isinstance(value, str) and choices:
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""
    if isinstance(value, str) and "number" in types and _is_number(value):
        return "; remove the quotes"
    if isinstance(value, int | float) and types == {"string"} and not choices:
        return "; put it in quotes"
    if isinstance(value, dict) and path == ("sources",):
        return "; begin each source with `- name: ...`"
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f" item {part + 1}"
        else:
            text += "." + (part if part.isprintable() and len(part) <= 63 else _cut(repr(part)))
    return text.lstrip(" .")


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _path(loc: Sequence[str | int], data: object, kind: str) -> Path:
    """Turn pydantic's place into keys and indexes of `data`: the names of a union's branches are left out."""
    path: list[str | int] = []
    for k, part in enumerate(loc):
        is_last = k == len(loc) - 1
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            data = data[part]
        elif not (is_last and kind == "missing"):
            continue
        path.append(part)
    return tuple(path)


def _value_at(data: Any, path: Path, default: object = None) -> Any:
    for part in path:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return default
    return data


@cache
def _schema() -> Node:
    return Recipe.model_json_schema()


def _alternatives(node: Node) -> list[Node]:
    """Give a node of the schema and, where it has branches or points elsewhere, those as well."""
    if "$ref" in node:
        return _alternatives(_schema()["$defs"][node["$ref"].rpartition("/")[2]])
    return [node, *(inner for branch in node.get("anyOf", ()) for inner in _alternatives(branch))]


def _nodes(path: Path) -> list[Node]:
    """Give every node of the schema that can describe what stands at `path`."""
    nodes = _alternatives(_schema())
    for part in path:
        nodes = [inner for node in nodes for child in _children(node, part) for inner in _alternatives(child)]
    return nodes


def _children(node: Node, part: str | int) -> list[Node]:
    if isinstance(part, int):
        return [node["items"]] if "items" in node else []
    if part in node.get("properties", {}):
        return [node["properties"][part]]
    more = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
    return [child for child in more if isinstance(child, dict)]


def _types(nodes: Sequence[Node]) -> set[str]:
    """Give the JSON types that may stand there; a whole number counts as number."""
    types = {"string" if isinstance(value, str) else "number" for n in nodes for value in n.get("enum", ()) if value}
    types |= {"string" if isinstance(node["const"], str) else "number" for node in nodes if "const" in node}
    types |= {node["type"] for node in nodes if "type" in node}
    return {"number" if name == "integer" else name for name in types} - {"null"}
