"""What every layout is: a frozen description of strings that turns the counts of one image into pieces, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, Self

from indexer.image_rules import ImageCount
from indexer.segments import Features, Piece, Pieces, Text, Token

_REMEMBERED = 4096
"""Images of a corpus repeat their counts; one Pixtral image has up to 128 pieces."""


class ImageLayout(Protocol):
    """Hashable, picklable, and its `repr` says everything that changes ids: what a fingerprint is made of."""

    def pieces(self, count: ImageCount, index_in_sample: int) -> Pieces:
        """What stands for one image, wrappers included; none of it is trained on.

        Raises:
            ValueError: the count is a refusal, which has no layout.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StringLayout(ABC):
    """A layout whose strings are its fields, every one a special token unless the field says otherwise."""

    token: str
    """Its id stands at every position that holds image features."""

    def pieces(self, count: ImageCount, index_in_sample: int) -> Pieces:
        """The pieces of one image, remembered by the numbers that make them."""
        if count.refusal is not None:
            raise ValueError(f"the processor refuses this image ({count.refusal}), so nothing stands for it")
        return _built(self, self._numbers(count, index_in_sample))

    @abstractmethod
    def required(self) -> tuple[str, ...]:
        """Strings that only a tokenizer with these special tokens can write."""

    def resolved(self, specials: Collection[str]) -> Self:
        """The same with what depends on the tokenizer settled: strings that may be tokens or text."""
        del specials
        return self

    @abstractmethod
    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        """All of `count` and of the position that `_build` needs."""

    @abstractmethod
    def _build(self, *args: Any, **kwargs: Any) -> Iterator[Piece]:
        """From `_numbers`."""

    def features(self, num_tokens: int) -> Features:
        """Positions of one run of image features."""
        return Features(num_tokens, self.token)


@lru_cache(maxsize=_REMEMBERED)
def _built(layout: StringLayout, numbers: tuple[int, ...]) -> Pieces:
    return tuple(layout._build(*numbers))


def special(token: str) -> Token:
    """A special token; a processor's tokens are never trained on."""
    return Token(token, loss=False)


def plain(text: str) -> Text:
    """Text that a processor adds."""
    return Text(text, loss=False)
