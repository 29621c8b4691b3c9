"""Documents: text and images in reading order between BOS and EOS. No Jinja, no roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from indexer.segments import Image, Segment, Text, Token

_BETWEEN_MESSAGES = "\n\n"


class DocumentTemplate:
    """BOS, parts, EOS; text and EOS are in the loss. Of conversations the roles are left out."""

    def __init__(self, bos: str | None, eos: str | None, fingerprint: str) -> None:
        self._bos = [] if bos is None else [Token(bos, loss=False)]
        self._eos = [] if eos is None else [Token(eos, loss=True)]
        self.fingerprint = fingerprint

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        segments: list[Segment] = [*self._bos]
        if "content" in record:
            segments += _parts(record["content"])
        else:
            spoken = filter(None, (_parts(message["content"]) for message in record["messages"]))
            for number, parts in enumerate(spoken):
                segments += [Text(_BETWEEN_MESSAGES, loss=True), *parts] if number else parts
        segments += self._eos
        return segments


def _parts(parts: Sequence[Mapping[str, Any]]) -> list[Segment]:
    return [
        Image(part["image"]) if part["type"] == "image" else Text(part["text"], loss=True)
        for part in parts
        if part["type"] == "image" or part["text"]
    ]
