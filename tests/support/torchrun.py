"""Ranks of one script under `torchrun`; none of them outlives the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(script: Path, *words: str, num_ranks: int, timeout_seconds: float = 120) -> str:
    """Run it to its end; what it printed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        str(script),
        *words,
    ]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), str(script.parent)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=script.parent,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-3000:]
    return out
