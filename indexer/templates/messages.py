"""A record's messages as a chat template expects them, and with markers where a text could become structure.

Fields follow transformers 5: null fields are left out, reasoning is passed under both names that templates read. A message
without any part has no `content` (it was null). `extra.tools` of the record are the template's `tools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indexer.templates.guard import Guard, free_marker, strings_of
from indexer.templates.probe import ContentForms
from indexer.templates.spec import TemplateFailure

_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The variables of one rendering."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    images: list[int]
    """In reading order."""
    marker: str | None
    """The character that stands for nothing in these strings; None when none was needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWriter:
    """Writes the messages of records for one template."""

    forms: ContentForms
    placeholder: str
    guard: Guard
    assistant_guard: Guard
    """For the texts of assistant turns, which may write some special tokens themselves."""
    reserved: str
    """Text of the template, where the marker must not occur either."""

    def write(self, record: Mapping[str, Any]) -> Written:
        messages = record["messages"]
        tools = _tools(record)
        marker = None
        if not (all(map(self._is_clean, messages)) and (tools is None or _is_clean_value(tools, self.guard))):
            marker = free_marker([self.reserved, *strings_of(messages), *strings_of(tools)])
            tools = _protect_value(tools, self.guard, marker)
        return Written(
            messages=[self._message(message, marker) for message in messages],
            tools=tools,
            images=[part["image"] for message in messages for part in message["content"] if part["type"] == "image"],
            marker=marker,
        )

    def _guard_of(self, message: Mapping[str, Any]) -> Guard:
        return self.assistant_guard if message["role"] == "assistant" else self.guard

    def _is_clean(self, message: Mapping[str, Any]) -> bool:
        guard = self._guard_of(message)
        return (
            guard.is_clean_name(message["role"])
            and all(part["type"] == "image" or guard.is_clean(part["text"]) for part in message["content"])
            and ("extra" not in message or _is_clean_value(message["extra"], guard))
        )

    def _message(self, message: Mapping[str, Any], marker: str | None) -> dict[str, Any]:
        guard = self._guard_of(message)
        role = message["role"]
        written: dict[str, Any] = {"role": role if marker is None else guard.protect_name(role, marker)}
        if parts := message["content"]:
            texts = [
                None if part["type"] == "image" else part["text"] if marker is None else guard.protect(part["text"], marker)
                for part in parts
            ]
            if self.forms.get(role, self.forms["user"]) == "string":
                written["content"] = "".join(self.placeholder if text is None else text for text in texts)
            else:
                written["content"] = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
        if extra := message.get("extra"):
            written |= self._extra(extra if marker is None else _protect_value(extra, guard, marker))
        return written

    def _extra(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        fields = {name: value for name, value in extra.items() if value is not None and name not in ("role", "content")}
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        return fields if reasoning is None else {"thinking": reasoning} | fields | {"reasoning_content": reasoning}


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("extra", {}).get("tools")
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return tools
    raise TemplateFailure(f"extra.tools: found {str(tools)[:60]!r}, expected a list of JSON schemas")


def _is_clean_value(value: Any, guard: Guard) -> bool:
    return all(map(guard.is_clean_name, strings_of(value)))


def _protect_value(value: Any, guard: Guard, marker: str) -> Any:
    if isinstance(value, str):
        return guard.protect_name(value, marker)
    if isinstance(value, dict):
        return {guard.protect_name(key, marker): _protect_value(item, guard, marker) for key, item in value.items()}
    if isinstance(value, list):
        return [_protect_value(item, guard, marker) for item in value]
    return value
