"""`bayplan estimate`: the first rows of every source, scaled up: size, parts, hours, expected quarantine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from packer.format.errors import BayplanError
from packer.sources import Compression
from pipelines.inputs import InputFile, first_not_empty, list_inputs, source_config
from pipelines.ray_executor import Listener, Progress, RayExecutor
from pipelines.recipe import Recipe, Source
from pipelines.tasks import Scouted, ScoutTask, Task

_PACKED_RATIO = 5.0
"""Usual ratio of JSONL text to its .gz or .zst, where nothing better is known without reading the file."""


@dataclass(slots=True, kw_only=True)
class Estimate:
    """What a source will probably become."""

    source: str
    failure: str | None = None
    num_files: int = 0
    input_bytes: int = 0
    num_rows: int = 0
    num_images: int = 0
    output_bytes: int = 0
    num_parts: int = 0
    core_seconds: float = 0.0
    quarantined_share: float = 0.0
    num_rows_seen: int = 0
    warning: str | None = None


class _Clock(Listener):
    """Times each source's scout on its worker."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        self._started: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def started(self, source: str) -> None:
        self._started[source] = time.monotonic()

    def advanced(self, source: str, progress: Progress) -> None:
        self.seconds[source] = time.monotonic() - self._started[source]

    def say(self, source: str, message: str) -> None:
        self._inner.say(source, message)


def estimate_recipe(recipe: Recipe, listener: Listener, should_stop: Callable[[], bool]) -> list[Estimate]:
    """Scout every source and scale what was seen to all of its files."""
    estimates, tasks, inputs = {}, list[tuple[str, Task]](), {}
    for source in recipe.sources:
        estimate = estimates[source.name] = Estimate(source=source.name)
        try:
            found = list_inputs(source, source.resolved_root, outside=recipe.output)
        except (BayplanError, OSError) as error:
            estimate.failure = str(error)
            continue
        inputs[source.name] = found
        estimate.num_files = len(found)
        estimate.input_bytes = sum(item.stat.size for item in found)
        first = first_not_empty(found)
        if first is not None:
            config = source_config(source, source.resolved_root)
            tasks.append((source.name, ScoutTask(source=config, work=first.whole)))
    clock = _Clock(listener)
    timeouts = {source.name: source.row_timeout_seconds for source in recipe.sources}
    outcome = RayExecutor(recipe.output, recipe.resources, timeouts, clock, should_stop).run(tasks)
    for source in recipe.sources:
        estimate = estimates[source.name]
        estimate.failure = estimate.failure or outcome.failures.get(source.name)
        for scouted in outcome.results.get(source.name, []):
            assert isinstance(scouted, Scouted)
            _scale(estimate, scouted, source, inputs[source.name], clock.seconds.get(source.name, 0.0))
    return list(estimates.values())


def _scale(estimate: Estimate, seen: Scouted, source: Source, inputs: list[InputFile], seconds: float) -> None:
    if not seen.input_bytes:
        return
    first = first_not_empty(inputs)
    assert first is not None
    ratios = {Compression.of(first.stat.name): seen.plain_ratio, Compression.NONE: 1.0}
    plain_bytes = sum(item.stat.size * ratios.get(Compression.of(item.stat.name), _PACKED_RATIO) for item in inputs)
    if seen.whole_file:  # its rows are known, only the others' are reckoned
        plain_bytes += seen.input_bytes - first.stat.size * ratios[Compression.of(first.stat.name)]
    factor = max(plain_bytes / seen.input_bytes, 1.0)
    estimate.num_rows_seen = seen.num_rows
    if seen.num_rows and not seen.num_good:
        reasons = ", ".join(f"{reason} {count}" for reason, count in seen.reasons.most_common())
        estimate.warning = f"all {seen.num_rows} rows seen are refused ({reasons}); the first, at byte {seen.first_refusal}"
    estimate.num_rows = round(seen.num_rows * factor)
    estimate.num_images = round(seen.num_images * factor)
    estimate.output_bytes = round((seen.image_bytes + seen.record_bytes) * factor)
    estimate.core_seconds = seconds * factor
    estimate.quarantined_share = 1.0 - seen.num_good / seen.num_rows if seen.num_rows else 0.0
    per_part = max(source.target_bundle_bytes, 1)
    estimate.num_parts = max(math.ceil(estimate.output_bytes / per_part), sum(1 for item in inputs if item.stat.size))


def estimate_table(estimates: list[Estimate], cores: int, as_json: bool) -> str:
    """The estimates as a table, or as JSON."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(estimates), indent=2).decode()
    table = Table("source", box=None, pad_edge=False)
    for name in ("files", "input MB", "rows", "images", "output MB", "parts", f"hours on {cores} cores", "quarantined"):
        table.add_column(name, justify="right")
    for item in estimates:
        table.add_row(*_cells(item.source, item, cores))
    numbers = [item for item in estimates if item.failure is None]
    whole = Estimate(source="all")
    for key in ("num_files", "input_bytes", "num_rows", "num_images", "output_bytes", "num_parts", "core_seconds"):
        setattr(whole, key, sum(getattr(item, key) for item in numbers))
    refused = sum(item.quarantined_share * item.num_rows for item in numbers)
    whole.quarantined_share = refused / whole.num_rows if whole.num_rows else 0.0
    table.add_row(*_cells("all", whole, cores))
    console = Console(width=150)
    with console.capture() as capture:
        console.print(table)
    failed = "".join(f"WARNING {item.source}: {item.warning}\n" for item in estimates if item.warning)
    failed += "".join(f"FAILED {item.source}: {item.failure}\n" for item in estimates if item.failure)
    return (capture.get() + failed).rstrip("\n")


def _cells(name: str, item: Estimate, cores: int) -> list[str]:
    if item.failure:
        return [name, "failed", *["-"] * 7]
    return [
        name,
        f"{item.num_files:,}",
        f"{item.input_bytes / 1e6:,.1f}",
        f"{item.num_rows:,}",
        f"{item.num_images:,}",
        f"{item.output_bytes / 1e6:,.1f}",
        f"{item.num_parts:,}",
        f"{item.core_seconds / 3600 / cores:,.2f}",
        f"{item.quarantined_share:.1%}",
    ]
