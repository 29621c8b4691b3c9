"""A small part of the example corpus, packed and counted once, and a store that misbehaves."""

from pathlib import Path

import pytest
import yaml
from faulty_store import FaultyFileSystem
from in_process import index_in_process, pack_in_process
from packed import Packed

from indexer.table import open_index
from packer.format import layout
from packer.format.record import decode_record

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
SOURCES = {"gimp-help", "handbook", "clipart", "icons", "photos", "wordnet"}
"""Many images a record, icons, large ones, conversations, and none at all."""
PROFILE = "qwen25vl"


def _bytes_at(path, offset, size):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Part of the example corpus."""
    folder = tmp_path_factory.mktemp("corpus")
    recipe = yaml.safe_load((CORPUS / "recipe.yaml").read_text())
    recipe["output"] = str(folder / "dataset")
    recipe["sources"] = [source for source in recipe["sources"] if source["name"] in SOURCES]
    for source in recipe["sources"]:
        files = source["files"] if isinstance(source["files"], list) else [source["files"]]
        source["files"] = [str(CORPUS / name) for name in files]
        if "image_root" in source:
            source["image_root"] = str(CORPUS / source["image_root"])
    profile = recipe["profiles"][PROFILE]
    recipe["profiles"] = {PROFILE: {**profile, "tokenizer": str(CORPUS / "tokenizer.json")}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    pack_in_process(folder / "recipe.yaml")
    assert index_in_process(folder / "dataset").exit_code == 0
    dataset = folder / "dataset"
    table = open_index(str(dataset), PROFILE)
    rows = [table.row(number) for number in range(table.num_rows)]
    lines = [_bytes_at(dataset / row.record_file, row.record_offset, row.record_size) for row in rows]
    records = [decode_record(line, "line") for line in lines]
    images = [
        [
            _bytes_at(dataset / layout.source_dir(row.source) / entry["bundle"], entry["offset"], entry["size"])
            for entry in record["images"]
        ]
        for row, record in zip(rows, records, strict=True)
    ]
    return Packed(url=str(dataset), rows=rows, records=records, images=images)


@pytest.fixture
def store(corpus, quick_retries):
    """The faulty store; `store.url` is the corpus in it."""
    FaultyFileSystem.reset()
    FaultyFileSystem.url = f"faulty://{corpus.url}"
    yield FaultyFileSystem
    FaultyFileSystem.hanging.set()
    FaultyFileSystem.reset()
