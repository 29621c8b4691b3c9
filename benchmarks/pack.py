"""Packing speed of one worker against copying, webdataset's ShardWriter plus `energon prepare`, and MDSWriter.

    python benchmarks/pack.py --peers PEERS_PYTHON [--folder FOLDER] [--runs 5]

All contestants read the same files with a warm page cache, in turn, in one process each (ours with its image threads).
Ours is a whole `convert_range`: parse, read, structure check, digest, store, prove by reading back, publish, manifest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from corpus import KINDS, make_corpus
from rich.console import Console
from rich.table import Table

OURS = "bayplan"
_SETTLE_SECONDS = 5.0


def copy(lines: Path, output: Path, fsync: bool) -> float:
    """Seconds of `cp -r` of the corpus's images."""
    started = time.perf_counter()
    subprocess.run(["cp", "-r", lines.with_suffix(""), output], check=True)
    if fsync:
        for entry in os.scandir(output):
            descriptor = os.open(entry.path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - started


def peer(python: str, name: str) -> Callable[[Path, Path, bool], float]:
    """A peer's writer, in a process of its own environment."""

    def run(lines: Path, output: Path, fsync: bool) -> float:
        script = Path(__file__).with_name("peer_pack.py")
        command = [python, script, name, lines, output, "fsync" if fsync else "nofsync"]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(found.stdout.splitlines()[-1])

    return run


def ours(lines: Path, output: Path, fsync: bool) -> float:
    """Seconds of converting the corpus in a fresh process of this environment."""
    command = [sys.executable, Path(__file__), "--ours", lines, output, "--fsync" if fsync else "--no-fsync"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def convert(lines: Path, output: Path, fsync: bool) -> float:
    """Convert in this process; seconds."""
    from packer.convert import ConvertTask, convert_range
    from packer.sources import InputRange
    from packer.storage import open_storage
    from pipelines.inputs import source_config
    from pipelines.recipe import Source

    source = Source(schema="caption", name="bench", files=(str(lines),), image_root=str(lines.parent))
    work = InputRange(url=str(lines), file=lines.name, file_size=lines.stat().st_size)
    task = ConvertTask(source=source_config(source, str(lines.parent)), work=work)
    started = time.perf_counter()
    for _ in convert_range(task, open_storage(str(output), fsync=fsync)):
        pass
    return time.perf_counter() - started


def measure(lines: Path, contestants: dict[str, Callable[[Path, Path, bool], float]], runs: int, folder: Path) -> dict:
    """Median seconds of every contestant, without and with fsync; contestants take turns within a run.

    Nothing is deleted in between: a file system that frees thousands of files slows whoever writes next.
    """
    seconds: dict[tuple[str, bool], list[float]] = {}
    outputs = folder / "outputs"
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir()
    for run, fsync in itertools.product(range(runs), (False, True)):
        for number, (name, contestant) in enumerate(contestants.items()):
            os.sync()
            output = outputs / f"{run}-{fsync}-{number}"
            seconds.setdefault((name, fsync), []).append(contestant(lines, output, fsync))
    shutil.rmtree(outputs)
    os.sync()
    time.sleep(_SETTLE_SECONDS)
    return {key: statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with webdataset, megatron-energon and mosaicml-streaming")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bayplan-benchmark")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ours", nargs=2, type=Path, metavar=("LINES", "OUTPUT"), help=argparse.SUPPRESS)
    parser.add_argument("--fsync", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        sys.stdout.write(str(convert(*options.ours, options.fsync)))
        return
    contestants: dict[str, Callable[[Path, Path, bool], float]] = {"cp -r": copy, OURS: ours}
    if options.peers:
        contestants["webdataset + energon prepare"] = peer(options.peers, "webdataset")
        contestants["MDSWriter"] = peer(options.peers, "mds")
    table = Table(title="packing, one worker, warm page cache, median seconds -> rate")
    for column in ("corpus", "fsync", "contestant", "MB/s", "images/s", "bayplan / this"):
        table.add_column(column, justify="left" if column in ("corpus", "fsync", "contestant") else "right")
    results = []
    for kind, (num_icons, num_photos) in KINDS.items():
        lines = make_corpus(options.folder, kind)
        num_bytes = sum(entry.stat().st_size for entry in os.scandir(lines.with_suffix("")))
        for entry in os.scandir(lines.with_suffix("")):
            Path(entry.path).read_bytes()
        medians = measure(lines, contestants, options.runs, options.folder)
        for (name, fsync), value in sorted(medians.items(), key=lambda item: (item[0][1], item[0][0])):
            ratio = value / medians[OURS, fsync]
            rate = (num_icons + num_photos) / value
            cells = [kind, "yes" if fsync else "no", name, f"{num_bytes / 1e6 / value:,.0f}", f"{rate:,.0f}", f"{ratio:.2f}"]
            table.add_row(*cells)
            results.append(dict(zip(("corpus", "fsync", "contestant", "MB/s", "images/s", "ratio"), cells, strict=True)))
    Console(width=110).print(json.dumps(results) if options.json else table)


if __name__ == "__main__":
    main()
