"""The last lines of a job: per source and in all, read, written, quarantined by reason; and what failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from packer.format.manifest import Totals
from pipelines.pack import JobReport, SourceReport


def add_totals(many: list[Totals]) -> Totals:
    """Sum of several sources."""
    result: dict[str, Any] = {}
    for totals in many:
        for key, value in msgspec.structs.asdict(totals).items():
            if isinstance(value, Mapping):
                known = result.setdefault(key, {})
                for name, count in value.items():
                    known[name] = known.get(name, 0) + count
            else:
                result[key] = result.get(key, 0) + value
    return msgspec.convert(result, Totals)


def counts_line(totals: Totals) -> str:
    """Read, written, quarantined by reason, on one line."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(totals.quarantined_by_reason.items()))
    dropped = sum(totals.images_dropped_by_reason.values())
    parts = [
        f"read {totals.num_read}, written {totals.num_written}, quarantined {totals.num_quarantined}",
        f" ({reasons})" if reasons else "",
        f", {totals.num_images} images ({totals.num_images_stored} stored)",
        f", {dropped} images dropped" if dropped else "",
        f", {totals.num_blank_lines} blank lines" if totals.num_blank_lines else "",
        f", {totals.num_byte_order_marks} byte order marks" if totals.num_byte_order_marks else "",
        f", {totals.num_non_finite} numbers turned into null" if totals.num_non_finite else "",
    ]
    return "".join(parts)


def report_lines(report: JobReport) -> Iterator[str]:
    """The report of a job, the totals in its last line."""
    for name, source in report.sources.items():
        yield f"{name}: {counts_line(source.totals)}"
        yield from (f"{name}: note: {note}" for note in source.notes)
        yield from (f"{name}: input is cut, its good part is kept: {file}" for file in source.incomplete)
    yield from (f"note: {note}" for note in report.notes)
    failed = {name: source for name, source in report.sources.items() if source.failure}
    yield from (f"FAILED {name}: {source.failure}" for name, source in failed.items())
    if report.above_limit:
        yield f"above the recipe's limit: {report.above_limit}"
    yield f"{len(report.sources) - len(failed)} of {len(report.sources)} sources done: {report.output}"
    yield counts_line(add_totals([source.totals for source in report.sources.values()]))


def report_json(report: JobReport) -> str:
    """The report of a job as one JSON object."""
    document = {
        "output": report.output,
        "exit_code": report.exit_code,
        "totals": add_totals([source.totals for source in report.sources.values()]),
        "sources": {name: _source_json(source) for name, source in report.sources.items()},
        "notes": report.notes,
        "above_limit": report.above_limit,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _source_json(source: SourceReport) -> dict[str, Any]:
    return {
        "totals": source.totals,
        "failure": source.failure,
        "notes": source.notes,
        "incomplete": source.incomplete,
    }
