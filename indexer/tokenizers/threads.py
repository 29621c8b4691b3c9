"""How many threads a batch is spread over: one number for all libraries, set before the first batch."""

from __future__ import annotations

import os

_bound: int | None = None


def bound_threads(num_cpus: float) -> None:
    """Bounds the threads of every batch of this process; a fraction of a CPU is one thread.

    The pool of `tokenizers` starts with its first batch and keeps its size: called later, only one thread or many is obeyed.
    """
    global _bound
    _bound = max(1, int(num_cpus))
    os.environ["RAYON_NUM_THREADS"] = str(_bound)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if _bound > 1 else "false"


def num_threads() -> int:
    """The bound, or the machine's CPUs."""
    return _bound or os.cpu_count() or 1
