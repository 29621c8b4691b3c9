"""What an index job prints: per profile and source how many samples have a length, and their tokens by kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from indexer.stats import Stats
from pipelines.index import IndexReport, SourceIndex


def index_lines(report: IndexReport) -> Iterator[str]:
    """The report of a job, the totals of each profile in its last lines."""
    for profile, states in report.profiles.items():
        for source, state in states.items():
            if state.stats is not None:
                yield f"{profile} / {source}: {_counts(state.stats)}"
    yield from (f"note: {note}" for note in report.notes)
    for profile, states in report.profiles.items():
        yield from (f"FAILED {profile} / {source}: {state.failure}" for source, state in states.items() if state.failure)
    for profile, states in report.profiles.items():
        whole = Stats.merged(state.stats for state in states.values() if state.stats is not None)
        done = sum(state.failure is None for state in states.values())
        yield f"{profile}: {done} of {len(states)} sources counted, {_counts(whole)}"


def _counts(stats: Stats) -> str:
    refused = ", ".join(f"{status} {count}" for status, count in sorted(stats.status.items()) if status != "usable" and count)
    kinds = f"text {stats.num_text_tokens:,}, image {stats.num_image_tokens:,}, other {stats.num_other_tokens:,}"
    not_counted = f" (not counted: {refused})" if refused else ""
    return (
        f"{stats.num_samples:,} samples{not_counted}, {stats.num_images:,} images, {stats.num_tokens:,} tokens ({kinds}), "
        f"{stats.num_loss_tokens:,} in the loss"
    )


def index_json(report: IndexReport) -> str:
    """The report of a job as one JSON object."""
    document = {
        "dataset": report.dataset,
        "exit_code": report.exit_code,
        "profiles": {
            profile: {source: _source_json(state) for source, state in states.items()}
            for profile, states in report.profiles.items()
        },
        "notes": report.notes,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _source_json(state: SourceIndex) -> dict[str, Any]:
    stats = state.stats
    if stats is None:
        return {"failure": state.failure}
    return {
        "failure": state.failure,
        "num_samples": stats.num_samples,
        "status": {status: count for status, count in stats.status.items() if count},
        "num_images": stats.num_images,
        "num_tokens": stats.num_tokens,
        "num_text_tokens": stats.num_text_tokens,
        "num_image_tokens": stats.num_image_tokens,
        "num_other_tokens": stats.num_other_tokens,
        "num_loss_tokens": stats.num_loss_tokens,
    }
