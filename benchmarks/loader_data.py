"""The samples of `loader.py` and `soak.py`, made on the spot; and the same ones as stock Energon takes them."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from byte_tokenizer import write_byte_tokenizer
from in_process import index_in_process, pack_in_process
from small_job import PROFILES, records, write_recipe, write_rows

from plugin import BundleReader

PROFILE, SOURCE = "qwen", "docs"
NUM_IMAGES = 500
_SOURCES = f"  - {{name: {SOURCE}, schema: interleaved, files: docs.jsonl, image_root: images}}\n"
_METADATASET = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    path: {path}
"""


def make_dataset(folder: Path, num_samples: int, sides: tuple[int, int]) -> str:
    """Packed and indexed: samples of 0 to 3 noisy PNGs with sides of that range and 20 to 400 bytes of text."""
    chance = random.Random(1)
    (folder / "images").mkdir(parents=True)
    for number in range(NUM_IMAGES):
        size = (chance.randrange(*sides), chance.randrange(*sides))
        Image.effect_noise(size, 50).convert("RGB").save(folder / "images" / f"{number}.png")
    write_byte_tokenizer(folder / "tokenizer.json")
    write_rows(folder / "docs.jsonl", (_document(number, chance) for number in range(num_samples)))
    pack_in_process(write_recipe(folder, sources=_SOURCES, profiles={PROFILE: PROFILES[PROFILE]}))
    report = index_in_process(folder / "out")
    if report.exit_code:
        raise SystemExit(f"the dataset was not indexed: {report}")
    return str(folder / "out")


def _document(number: int, chance: random.Random) -> dict[str, Any]:
    images = [{"type": "image", "image": f"{chance.randrange(NUM_IMAGES)}.png"} for _ in range(number % 4)]
    text = {"type": "text", "text": "word " * chance.randrange(4, 80)}
    return {"id": f"doc {number}", "content": [text, *images]}


def make_loose(dataset: str, folder: Path) -> Path:
    """A JSONL of the records and a file for each image of each sample; the metadataset of both."""
    (folder / "images").mkdir(parents=True)
    lines = folder / "records.jsonl"
    with lines.open("wb") as file:
        for number, (record, images) in enumerate(_samples(dataset)):
            for place, data in enumerate(images):
                (folder / "images" / image_name(number, place)).write_bytes(data)
            file.write(orjson.dumps({"number": number, "record": record}) + b"\n")
    from megatron.energon import CrudeJsonlDatasetFactory
    from megatron.energon.epathlib import EPath

    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))
    metadataset = folder / "metadataset.yaml"
    aux = f"    aux: {{images: 'filesystem://{folder / 'images'}'}}\n"
    metadataset.write_text(_METADATASET.format(path=lines) + aux)
    return metadataset


def make_shards(dataset: str, folder: Path) -> Path:
    """WebDataset shards of the same samples, prepared by Energon."""
    from webdataset import ShardWriter

    folder.mkdir(parents=True)
    with ShardWriter(f"{folder}/shard-%06d.tar", maxcount=500, verbose=0) as writer:
        for number, (record, images) in enumerate(_samples(dataset)):
            files = {f"{place}.png": data for place, data in enumerate(images)}
            document = orjson.dumps({"number": number, "record": record})
            writer.write({"__key__": f"{number:08d}", "json": document, **files})
    energon = Path(sys.executable).with_name("energon")
    options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1"]
    subprocess.run([energon, "prepare", "--no-progress", *options, folder], check=True, stdout=subprocess.DEVNULL)
    metadataset = folder.with_suffix(".yaml")
    metadataset.write_text(_METADATASET.format(path=folder))
    return metadataset


def image_name(number: int, place: int) -> str:
    """Of a loose image file."""
    return f"{number:06d}-{place}.png"


def _samples(dataset: str) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    reader = BundleReader(dataset)
    for record in records(Path(dataset), SOURCE):
        yield record, [reader.read(SOURCE, entry["bundle"], entry) for entry in record["images"]]
    reader.close()
