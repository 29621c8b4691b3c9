"""Peak memory of one worker on hostile inputs. Each case runs in a process of its own; the aim is under 1 GiB.

python benchmarks/memory.py [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zstandard
from corpus import make_corpus
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
LIMIT_MIB = 1024


def long_line(folder: Path) -> tuple[Path, str]:
    """A line of 200 MB between two normal ones."""
    path = folder / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "before"}\n{"text": "')
        for _ in range(200):
            file.write(b"x" * 1_000_000)
        file.write(b'"}\n{"text": "after"}\n')
    return path, "text"


def bomb(folder: Path) -> tuple[Path, str]:
    """A .zst of a few hundred KB that expands to 3 GB of normal lines."""
    path = folder / "bomb.jsonl.zst"
    line = b'{"text": "' + b"a" * 100_000 + b'"}\n'
    with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as writer:
        for _ in range(30_000):
            writer.write(line)
    return path, "text"


def one_line_bomb(folder: Path) -> tuple[Path, str]:
    """A .zst that expands to one line of 3 GB."""
    path = folder / "line-bomb.jsonl.zst"
    with path.open("wb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file) as writer:
        writer.write(b'{"text": "')
        for _ in range(3_000):
            writer.write(b"\0" * 1_000_000)
        writer.write(b'"}\n{"text": "after"}\n')
    return path, "text"


def many_images(folder: Path) -> tuple[Path, str]:
    """One record with 10,000 references, 6,000 distinct images of 25 KB among them."""
    lines = make_corpus(folder, "icons")
    names = [json.loads(line)["image_path"] for line in lines.read_text().splitlines()]
    path = folder / "many.jsonl"
    path.write_text(json.dumps({"image_path": (names * 2)[:10_000], "caption": "many"}) + "\n")
    return path, "caption"


def large_images(folder: Path) -> tuple[Path, str]:
    """2,000 references to photos of 1 MB, 400 distinct, as one record."""
    lines = make_corpus(folder, "photos")
    names = [json.loads(line)["image_path"] for line in lines.read_text().splitlines()]
    path = folder / "large.jsonl"
    path.write_text(json.dumps({"image_path": (names * 5)[:2_000], "caption": "large"}) + "\n")
    return path, "caption"


CASES = {case.__name__: case for case in (long_line, bomb, one_line_bomb, many_images, large_images)}


def convert(path: Path, schema: str, output: Path) -> Iterator[str]:
    from packer.convert import ConvertTask, convert_range
    from packer.format.manifest import PartManifest
    from packer.sources import InputRange
    from packer.storage import open_storage
    from pipelines.inputs import source_config
    from pipelines.recipe import Source

    source = Source(schema=schema, name="memory", files=(str(path),), image_root=str(path.parent))
    work = InputRange(url=str(path), file=path.name, file_size=path.stat().st_size)
    task = ConvertTask(source=source_config(source, str(path.parent)), work=work)
    for item in convert_range(task, open_storage(str(output), fsync=False)):
        if isinstance(item, PartManifest):
            yield f"{item.num_written} written, {item.num_quarantined} quarantined, {item.num_images} images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bayplan-benchmark")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.case:
        path, schema, output = options.case
        done = "; ".join(convert(Path(path), schema, Path(output)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        sys.stdout.write(json.dumps([peak, done]))
        return
    table = Table(title="peak memory of one worker")
    for column in ("case", "what it is", "peak MiB", "of 1 GiB", "result"):
        table.add_column(column)
    output = options.folder / "memory-output"
    for name, make in CASES.items():
        path, schema = make(options.folder)
        command = [sys.executable, __file__, "--case", path, schema, output]
        peak, done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        table.add_row(name, make.__doc__ or "", f"{peak:,.0f}", f"{peak / LIMIT_MIB:.2f}", done)
        shutil.rmtree(output, ignore_errors=True)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
