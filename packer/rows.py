"""One line -> one JSON object, by one strict rule, whatever JSON library is installed; and its fields' original bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from packer.format.errors import RowError
from packer.format.reasons import Reason

MAX_NESTING = 200
_STRINGS_AND_NUMBERS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?(?:NaN|Infinity)|-?[0-9][0-9.eE+-]*', re.DOTALL)
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RAW_ITEMS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def parse_row(text: bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        RowError: with the one reason this line is refused for.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise _why_refused(text) from None
    if not isinstance(value, dict):
        raise RowError(Reason.INVALID_JSON, f"found a JSON {_json_type(value)}, expected an object")
    if text.count(b"[") + text.count(b"{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise RowError(Reason.NESTING_TOO_DEEP, f"more than {MAX_NESTING} levels of lists and objects")
    return value


def raw_fields(text: bytes) -> Mapping[str, bytes]:
    """Top-level fields of a line that `parse_row` accepted, as their original bytes."""
    return {name: bytes(value) for name, value in _RAW_FIELDS.decode(text).items()}


def raw_items(items: bytes) -> list[dict[str, bytes]]:
    """For each message or part of a list, its fields as their original bytes."""
    return [{name: bytes(value) for name, value in item.items()} for item in _RAW_ITEMS.decode(items)]


def null_non_finite(text: bytes) -> tuple[bytes, int]:
    """The line with every NaN, Infinity and number beyond a double turned into null, and how many there were.

    All other bytes stay as they are. The line must be JSON but for such numbers.
    """
    count = 0

    def checked(match: re.Match[bytes]) -> bytes:
        nonlocal count
        token = match[0]
        if token[:1] == b'"' or math.isfinite(float(token)):
            return token
        count += 1
        return b"null"

    return _STRINGS_AND_NUMBERS.sub(checked, text), count


def _json_type(value: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _depth(value: object) -> int:
    """Levels of lists and objects, without recursion."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        if isinstance(item, dict | list):
            deepest = max(deepest, level)
            stack.extend((child, level + 1) for child in (item.values() if isinstance(item, dict) else item))
    return deepest


def _why_refused(text: bytes) -> RowError:
    """Name the reason ourselves: the wording of parsers changes with their versions."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as bad:
        return RowError(Reason.INVALID_UTF8, f"byte {bad.start} of the line: {bad.reason}")
    found: list[str] = []

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            found.append(digits[:20])
        return value

    try:
        value = json.loads(decoded, parse_constant=found.append, parse_float=number, parse_int=number)
    except RecursionError:
        return RowError(Reason.NESTING_TOO_DEEP, f"more than {MAX_NESTING} levels of lists and objects")
    except ValueError as bad:
        return RowError(Reason.INVALID_JSON, f"not JSON from character {getattr(bad, 'pos', 0)} on")
    if found:
        return RowError(Reason.NON_FINITE_NUMBER, f"found {found[0]}")
    if _depth(value) > MAX_NESTING:
        return RowError(Reason.NESTING_TOO_DEEP, f"more than {MAX_NESTING} levels of lists and objects")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return RowError(Reason.LONE_SURROGATE, "a \\u escape is half of a surrogate pair")
    return RowError(Reason.INVALID_JSON, "not strict JSON")
