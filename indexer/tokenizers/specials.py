"""The special tokens a user adds to those of the file: their ids, and what makes them impossible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from indexer.tokenizers.core import SpecialToken
from packer.format.errors import UsageError


def added_specials(
    wanted: Mapping[str, int] | Sequence[str],
    *,
    id_of: Callable[[str], int | None],
    token_at: Callable[[int], str | None],
    next_id: int,
) -> dict[str, int]:
    """String -> id of what a user named.

    Raises:
        UsageError: a string twice, an id that another token has, or another id than the file gives the string.
    """
    _check_names(wanted)
    if not isinstance(wanted, Mapping):
        new = [token for token in wanted if id_of(token) is None]
        following = {token: next_id + position for position, token in enumerate(new)}
        return {token: following[token] if (known := id_of(token)) is None else known for token in wanted}
    holders: dict[int, str] = {}
    for token, number in wanted.items():
        _check_id(token, number, id_of(token), token_at(number) if type(number) is int and number >= 0 else None)
        if (holder := holders.setdefault(number, token)) != token:
            raise UsageError(f"special tokens {holder!r} and {token!r} both have id {number}; give each its own")
    return dict(wanted)


def _check_names(wanted: Mapping[str, int] | Sequence[str]) -> None:
    if isinstance(wanted, str):
        raise UsageError(f"special_tokens is the string {wanted!r}, expected a list of strings, or strings with ids")
    seen = set()
    for token in wanted:
        if not isinstance(token, str) or not token:
            raise UsageError(f"special_tokens holds {token!r}, expected strings of at least one character")
        if token in seen:
            raise UsageError(f"special token {token!r} is named twice; name it once")
        seen.add(token)


def _check_id(token: str, number: int, known: int | None, holder: str | None) -> None:
    if type(number) is not int or not 0 <= number < 2**31:
        raise UsageError(f"special token {token!r} has id {number!r}, expected a whole number from 0")
    if known is not None and number != known:
        raise UsageError(f"special token {token!r} has id {known} in the tokenizer file, not {number}; leave its id as it is")
    if holder is not None and holder != token:
        raise UsageError(f"special token {token!r} cannot have id {number}, which is {holder!r} in the tokenizer file")


def refuse_needed(token: str) -> UsageError:
    """The error for a token without which some texts could not be written."""
    return UsageError(f"{token!r} cannot be a special token: text needs it, as a single character or byte of the vocabulary")


def special_table(ids: Mapping[str, int]) -> dict[str, SpecialToken]:
    return {token: SpecialToken(token=token, id=number) for token, number in ids.items()}
