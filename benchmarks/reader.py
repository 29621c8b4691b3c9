"""Random image reads against `os.pread` on the same offsets; and how much of a slow store's latency the prefetch pool hides.

    python benchmarks/reader.py [--runs 5] [--scratch FOLDER]

Local: a warm page cache, so every microsecond of ours shows. Store: a local HTTP server, a process of its own, that answers each
request after 20 ms; a consumer takes a pack of 16 images, then computes (sleeps) for 60 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from packer.format.bundle import BundleWriter, crc32
from plugin import BundleReader, ImageRead, PrefetchPool

SOURCE = "web"
SIZES = {"icons": (25_000, 8_000), "pictures": (100_000, 2_000), "photos": (1_000_000, 400)}
"""Kind -> bytes of an image, number of images."""
NUM_BUNDLES = 8
IMAGES_PER_RECORD = 5
LATENCY_SECONDS, COMPUTE_SECONDS, PACK_IMAGES, NUM_PACKS = 0.020, 0.060, 16, 40

Entry = dict[str, Any]


def make_bundles(folder: Path, image_bytes: int, num_images: int) -> list[Entry]:
    """Bundles of random bytes; the entries in the order they stand."""
    chance = random.Random(image_bytes)
    entries: list[Entry] = []
    (folder / "sources" / SOURCE).mkdir(parents=True, exist_ok=True)
    for number in range(NUM_BUNDLES):
        name = f"b{number}.zip"
        with open(folder / "sources" / SOURCE / name, "wb") as file:
            writer = BundleWriter(file)
            for image in range(num_images // NUM_BUNDLES):
                data = chance.randbytes(image_bytes)
                stored = writer.add(data, digest=f"{number:016x}{image:016x}", extension="png", crc=crc32(data))
                entries.append({"bundle": name, "offset": stored.offset, "size": stored.size, "crc32": stored.crc32})
            writer.close()
    return entries


def seconds(run: Callable[[Sequence[Any]], None], work: Sequence[Any], num_threads: int) -> float:
    """Of all the work, dealt to threads."""
    started = time.perf_counter()
    if num_threads == 1:
        run(work)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(run, [work[number::num_threads] for number in range(num_threads)]))
    return time.perf_counter() - started


def local(folder: Path, runs: int) -> Table:
    table = Table(title="random reads, warm page cache: microseconds an image (os.pread / this)")
    for column in ("images", "threads", "os.pread", "read, crc off", "read, crc on", "5 x os.pread", "read_images of 5, crc off"):
        table.add_column(column, justify="right")
    for kind, (image_bytes, num_images) in SIZES.items():
        entries = make_bundles(folder / kind, image_bytes, num_images)
        for num_threads in (1, 8):
            table.add_row(
                f"{kind}, {image_bytes // 1000} KB", str(num_threads), *_local_cells(folder / kind, entries, num_threads, runs)
            )
    return table


def _local_cells(folder: Path, entries: list[Entry], num_threads: int, runs: int) -> list[str]:
    names = {entry["bundle"] for entry in entries}
    descriptors = {name: os.open(folder / "sources" / SOURCE / name, os.O_RDONLY) for name in names}
    records = [entries[start : start + IMAGES_PER_RECORD] for start in range(0, len(entries), IMAGES_PER_RECORD)]
    records = [record for record in records if len({entry["bundle"] for entry in record}) == 1]
    singles = list(entries)
    for work in (singles, records):
        random.Random(1).shuffle(work)
    plain, checked = BundleReader(str(folder), check_crc=False), BundleReader(str(folder))

    def pread(work: Sequence[Entry]) -> None:
        for entry in work:
            os.pread(descriptors[entry["bundle"]], entry["size"], entry["offset"])

    def pread_records(work: Sequence[list[Entry]]) -> None:
        for record in work:
            [os.pread(descriptors[entry["bundle"]], entry["size"], entry["offset"]) for entry in record]

    def reads(reader: BundleReader) -> Callable[[Sequence[Entry]], None]:
        def run(work: Sequence[Entry]) -> None:
            for entry in work:
                reader.read(SOURCE, entry["bundle"], entry)

        return run

    def read_records(work: Sequence[list[Entry]]) -> None:
        for record in work:
            plain.read_images(SOURCE, record)

    contestants: list[tuple[Callable[[Sequence[Any]], None], Sequence[Any], int]] = [
        (pread, singles, 0),
        (reads(plain), singles, 0),
        (reads(checked), singles, 0),
        (pread_records, records, 3),
        (read_records, records, 3),
    ]
    found: list[list[float]] = [[] for _ in contestants]
    for _ in range(runs + 1):
        for times, (run, work, _) in zip(found, contestants, strict=True):
            times.append(seconds(run, work, num_threads))
    for descriptor in descriptors.values():
        os.close(descriptor)
    images = [len(singles)] * 3 + [len(records) * IMAGES_PER_RECORD] * 2
    cost = [statistics.median(times[1:]) / count * 1e6 for times, count in zip(found, images, strict=True)]
    # Contestants ran in turn, so the ratio of each round is free of what the machine did in between.
    ratios = [
        statistics.median(a / b for a, b in zip(found[base][1:], times[1:], strict=True))
        for times, (_, _, base) in zip(found, contestants, strict=True)
    ]
    return [f"{value:.2f} ({ratio:.0%})" for value, ratio in zip(cost, ratios, strict=True)]


class SlowHandler(BaseHTTPRequestHandler):
    """Gives ranges of files, each answer after the latency."""

    protocol_version = "HTTP/1.1"
    folder = ""

    def do_GET(self) -> None:
        time.sleep(LATENCY_SECONDS)
        start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        with open(self.folder + self.path, "rb") as file:
            data = os.pread(file.fileno(), end + 1 - start, start)
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/*")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def serve(folder: Path) -> None:
    SlowHandler.folder = str(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def store(folder: Path, runs: int) -> Table:
    image_bytes, num_images = SIZES["pictures"]
    entries = make_bundles(folder / "pictures", image_bytes, num_images)
    random.Random(1).shuffle(entries)
    packs = [entries[start : start + PACK_IMAGES] for start in range(0, NUM_PACKS * PACK_IMAGES, PACK_IMAGES)]
    table = Table(
        title=f"{NUM_PACKS} packs of {PACK_IMAGES} pictures; 20 ms a request, {COMPUTE_SECONDS * 1e3:.0f} ms of work a pack"
    )
    for column in ("how", "wait a pack, ms", "hidden"):
        table.add_column(column, justify="right")
    command = [sys.executable, __file__, "--serve", str(folder / "pictures")]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert server.stdout is not None
    try:
        reader = BundleReader(f"http://127.0.0.1:{server.stdout.readline().strip()}")
        ways: dict[str, Callable[[], float]] = {"one after the other": lambda: _waits_alone(reader, packs)}
        for ahead in (1, 2, 4):
            ways[f"prefetched, {ahead} ahead"] = lambda ahead=ahead: _waits_ahead(reader, packs, ahead)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, way in ways.items():
                found[name].append(way())
    finally:
        server.terminate()
        server.wait()
    alone = statistics.median(found["one after the other"])
    for name, waits in found.items():
        wait = statistics.median(waits)
        table.add_row(name, f"{wait / NUM_PACKS * 1e3:.1f}", f"{1 - wait / alone:.1%}")
    return table


def _waits_alone(reader: BundleReader, packs: Sequence[Sequence[Entry]]) -> float:
    waited = 0.0
    for pack in packs:
        started = time.perf_counter()
        for entry in pack:
            reader.read(SOURCE, entry["bundle"], entry)
        waited += time.perf_counter() - started
        time.sleep(COMPUTE_SECONDS)
    return waited


def _waits_ahead(reader: BundleReader, packs: Sequence[Sequence[Entry]], ahead: int) -> float:
    """The wait of the first pack, which nothing can hide, is counted too."""
    waited = 0.0
    with PrefetchPool(reader, num_threads=PACK_IMAGES) as pool:
        for number in range(len(packs) + ahead):
            if number < len(packs):
                pool.submit(number, [ImageRead(source=SOURCE, entry=entry) for entry in packs[number]])
            if number >= ahead:
                started = time.perf_counter()
                pool.get(number - ahead)
                waited += time.perf_counter() - started
                time.sleep(COMPUTE_SECONDS)
    return waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="a folder for 1 GB of images; a temporary one when not given")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    console = Console(width=150)
    with tempfile.TemporaryDirectory(prefix="bayplan-reader-", dir=options.scratch) as folder:
        console.print(local(Path(folder), options.runs))
        console.print(store(Path(folder), options.runs))


if __name__ == "__main__":
    main()
