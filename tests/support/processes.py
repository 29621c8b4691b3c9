"""Real `bayplan` processes with a real Ray, to be killed in the middle. Only processes of our own tree are touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's environment without a Ray to join, its authentication set by us and not by a file in the home."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_AUTH_MODE": "disabled", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", **more}


def start(*arguments: str | Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """A `bayplan` process."""
    command = [sys.executable, "-m", "pipelines.cli", *map(str, arguments)]
    path = os.pathsep.join([str(REPOSITORY), str(cwd)])
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(PYTHONPATH=path, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_seconds: float = 240) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process."""
    out, err = process.communicate(timeout=timeout_seconds)
    return process.returncode, out, err


def run(*arguments: str | Path, cwd: Path, **more: str) -> tuple[int, str, str]:
    """Run `bayplan` to its end."""
    return finish(start(*arguments, cwd=cwd, **more))


def descendants(process: subprocess.Popen[str], name: str) -> list[psutil.Process]:
    """Processes below `process` whose command line holds `name`."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if name in " ".join(child.cmdline()):
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 120) -> None:
    """Poll until something is so."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition never came true")
        time.sleep(0.05)
