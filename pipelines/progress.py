"""What a person sees while a job runs: a live table on a terminal, plain lines elsewhere. All of it on stderr."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pipelines.ray_executor import Listener, Progress

_LINE_SECONDS = 10.0
_MAX_TABLE_ROWS = 20


@dataclass(slots=True)
class _Source:
    num_tasks: int = 0
    num_done: int = 0
    num_rows: int = 0
    num_quarantined: int = 0
    num_bytes: int = 0
    started: float = 0.0
    ended: float = 0.0

    def rates(self, now: float) -> tuple[float, float]:
        """Rows and MB of input a second since the source began."""
        seconds = max((self.ended or now) - self.started, 1e-3)
        return self.num_rows / seconds, self.num_bytes / 1e6 / seconds


class ProgressDisplay(Listener):
    """Per source: tasks, rows a second, MB of input a second, quarantined."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._sources: dict[str, _Source] = {}
        self._live: Live | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def queued(self, source: str, count: int) -> None:
        self._sources[source] = _Source(num_tasks=count)

    def started(self, source: str) -> None:
        state = self._sources[source]
        state.started = state.started or time.monotonic()

    def advanced(self, source: str, progress: Progress) -> None:
        state = self._sources[source]
        state.num_rows += progress.num_rows
        state.num_quarantined += progress.num_quarantined
        state.num_bytes += progress.num_bytes

    def finished(self, source: str) -> None:
        state = self._sources[source]
        state.num_done += 1
        if state.num_done == state.num_tasks:
            state.ended = time.monotonic()
            if self._live is None:
                self._print_line(source, state)

    def say(self, source: str, message: str) -> None:
        self._console.print(f"[yellow]{escape(source)}[/]: {escape(message)}", soft_wrap=True)

    def tick(self) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._table(now))
        elif now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            for source, state in self._sources.items():
                if state.started and not state.ended:
                    self._print_line(source, state)

    def _print_line(self, source: str, state: _Source) -> None:
        rows, megabytes = state.rates(time.monotonic())
        self._console.print(
            f"{escape(source)}: {state.num_done}/{state.num_tasks} ranges, {state.num_rows} rows, "
            f"{rows:.0f} rows/s, {megabytes:.1f} MB/s, {state.num_quarantined} quarantined",
            soft_wrap=True,
            highlight=False,
        )

    def _table(self, now: float) -> Table:
        table = Table("source", box=None, pad_edge=False)
        for name in ("ranges", "rows", "rows/s", "MB/s", "quarantined"):
            table.add_column(name, justify="right")
        active = [(name, state) for name, state in self._sources.items() if state.started and not state.ended]
        for name, state in active[:_MAX_TABLE_ROWS]:
            _add_row(table, name, state, now)
        every = list(self._sources.values())
        whole = _Source(
            num_tasks=sum(state.num_tasks for state in every),
            num_done=sum(state.num_done for state in every),
            num_rows=sum(state.num_rows for state in every),
            num_quarantined=sum(state.num_quarantined for state in every),
            num_bytes=sum(state.num_bytes for state in every),
            started=min((state.started for state in every if state.started), default=now),
        )
        _add_row(table, f"all {len(every)} sources, {len(active)} running", whole, now)
        return table


def _add_row(table: Table, name: str, state: _Source, now: float) -> None:
    rows, megabytes = state.rates(now)
    table.add_row(
        escape(name),
        f"{state.num_done}/{state.num_tasks}",
        f"{state.num_rows:,}",
        f"{rows:,.0f}",
        f"{megabytes:,.1f}",
        f"{state.num_quarantined:,}",
    )
