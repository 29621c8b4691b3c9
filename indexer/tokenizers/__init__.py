"""Plain text -> token ids, by the library a tokenizer file was made for; special tokens by name, never out of text.

Knows nothing of templates, images or records. A new kind of file is a module here and a line in `contents.py` and
`lookup.py`.
"""

from __future__ import annotations

from indexer.tokenizers.core import SpecialToken, TextTokenizer, TokenizationFailed, TokenizerSpec, token_id
from indexer.tokenizers.lookup import open_tokenizer
from indexer.tokenizers.patterns import PATTERNS, Pattern
from indexer.tokenizers.threads import bound_threads

__all__ = [
    "PATTERNS",
    "Pattern",
    "SpecialToken",
    "TextTokenizer",
    "TokenizationFailed",
    "TokenizerSpec",
    "bound_threads",
    "open_tokenizer",
    "token_id",
]
