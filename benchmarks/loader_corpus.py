"""The samples of the loader's benchmarks, three times on one disk: our dataset, JSONL with loose images, and tar shards.

Records are the same lines in all three, so that each contestant gives the same lengths to the packing. The tars and the JSONL are
prepared by Energon's own command.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import yaml
from corpus import unique_jpeg, unique_png
from counting import CORPUS, texts
from PIL import Image

from packer.convert import Step
from packer.guard import NoGuard
from pipelines.index import IndexJob
from pipelines.pack import PackJob
from pipelines.ray_executor import Listener, Outcome
from pipelines.recipe import load_recipe
from pipelines.tasks import Task, run_task

Result = TypeVar("Result")
SOURCE, PROFILE = "web", "bench"
SHARD_SAMPLES = 250
"""Of a tar: Energon reads 16 slices of shards in turn."""
LARGE_SHARD_BYTES = 600 << 20
"""The client of stores loads objects of up to 512 MiB whole into memory; larger ones it reads by ranges."""
METADATASET = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train: {path: records.jsonl, aux: {images: 'filesystem://images'}}
  val: {path: records.jsonl, aux: {images: 'filesystem://images'}}
"""
OURS_ONCE = f"""\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train: {{path: ours/sources/{SOURCE}, dataset_config: profile-{PROFILE}.yaml}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Where the samples lie below a root, which may be a folder or the URL of a store that serves it."""

    root: str

    @property
    def ours(self) -> str:
        return f"{self.root}/ours"

    @property
    def ours_once(self) -> str:
        """A metadataset that may be read once: the blend of a profile repeats for ever."""
        return f"{self.root}/ours-once.yaml"

    @property
    def jsonl(self) -> str:
        return f"{self.root}/jsonl/dataset.yaml"

    @property
    def tars(self) -> str:
        return f"{self.root}/tars"

    @property
    def large_tars(self) -> str:
        """All samples in one shard, padded to `LARGE_SHARD_BYTES` with zeros behind its end."""
        return f"{self.root}/large-tars"


def in_child(work: Callable[[], Result]) -> Result:
    """In a process of its own, forked so that nothing is imported again; what Energon prints is dropped."""
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(work, theirs))
    child.start()
    theirs.close()
    error, found = ours.recv()
    child.join()
    if error:
        raise RuntimeError(error)
    return found


def _child(work: Callable[[], Result], connection: Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    try:
        connection.send((None, work()))
    except BaseException:
        connection.send((traceback.format_exc(), None))
    connection.close()
    for worker in multiprocessing.active_children():
        worker.kill()  # Energon's own way out takes a second for each
    os._exit(0)


def write_documents(root: Path, num_samples: int) -> Layouts:
    """Documents of 1 to 3 texts and 0 to 4 JPEGs of 224 to 560 pixels a side; each image's bytes are unique."""
    (root / "jsonl" / "images").mkdir(parents=True)
    chance = random.Random(3)
    photos = [_photo(chance) for _ in range(60)]
    pieces = texts()
    rows = [_document(root / "jsonl", number, photos, pieces, chance) for number in range(num_samples)]
    _write_ours(root, rows, "interleaved")
    (root / "ours-once.yaml").write_text(OURS_ONCE)
    lines = list(_record_lines(root / "ours"))
    (root / "jsonl" / "records.jsonl").write_bytes(b"".join(lines))
    (root / "jsonl" / "dataset.yaml").write_text(METADATASET)
    _energon_prepare(root / "jsonl" / "records.jsonl")
    for name, shard_samples in (("tars", SHARD_SAMPLES), ("large-tars", num_samples)):
        _write_tars(root / name, root / "jsonl" / "images", lines, shard_samples)
        if shard_samples == num_samples:
            os.truncate(root / name / "shard-0000.tar", LARGE_SHARD_BYTES)
        _energon_prepare(root / name, "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset")
    return Layouts(root=str(root))


def write_icons(root: Path, num_samples: int) -> str:
    """Captions of one PNG of 16 to 64 pixels a side; our dataset of them."""
    images = root / "jsonl" / "images"
    images.mkdir(parents=True)
    chance = random.Random(4)
    icons = [_encoded(_noise(chance, chance.randrange(16, 65), chance.randrange(16, 65)), "PNG") for _ in range(300)]
    rows = []
    for number in range(num_samples):
        name = f"{number:06d}.png"
        (images / name).write_bytes(unique_png(icons[number % len(icons)], number))
        rows.append({"id": f"icon {number}", "image_path": name, "caption": f"icon number {number}, one of many"})
    _write_ours(root, rows, "caption")
    return str(root / "ours")


def _document(folder: Path, number: int, photos: Sequence[bytes], pieces: Sequence[str], chance: random.Random) -> dict[str, Any]:
    content: list[dict[str, str]] = []
    for _ in range(chance.randint(1, 3)):
        content.append({"type": "text", "text": chance.choice(pieces)[: chance.randrange(50, 900)]})
    for place in range(chance.randint(0, 4)):
        name = f"{number:06d}-{place}.jpg"
        data = unique_jpeg(chance.choice(photos), number * 10 + place)
        (folder / "images" / name).write_bytes(data)
        content.insert(chance.randint(0, len(content)), {"type": "image", "image": name})
    return {"id": f"document {number}", "content": content}


def _photo(chance: random.Random) -> bytes:
    """Noise at several scales: about as many bytes a pixel as a photo."""
    width, height = chance.randrange(224, 561), chance.randrange(224, 561)
    image = _noise(chance, 12, 12).resize((width, height), Image.Resampling.BICUBIC)
    fine = _noise(chance, width // 2, height // 2).resize((width, height), Image.Resampling.BILINEAR)
    return _encoded(Image.blend(image, fine, 0.25), "JPEG", quality=85)


def _noise(chance: random.Random, width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), chance.randbytes(width * height * 3))


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _write_ours(root: Path, rows: Sequence[dict[str, Any]], schema: str) -> None:
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "version": 1,
        "name": "bench",
        "output": "ours",
        "sources": [{"name": SOURCE, "schema": schema, "files": "rows.jsonl", "image_root": "jsonl/images"}],
        "profiles": {
            PROFILE: {
                "tokenizer": str(CORPUS / "tokenizer.json"),
                "template": "chatml",
                "eos": "<|endoftext|>",
                "image_rule": "qwen2_5_vl",
            }
        },
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    logging.disable(logging.INFO)
    loaded = load_recipe(root / "recipe.yaml")
    packed = PackJob(loaded, run_tasks=run_here(loaded.output)).run()
    counted = IndexJob(loaded.output, run_tasks=run_here(loaded.output)).run()
    if packed.exit_code or counted.exit_code:
        raise RuntimeError(f"the samples of the benchmark were not packed: {packed}, {counted}")


def run_here(url: str) -> Any:
    """Tasks of a job in this process, one after the other: a cluster takes longer to start than this small corpus to pack."""

    def run_tasks(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        outcome = Outcome(results={source: [] for source, _ in tasks})
        for source, task in tasks:
            outcome.results[source] += [item for item in run_task(task, url, NoGuard()) if not isinstance(item, Step)]
        return outcome

    return run_tasks


def _record_lines(dataset: Path) -> Iterator[bytes]:
    """The record lines of our dataset, in the order of its parts."""
    for part in sorted((dataset / "sources" / SOURCE).glob("*.jsonl")):
        yield from part.read_bytes().splitlines(keepends=True)


def _write_tars(folder: Path, images: Path, lines: Sequence[bytes], shard_samples: int) -> None:
    """Shards as webdataset's own writer makes them: the files of a sample one after the other, under one key."""
    folder.mkdir()
    for first in range(0, len(lines), shard_samples):
        with tarfile.open(folder / f"shard-{first // shard_samples:04d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, line in enumerate(lines[first : first + shard_samples], start=first):
                _add(tar, f"{number:06d}.json", line)
                for place, entry in enumerate(json.loads(line)["images"]):
                    _add(tar, f"{number:06d}.{place}.jpg", (images / entry["ref"]).read_bytes())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, BytesIO(data))


def _energon_prepare(path: Path, *options: str) -> None:
    command = [Path(sys.executable).with_name("energon"), "prepare", *options, path]
    subprocess.run(command, check=True, capture_output=True)
