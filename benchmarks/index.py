"""Counting against the tokenizer alone; and the index table at 1, 10 and 100 million rows, against copying and mapping.

    python benchmarks/index.py [--rows 1000000 ...] [--part-rows 50000] [--runs 5] [--scratch FOLDER] [--keep]

Counting is in `counting.py`. The table: made-up rows of 0 to 4 images, in parts as a job leaves them. Every measurement is a
process of its own, so its memory is its own; limits are measured in the same run: `cp` of the bytes that consolidating reads, and
mapping and reading one column's bytes. 100 million rows need 30 GB of scratch while they run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import counting
import numpy as np
from rich.console import Console
from rich.table import Table

PROFILE, SOURCE, FINGERPRINT = "bench", "web", "c" * 32
_MIB = 1 << 20


def make_parts(folder: Path, num_rows: int, part_rows: int) -> None:
    """Write the parts, `source.json` and `profile.json`. Sample i has the id `i`."""
    from indexer.table import write_part
    from packer.format import layout
    from packer.format.manifest import encode_document, encode_source
    from packer.storage import LocalStorage

    storage = LocalStorage(str(folder), fsync=False)
    manifests = []
    for number, start in enumerate(range(0, num_rows, part_rows)):
        rows = _rows(start, min(part_rows, num_rows - start))
        manifest = _manifest(number, len(rows))
        manifests.append(manifest)
        write_part(
            storage,
            PROFILE,
            SOURCE,
            manifest.part_id,
            rows,
            profile_fingerprint=FINGERPRINT,
            part_fingerprint=manifest.fingerprint,
            stats=b"{}",
        )
    storage.publish_bytes(layout.source_file(SOURCE), encode_source(SOURCE, manifests))
    storage.publish_bytes(layout.profile_file(PROFILE), encode_document("profile", {"fingerprint": FINGERPRINT}))


def _rows(start: int, count: int):
    from indexer.rows import Rows, id_hashes

    chance = np.random.default_rng(start)
    num_images = chance.choice(5, count, p=(0.3, 0.4, 0.15, 0.1, 0.05)).astype(np.int32)
    owner = np.repeat(np.arange(count), num_images)
    tokens = chance.integers(64, 2000, len(owner)).astype(np.int32)
    image_tokens = np.bincount(owner, tokens, minlength=count).astype(np.int32)
    text = chance.integers(20, 3000, count).astype(np.int32)
    size = chance.integers(500, 5000, count)
    return Rows(
        num_text_tokens=text,
        num_image_tokens=image_tokens,
        num_tokens=text + image_tokens,
        num_loss_tokens=text // 2,
        num_images=num_images,
        num_patches=image_tokens * 4,
        record_offset=np.cumsum(size) - size,
        record_size=size,
        id_hash=id_hashes(str(number) for number in range(start, start + count)),
        status=np.zeros(count, np.uint8),
        image_width=tokens * 2,
        image_height=tokens,
        image_num_tokens=tokens,
        image_num_patches=tokens * 4,
        image_sum_squared_attention=(tokens.astype(np.int64) * 4) ** 2,
    )


def _manifest(number: int, num_rows: int):
    from packer.format.manifest import FileEntry, InputSpan, PartManifest

    part_id = f"{number:012x}-r00000-p00000"
    return PartManifest(
        part_id=part_id,
        source=SOURCE,
        input=InputSpan(file=f"{number}.jsonl", byte_start=0, byte_end=9, file_size=9, digest="a" * 64),
        recipe_fingerprint="f" * 32,
        num_read=num_rows,
        num_written=num_rows,
        num_quarantined=0,
        quarantined_by_reason={},
        num_images=0,
        num_images_stored=0,
        check="structure",
        files={f"{part_id}{suffix}": FileEntry(size=9, digest="b" * 64) for suffix in (".jsonl", ".jsonl.idx", ".zip")},
        is_last_of_range=True,
    )


def consolidating(folder: Path, num_rows: int) -> dict[str, float]:
    """Put the table together; peak resident memory, imports and manifests included."""
    from indexer.table import consolidate
    from packer.format import layout
    from packer.format.manifest import decode_source
    from packer.storage import LocalStorage

    storage = LocalStorage(str(folder), fsync=False)
    manifests = decode_source(storage.read_bytes(layout.source_file(SOURCE)), "source.json")
    started = time.perf_counter()
    with Peak() as peak:
        consolidate(storage, PROFILE, SOURCE, manifests, FINGERPRINT)
    return {"seconds": time.perf_counter() - started, "rss_mib": peak.mib}


def opening(folder: Path, num_rows: int, check: bool = True) -> dict[str, float]:
    """Open it, all checks made."""
    from indexer.table import open_index

    before = _memory("VmRSS")
    started = time.perf_counter()
    table = open_index(str(folder), PROFILE, check=check)
    seconds = time.perf_counter() - started
    assert table.num_rows == num_rows
    return {"seconds": seconds, "rss_mib": _memory("VmRSS") - before}


def unchecked(folder: Path, num_rows: int) -> dict[str, float]:
    """Open it without reading `source.json`."""
    return opening(folder, num_rows, check=False)


def looking_up(folder: Path, num_rows: int) -> dict[str, float]:
    """Median of single look-ups, each row looked up before: warm."""
    from indexer.table import open_index

    table = open_index(str(folder), PROFILE, check=False)
    chance = random.Random(1)
    chosen = [chance.randrange(num_rows) for _ in range(3000)]
    looks: dict[str, Callable[[int], object]] = {
        "row_us": table.row,
        "id_us": lambda row: table.find(str(row)),
        "locate_us": table.locate,
    }
    found = {}
    for name, look in looks.items():
        for row in chosen:
            look(row)
        found[name] = statistics.median(_timed(look, row) for row in chosen) * 1e6
    assert all(table.find(str(row)) == [row] for row in chosen)
    return found


def excluding(folder: Path, num_rows: int) -> dict[str, float]:
    """Apply a list of a million ids, half of which are there."""
    from indexer.exclusion import read_exclusions
    from indexer.table import open_index

    table = open_index(str(folder), PROFILE, exclude=False, check=False)
    ids = "\n".join(str(number * 2 * num_rows // 1_000_000) for number in range(1_000_000))
    Path(folder, "exclude").mkdir(exist_ok=True)
    Path(folder, "exclude", "some.txt").write_text(ids)
    from packer.storage import LocalStorage

    started = time.perf_counter()
    exclusions = read_exclusions(LocalStorage(str(folder)))
    read = time.perf_counter()
    table.exclude(exclusions)
    shutil.rmtree(Path(folder, "exclude"))
    return {"read_seconds": read - started, "seconds": time.perf_counter() - read}


def scanning(folder: Path, num_rows: int) -> dict[str, float]:
    """Sum a column of every row, warm; then the same bytes from one mapped flat file."""
    from indexer.table import open_index

    table = open_index(str(folder), PROFILE, check=False)

    def scan() -> int:
        return sum(int(np.sum(chunk.to_numpy(), dtype=np.int64)) for chunk in table.column("num_tokens").chunks)

    flat = folder / "flat"
    table.column("num_tokens").to_numpy().tofile(flat)

    def scan_flat() -> int:
        return int(np.sum(np.memmap(flat, np.int32, "r"), dtype=np.int64))

    assert scan() == scan_flat()
    found = {
        "seconds": statistics.median(_timed(scan) for _ in range(5)),
        "limit_seconds": statistics.median(_timed(scan_flat) for _ in range(5)),
    }
    flat.unlink()
    return found


def whole_table(folder: Path, num_rows: int) -> dict[str, float]:
    """Every total and distribution of the report, from the table, batch by batch."""
    from indexer.rows import Rows
    from indexer.stats import Stats, stats_of
    from indexer.table import open_index

    table = open_index(str(folder), PROFILE, check=False)
    started = time.perf_counter()
    with Peak() as peak:
        stats = Stats.merged(stats_of(Rows.from_batch(batch, "batch")) for batch in table.batches())
    assert stats.num_samples == num_rows
    return {"seconds": time.perf_counter() - started, "rss_mib": peak.mib}


def copying(folder: Path, num_rows: int) -> dict[str, float]:
    """`cp -r` of the parts: reading and writing the same bytes."""
    parts, copy = folder / "index" / PROFILE / "parts", folder / "copy"
    started = time.perf_counter()
    subprocess.run(["cp", "-r", parts, copy], check=True)
    seconds = time.perf_counter() - started
    shutil.rmtree(copy)
    return {"seconds": seconds}


def _timed(function: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def _memory(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(key)


class Peak:
    """Largest resident memory while it is open, looked at 50 times a second."""

    def __enter__(self) -> Peak:
        self.mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.mib = max(self.mib, _memory("VmRSS"))

    def __exit__(self, *caught: object) -> None:
        self._stop.set()
        self._thread.join()
        self.mib = max(self.mib, _memory("VmRSS"))


STEPS = {
    step.__name__: step for step in (copying, consolidating, opening, unchecked, looking_up, excluding, scanning, whole_table)
}


def measure(folder: Path, num_rows: int, step: str) -> dict[str, float]:
    """One step in a process of its own."""
    command = [sys.executable, Path(__file__), "--step", step, "--scratch", folder, "--rows", str(num_rows)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def report(folder: Path, num_rows: int, part_rows: int) -> dict[str, str]:
    """All steps at one size; the cells of its column."""
    started = time.perf_counter()
    make_parts(folder, num_rows, part_rows)
    made = time.perf_counter() - started
    found = {step: measure(folder, num_rows, step) for step in STEPS}
    size = {path.name: path.stat().st_size for path in Path(folder, "index", PROFILE).glob("*.arrow")}
    written = sum(size.values())
    copied, done = found["copying"]["seconds"], found["consolidating"]["seconds"]
    return {
        "parts": f"{-(-num_rows // part_rows):,} of {part_rows:,} rows, made in {made:.0f} s",
        "table + ids": f"{size[f'{SOURCE}.arrow'] / 1e9:.2f} + {size[f'{SOURCE}.ids.arrow'] / 1e9:.2f} GB",
        "consolidate": f"{done:.1f} s, {written / done / 1e6:,.0f} MB/s",
        "  cp -r of the parts": f"{copied:.1f} s, {size[f'{SOURCE}.arrow'] / copied / 1e6:,.0f} MB/s",
        "  peak RSS": f"{found['consolidating']['rss_mib']:,.0f} MiB",
        "open, checked": f"{found['opening']['seconds']:.3f} s, +{found['opening']['rss_mib']:.0f} MiB",
        "open, check=False": f"{found['unchecked']['seconds']:.3f} s, +{found['unchecked']['rss_mib']:.0f} MiB",
        "row(i)": f"{found['looking_up']['row_us']:.0f} us",
        "find(id)": f"{found['looking_up']['id_us']:.0f} us",
        "locate(i)": f"{found['looking_up']['locate_us']:.1f} us",
        "exclude 1M ids": f"{found['excluding']['read_seconds']:.2f} s read + {found['excluding']['seconds']:.2f} s",
        "statistics of all rows": f"{found['whole_table']['seconds']:.1f} s",
        "sum of a column": f"{found['scanning']['seconds'] * 1e3:.1f} ms",
        "  of a flat mapped file": f"{found['scanning']['limit_seconds'] * 1e3:.1f} ms",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--part-rows", type=int, default=50_000)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "bayplan-benchmark-index")
    parser.add_argument("--keep", action="store_true", help="leave the made-up index in the scratch folder")
    parser.add_argument("--runs", type=int, default=5, help="repetitions of the counting figures; 0 leaves them out")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        sys.stdout.write(json.dumps(STEPS[options.step](options.scratch, options.rows[0])))
        return
    if options.runs:
        counting.report(options.runs)
    columns = {}
    for num_rows in options.rows:
        folder = options.scratch / f"{num_rows}-{options.part_rows}"
        shutil.rmtree(folder, ignore_errors=True)
        columns[f"{num_rows:,} rows"] = report(folder, num_rows, options.part_rows)
        if not options.keep:
            shutil.rmtree(folder)
            os.sync()
    table = Table(title="the index table: warm page cache, no fsync")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for line in next(iter(columns.values())):
        table.add_row(line, *(cells[line] for cells in columns.values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
