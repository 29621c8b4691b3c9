"""From bytes of UTF-8, or characters of NFC, back to the characters of the text that was given."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import cache

import numpy as np

from indexer.tokenizers.core import Span


def spans_of_bytes(text: str, lengths: Iterable[int]) -> list[Span]:
    """The characters that tokens of these lengths in bytes, one after the other, are from; a token that starts inside a
    character belongs to it."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    character = np.cumsum((encoded & 0xC0) != 0x80) - 1
    ends = np.cumsum(np.fromiter(lengths, np.int64))
    assert (int(ends[-1]) if len(ends) else 0) == len(encoded), "the tokens do not spell the text"
    starts = np.concatenate([[0], ends[:-1]])[: len(ends)].astype(np.int64)
    return list(zip(character[starts].tolist(), (character[ends - 1] + 1).tolist(), strict=True))


def spans_before_nfc(text: str, spans: list[Span]) -> list[Span]:
    """Spans of `text` from those of its NFC; what was composed is one piece, and all of it belongs to each of its tokens."""
    starts, ends = _alignment(text)
    return [(starts[start], ends[end - 1]) for start, end in spans]


def _alignment(text: str) -> tuple[list[int], list[int]]:
    starts: list[int] = []
    ends: list[int] = []
    begin = 0
    for end in range(1, len(text) + 1):
        if end < len(text) and not _begins_anew(text[end]):
            continue
        composed = unicodedata.normalize("NFC", text[begin:end])
        starts += [begin] * len(composed)
        ends += [end] * len(composed)
        begin = end
    return starts, ends


def _begins_anew(character: str) -> bool:
    """Whether composing never reaches over the place before this character."""
    if character < "\u0300":
        return True
    # Three Tibetan vowels are no combining marks, but decompose into some.
    head = unicodedata.normalize("NFD", character)[0]
    return not (unicodedata.combining(head) or head in _second_halves())


@cache
def _second_halves() -> frozenset[str]:
    """Characters that compose with one before them although they are no combining marks, from Unicode's own table."""
    parts = (unicodedata.decomposition(chr(number)).split() for number in range(0x110000))
    seconds = {chr(int(part[1], 16)) for part in parts if len(part) == 2 and not part[0].startswith("<")}
    jamo = map(chr, [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)])
    return frozenset(seconds).union(jamo)
