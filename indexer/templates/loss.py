"""Which part of a rendered conversation is in the loss, for templates without `{% generation %}`.

The span of an assistant turn is what rendering the messages up to it adds to rendering those before it with the prompt for
a generation. Two renderings for each assistant turn: a template with `{% generation %}` needs one for all.

Two habits of templates make a turn look different once messages follow it, and are understood: text at the end of the whole
conversation (Phi-3's EOS), and a beginning of the turn that only the last one keeps (Qwen3's thinking).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from indexer.templates.spec import TemplateFailure
from indexer.templates.splitter import Span, Splitter


class Render(Protocol):
    def __call__(self, messages: Sequence[Any], *, prompt: bool) -> str: ...


def prefix_spans(render: Render, messages: Sequence[Any], full: str, splitter: Splitter) -> list[Span]:
    """Spans [start, end) of `full`, the rendering of all messages; white space at the end of a turn is left out.

    Raises:
        TemplateFailure: when it cannot be told where a turn stands.
    """
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        last = index + 1 == len(messages)
        through = full if last else _rendering(render, messages[: index + 1], prompt=False)
        span = through and _span(through, full, _before(render, messages[:index]), splitter)
        if not span or (spans and span[0] < spans[-1][1]):
            raise TemplateFailure(
                f"message {index}: the template writes an assistant's turn differently when messages follow it or when it "
                "is prompted, so what to train on cannot be told: mark it in the template with {% generation %}"
            )
        if span[0] < span[1]:
            spans.append(span)
    return spans


def _span(through: str, full: str, befores: Iterator[str], splitter: Splitter) -> Span | None:
    start = next((len(text) for text in befores if through.startswith(text) and full.startswith(text)), None)
    end = None if start is None else _end(through, full, start, splitter)
    return None if start is None or end is None else (start, start + len(full[start:end].rstrip()))


def _end(through: str, full: str, start: int, splitter: Splitter) -> int | None:
    """Where in `full` the turn ends that `through` ends with and that begins at `start` in both."""
    if full.startswith(through):
        return len(through)
    first, last = full[start : start + 1], len(through.rstrip())
    cut = through.find(first, start + 1, last)
    while cut >= 0:
        if _continues(full, start, through, cut):
            return start + len(through) - cut
        cut = through.find(first, cut + 1, last)
    common = _num_common(through, full)
    common = min(splitter.outside_token(text, common, start) for text in (through, full))
    return common if common > start and full.endswith(through[common:]) else None


def _continues(full: str, start: int, through: str, cut: int) -> bool:
    """Whether `full` goes on from `start` as `through` does from `cut`. Copies little more than what is the same: a turn of
    400,000 characters has tens of thousands of places to try.
    """
    tail = through[max(cut, len(through) - 64) :]
    if not full.endswith(tail, start, start + len(through) - cut):
        return False
    size = 64
    while cut < len(through):
        if not full.startswith(through[cut : cut + size], start):
            return False
        start, cut, size = start + size, cut + size, 2 * size
    return True


def _num_common(first: str, second: str) -> int:
    """How many characters at the beginning are the same."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first.startswith(second[:middle]) else (low, middle - 1)
    return low


def _before(render: Render, messages: Sequence[Any]) -> Iterator[str]:
    for prompt in (True, False):
        text = _rendering(render, messages, prompt=prompt)
        if text is not None:
            yield text
    if not messages:
        yield ""


def _rendering(render: Render, messages: Sequence[Any], *, prompt: bool) -> str | None:
    """None where the template refuses to end there."""
    try:
        return render(messages, prompt=prompt)
    except TemplateFailure:
        return None
