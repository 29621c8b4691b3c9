"""The text of samples on its way through a tokenizer: many runs in one call, and a run that fails costs itself only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from indexer.segments import Text
from indexer.tokenizers import TextTokenizer, TokenizationFailed

Ints = npt.NDArray[np.int64]
Failures = dict[int, TokenizationFailed]
"""Position of a run -> why it has no tokens."""
Found = TypeVar("Found")


class Run:
    """Texts that stand side by side, tokenized as one."""

    __slots__ = ("_texts", "loss", "starts", "text")

    def __init__(self, texts: Sequence[Text], starts: bool) -> None:
        self._texts = texts
        self.starts = starts
        """Whether nothing stands before it in the sample."""
        self.text = texts[0].text if len(texts) == 1 else "".join([text.text for text in texts])
        losses = {text.loss for text in texts}
        self.loss = losses.pop() if len(losses) == 1 else None
        """The same for all its text, or None."""

    def losses(self, offsets: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each token covers a character that is a target."""
        targets_before = [0]
        for text in self._texts:
            last = targets_before[-1]
            targets_before += range(last + 1, last + 1 + len(text.text)) if text.loss else [last] * len(text.text)
        return [targets_before[end] > targets_before[start] for start, end in offsets]


class RunIds:
    """The tokens of a run. `loss` is one answer for all of them, or one for each."""

    __slots__ = ("ids", "loss")

    def __init__(self, ids: Sequence[int], loss: bool | list[bool]) -> None:
        self.ids = ids
        self.loss = loss


def run_ids(tokenizer: TextTokenizer, runs: Sequence[Run]) -> tuple[list[RunIds], Failures]:
    """The tokens of each run; none of one that fails."""

    def of(some: Sequence[Run]) -> list[RunIds]:
        plain = [run for run in some if run.loss is not None]
        ids = iter(tokenizer.encode_batch([run.text for run in plain], [run.starts for run in plain]) if plain else ())
        return [RunIds(*_mixed(tokenizer, run)) if run.loss is None else RunIds(next(ids), run.loss) for run in some]

    return _each(of, runs, RunIds((), False))


def run_lengths(tokenizer: TextTokenizer, runs: Sequence[Run]) -> tuple[Ints, Ints, Failures]:
    """Tokens and loss tokens of each run; zeros of one that fails."""

    def of(some: Sequence[Run]) -> list[tuple[int, int]]:
        plain = [run for run in some if run.loss is not None]
        sizes = iter(tokenizer.count_batch([run.text for run in plain], [run.starts for run in plain]).tolist() if plain else ())
        return [_mixed_lengths(tokenizer, run) if run.loss is None else _lengths(next(sizes), run.loss) for run in some]

    found, failures = _each(of, runs, (0, 0))
    sizes, losses = np.array(found, np.int64).reshape(-1, 2).T
    return sizes, losses, failures


def _each(of: Callable[[Sequence[Run]], list[Found]], runs: Sequence[Run], nothing: Found) -> tuple[list[Found], Failures]:
    """`of` all runs at once; where that fails, of each alone."""
    try:
        return of(runs), {}
    except TokenizationFailed:
        pass
    found: list[Found] = []
    failures: Failures = {}
    for place, run in enumerate(runs):
        try:
            found += of([run])
        except TokenizationFailed as error:
            found.append(nothing)
            failures[place] = error.with_traceback(None)  # its frames hold this dict, and all that the callers hold
    return found, failures


def _mixed(tokenizer: TextTokenizer, run: Run) -> tuple[Sequence[int], list[bool]]:
    """The tokens of a run of which a part is a target, and whether each is one."""
    ids, offsets = tokenizer.encode_with_offsets(run.text, run.starts)
    return ids, run.losses(offsets)


def _mixed_lengths(tokenizer: TextTokenizer, run: Run) -> tuple[int, int]:
    ids, losses = _mixed(tokenizer, run)
    return len(ids), sum(losses)


def _lengths(size: int, loss: bool) -> tuple[int, int]:
    return size, size if loss else 0
