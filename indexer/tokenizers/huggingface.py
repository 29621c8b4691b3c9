"""Tokenizers of Hugging Face's `tokenizer.json`, run by its own library.

A text is encoded as that library encodes what stands between two special tokens: special tokens are cut out before text is
normalized, each rest is normalized and split by itself, and nothing is put around it. Added tokens that are not special
(`<tool_call>`, `</think>`) are found in text, as there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Encoding, Tokenizer

from indexer.tokenizers.contents import Contents
from indexer.tokenizers.core import Ids, Span, SpecialToken, TokenizerSpec, fingerprint_of
from indexer.tokenizers.failures import is_failure, reason, try_batch
from indexer.tokenizers.huggingface_json import Json, in_the_middle, largest_id, plain_text_only, special_tokens_of
from packer.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceTokenizer:
    """Two tokenizers where the first text of a sample is encoded otherwise than the rest, else twice the same."""

    first: Tokenizer
    later: Tokenizer
    fingerprint: str
    vocab_size: int
    special_tokens: Mapping[str, SpecialToken]

    def encode_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> list[Ids]:
        return [encoding.ids for encoding in self._encodings(texts, starts)]

    def count_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self._encodings(texts, starts)), np.int64, len(texts))

    def encode_with_offsets(self, text: str, start: bool = False) -> tuple[Ids, Sequence[Span]]:
        tokenizer = self.first if start else self.later
        (encoding,) = try_batch(lambda texts, _: tokenizer.encode_batch(texts, add_special_tokens=False), [text], [start])
        return encoding.ids, encoding.offsets

    def _encodings(self, texts: Sequence[str], starts: Sequence[bool] | None) -> list[Encoding]:
        if self.first is self.later or starts is None:
            return try_batch(lambda some, _: self.later.encode_batch_fast(some, add_special_tokens=False), texts, starts)
        return try_batch(self._first_and_later, texts, starts)

    def _first_and_later(self, texts: list[str], starts: Sequence[bool]) -> list[Encoding]:
        parts: dict[bool, list[str]] = {True: [], False: []}
        for text, start in zip(texts, starts, strict=True):
            parts[bool(start)].append(text)
        first = iter(self.first.encode_batch_fast(parts[True], add_special_tokens=False))
        later = iter(self.later.encode_batch_fast(parts[False], add_special_tokens=False))
        return [next(first if start else later) for start in starts]


def open_huggingface(spec: TokenizerSpec, contents: Contents) -> HuggingFaceTokenizer:
    try:
        specials = special_tokens_of(spec, contents.document)
        document, renamed = plain_text_only(contents.document, specials)
        first = _load(document)
        other = in_the_middle(document)
        later = _load(other) if other else first
        _check_ids(first, contents.document, renamed)
        last = largest_id(contents.document)
    except BaseException as error:
        if isinstance(error, UsageError) or not is_failure(error):
            raise
        raise UsageError(f"{spec.file} cannot be opened as a tokenizer.json ({reason(error)}); get the file again") from error
    return HuggingFaceTokenizer(
        first=first,
        later=later,
        fingerprint=fingerprint_of("huggingface", contents.content, "", specials),
        vocab_size=1 + max([last, *(special.id for special in specials.values())]),
        special_tokens=specials,
    )


def _load(document: Json) -> Tokenizer:
    tokenizer = Tokenizer.from_str(orjson.dumps(document).decode())
    tokenizer.encode_special_tokens = True
    return tokenizer


def _check_ids(tokenizer: Tokenizer, document: Json, renamed: Mapping[str, str]) -> None:
    """The library numbers added tokens by their order, whatever id the file gives them."""
    for entry in document.get("added_tokens") or []:
        token = entry["content"]
        found = tokenizer.token_to_id(renamed.get(token, token))
        if found != entry["id"]:
            raise UsageError(f"added token {token!r} has id {entry['id']} in the file, but is loaded as {found}; save it anew")
