"""Results in order while the next ones are fetched: a store answers each request late, but many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 16


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, remote: bool) -> Iterator[Result]:
    """`map`, with up to 16 results fetched ahead by threads when the files are remote; local reads gain nothing from them."""
    if not remote:
        yield from map(function, items)
        return
    ahead: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) >= _THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
