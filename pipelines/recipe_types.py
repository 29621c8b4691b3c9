"""The recipe's own types: names, sizes, globs. Each has its check and, for the JSON schema, how an editor may check it.

`errorMessage` (known to VS Code) says what is expected where type and bounds do not; the wording of mistakes uses it too.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from packer.schemas import DEFAULT_FIELDS

FIELD_DEFAULTS: dict[str, dict[str, str]] = {schema: {**fields, "id": "id"} for schema, fields in DEFAULT_FIELDS.items()}
MIB = 2**20
GIB = 2**30

_SLUG = "^[a-z0-9][a-z0-9_-]{0,62}$"
_PYTHON_SCHEMA = r"^python:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
_HOST = "^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?$"
_SIZE = re.compile(r"^([0-9]+(?:\.[0-9]+)?) *([KkMmGgTt][Ii]?)?[Bb]$")
_UNITS = {"": 1} | {
    letter + suffix: base**power for power, letter in enumerate("kmgt", start=1) for suffix, base in (("", 1000), ("i", 1024))
}


def problem(message: str, **context: Any) -> PydanticCustomError:
    """Make the error of a validator whose message is shown as it stands, after source and field."""
    return PydanticCustomError("problem", "{message}", {"message": message, **context})


def _parse_bytes(value: object) -> object:
    """Turn "64 MiB" into a number of bytes; anything else goes on to the check of the type."""
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    size = Fraction(match[1]) * _UNITS[(match[2] or "").lower()]
    return size.numerator if size.denominator == 1 else value


def _whole_number(value: object) -> object:
    # A literal 1 would also take 1.0 and true.
    if type(value) is not int:
        raise ValueError("not a whole number")
    return value


def _power_of_two(value: int) -> int:
    if value.bit_count() != 1:
        raise ValueError("not a power of two")
    return value


def _whole_above_one(value: float) -> float:
    if value > 1 and value != int(value):
        raise problem(f"found {value}, expected a share of one (0.5) or a whole number, as Ray asks")
    return value


def _bytes_schema(expected: str) -> WithJsonSchema:
    sizes: list[dict[str, object]] = [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "string", "pattern": _SIZE.pattern},
    ]
    return WithJsonSchema({"anyOf": sizes, "errorMessage": expected})


def _pattern_schema(pattern: str, expected: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "errorMessage": expected})


Version = Annotated[Literal[1], BeforeValidator(_whole_number)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Slug = Annotated[
    str,
    Field(pattern=_SLUG),
    _pattern_schema(_SLUG, 'a name of a-z, 0-9, "-" and "_" (at most 63, a letter or digit first)'),
]
Host = Annotated[
    str,
    Field(pattern=_HOST),
    AfterValidator(str.lower),
    _pattern_schema(_HOST, 'the name of a host such as "images.example.org", or with its port'),
]
ByteSize = Annotated[
    int, BeforeValidator(_parse_bytes), Field(gt=0), _bytes_schema('a number of bytes, or a size such as "64MiB"')
]
BundleSize = Annotated[
    int,
    BeforeValidator(_parse_bytes),
    Field(gt=0, lt=4 * GIB),
    _bytes_schema('a number of bytes below 4 GiB, or a size such as "1GiB"'),
]
RangeSize = Annotated[
    int,
    BeforeValidator(_parse_bytes),
    Field(gt=0),
    AfterValidator(_power_of_two),
    _bytes_schema('a power of two in bytes, or a size such as "256MiB"'),
]
Globs = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(strict=False, min_length=1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ],
            "errorMessage": "a path, a glob or a URL, or a list of them",
        }
    ),
]
SchemaName = Annotated[
    str,
    Field(pattern=f"^({'|'.join(FIELD_DEFAULTS)})$|{_PYTHON_SCHEMA}"),
    WithJsonSchema(
        {
            "anyOf": [{"enum": list(FIELD_DEFAULTS)}, {"type": "string", "pattern": _PYTHON_SCHEMA}],
            "errorMessage": f"one of {', '.join(FIELD_DEFAULTS)} or python:module:function",
        }
    ),
]
# The word for "make it null" is also YAML's null; both are taken.
NonFinite = Annotated[
    Literal["quarantine", "null"],
    BeforeValidator(lambda value: "null" if value is None else value),
    WithJsonSchema({"enum": ["quarantine", "null", None]}),
]
Keep = Annotated[
    Literal["all"] | Texts,
    WithJsonSchema(
        {
            "anyOf": [{"const": "all"}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
            "errorMessage": '"all" or a list of field names',
        }
    ),
]
RayShare = Annotated[float, Field(gt=0), AfterValidator(_whole_above_one)]
