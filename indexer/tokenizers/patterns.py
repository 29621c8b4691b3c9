"""How published models split text before their byte pairs are merged; a rank file does not say it.

Each is quoted from the code that the model came with, and named there. Llama's own code also cuts runs of more than 25,000
characters, against a weakness of tiktoken that `ranks.py` works around; nothing is cut here, as in its tokenizer.json.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from indexer.tokenizers.core import nearest
from packer.format.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A regular expression of tiktoken, and whether text is brought to Unicode's form NFC before."""

    regex: str
    nfc: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITE_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    + _WHITE_SPACE
)

PATTERNS = {
    # Qwen/Qwen-7B, tokenization_qwen.py: PAT_STR; tokenize() normalizes to NFC first.
    "qwen": Pattern(regex=_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITE_SPACE, nfc=True),
    # meta-llama/llama-models, models/llama3/tokenizer.py: pat_str.
    "llama3": Pattern(regex=_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _WHITE_SPACE),
    # meta-llama/llama-models, models/llama4/tokenizer.py: O200K_PATTERN.
    "llama4": Pattern(regex=_O200K),
    # openai/tiktoken, tiktoken_ext/openai_public.py: cl100k_base and o200k_base.
    "cl100k": Pattern(
        regex=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": Pattern(regex=_O200K),
}


def pattern_of(name: str | None) -> Pattern:
    """The published pattern of this name, or a regular expression as it stands.

    Raises:
        UsageError: none given, or an unknown name.
    """
    known = ", ".join(PATTERNS)
    if not name:
        raise UsageError(f"a tiktoken rank file does not say how text is split; set pattern to one of {known}, or to a regex")
    if name in PATTERNS:
        return PATTERNS[name]
    if re.fullmatch(r"[\w.-]+", name):
        near = nearest(name.lower(), PATTERNS)
        raise UsageError(f"unknown pattern {name!r}{near or f'; expected one of {known}, or a regex'}")
    return Pattern(regex=name)
