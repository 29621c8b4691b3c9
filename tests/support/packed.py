"""A packed dataset with what must be found in it, and children that read it. A module of its own, so spawned children find it."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from plugin import BundleReader, PrefetchPool, Sample, SampleRead

CHILD_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A dataset, its index rows, and what a reader that knows nothing but the format finds at them."""

    url: str
    rows: list[Any]
    records: list[dict[str, Any]]
    images: list[list[bytes]]

    @property
    def entries(self) -> list[tuple[str, dict[str, Any], bytes]]:
        """(Source, entry, bytes) of every image of every record."""
        return [
            (row.source, entry, data)
            for row, record, images in zip(self.rows, self.records, self.images, strict=True)
            for entry, data in zip(record["images"], images, strict=True)
        ]


class PooledSamples:
    """A map-style dataset of torch: workers read through the pool they were given, four samples ahead."""

    def __init__(self, pool: PrefetchPool, rows: list[Any]) -> None:
        self.pool = pool
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Sample:
        for ahead in range(number, min(number + 4, len(self.rows))):
            self.pool.submit(ahead, [SampleRead(row=self.rows[ahead])])
        (sample,) = self.pool.get(number)
        assert isinstance(sample, Sample)
        return sample


def open_bundles() -> int:
    """Descriptors of bundles that this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").endswith(".zip")
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def _read_in_child(reader: BundleReader, packed: Packed, seed: int, connection: Any) -> None:
    inherited = (reader.num_open, open_bundles())
    order = list(packed.entries)
    random.Random(seed).shuffle(order)
    wrong = sum(reader.read(source, entry["bundle"], entry) != data for source, entry, data in order)
    wrong += sum(reader.read_record(row) != record for row, record in zip(packed.rows, packed.records, strict=True))
    connection.send((inherited, wrong, reader.num_open))
    connection.close()


def read_in_children(
    method: str, reader: BundleReader, packed: Packed, meanwhile: Callable[[], None] = lambda: None
) -> list[Any]:
    """What four children saw that share a reader of their parent's: what they inherited, wrong reads, descriptors at the end."""
    context: Any = multiprocessing.get_context(method)
    children = []
    for seed in range(4):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_read_in_child, args=(reader, packed, seed, theirs))
        child.start()
        theirs.close()
        children.append((child, ours))
    meanwhile()
    found = []
    for child, ours in children:
        assert ours.poll(CHILD_SECONDS), "a child hangs"
        found.append(ours.recv())
        child.join(CHILD_SECONDS)
        assert child.exitcode == 0
        ours.close()
    return found
