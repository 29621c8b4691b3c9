"""Our loader against stock Energon over JSONL with loose images and over tars: from a local disk, and from a store with latency.

    PYTHONPATH=. python benchmarks/loader.py [--runs 3] [--samples 2500] [--scratch FOLDER]

Same samples, encoder, decoding, packing plan, buffer and form of packs. First packs are drawn as fast as they come; then a
trainer "computes" (sleeps) for a while with each. Before each stream all files are put into the page cache, or out of it.
Random reads of images against `os.pread` are `reader.py`'s.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

COMPUTE_SECONDS = 0.100
LOCAL, COLD, STORE = "local disk, page cache warm", "local disk, page cache dropped", "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured of one stream."""

    buffer_size: int
    shuffle_size: int
    num_warm: int
    num_packs: int
    num_trained: int


EFFORTS = {
    # Place, decoding -> effort. A pack takes 4 ms without decoding and 60 ms with it, and up to a second from the store.
    (LOCAL, False): Effort(buffer_size=200, shuffle_size=100, num_warm=40, num_packs=250, num_trained=12),
    (LOCAL, True): Effort(buffer_size=200, shuffle_size=100, num_warm=20, num_packs=60, num_trained=12),
    (COLD, False): Effort(buffer_size=200, shuffle_size=100, num_warm=20, num_packs=120, num_trained=12),
    (STORE, False): Effort(buffer_size=150, shuffle_size=50, num_warm=10, num_packs=40, num_trained=12),
    (STORE, True): Effort(buffer_size=150, shuffle_size=50, num_warm=10, num_packs=40, num_trained=12),
}
SETTLING_PACKS = 6
"""Of the trained ones: until the queue is as full as it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the table."""

    place: str
    decodes: bool
    num_workers: int
    contestant: str
    max_runs: int = field(default=99, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    first_seconds: float
    samples_per_second: float
    tokens_per_second: float
    """Real ones: within a short while one contestant may give larger samples than another."""
    packs_per_second: float
    wait_seconds: float
    """Of the trainer, for one pack."""
    num_requests: float
    """For one pack."""
    peak_mib: float
    """Private memory of all processes."""


@dataclass(slots=True, kw_only=True)
class Ground:
    """What the cases run on."""

    local: Any
    address: str | None = None
    found: dict[Case, list[Measured]] = field(default_factory=dict)


def cases() -> list[Case]:
    from loader_contestants import CONTESTANTS, OURS, OURS_THREADS

    local = [
        Case(place=LOCAL, decodes=decodes, num_workers=workers, contestant=name)
        for decodes, workers, name in itertools.product(
            (False, True), (0, 2), (OURS, OURS_THREADS, "energon jsonl", "energon tars")
        )
        if decodes or name != OURS_THREADS
    ]
    cold = [
        Case(place=COLD, decodes=False, num_workers=workers, contestant=name)
        for workers, name in itertools.product((0, 2), (OURS, "energon jsonl", "energon tars"))
    ]
    store = [
        # Those that wait for every read take half a minute: one run tells enough, and decoding changes nothing.
        Case(place=STORE, decodes=decodes, num_workers=2, contestant=name, max_runs=1 if _is_slow(name) else 99)
        for decodes, name in itertools.product((False, True), CONTESTANTS)
        if not (decodes and _is_slow(name)) and name != OURS_THREADS
    ]
    return local + cold + store


def _is_slow(contestant: str) -> bool:
    return contestant in ("energon jsonl", "energon tars, large")


def measure(case: Case, ground: Ground) -> Measured:
    """One stream, in this process and its workers."""
    from loader_contestants import Layouts, Run, packs_of
    from loader_store import PROFILE, num_requests

    from plugin.settings import PackSettings

    effort = EFFORTS[case.place, case.decodes]
    run = Run(
        contestant=case.contestant,
        layouts=Layouts(root=f"msc://{PROFILE}") if case.place == STORE else ground.local,
        profile_url=ground.local.ours,
        settings=PackSettings(sequence_length=4096, max_patches_per_pack=16384, buffer_size=effort.buffer_size),
        decodes=case.decodes,
        num_workers=case.num_workers,
        shuffle_size=effort.shuffle_size,
    )
    started = time.perf_counter()
    packs = packs_of(run)
    next(packs)
    first_seconds = time.perf_counter() - started
    for _ in range(effort.num_warm):
        next(packs)
    started = time.perf_counter()
    drawn = [counted(next(packs)) for _ in range(effort.num_packs)]
    seconds = time.perf_counter() - started
    trained(packs, SETTLING_PACKS)
    asked = num_requests(ground.address) if case.place == STORE and ground.address else 0
    wait = trained(packs, effort.num_trained)
    asked = num_requests(ground.address) - asked if case.place == STORE and ground.address else 0
    return Measured(
        first_seconds=first_seconds,
        samples_per_second=sum(samples for samples, _ in drawn) / seconds,
        tokens_per_second=sum(tokens for _, tokens in drawn) / seconds,
        packs_per_second=effort.num_packs / seconds,
        wait_seconds=wait / effort.num_trained,
        num_requests=asked / effort.num_trained,
        peak_mib=private_mib([os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]),
    )


def counted(pack: Any) -> tuple[int, int]:
    """Samples and real tokens of a pack."""
    return pack.batch.num_samples, int(pack.batch.cu_seqlens[-1])


def trained(packs: Iterator[Any], number: int) -> float:
    """Seconds that a trainer waited for so many packs."""
    waited = 0.0
    for _ in range(number):
        started = time.perf_counter()
        next(packs)
        waited += time.perf_counter() - started
        time.sleep(COMPUTE_SECONDS)
    return waited


def private_mib(processes: Sequence[int]) -> float:
    lines = [line for one in processes for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def set_cache(folder: Path, *, cold: bool) -> None:
    """Put every file into the page cache, or its pages out of it. The padding of the large tar is not worth it."""
    for path in folder.rglob("*"):
        if path.is_file() and "large" not in path.parent.name:
            with open(path, "rb") as file:
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                else:
                    file.read()


def run_all(ground: Ground, runs: int, wanted: Sequence[Case]) -> None:
    from loader_contestants import CONTESTANTS  # noqa: F401  once, here, and in no child
    from loader_corpus import in_child

    for number in range(runs):
        for case in wanted:
            if number < case.max_runs:
                set_cache(Path(ground.local.root), cold=case.place == COLD)
                ground.found.setdefault(case, []).append(in_child(lambda case=case: measure(case, ground)))
                print(f"{number + 1}/{runs} {case} {ground.found[case][-1]}", file=sys.stderr)


def table(ground: Ground, place: str) -> Table:
    shown = Table(title=f"{place}; a trainer that computes {COMPUTE_SECONDS * 1e3:.0f} ms a pack")
    columns = [
        "decoding",
        "workers",
        "contestant",
        "samples/s",
        "packs/s",
        "k tokens/s",
        "ours / this",
        "first pack, s",
        "data wait",
        "MiB",
    ]
    for column in columns + (["requests a pack", "latency hidden"] if place == STORE else []):
        shown.add_column(column, justify="left" if column == "contestant" else "right")
    for case, found in ground.found.items():
        if case.place == place:
            shown.add_row(*_cells(ground, case, found))
    return shown


def _cells(ground: Ground, case: Case, found: Sequence[Measured]) -> list[str]:
    ours = ground.found[_like(case, contestant="ours")]
    # Contestants ran in turn, so the ratio of each round is free of what the machine did in between.
    ratio = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, found, strict=False))
    wait = _median(found, "wait_seconds")
    cells = [
        "on" if case.decodes else "off",
        str(case.num_workers),
        case.contestant,
        f"{_median(found, 'samples_per_second'):,.0f}",
        f"{_median(found, 'packs_per_second'):,.1f}",
        f"{_median(found, 'tokens_per_second') / 1e3:,.0f}",
        f"{ratio:.2f}",
        f"{_median(found, 'first_seconds'):.1f}",
        f"{wait / (wait + COMPUTE_SECONDS):.1%}",
        f"{_median(found, 'peak_mib'):,.0f}",
    ]
    if case.place == STORE:
        cells += [f"{_median(found, 'num_requests'):.1f}", _hidden(ground, case, found)]
    return cells


def _hidden(ground: Ground, case: Case, found: Sequence[Measured]) -> str:
    """Of the seconds that requests for a pack took: what the trainer did not see, beyond its wait on a local disk."""
    from loader_store import LATENCY_SECONDS

    local = ground.found.get(_like(case, place=LOCAL, contestant=case.contestant.partition(",")[0]))
    latency = _median(found, "num_requests") * LATENCY_SECONDS
    if not local or not latency:
        return "-"
    return f"{1 - max(0.0, _median(found, 'wait_seconds') - _median(local, 'wait_seconds')) / latency:.1%}"


def _like(case: Case, *, place: str | None = None, contestant: str) -> Case:
    return Case(place=place or case.place, decodes=case.decodes, num_workers=case.num_workers, contestant=contestant)


def _median(found: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2500, help="documents, each about 100 KB, in four layouts")
    parser.add_argument("--scratch", type=Path, help="a folder for the layouts; a temporary one when not given")
    parser.add_argument("--only", default="", help="cases whose place, contestant or `decodes=...` holds this")
    options = parser.parse_args()
    console = Console(width=170)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bayplan-loader-", dir=options.scratch) as scratch:
        # Both keep copies of what comes from a store; here they go with the rest.
        os.environ["ENERGON_LOCAL_COPY_TMP_DIR"] = os.environ["XDG_CACHE_HOME"] = f"{scratch}/copies"
        from loader_corpus import in_child, write_documents
        from loader_store import serving

        root = Path(scratch) / "samples"
        root.mkdir()
        layouts = in_child(lambda: write_documents(root, options.samples))
        os.sync()  # a page that is not written yet cannot be dropped
        wanted = [case for case in cases() if options.only in str(case)]
        ground = Ground(local=layouts)
        with serving(root) as ground.address:
            run_all(ground, options.runs, wanted)
        for place in (LOCAL, COLD, STORE):
            if any(case.place == place for case in ground.found):
                console.print(table(ground, place))
    console.print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
