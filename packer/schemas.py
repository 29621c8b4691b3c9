"""Parsed row -> content parts and image references, one mapping per schema.

A mapping is a pure function of the row. It returns a `Mapped`: the body in reading order, its images numbered by first
mention, and the fields it used; all other fields of the row may be carried.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from packer.format.errors import InputError, RowError
from packer.format.reasons import Reason
from packer.format.record import Body

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_MEDIA = frozenset({"audio", "video", "input_audio", "audio_url", "video_url", "video_frames"})
DEFAULT_FIELDS: Mapping[str, Mapping[str, str]] = {
    "interleaved": {"content": "content"},
    "llava": {"conversations": "conversations", "image": "image"},
    "chat": {"messages": "messages"},
    "obelics": {"texts": "texts", "images": "images"},
    "caption": {"image": "image_path", "text": "caption"},
    "text": {"text": "text"},
}
"""Per schema: the parts it needs and the field each is in unless the recipe's `fields` says otherwise."""


MESSAGE_FIELDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("role",), ("content",)),
    "llava": (("from", "role"), ("value", "content")),
}
"""Fields of a message that its schema uses, the first of each group that is there; any other is carried in `extra`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaConfig:
    """A source's schema with its fields filled in; picklable."""

    name: str
    """A key of DEFAULT_FIELDS, or `python:module:function`."""
    fields: Mapping[str, str]
    id_field: str = "id"
    placeholder: str = "<image>"
    literal_placeholders: str = "quarantine"


@dataclass(slots=True, kw_only=True)
class Mapped:
    """A row taken apart."""

    body: Body
    references: list[str]
    used_fields: frozenset[str]
    num_cut: int = 0
    """References beyond the source's `max_per_sample` that were left out."""
    part_field: str | None = None
    """Where the content or messages stand, when some of their parts have fields beyond those the schema used."""
    message_field: str | None = None
    """Where the messages stand, when some have fields beyond those the schema used."""


Mapping_ = Callable[[Mapping[str, Any], SchemaConfig], Mapped]


@dataclass(slots=True)
class _Collector:
    """Numbers image references in reading order while a body is built."""

    references: list[str] = field(default_factory=list)
    has_part_fields: bool = False

    def image(self, reference: object, where: str) -> dict[str, Any]:
        if not isinstance(reference, str) or not reference:
            raise _mismatch(where, reference, "a non-empty string naming an image")
        self.references.append(reference)
        return {"type": "image", "image": len(self.references) - 1}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _mismatch(where: str, found: object, expected: str) -> RowError:
    shown = "null" if found is None else f"{type(found).__name__} {str(found)[:60]!r}"
    return RowError(Reason.SCHEMA_MISMATCH, f"field {where}: found {shown}, expected {expected}")


def _field(row: Mapping[str, Any], name: str, kind: type, expected: str) -> Any:
    if name not in row:
        keys = ", ".join(sorted(row)[:12]) or "none"
        raise RowError(
            Reason.SCHEMA_MISMATCH,
            f"field {name!r} is missing, expected {expected}; the row has: {keys} (see `fields` in the recipe)",
        )
    value = row[name]
    if not isinstance(value, kind):
        raise _mismatch(repr(name), value, expected)
    return value


def map_interleaved(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """`content`: a list of text and image parts in reading order."""
    name = config.fields["content"]
    parts = _field(row, name, list, "a list of text and image parts")
    collector = _Collector()
    content = _parts(parts, collector, repr(name))
    return Mapped(
        body=Body(kind="content", items=content),
        references=collector.references,
        used_fields=frozenset({name}),
        part_field=name if collector.has_part_fields else None,
    )


def _parts(parts: Sequence[Any], collector: _Collector, where: str) -> list[dict[str, Any]]:
    """Parts as OpenAI's chat API and interleaved corpora write them."""
    content = []
    for index, part in enumerate(parts):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise _mismatch(place, part, "an object with a type")
        kind = part.get("type")
        if kind == "text":
            text = part.get("text")
            if not isinstance(text, str):
                raise _mismatch(f"{place}.text", text, "a string")
            content.append(_text(text) | _other_fields(part, "text", collector))
        elif kind in ("image", "image_url", "input_image"):
            name = next((name for name in IMAGE_KEYS if part.get(name) is not None), "image")
            value = part.get(name)
            image = collector.image(value.get("url") if isinstance(value, dict) else value, f"{place}.{kind}")
            content.append(image | _other_fields(part, name, collector))
        elif kind in _MEDIA:
            raise RowError(
                Reason.UNSUPPORTED_MEDIA, f"{place}: found a part of type {kind!r}; format version 1 holds text and images"
            )
        else:
            raise _mismatch(f"{place}.type", kind, "text, image or image_url")
    return content


def _other_fields(part: Mapping[str, Any], used: str, collector: _Collector) -> dict[str, Any]:
    """What else a part says (`detail`, `alt`, ...), as the part's `extra`; nothing when there is nothing."""
    extra = {name: value for name, value in part.items() if name not in ("type", used)}
    if isinstance(part[used], dict) and len(part[used]) > 1:
        extra[used] = {name: value for name, value in part[used].items() if name != "url"}
    if not extra:
        return {}
    collector.has_part_fields = True
    return {"extra": extra}


def map_chat(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """`messages` of OpenAI's chat API; content is a string or a list of parts."""
    name = config.fields["messages"]
    messages = _field(row, name, list, "a list of messages")
    collector = _Collector()
    items: list[dict[str, Any]] = []
    has_more = False
    for index, message in enumerate(messages):
        place = f"{name!r}[{index}]"
        if not isinstance(message, dict):
            raise _mismatch(place, message, "a message with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise _mismatch(f"{place}.role", role, "a string")
        if content is None and len(message) > 2:
            parts: list[dict[str, Any]] = []  # a turn that only calls tools
        elif isinstance(content, str):
            parts = [_text(content)]
        elif isinstance(content, list):
            parts = _parts(content, collector, f"{place}.content")
        else:
            raise _mismatch(f"{place}.content", content, "a string or a list of parts")
        has_more = has_more or bool(message.keys() - {"role", "content"})
        items.append({"role": role, "content": parts})
    return Mapped(
        body=Body(kind="messages", items=items),
        references=collector.references,
        used_fields=frozenset({name}),
        part_field=name if collector.has_part_fields else None,
        message_field=name if has_more else None,
    )


def map_llava(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """`conversations` with placeholders in the turns, and one image or a list of them beside."""
    turns_field, image_field = config.fields["conversations"], config.fields["image"]
    turns = _field(row, turns_field, list, "a list of turns with from and value")
    images = row.get(image_field)
    references = [] if images is None else images if isinstance(images, list) else [images]
    collector = _Collector()
    items = []
    has_more = False
    spare = config.literal_placeholders == "text"
    num_placeholders = 0
    for index, turn in enumerate(turns):
        role, value = _turn(turn, f"{turns_field!r}[{index}]")
        has_more = has_more or len(turn) > 2
        if spare and (role != "user" or not references):
            items.append({"role": role, "content": [_text(value)]})
            continue
        pieces = value.split(config.placeholder)
        content: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            if number:
                num_placeholders += 1
                if num_placeholders <= len(references):
                    content.append(collector.image(references[num_placeholders - 1], repr(image_field)))
            if piece or len(pieces) == 1:
                content.append(_text(piece))
        items.append({"role": role, "content": content})
    if num_placeholders != len(references):
        raise RowError(
            Reason.PLACEHOLDER_MISMATCH,
            f"found {num_placeholders} {config.placeholder!r} in the turns and {len(references)} images in {image_field!r}",
        )
    return Mapped(
        body=Body(kind="messages", items=items),
        references=collector.references,
        used_fields=frozenset({turns_field, image_field}),
        message_field=turns_field if has_more else None,
    )


def _turn(turn: object, where: str) -> tuple[str, str]:
    if not isinstance(turn, dict):
        raise _mismatch(where, turn, "a turn with from and value")
    role, value = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
    if not isinstance(role, str):
        raise _mismatch(f"{where}.from", role, "a string")
    if not isinstance(value, str):
        raise _mismatch(f"{where}.value", value, "a string")
    return ROLES.get(role, role), value


def map_obelics(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """Parallel lists `texts` and `images`, exactly one of the two set at each place."""
    texts_field, images_field = config.fields["texts"], config.fields["images"]
    texts = _field(row, texts_field, list, "a list of strings and nulls")
    images = _field(row, images_field, list, "a list of image references and nulls")
    if len(texts) != len(images):
        raise RowError(
            Reason.SCHEMA_MISMATCH,
            f"found {len(texts)} items in {texts_field!r} and {len(images)} in {images_field!r}, expected as many",
        )
    collector = _Collector()
    content = []
    for index, (text, image) in enumerate(zip(texts, images, strict=True)):
        if text is not None and image is not None:
            raise _mismatch(f"{texts_field!r}[{index}]", text, f"null, since {images_field!r}[{index}] is set")
        if text is not None:
            if not isinstance(text, str):
                raise _mismatch(f"{texts_field!r}[{index}]", text, "a string or null")
            content.append(_text(text))
        elif image is not None:
            content.append(collector.image(image, f"{images_field!r}[{index}]"))
    used = frozenset({texts_field, images_field})
    return Mapped(body=Body(kind="content", items=content), references=collector.references, used_fields=used)


def map_caption(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """One image (or a list) and its caption: the images first, then the text. A null caption leaves the images alone."""
    image_field, text_field = config.fields["image"], config.fields["text"]
    text = _field(row, text_field, object, "a caption or null")
    if text is not None and not isinstance(text, str):
        raise _mismatch(repr(text_field), text, "a caption or null")
    images = _field(row, image_field, object, "an image reference")
    collector = _Collector()
    content = [collector.image(image, repr(image_field)) for image in (images if isinstance(images, list) else [images])]
    used = frozenset({image_field, text_field})
    if text is not None:
        content.append(_text(text))
    return Mapped(body=Body(kind="content", items=content), references=collector.references, used_fields=used)


def map_text(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
    """A document of text alone."""
    name = config.fields["text"]
    text = _field(row, name, str, "a string")
    return Mapped(body=Body(kind="content", items=[_text(text)]), references=[], used_fields=frozenset({name}))


_MAPPINGS: dict[str, Mapping_] = {
    "interleaved": map_interleaved,
    "llava": map_llava,
    "chat": map_chat,
    "obelics": map_obelics,
    "caption": map_caption,
    "text": map_text,
}
IMAGE_KEYS = ("image", "image_url", "url", "path")
"""Where an image part may have its reference; the first that is set counts."""
_PYTHON = re.compile(r"python:(?P<module>[\w.]+):(?P<function>\w+)")


def schema_of(config: SchemaConfig) -> Mapping_:
    """The mapping a source's config names.

    Raises:
        InputError: when a `python:` schema cannot be imported.
    """
    match = _PYTHON.fullmatch(config.name)
    return _MAPPINGS[config.name] if match is None else _python_mapping(match["module"], match["function"])


def _python_mapping(module_name: str, function_name: str) -> Mapping_:
    """A user's function: row -> {"content" | "messages": parts as in the interleaved and chat schemas, "used": [fields]}."""
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"schema python:{module_name}:{function_name} cannot be loaded: {_shown(error)}: "
            "put the module on PYTHONPATH or into the job's working dir"
        ) from error

    def mapping(row: Mapping[str, Any], config: SchemaConfig) -> Mapped:
        try:
            result = function(dict(row))
        except (Exception, SystemExit, GeneratorExit) as error:
            raise RowError(Reason.SCHEMA_ERROR, f"{function_name} raised {_shown(error)}") from error
        if not isinstance(result, dict) or ("content" in result) == ("messages" in result):
            raise RowError(Reason.SCHEMA_ERROR, f"{function_name} returned no dict with exactly one of content and messages")
        kind = "content" if "content" in result else "messages"
        inner = SchemaConfig(name=kind, fields={kind: kind})
        mapped = map_interleaved(result, inner) if kind == "content" else map_chat(result, inner)
        used = result.get("used", ())
        if not isinstance(used, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in used):
            raise RowError(Reason.SCHEMA_ERROR, f"{function_name} returned `used` = {used!r:.60}, expected a list of field names")
        mapped.used_fields = frozenset(used)
        mapped.part_field = None  # likewise: values, not bytes of the row
        if mapped.message_field is not None:
            mapped.message_field = None  # these messages are not in the row; their other fields are values, not bytes
            _keep_fields(mapped.body.items, result["messages"])
        try:
            orjson.dumps([mapped.body.items, mapped.references])
        except TypeError as error:
            raise RowError(Reason.NOT_WRITABLE, f"{function_name}'s result cannot be written as JSON: {error}") from error
        return mapped

    return mapping


def _shown(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {str(error)[:200]}"
    except Exception:
        return type(error).__name__


def _keep_fields(items: Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> None:
    for item, message in zip(items, messages, strict=True):
        extra = {name: value for name, value in message.items() if name not in ("role", "content")}
        if extra:
            item["extra"] = extra


def sample_id(row: Mapping[str, Any], config: SchemaConfig) -> str | None:
    """The row's id as text, or None when it has none or one that only its original bytes give exactly."""
    value = row.get(config.id_field)
    if isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
