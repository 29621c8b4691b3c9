"""What a stream handed out so far, counted from the packs that reached the trainer; a replayed pack of a worker counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plugin.batch import PackedBatch
from plugin.batch.facts import Count

_READING = ("hits", "waits", "wait_seconds", "bytes", "reads", "stalls", "retries", "abandoned", "errors")
"""Of the workers' prefetch pools: sums only, not what they hold at the moment."""


@dataclass(slots=True, kw_only=True)
class StreamCounters:
    """Sums over packs, and the latest word of each loader worker."""

    packs: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    tokens_by_source: Counter[str] = field(default_factory=Counter)
    samples_by_source: Counter[str] = field(default_factory=Counter)
    wait_seconds: float = 0.0
    """The trainer's, for packs."""
    refused: dict[int, Mapping[str, int]] = field(default_factory=dict)
    reading: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def add(self, batch: PackedBatch, *, wait_seconds: float) -> None:
        """Count one pack."""
        self.packs += 1
        self.wait_seconds += wait_seconds
        kinds = batch.num_tokens_by_kind
        self.sums.update({f"{kind}_tokens": number for kind, number in kinds.items()})
        self.sums.update(
            samples=batch.num_samples,
            images=batch.num_images,
            patches=batch.num_patches,
            blank_images=batch.num_blank_images,
            slots=len(batch.tokens),
            bytes=len(batch.buffer),
        )
        tokens = batch.sample_counts[:, : Count.LOSS].sum(axis=1)
        sources = batch.sources
        by_source = np.bincount(batch.sample_source, tokens, len(sources)).astype(np.int64).tolist()
        samples = np.bincount(batch.sample_source, minlength=len(sources)).tolist()
        self.tokens_by_source.update(dict(zip(sources, by_source, strict=True)))
        self.samples_by_source.update(dict(zip(sources, samples, strict=True)))

    def fail(self, num_failures: int) -> None:
        """Count samples that could not be used, whether a pack came of the others or not."""
        self.sums.update(failed_samples=num_failures)

    def hear(self, worker: int, refused: Mapping[str, int] | None, reading: Mapping[str, float] | None) -> None:
        """What a worker said of itself, cumulative since it began."""
        self.refused[worker] = refused or {}
        self.reading[worker] = reading or {}

    def totals(self) -> dict[str, Any]:
        """Flat numbers, and two dicts by source.

        `efficiency`: real tokens per slot. `data_wait_seconds`: of the trainer; `read_wait_seconds`: of the workers, for files.
        """
        sums = {name: int(value) for name, value in sorted(self.sums.items())}
        real = sum(sums.get(f"{kind}_tokens", 0) for kind in ("text", "image", "other"))
        refused: Counter[str] = Counter()
        for of_worker in list(self.refused.values()):
            refused.update(of_worker)
        reading = {name: sum(of_worker.get(name, 0) for of_worker in list(self.reading.values())) for name in _READING}
        return {
            "packs": self.packs,
            **sums,
            "tokens": real,
            "efficiency": real / sums["slots"] if sums.get("slots") else 1.0,
            "data_wait_seconds": self.wait_seconds,
            "refused_samples": sum(refused.values()),
            "refused_by_reason": dict(refused),
            **{f"read_{name}": value for name, value in reading.items()},
            "tokens_by_source": dict(self.tokens_by_source),
            "samples_by_source": dict(self.samples_by_source),
        }


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What came between two `totals`; `efficiency` is that of the packs between."""
    made: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            made[name] = {key: number - before.get(name, {}).get(key, 0) for key, number in value.items()}
        else:
            made[name] = value - before.get(name, 0)
    made["efficiency"] = made["tokens"] / made["slots"] if made.get("slots") else 1.0
    return made


def line(counted: Mapping[str, Any]) -> str:
    """One line for a log."""
    sources = ", ".join(f"{name} {number:,}" for name, number in sorted(counted["tokens_by_source"].items()) if number)
    trouble = [
        f"{counted.get(name, 0)} {text}"
        for name, text in (
            ("failed_samples", "samples failed"),
            ("blank_images", "images blank"),
            ("refused_samples", "samples fit no pack"),
            ("read_retries", "reads retried"),
        )
        if counted.get(name, 0)
    ]
    words = [
        f"{counted['packs']} packs",
        f"{counted['tokens']:,} tokens (text {counted.get('text_tokens', 0):,}, image {counted.get('image_tokens', 0):,}, "
        f"loss {counted.get('loss_tokens', 0):,})",
        f"{100 * counted['efficiency']:.2f}% full",
        f"{counted.get('images', 0):,} images of {counted.get('patches', 0):,} patches",
        f"waited {counted['data_wait_seconds']:.3f} s",
        f"by source: {sources or 'none'}",
        *trouble,
    ]
    return "; ".join(words)
