"""Tokenizers of ranked byte strings, run by tiktoken.

tiktoken panics on a million characters of white space in a row, since its regular expressions keep a stack of their steps.
Such a text is split by `regex` instead: both split every Unicode character alike, and the pieces' ids are tiktoken's own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from indexer.tokenizers.contents import Contents
from indexer.tokenizers.core import (
    Ids,
    Span,
    SpecialToken,
    TokenizationFailed,
    TokenizerSpec,
    fingerprint_of,
)
from indexer.tokenizers.failures import check_text, is_failure, reason
from indexer.tokenizers.offsets import spans_before_nfc, spans_of_bytes
from indexer.tokenizers.patterns import Pattern
from indexer.tokenizers.specials import added_specials, refuse_needed, special_table
from indexer.tokenizers.threads import num_threads
from packer.format.errors import UsageError

if TYPE_CHECKING:
    import tiktoken

_LONG_WHITE_SPACE = re.compile(r"\s{500000}")
Ranks = dict[bytes, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTokenizer:
    """Byte strings merged by rank; the ranks are the ids."""

    encoding: tiktoken.Encoding
    pattern: Pattern
    fingerprint: str
    vocab_size: int
    special_tokens: Mapping[str, SpecialToken]

    def encode_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> list[Ids]:
        return self._each(self._ids, texts)

    def count_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> npt.NDArray[np.int64]:
        return np.array(self._each(lambda text: len(self._ids(text)), texts), np.int64)

    def encode_with_offsets(self, text: str, start: bool = False) -> tuple[Ids, Sequence[Span]]:
        (ids,) = self.encode_batch([text])
        normal = self._normalized(text)
        spans = spans_of_bytes(normal, (len(self.encoding.decode_single_token_bytes(number)) for number in ids))
        return ids, spans if normal == text else spans_before_nfc(text, spans)

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.pattern.nfc else text

    def _ids(self, text: str) -> Ids:
        check_text(text)
        text = self._normalized(text)
        if not _LONG_WHITE_SPACE.search(text):
            try:
                return self.encoding.encode_ordinary(text)
            except BaseException as error:
                if not is_failure(error):
                    raise
        return self.encoding._encode_only_native_bpe(text)

    def _each(self, function: Callable[[str], Any], texts: Sequence[str]) -> list[Any]:
        """As tiktoken's own batch, which lets go of the interpreter's lock; but one bad text does not end it."""

        def outcome(text: str) -> tuple[Any, str | None]:
            try:
                return function(text), None
            except BaseException as error:
                if not is_failure(error):
                    raise
                return None, reason(error)

        if len(texts) < 2 or num_threads() < 2:
            outcomes = [outcome(text) for text in texts]
        else:
            with ThreadPoolExecutor(num_threads()) as pool:
                outcomes = list(pool.map(outcome, texts))
        if failures := {position: why for position, (_, why) in enumerate(outcomes) if why is not None}:
            raise TokenizationFailed(failures)
        return [result for result, _ in outcomes]


def rank_tokenizer(
    spec: TokenizerSpec, contents: Contents, ranks: Ranks, pattern: Pattern, own: Mapping[str, int]
) -> RankTokenizer:
    """The tokenizer of these ranks, the special tokens `own` of its file, and those of the spec."""
    _check_ranks(spec.file, ranks)
    names = {number: token.decode(errors="replace") for token, number in ranks.items()}
    names |= {number: token for token, number in own.items()}
    added = added_specials(
        spec.special_tokens,
        id_of=lambda token: own.get(token, ranks.get(token.encode(errors="surrogatepass"))),
        token_at=names.get,
        next_id=max(names) + 1,
    )
    for token in added.keys() - own.keys():
        # Without its rank, no merging can lead to it.
        if ranks.pop(token.encode(errors="surrogatepass"), None) is not None and len(token.encode()) == 1:
            raise refuse_needed(token)
    specials = special_table({**own, **added})
    return RankTokenizer(
        encoding=_encoding(ranks, pattern),
        pattern=pattern,
        fingerprint=fingerprint_of(contents.kind, contents.content, f"nfc={pattern.nfc} {pattern.regex}", specials),
        vocab_size=1 + max(max(names), *(special.id for special in specials.values()), 0),
        special_tokens=specials,
    )


def _check_ranks(file: str, ranks: Ranks) -> None:
    if missing := [number for number in range(256) if bytes([number]) not in ranks]:
        raise UsageError(
            f"{file} has no rank for {len(missing)} of the 256 single bytes (0x{missing[0]:02x}); get the file again"
        )
    if len(set(ranks.values())) < len(ranks):
        raise UsageError(f"{file} gives one rank to several tokens, expected each its own; get the file again")


def _encoding(ranks: Ranks, pattern: Pattern) -> tiktoken.Encoding:
    try:
        import tiktoken
    except ImportError:
        raise UsageError("this tokenizer needs the package tiktoken; pip install 'bayplan[tiktoken]'") from None
    try:
        return tiktoken.Encoding("bayplan", pat_str=pattern.regex, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise UsageError(f"the pattern {pattern.regex[:80]!r} is no regular expression of tiktoken: {error}") from error
