"""The example corpus is small, whole and what its README says; packed, it is read by stock Energon to the last record."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from packer.inline import is_data_url
from packer.rows import parse_row
from packer.schemas import DEFAULT_FIELDS, schema_of
from packer.sources import Compression, InputRange, LineReader
from pipelines.inputs import InputFile, list_inputs, source_config
from pipelines.recipe import Source, load_recipe

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
MAX_BYTES = 8_000_000
BROKEN = {CORPUS / "wallpapers/images/mate/(none)", CORPUS / "photos/images/skimage/data/eagle.png"}
"""Referenced and not there, on purpose."""
DOCUMENTS = {CORPUS / name for name in ("README.md", "recipe.yaml", "LICENSES.md", "tokenizer.json", "make_tokenizer.py")}
SOURCES = load_recipe(CORPUS / "recipe.yaml").sources

ENERGON = """
import json, sys
from megatron.energon import Cooker, DefaultTaskEncoder, TextSample, WorkerConfig, basic_sample_keys
from megatron.energon import get_loader, get_val_dataset, stateless

@stateless
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["__subflavors__"]["source"] + " " + sample["json"]["id"])

class Ids(DefaultTaskEncoder):
    cookers = [Cooker(cook)]

    def batch(self, samples):
        return samples

config = WorkerConfig(rank=0, world_size=1, num_workers=0)
dataset = get_val_dataset(sys.argv[1], split_part="train", worker_config=config, batch_size=1, task_encoder=Ids())
for batch in get_loader(dataset):
    print("RECORD", json.dumps(batch[0].text))
"""


def inputs_of(source: Source) -> list[InputFile]:
    return list_inputs(source, source.resolved_root, outside="/nowhere")


def lines_of(item: InputFile) -> Iterator[bytes]:
    work = InputRange(url=item.stat.name, file=item.file, file_size=item.stat.size)
    with LineReader(work, max_line_bytes=1 << 26) as reader:
        yield from (line.text for line in reader)


def references_of(source: Source) -> Iterator[str]:
    schema = source_config(source, source.resolved_root).schema
    for item in inputs_of(source):
        for line in lines_of(item):
            yield from schema_of(schema)(parse_row(line), schema).references


def image_files() -> set[Path]:
    return {Path(source.resolved_image_root, ref) for source in SOURCES for ref in references_of(source) if not is_data_url(ref)}


def all_files() -> set[Path]:
    return {path for path in CORPUS.rglob("*") if path.is_file()}


def test_corpus_is_small() -> None:
    assert sum(path.stat().st_size for path in all_files()) <= MAX_BYTES


def test_only_the_known_images_are_missing() -> None:
    assert {path for path in image_files() if not path.exists()} == BROKEN


def test_no_file_is_there_for_nothing() -> None:
    licences = {CORPUS / name for name in re.findall(r"licenses/[\w.-]+copyright", (CORPUS / "LICENSES.md").read_text())}
    inputs = {Path(item.stat.name) for source in SOURCES for item in inputs_of(source)}
    assert all_files() == inputs | licences | DOCUMENTS | (image_files() - BROKEN)


def test_every_kind_of_input_is_shown() -> None:
    assert {source.schema_name for source in SOURCES} == DEFAULT_FIELDS.keys()
    assert {Compression.of(item.file) for source in SOURCES for item in inputs_of(source)} == set(Compression)
    references = {source.name: list(references_of(source)) for source in SOURCES}
    assert any(is_data_url(ref) for ref in references["icons"])
    suffixes = {Path(ref).suffix for refs in references.values() for ref in refs if not is_data_url(ref)}
    assert {".png", ".jpg", ".webp", ".gif", ".tif", ".svg"} <= suffixes


def test_korean_is_shown() -> None:
    def korean(item: InputFile) -> bool:
        return any(re.search("[가-힣]", json.dumps(parse_row(line), ensure_ascii=False)) for line in lines_of(item))

    with_korean = {source.name for source in SOURCES if any(korean(item) for item in inputs_of(source))}
    assert {"handbook", "desktop-help", "stamps", "installer-pages"} <= with_korean


def test_readme_and_licences_speak_of_every_source() -> None:
    names = [source.name for source in SOURCES]
    assert re.findall(r"^\| `([\w-]+)` \|", (CORPUS / "README.md").read_text(), re.MULTILINE) == names
    users = re.findall(r"\| ([\w-]+) \|$", (CORPUS / "LICENSES.md").read_text(), re.MULTILINE)
    assert set(users) == set(names)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, copied and packed as `make demo` does."""
    folder = tmp_path_factory.mktemp("packed")
    shutil.copytree(CORPUS, folder / "examples" / "corpus")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "pipelines.pack", "examples/corpus/recipe.yaml"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "demo-dataset"


def test_packed_corpus_has_the_counts_its_readme_tells(packed: Path) -> None:
    totals = [json.loads(path.read_bytes())["totals"] for path in packed.glob("sources/*/source.json")]
    reasons = sum((Counter(item["quarantined_by_reason"]) for item in totals), Counter[str]())
    assert reasons == {"missing_image": 3, "truncated_image": 1, "unsupported_image_format": 5}
    assert sum(item["num_read"] for item in totals) == 700
    assert sum(sum(item["images_dropped_by_reason"].values()) for item in totals) == 15


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-energon is not installed")
def test_stock_energon_reads_every_record_once(packed: Path) -> None:
    command = [sys.executable, "-c", ENERGON, str(packed / "stock.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    found = Counter(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RECORD "))
    files = list(packed.rglob("*-p?????.jsonl"))
    records = [(path.parent.name, json.loads(line)["id"]) for path in files for line in path.read_bytes().split(b"\n")[:-1]]
    assert found == Counter(f"{source} {record_id}" for source, record_id in records)
    assert len(records) == 691


def test_the_tokenizer_is_what_its_script_makes_of_the_corpus(packed: Path, tmp_path: Path) -> None:
    script = shutil.copy(CORPUS / "make_tokenizer.py", tmp_path)
    subprocess.run([sys.executable, script, packed], check=True, timeout=120)
    assert (tmp_path / "tokenizer.json").read_bytes() == (CORPUS / "tokenizer.json").read_bytes()
