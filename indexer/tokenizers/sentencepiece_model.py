"""Tokenizers of sentencepiece model files, run by its own library.

Every text is encoded by itself, with the mark of a word before it where the model says so (`add_dummy_prefix`), as
sentencepiece and mistral_common do; whether it begins the sample makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from indexer.tokenizers.contents import Contents
from indexer.tokenizers.core import Ids, Span, SpecialToken, TokenizerSpec, fingerprint_of
from indexer.tokenizers.failures import reason, try_batch
from indexer.tokenizers.sentencepiece_proto import as_control
from indexer.tokenizers.specials import added_specials, refuse_needed, special_table
from indexer.tokenizers.threads import num_threads
from packer.format.errors import UsageError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceTokenizer:
    """Control symbols are special; user-defined symbols are found in text, unless they are named as special."""

    processor: SentencePieceProcessor
    fingerprint: str
    vocab_size: int
    special_tokens: Mapping[str, SpecialToken]

    def encode_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> list[Ids]:
        return try_batch(lambda some, _: list(self.processor.encode(some, num_threads=num_threads())), texts, starts)

    def count_batch(self, texts: Sequence[str], starts: Sequence[bool] | None = None) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.encode_batch(texts)), np.int64, len(texts))

    def encode_with_offsets(self, text: str, start: bool = False) -> tuple[Ids, Sequence[Span]]:
        (found,) = try_batch(lambda some, _: [self.processor.encode_as_offset_mapping(one) for one in some], [text], [start])
        ids, spans = list(found["ids"]), list(found["offsets"])
        # Of a character written in bytes, only the last piece is given the place.
        for position in reversed(range(len(ids) - 1)):
            begin, end = spans[position]
            if begin == end and self.processor.is_byte(ids[position]) and self.processor.is_byte(ids[position + 1]):
                spans[position] = spans[position + 1]
        return ids, spans


def open_sentencepiece(spec: TokenizerSpec, contents: Contents) -> SentencePieceTokenizer:
    plain = _processor(spec.file, contents.content)
    pieces = [plain.id_to_piece(number) for number in range(plain.get_piece_size())]
    known = {piece: number for number, piece in enumerate(pieces)}
    added = added_specials(
        spec.special_tokens,
        id_of=known.get,
        token_at=lambda number: pieces[number] if number < len(pieces) else None,
        next_id=len(pieces),
    )
    for token in added.keys() & known.keys():
        if len(token) == 1 or plain.is_byte(known[token]):
            raise refuse_needed(token)
    own = {piece: number for piece, number in known.items() if plain.is_control(number) or plain.is_unknown(number)}
    specials = special_table({**own, **added})
    hidden = {number for token, number in added.items() if token in known and token not in own}
    return SentencePieceTokenizer(
        processor=_processor(spec.file, as_control(contents.content, hidden)) if hidden else plain,
        fingerprint=fingerprint_of("sentencepiece", contents.content, "", specials),
        vocab_size=1 + max(len(pieces) - 1, *(special.id for special in specials.values())),
        special_tokens=specials,
    )


def _processor(file: str, model: bytes) -> SentencePieceProcessor:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise UsageError("this tokenizer needs the package sentencepiece; pip install 'bayplan[sentencepiece]'") from None
    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise UsageError(f"{file} is no whole sentencepiece model ({reason(error)}); get the file again") from error
