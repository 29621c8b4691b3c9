"""What a tokenizer is here: plain text in, ids out, and a table of special tokens that no text can become.

Special tokens are placed by templates and image layouts, by their string; they are never searched for in text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from packer.format.errors import BayplanError, UsageError

Kind = Literal["huggingface", "tiktoken", "tekken", "sentencepiece"]
Ids = Sequence[int]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialToken:
    """One special token: its string and id, and whether it swallows the white space beside it."""

    token: str
    id: int
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSpec:
    """Which tokenizer to open."""

    file: str
    """A local path; not part of the fingerprint."""
    kind: Kind | None = None
    """None: found out from the content."""
    pattern: str | None = None
    """How a rank file of `tiktoken` splits text: the name of a published pattern, or a regular expression."""
    special_tokens: Mapping[str, int] | Sequence[str] = field(default_factory=tuple)
    """Further special tokens. A string of the vocabulary keeps its id and text no longer becomes it; new ones of a list get
    the ids after the vocabulary."""


class TextTokenizer(Protocol):
    """Text -> ids. Safe to use from several threads; equal fingerprints give equal ids."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int:
        """1 + the largest id, special tokens included."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, SpecialToken]:
        """All that templates and layouts may name. No text gives their ids, except that of the unknown token for what the
        vocabulary cannot write."""
        ...

    def encode_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> list[Ids]:
        """Ids of plain texts; `starts` says which of them begin the sample, with no token written out before (none, if left out).

        Raises:
            TokenizationFailed: for all texts that cannot be encoded; the others are fine without them.
        """
        ...

    def count_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> npt.NDArray[np.int64]:
        """How many ids each text has, without making lists of them."""
        ...

    def encode_with_offsets(self, text: str, start: bool = False) -> tuple[Ids, Sequence[Span]]:
        """Ids, and the characters of `text` each comes from: half-open, and a character of several tokens is in all of them."""
        ...


class TokenizationFailed(BayplanError):
    """Some texts of a batch cannot be encoded. `failures` says why, by their position in the batch."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        super().__init__("; ".join(f"text {position} cannot be tokenized: {why}" for position, why in self.failures.items()))

    def __reduce__(self) -> tuple[type[TokenizationFailed], tuple[dict[int, str]]]:
        return type(self), (self.failures,)


def token_id(tokenizer: TextTokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
        UsageError: no such special token; names the nearest.
    """
    found = tokenizer.special_tokens.get(token)
    if found is None:
        near = nearest(token, tokenizer.special_tokens) or "; name it in special_tokens if it is one"
        raise UsageError(f"the tokenizer has no special token {token!r}{near}")
    return found.id


def nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def fingerprint_of(kind: Kind, content: bytes, pattern: str, special_tokens: Mapping[str, SpecialToken]) -> str:
    """Of all that changes ids. Version 1 of this rule."""
    digest = blake3(content)
    ids = sorted((special.id, special.token) for special in special_tokens.values())
    digest.update(repr(("tokenizer-1", kind, pattern, ids)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]
