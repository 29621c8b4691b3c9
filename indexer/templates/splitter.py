"""Rendered text -> segments: special strings become tokens, placeholders become images, the rest is text.

Special strings are found as the `tokenizers` library finds them: leftmost, then longest; `lstrip` and `rstrip` of a token
take the white space beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from indexer.segments import Image, Segment, Text, Token
from indexer.templates.guard import escaped, words_pattern
from indexer.templates.spec import SpecialFlags, TemplateFailure

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space, as the Rust side strips it; Python's own strip takes four control characters more."""

_WHITE_SPACE = re.compile(f"[{WHITE_SPACE}]*")

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""


class Splitter:
    """Splits by the special tokens of one tokenizer and one placeholder."""

    def __init__(self, specials: Mapping[str, SpecialFlags], placeholder: str) -> None:
        self.words = sorted({*specials, placeholder})
        self._pattern = words_pattern(self.words)
        self._placeholder = placeholder
        self._strips = {word: (flags.lstrip, flags.rstrip) for word, flags in specials.items()}
        if placeholder not in specials:
            self._strips[placeholder] = _outer_strips(placeholder, specials)

    def split(self, rendered: str, spans: Sequence[Span], images: Sequence[int], marker: str | None) -> list[Segment]:
        """The segments; `spans` (in order, apart) are in the loss, the i-th placeholder is `images[i]`.

        Raises:
            TemplateFailure: when there are more or fewer placeholders than images.
        """
        texts = _Texts(rendered, spans, marker)
        segments = texts.segments
        position = num_images = 0
        for match in self._pattern.finditer(rendered):
            start, end = match.span()
            if marker is not None and end - start == 1 and rendered[start - 1 : start] == marker:
                continue
            word = match[0]
            left, right = self._strips[word]
            text_end = position + len(rendered[position:start].rstrip(WHITE_SPACE)) if left else start
            texts.add(position, text_end)
            position = end
            if right and (white_space := _WHITE_SPACE.match(rendered, end)):
                position = white_space.end()
            if word == self._placeholder:
                if num_images < len(images):
                    segments.append(Image(images[num_images]))
                num_images += 1
            else:
                segments.append(Token(word, texts.in_loss(start, end)))
        texts.add(position, len(rendered))
        if num_images != len(images):
            raise TemplateFailure(
                f"the template wrote the placeholder {self._placeholder!r} {num_images} times for {len(images)} images"
            )
        return segments

    def outside_token(self, text: str, position: int, boundary: int) -> int:
        """`position`, or the start of the special string it lies within; between `boundary` and it are whole ones."""
        for match in self._pattern.finditer(text, boundary):
            if match.end() > position:
                return min(position, match.start())
        return position


def _outer_strips(placeholder: str, specials: Mapping[str, SpecialFlags]) -> tuple[bool, bool]:
    """A placeholder made of special tokens strips as its first and its last one do."""
    matches = list(words_pattern(specials).finditer(placeholder))
    left = bool(matches) and matches[0].start() == 0 and specials[matches[0][0]].lstrip
    right = bool(matches) and matches[-1].end() == len(placeholder) and specials[matches[-1][0]].rstrip
    return left, right


class _Texts:
    """Collects segments; cuts text where the loss begins and ends. Asked from left to right only."""

    def __init__(self, rendered: str, spans: Sequence[Span], marker: str | None) -> None:
        self.segments: list[Segment] = []
        self._rendered = rendered
        self._spans = spans
        self._next = 0
        self._markers = () if marker is None else (marker, escaped(marker))

    def in_loss(self, start: int, end: int) -> bool:
        """Whether the characters touch a span."""
        spans = self._spans
        while self._next < len(spans) and spans[self._next][1] <= start:
            self._next += 1
        return self._next < len(spans) and spans[self._next][0] < end

    def add(self, start: int, end: int) -> None:
        while start < end:
            cut, loss = end, self.in_loss(start, end)
            if loss:
                span_start, span_end = self._spans[self._next]
                loss = span_start <= start
                cut = min(end, span_end if loss else span_start)
            text = self._rendered[start:cut]
            for marker in self._markers:
                text = text.replace(marker, "")
            if text:
                self.segments.append(Text(text, loss))
            start = cut
