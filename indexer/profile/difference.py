"""Where two profiles differ, in words of their settings: the identity has only digests of tokenizer and template."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Protocol

from indexer.profile.opening import used_placeholder
from indexer.profile.settings import Profile

_DIGESTS = ("tokenizer", "template")
_TEMPLATE_SETTINGS = ("name", "bos", "eos", "content", "date", "variables", "assistant_tokens")
_MAX_LINE = 60


class Described(Protocol):
    """A profile, open or stored."""

    @property
    def profile(self) -> Profile: ...
    @property
    def identity(self) -> Mapping[str, Any]: ...


def difference(old: Described, new: Described) -> str:
    """What of `old`, which the index has, counts differently in `new`: each setting with both values; empty if nothing."""
    old_flat, new_flat = dict(_flat(old.identity)), dict(_flat(new.identity))
    found = {key: (new_flat.get(key), old_flat.get(key)) for key in old_flat.keys() | new_flat.keys() if key not in _DIGESTS}
    texts: dict[str, str] = {}
    if new.identity.get("tokenizer") != old.identity.get("tokenizer"):
        found |= _tokenizer_settings(old.profile, new.profile)
        if all(has == had for key, (has, had) in found.items() if key.startswith("tokenizer.") and key != "tokenizer.kind"):
            texts["tokenizer"] = "the tokenizer's file: found other contents than the index was counted with"
    if new.identity.get("template") != old.identity.get("template"):
        found |= _template_settings(old.profile, new.profile)
        texts |= _template_text(old.profile, new.profile)
        named = any(has != had for key, (has, had) in found.items() if key.startswith("template."))
        # The tokenizer's special tokens are part of a chat template's digest.
        if not named and "template" not in texts and new.identity.get("tokenizer") == old.identity.get("tokenizer"):
            texts["template"] = "the template: the same settings are read otherwise than when the index was counted"
    texts |= {key: f"{key}: found {has!r}, the index has {had!r}" for key, (has, had) in found.items() if has != had}
    return "; ".join(texts[key] for key in sorted(texts))


def _tokenizer_settings(old: Profile, new: Profile) -> dict[str, tuple[Any, Any]]:
    has, had = new.tokenizer, old.tokenizer
    found: dict[str, tuple[Any, Any]] = {
        "tokenizer.pattern": (has.pattern, had.pattern),
        "tokenizer.special_tokens": (has.special_tokens, had.special_tokens),
    }
    if None not in (has.kind, had.kind):  # one that is found out changes with the file alone
        found["tokenizer.kind"] = (has.kind, had.kind)
    return found


def _template_settings(old: Profile, new: Profile) -> dict[str, tuple[Any, Any]]:
    found = {f"template.{name}": (getattr(new.template, name), getattr(old.template, name)) for name in _TEMPLATE_SETTINGS}
    return found | {"template.placeholder": (used_placeholder(new), used_placeholder(old))}


def _template_text(old: Profile, new: Profile) -> dict[str, str]:
    has, had = new.template.text, old.template.text
    if has is None or had is None or has == had:
        return {}
    lines = enumerate(zip_longest(has.split("\n"), had.split("\n")), 1)
    number, pair = next((number, pair) for number, pair in lines if pair[0] != pair[1])
    here, there = (_around(line, pair) for line in pair)
    return {"template": f"the template's text: first differing line {number}: found {here}, the index has {there}"}


def _around(line: str | None, pair: tuple[str | None, str | None]) -> str:
    """The piece of a line where it begins to differ from the other."""
    if line is None:
        return "its end"
    one, other = pair[0] or "", pair[1] or ""
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, common - _MAX_LINE // 2)
    end = start + _MAX_LINE
    return f"{'...' if start else ''}{line[start:end]!r}{'...' if end < len(line) else ''}"


def _flat(identity: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in identity.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found
