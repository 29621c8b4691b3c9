"""A sample between template and tokenizer: what is plain text, what is a special token, where an image stands.

Kept apart until the ids are made, so that no text of a user can become structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: a special token's string in it stays text. Neighbouring texts are joined before they are tokenized."""

    text: str
    loss: bool
    """Whether a model is trained to write it."""


@dataclass(frozen=True, slots=True)
class Token:
    """One special token of the tokenizer, by its string."""

    token: str
    loss: bool


@dataclass(frozen=True, slots=True)
class Image:
    """The place of an image, wrapper tokens included."""

    index: int
    """Into the record's `images`."""


@dataclass(frozen=True, slots=True)
class Features:
    """Positions that hold the features of one image; each has the id of `token`."""

    num_tokens: int
    token: str


Segment = Text | Token | Image
Piece = Text | Token | Features
"""What is left once every image has been replaced by the pieces of its layout."""

Segments = Sequence[Segment]
Pieces = Sequence[Piece]
