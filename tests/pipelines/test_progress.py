"""What a person sees while a job runs."""

from __future__ import annotations

import io

from rich.console import Console

from pipelines.progress import ProgressDisplay
from pipelines.ray_executor import Progress


def play(console: Console) -> str:
    with ProgressDisplay(console) as display:
        display.queued("web", 2)
        display.queued("idle", 1)
        display.started("web")
        display.advanced("web", Progress(num_rows=10, num_quarantined=3, num_bytes=1000))
        display.finished("web")
        display.say("web", "a worker died [between] bytes")
        display.tick()
        display.advanced("web", Progress(num_rows=5))
        display.finished("web")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    lines = play(Console(file=io.StringIO(), width=60)).splitlines()
    assert lines[0] == "web: a worker died [between] bytes"
    assert lines[1].startswith("web: 2/2 ranges, 15 rows, ")
    assert lines[1].endswith(", 3 quarantined")
    assert len(lines) == 2


def test_a_live_table_on_a_terminal() -> None:
    shown = play(Console(file=io.StringIO(), force_terminal=True, width=100))
    assert "all 2 sources, 1 running" in shown
    assert "1/3" in shown
