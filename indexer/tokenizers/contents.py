"""A tokenizer file read whole, and what it is by its content: names of files say little (`tokenizer.model` has two kinds)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from indexer.tokenizers.core import Kind
from packer.format.errors import UsageError

KINDS: dict[Kind, str] = {
    "huggingface": "a tokenizer.json of Hugging Face",
    "tiktoken": "a rank file of tiktoken",
    "tekken": "a tekken JSON of Mistral",
    "sentencepiece": "a sentencepiece model",
}
_USUAL_NAMES = ("tokenizer.json", "tekken.json", "*.tiktoken", "tokenizer.model*")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|\Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The bytes of a file, the kind they are of, and the parsed document if they are JSON."""

    content: bytes
    kind: Kind
    document: Any = None


def read_file(file: str) -> bytes:
    """All bytes of a local file.

    Raises:
        UsageError: missing, a folder (says what is in it), or unreadable.
    """
    path = Path(file)
    if path.is_dir():
        inside = sorted({found.name for name in _USUAL_NAMES for found in path.glob(name)})
        name = f"; name the file in it: {' or '.join(inside)}" if inside else " without a tokenizer; expected a file"
        raise UsageError(f"tokenizer {file} is a folder{name}")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no tokenizer file {file}; expected a local tokenizer.json or another kind of it") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"tokenizer file {file} cannot be read: {error}") from error


def recognise(file: str, content: bytes, kind: Kind | None) -> Contents:
    """The content, if it is of `kind`, or of any kind known here if that is None.

    Raises:
        UsageError: empty, cut, or something else; says what it is instead.
    """
    if kind is not None and kind not in KINDS:
        raise UsageError(f"unknown kind of tokenizer {kind!r}; expected one of {', '.join(KINDS)}, or none")
    found, what, document = _recognise(content)
    if found is None or kind not in (None, found):
        expected = KINDS[kind] if kind else ", ".join(KINDS.values())
        way_out = f"; set kind to {found}, or leave it out" if found else ""
        raise UsageError(f"tokenizer file {file} is {what}, expected {expected}{way_out}")
    return Contents(content=content, kind=found, document=document)


def _recognise(content: bytes) -> tuple[Kind | None, str, Any]:
    if not content.strip():
        return None, "empty", None
    if content.lstrip()[:1] in (b"{", b"["):
        return _recognise_json(content)
    if _RANK_LINE.match(content):
        return "tiktoken", KINDS["tiktoken"], None
    if content.startswith(b"version https://git-lfs"):
        return None, "a pointer of Git LFS (get the file itself: git lfs pull)", None
    if _starts_with_a_piece(content):
        return "sentencepiece", KINDS["sentencepiece"], None
    return None, "no tokenizer known here", None


def _recognise_json(content: bytes) -> tuple[Kind | None, str, Any]:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        return None, f"cut or damaged JSON ({error})", None
    keys = document if isinstance(document, dict) else {}
    if isinstance(keys.get("model"), dict) and isinstance(keys["model"].get("vocab"), dict | list):
        return "huggingface", KINDS["huggingface"], document
    if isinstance(keys.get("config"), dict) and isinstance(keys.get("vocab"), list):
        return "tekken", KINDS["tekken"], document
    if "tokenizer_class" in keys or "chat_template" in keys:
        return None, "a tokenizer_config.json", None
    if keys and all(type(value) is int for value in keys.values()):
        return None, "a vocab.json (a vocabulary alone)", None
    return None, "JSON without a tokenizer in it", None


def _starts_with_a_piece(content: bytes) -> bool:
    """Whether it begins as a ModelProto does: a message of field 1 whose own field 1 is a string."""
    return len(content) > 4 and content[0] == 0x0A and content[1] < 128 and content[2] == 0x0A and content[3] < content[1]
