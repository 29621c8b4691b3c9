"""Keeps a record's text from becoming structure.

A chat template mixes its own text with the record's into one string, where `<|im_end|>` of either looks the same. So
before rendering a *marker*, one character that neither record nor template has, is put into every place of the record's
strings that could become a special string, and after rendering it is taken out of what is text. It stands

- inside each special string (behind its first character), overlapping ones included;
- at the edge of a text that begins with the end of a special string, ends with the beginning of one, or lies within one,
  so that nothing is completed by the template or by the next text. It stands inside any outer white space, so trimming
  works as without it.

Most records need no marker (about 2 microseconds a text to find that out). What remains outside the promise: a template
that takes characters out of the middle of a text, so that the rest joins into a special string.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from indexer.templates.spec import TemplateFailure

_MARKERS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))]
"""Noncharacters, then private use; all of them are written as one \\uXXXX escape by JSON and by repr."""
_NAME = re.compile(r"[\w.-]+")


class Guard:
    """Finds and breaks special strings in texts."""

    def __init__(self, words: Collection[str]) -> None:
        self._words = words_pattern(words)
        self._reach = max(map(len, words), default=1) - 1
        self._beginnings = frozenset(word[:end] for word in words for end in range(1, len(word)))
        self._endings = frozenset(word[start:] for word in words for start in range(1, len(word)))
        self._first = _any_of(word[0] for word in words)
        self._last = _any_of(word[-1] for word in words)
        self._pairs = frozenset(word[i : i + size] for word in words for i in range(len(word)) for size in (1, 2))
        self._all = "\0".join(words)

    def is_clean(self, text: str) -> bool:
        """Whether the text can be rendered without a marker."""
        return self._words.search(text) is None and self._open_edges(text.strip()) == (False, False)

    def is_clean_name(self, text: str) -> bool:
        """The same for a string outside the content. Plain names are the template's vocabulary, even in `<|` + role + `|>`."""
        if _NAME.fullmatch(text):
            return self._words.search(text) is None
        return self.is_clean(text)

    def protect(self, text: str, marker: str) -> str:
        """The text with its markers."""
        body = text.strip()
        before, after = self._open_edges(body)
        if not (before or after):
            return self._break(text, marker)
        start = text.index(body)
        inner = f"{marker if before else ''}{self._break(body, marker)}{marker if after else ''}"
        return text[:start] + inner + text[start + len(body) :]

    def protect_name(self, text: str, marker: str) -> str:
        """The same for a string outside the content."""
        return self._break(text, marker) if _NAME.fullmatch(text) else self.protect(text, marker)

    def _break(self, text: str, marker: str) -> str:
        pieces, position = [], 0
        match = self._words.search(text)
        while match is not None:
            # A special string of one character cannot be broken; the splitter knows it by the marker before it.
            cut = match.start() + (len(match[0]) > 1)
            pieces += [text[position:cut], marker]
            position = cut
            match = self._words.search(text, match.start() + 1)
        return "".join((*pieces, text[position:]))

    def _open_edges(self, body: str) -> tuple[bool, bool]:
        """Whether something before, and something behind the text could complete a special string with it."""
        head, tail = body[: self._reach], body[-self._reach :] if self._reach else ""
        before = any(head[: match.end()] in self._endings for match in self._last.finditer(head))
        after = any(tail[match.start() :] in self._beginnings for match in self._first.finditer(tail))
        if len(body) < self._reach and not (before and after) and body[:2] in self._pairs and body[-2:] in self._pairs:
            within = bool(body) and body in self._all
            return before or within, after or within
        return before, after


def words_pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Finds the leftmost, there the longest word, as a trie: thousands of reserved tokens cost what a few do."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branches(trie) if trie else r"(?!)")


def _branches(node: dict[str, Any]) -> str:
    alternatives = []
    for character, child in sorted(node.items()):
        if not character:
            continue
        run = character
        while len(child) == 1 and "" not in child:
            ((character, child),) = child.items()
            run += character
        alternatives.append(re.escape(run) + (_branches(child) if child.keys() - {""} else ""))
    if "" in node:
        return f"(?:{'|'.join(alternatives)})?"
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"


def _any_of(characters: Iterable[str]) -> re.Pattern[str]:
    found = "".join(sorted(set(characters)))
    return re.compile(f"[{re.escape(found)}]" if found else r"(?!)")


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_of(item)


def free_marker(strings: Iterable[str]) -> str:
    """A marker that occurs in none of the strings, neither itself nor as an escape."""
    everything = "\0".join(strings)
    for marker in _MARKERS:
        if marker not in everything and escaped(marker) not in everything:
            return marker
    raise TemplateFailure(f"the record holds all {len(_MARKERS)} characters that could mark special strings in its text")


def escaped(marker: str) -> str:
    """The marker as JSON (ASCII only) and repr write it."""
    return f"\\u{ord(marker):04x}"
