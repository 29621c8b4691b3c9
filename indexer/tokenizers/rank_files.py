"""The two files of ranked byte strings: tiktoken's lines, and Mistral's tekken JSON."""

from __future__ import annotations

import base64
import binascii

from indexer.tokenizers.contents import Contents
from indexer.tokenizers.core import TokenizerSpec
from indexer.tokenizers.failures import reason
from indexer.tokenizers.patterns import Pattern, pattern_of
from indexer.tokenizers.ranks import Ranks, RankTokenizer, rank_tokenizer
from packer.format.errors import UsageError

# What files up to version 7 leave out, in order of ids: Tekkenizer.DEPRECATED_SPECIAL_TOKENS.
_OLD_NAMES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> "
    "[IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_OLD_SPECIALS = {name: number for number, name in enumerate(_OLD_NAMES.split())}


def open_tiktoken(spec: TokenizerSpec, contents: Contents) -> RankTokenizer:
    """Of a rank file: lines of a byte string in base64 and its rank."""
    pattern = pattern_of(spec.pattern)
    ranks: Ranks = {}
    for number, line in enumerate(contents.content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            found = line[:60].decode(errors="replace")
            raise UsageError(f"{spec.file}, line {number} is {found!r}, expected base64 and a rank; the file is cut?") from None
    return rank_tokenizer(spec, contents, ranks, pattern, {})


def open_tekken(spec: TokenizerSpec, contents: Contents) -> RankTokenizer:
    """Of a tekken JSON: the special tokens have the first ids, as in mistral_common, tokens/tokenizers/tekken.py."""
    config = contents.document["config"]
    try:
        num_special, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        entries = contents.document["vocab"][: size - num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + num_special for entry in entries}
        own = {entry["token_str"]: entry["rank"] for entry in contents.document.get("special_tokens") or ()} or _OLD_SPECIALS
        pattern = Pattern(regex=config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{spec.file} is no whole tekken JSON ({reason(error)}); get the file again") from error
    if len(entries) < size - num_special:
        raise UsageError(f"{spec.file} holds {len(entries)} tokens, expected {size - num_special}; get the file again")
    taken = set(own.values())
    fillers = {f"<SPECIAL_{number}>": number for number in range(num_special) if number not in taken}
    return rank_tokenizer(spec, contents, ranks, pattern, fillers | own)
