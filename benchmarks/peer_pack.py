"""Pack a corpus with a peer's writer and print the seconds it took. Runs in the peers' environment, one process.

python peer_pack.py webdataset|mds LINES OUTPUT fsync|nofsync
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


def rows(lines: Path) -> Iterator[tuple[dict[str, str], bytes]]:
    with lines.open() as file:
        for line in file:
            row = json.loads(line)
            yield row, (lines.parent / row["image_path"]).read_bytes()


def pack_webdataset(lines: Path, output: Path) -> None:
    from webdataset import ShardWriter

    with ShardWriter(f"{output}/shard-%06d.tar", maxsize=1 << 30, maxcount=1 << 30, verbose=0) as writer:
        for number, (row, data) in enumerate(rows(lines)):
            extension = row["image_path"].rpartition(".")[2]
            writer.write({"__key__": f"{number:08d}", extension: data, "json": json.dumps(row).encode()})
    energon = Path(sys.executable).with_name("energon")
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1"]
    subprocess.run([energon, "prepare", "--no-progress", *options, output], check=True, stdout=subprocess.DEVNULL)


def pack_mds(lines: Path, output: Path) -> None:
    from streaming import MDSWriter

    columns = {"image": "bytes", "row": "str"}
    with MDSWriter(out=str(output), columns=columns, size_limit=1 << 30) as writer:
        for row, data in rows(lines):
            writer.write({"image": data, "row": json.dumps(row)})


def main() -> None:
    peer, lines, output, fsync = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    output.mkdir(parents=True)
    pack = {"webdataset": pack_webdataset, "mds": pack_mds}[peer]
    if peer == "webdataset":
        import webdataset  # noqa: F401  imports are no part of the time
    else:
        import streaming  # noqa: F401
    started = time.perf_counter()
    pack(lines, output)
    if fsync == "fsync":
        for path in output.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
    sys.stdout.write(f"{time.perf_counter() - started}\n")


if __name__ == "__main__":
    main()
