"""A tokenizer.json changed in memory so that no text can become a special token.

Being marked special keeps a token's string from being searched for in text, but a model whose vocabulary holds the string
may still arrive at it (Unigram does, for `<s>`). So special tokens are renamed to strings that nobody can write, and merges
that lead to them are taken out; ids stay.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from indexer.tokenizers.core import SpecialToken, TokenizerSpec
from indexer.tokenizers.specials import added_specials, refuse_needed
from packer.format.errors import UsageError

Json = dict[str, Any]
_SECRET = secrets.token_hex(16)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def special_tokens_of(spec: TokenizerSpec, document: Json) -> dict[str, SpecialToken]:
    """All that the file marks as special, and those the user adds to them.

    A token that texts cannot do without (a single character or a byte of the vocabulary) is not special, whatever the file
    says: CLIP's padding `!` is such a one.
    """
    vocabulary = vocabulary_of(document["model"])
    entries: dict[str, Json] = {entry["content"]: entry for entry in document.get("added_tokens") or []}
    ids = {**vocabulary, **{token: entry["id"] for token, entry in entries.items()}}
    names = {number: token for token, number in ids.items()}
    added = added_specials(spec.special_tokens, id_of=ids.get, token_at=names.get, next_id=max(names, default=-1) + 1)
    for token in added:
        if _is_needed(token, vocabulary):
            raise refuse_needed(token)
    own = [token for token, entry in entries.items() if entry["special"] and not _is_needed(token, vocabulary)]
    return {token: _special(token, added.get(token, ids.get(token)), entries.get(token, {})) for token in [*own, *added]}


def largest_id(document: Json) -> int:
    ids = [entry["id"] for entry in document.get("added_tokens") or []]
    return max(ids + list(vocabulary_of(document["model"]).values()), default=-1)


def vocabulary_of(model: Json) -> dict[str, int]:
    """String -> id of the model itself, without added tokens; Unigram's is a list of strings with scores."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}


def _is_needed(token: str, vocabulary: Mapping[str, int]) -> bool:
    return token in vocabulary and (len(token) == 1 or bool(_BYTE.fullmatch(token)))


def _special(token: str, number: int | None, entry: Json) -> SpecialToken:
    if entry.get("single_word"):
        raise UsageError(
            f"special token {token!r} is marked single_word, so what is beside it would decide; set it to false in the file"
        )
    assert number is not None
    return SpecialToken(token=token, id=number, lstrip=entry.get("lstrip", False), rstrip=entry.get("rstrip", False))


def plain_text_only(document: Json, special: Iterable[str]) -> tuple[Json, dict[str, str]]:
    """The document for encoding plain text whole, and what each special token is called in it."""
    renamed = {token: f"{_SECRET}{position}" for position, token in enumerate(special)}
    tokens = [
        {**entry, "content": renamed.get(entry["content"], entry["content"]), "special": entry["content"] in renamed}
        for entry in document.get("added_tokens") or []
    ]
    model = _renamed_model(document["model"], renamed)
    if "dropout" in model:  # for training a model on random pieces; a count must be the same twice
        model = {**model, "dropout": None}
    # Sentence embedders' files cut at 128 tokens and pad; a count must do neither.
    return {**document, "added_tokens": tokens, "model": model, "truncation": None, "padding": None}, renamed


def _renamed_model(model: Json, renamed: Mapping[str, str]) -> Json:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {**model, "vocab": [[renamed.get(piece, piece), score] for piece, score in vocabulary]}
    changed = {**model, "vocab": {renamed.get(token, token): number for token, number in vocabulary.items()}}
    if model.get("unk_token") in renamed:
        changed["unk_token"] = renamed[model["unk_token"]]
    if "merges" in model:
        changed["merges"] = _merges_without(renamed, model)
    return changed


def _merges_without(renamed: Mapping[str, str], model: Json) -> list[Any]:
    prefix = model.get("continuing_subword_prefix") or ""
    hidden = renamed.keys() & model["vocab"].keys()

    def keeps(merge: Any) -> bool:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        return not hidden.intersection((left, right, left + right.removeprefix(prefix)))

    return [merge for merge in model["merges"] if keeps(merge)] if hidden else model["merges"]


def in_the_middle(document: Json) -> Json | None:
    """The document for text that does not begin the sample; None if that is all the same.

    Metaspace's scheme `first` puts its mark before the first text only.
    """
    splitter = document.get("pre_tokenizer")
    changed = _without_first(splitter)
    return None if changed == splitter else {**document, "pre_tokenizer": changed}


def _without_first(splitter: Any) -> Any:
    if isinstance(splitter, dict) and "pretokenizers" in splitter:
        return {**splitter, "pretokenizers": [_without_first(part) for part in splitter["pretokenizers"]]}
    if isinstance(splitter, dict) and splitter.get("prepend_scheme") == "first":
        return {**splitter, "prepend_scheme": "never"}
    return splitter
