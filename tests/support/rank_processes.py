"""Real processes of torch.distributed over gloo that run one function after another, since starting one takes seconds.

`forked`: children of one process that has imported torch already, so that eight ranks start in a second instead of fifteen. They
leave without the interpreter's exit, so tests of how a process ends take those that are started anew.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a function did on one rank."""

    value: Any = None
    error: str | None = None
    """Type and message."""
    traceback: str = ""
    logs: list[str] = field(default_factory=list)


class RankProcesses:
    """Ranks 0 to n - 1 of one world. Those that start loader workers cannot be daemons."""

    def __init__(self, number: int, *, daemon: bool = True, forked: bool = False) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver" if forked else "spawn")
        # Of the first fork server only; what cannot be imported there is imported by each rank.
        context.set_forkserver_preload(["torch.distributed", "plugin.balance", "plugin.reorder"])
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(number):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, number, port, there), daemon=daemon)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, ranks: Sequence[int] | None = None) -> list[Outcome | None]:
        """Call a function of a module on some ranks at once; None for a rank that died of it."""
        chosen = range(len(self._pipes)) if ranks is None else ranks
        for rank in chosen:
            self._pipes[rank].send((function, arguments))
        return [self._outcome(rank) for rank in chosen]

    def close(self) -> list[int | None]:
        """Let all leave as a script does at its end; their exit codes, None for one that did not leave."""
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:  # Died in a test.
                continue
        for process in self.processes:
            process.join(30)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        return codes

    def _outcome(self, rank: int) -> Outcome | None:
        try:
            if not self._pipes[rank].poll(120):
                return Outcome(error="the rank hangs")
            outcome: Outcome = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None
        return outcome


def _serve(rank: int, number: int, port: int, pipe: Connection) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=number, timeout=timedelta(seconds=60)
    )
    handler = _Kept()
    logging.getLogger("plugin").addHandler(handler)
    logging.getLogger("plugin").setLevel(logging.INFO)
    while (call := pipe.recv()) is not None:
        function, arguments = call
        handler.lines = []
        try:
            outcome = Outcome(value=function(*arguments), logs=handler.lines)
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(error=text, traceback=traceback.format_exc(), logs=handler.lines)
        pipe.send(outcome)


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")
