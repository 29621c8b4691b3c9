"""Microbatches with times made up from known coefficients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from plugin.cost import Timing, Timings

ENCODER = {"num_patches": 6.6e-6, "sum_squared_attention": 9.3e-10, "num_images": 5e-5, "constant": 3e-3}
LLM = {"num_tokens": 1.1e-4, "sum_squared_tokens": 2.2e-9, "constant": 1e-2}


def measured(
    number: int,
    *,
    encoder: Mapping[str, float] | None = None,
    llm: Mapping[str, float] | None = None,
    noise: float = 0.0,
    whole: bool = False,
    full: bool = True,
    windows: bool = False,
    seed: int = 0,
) -> Timings:
    """`full`: every sequence is full but for a few tokens; `whole`: only all of the microbatch is timed."""
    numbers = np.random.default_rng(seed)
    rows = []
    for step in range(number):
        sides = 2 * numbers.integers(2, 33, (numbers.integers(0, 12), 2))
        patches = sides.prod(axis=1)
        pieces = sides // 8 * 64 + (sides % 8) ** 2
        length = 8192 - int(numbers.integers(0, 20)) if full else int(numbers.integers(2000, 8192))
        cuts = np.sort(numbers.integers(0, length + 1, numbers.integers(0, 8)))
        samples = np.diff(np.concatenate(([0], cuts, [length])))
        features = {
            "num_patches": int(patches.sum()),
            "sum_squared_attention": int(pieces.prod(axis=1).sum() if windows else (patches**2).sum()),
            "sum_squared_patches": int((patches**2).sum()) if windows else None,
            "num_images": len(sides),
            "num_tokens": length,
            "sum_squared_tokens": int((samples**2).sum()),
        }
        times = [
            sum(seconds * (1 if name == "constant" else features[name] or 0) for name, seconds in (part or default).items())
            * float(np.exp(noise * numbers.normal()))
            for part, default in ((encoder, ENCODER), (llm, LLM))
        ]
        named = {"seconds": sum(times)} if whole else {"encoder_seconds": times[0], "llm_seconds": times[1]}
        rows.append(Timing(version=1, rank=0, step=step, **features, **named))
    return Timings(rows=tuple(rows), places=tuple(f"made.jsonl line {step + 1}" for step in range(number)), bad=())
