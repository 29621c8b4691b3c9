"""Which texts of a batch a library gives up on, so that they cost themselves only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from indexer.tokenizers.core import TokenizationFailed

Result = TypeVar("Result")
Batch = Callable[[list[str], Sequence[bool]], Result]
"""Texts, and for each whether it begins the sample."""


def try_batch(batch: Batch[Result], texts: Sequence[str], starts: Sequence[bool] | None) -> Result:
    """`batch` of all texts; where it fails, each alone, to tell the bad ones from the good."""
    starts = starts if starts is not None else [False] * len(texts)
    try:
        return batch(list(texts), starts)
    except BaseException as error:
        if not is_failure(error) or not (failures := _failures(batch, texts, starts)):
            raise
    raise TokenizationFailed(failures)


def _failures(batch: Batch[Result], texts: Sequence[str], starts: Sequence[bool]) -> dict[int, str]:
    failures = {}
    for position, (text, start) in enumerate(zip(texts, starts, strict=True)):
        try:
            check_text(text)
            batch([text], [start])
        except BaseException as error:
            if not is_failure(error):
                raise
            failures[position] = reason(error)
    return failures


def is_failure(error: BaseException) -> bool:
    """Whether a library gave up on a text. A panic of Rust code is no Exception, and its class cannot be imported."""
    return (isinstance(error, Exception) and not isinstance(error, MemoryError)) or type(error).__name__ == "PanicException"


def reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def check_text(text: str) -> None:
    """Raises UnicodeEncodeError for half a surrogate pair, which some libraries replace and others call a type error."""
    text.encode()
