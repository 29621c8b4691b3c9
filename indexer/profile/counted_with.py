"""What a fingerprint cannot hold: the versions of the libraries that count, and the ids they give to a fixed probe.

A fingerprint names files and parameters, and the same file may give other ids with another release of its library. Versions
alone would make every update stale; so the ids of the probe decide, and versions say what to do. About 5 ms an opening.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import msgspec
from blake3 import blake3

from indexer.encode import SampleRefused
from indexer.profile.opening import OpenProfile
from indexer.tokenizers import TextTokenizer, TokenizationFailed
from packer.format.errors import UsageError

_LIBRARIES = {"HuggingFaceTokenizer": "tokenizers", "RankTokenizer": "tiktoken", "SentencePieceTokenizer": "sentencepiece"}
_TEXTS = (
    "The quick brown fox doesn't jump over 3,141 lazy dogs; they'll (probably) RUN away -- won't they?",
    "동해 물과 백두산이 마르고 닳도록, 하느님이 보우하사 우리나라 만세. ㅋㅋㅋ 값을 읽다",
    "日本語と中文的句子。Ünïcödé ﬁ Ⅷ ½ ＡＢＣ Привет العربية हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇰🇷",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 0x1F\n\n\n\tif (a != b && c <= d) { y += 1; }\r\n",
    "0 12 345 6789 1234567890 3.14e-10 2024-07-26 ١٢٣",
    " leading, trailing \t\t  and   runs      of \u00a0\u3000 white\n\n\n\n space   ",
    "e\u0301 \u1112\u1161\u11ab n\u0303\u0323 Z\u0351\u036b\u0343 \u200b\ufeff\u200d",
    "<|im_start|>user\n<s>[INST] <image></s> <unk>",
)
_EVERYTHING = "\n".join(_TEXTS)


def _conversation(*roles: str) -> dict[str, Any]:
    messages = [{"role": role, "content": [{"type": "text", "text": _EVERYTHING}]} for role in roles]
    return {"id": "probe", "messages": messages, "images": [], "origin": {}, "extra": {}}


_CONVERSATIONS = (_conversation("user", "assistant", "user", "assistant"), _conversation("system", "user", "assistant"))


class CountedWith(msgspec.Struct, frozen=True, kw_only=True):
    """The libraries of a profile and what they made of the probe, as in `profile.json`."""

    libraries: dict[str, str]
    """Name -> version."""
    probe_text: str
    """Digest of the ids of plain texts."""
    probe_conversation: str
    """Digest of the ids and the loss mask of conversations; those that the template refuses count as refused."""


def counted_with(opened: OpenProfile) -> CountedWith:
    """By this machine's libraries."""
    tokenizer = opened.encoder.tokenizer
    libraries = [_LIBRARIES[type(tokenizer).__name__]]
    if opened.profile.template.name != "document":
        libraries.append("jinja2")
    return CountedWith(
        libraries={name: version(name) for name in libraries},
        probe_text=_digest([_ids(tokenizer, text, start) for text in (*_TEXTS, _EVERYTHING) for start in (True, False)]),
        probe_conversation=_digest([_encoded(opened, record) for record in _CONVERSATIONS]),
    )


def check_counted_with(opened: OpenProfile, known: CountedWith) -> None:
    """Refuse libraries that give other ids than those of an index of the same fingerprint.

    Raises:
        UsageError: with both versions. Other versions that give the same ids are fine.
    """
    found = counted_with(opened)
    name = opened.profile.name
    if found.probe_text != known.probe_text:
        probe = "text"
    elif found.probe_conversation != known.probe_conversation:
        probe = "conversation"
    else:
        return
    raise UsageError(
        f"profile {name!r}: counted with {_shown(known)}, here {_shown(found)} gives other ids for a fixed {probe}, so lengths "
        f"would not be those of the index: install that version, or remove index/{name} of the dataset and index again"
    )


def _shown(counted: CountedWith) -> str:
    return " and ".join(f"{name} {number}" for name, number in counted.libraries.items())


def _ids(tokenizer: TextTokenizer, text: str, start: bool) -> list[int] | None:
    try:
        return [int(token) for token in tokenizer.encode_batch([text], [start])[0]]
    except TokenizationFailed:
        return None


def _encoded(opened: OpenProfile, record: dict[str, Any]) -> Any:
    try:
        sample = opened.encoder.encode(record)
    except SampleRefused as refused:
        return refused.status.name  # what it says may be worded anew by a library
    return [sample.ids.tolist(), sample.loss_mask.tolist()]


def _digest(value: Any) -> str:
    return blake3(json.dumps(value).encode()).hexdigest()[:32]
