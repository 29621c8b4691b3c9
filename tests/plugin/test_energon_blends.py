"""Counted sources and their blend inside a user's own metadataset: subsets, weights, repetitions, and samples brought back."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import write_byte_tokenizer
from in_process import index_in_process, pack_in_process
from small_job import QWEN, SOURCES, write_job, write_recipe, write_rows

from indexer.table import open_index

energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
from energon_rows import Rows, config, one_pass, train, write_metadataset  # noqa: E402
from megatron.energon.metadataset import load_dataset  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

ROOT = Path(__file__).parents[2]
WEIGHTS = {"docs": 1.0, "talk": 3.0, "pics": 0.5, "text": 2.0}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blends")
    write_job(folder)
    sources = SOURCES
    for name, weight in WEIGHTS.items():
        sources = sources.replace(f"{{name: {name}", f"{{weight: {weight}, name: {name}")
    pack_in_process(write_recipe(folder, sources=sources.replace("name: text", "val: 0.25, name: text")))
    index_in_process(folder / "out")
    return folder / "out"


def source(dataset: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"path": str(dataset / "sources" / name), "dataset_config": "profile-qwen.yaml", **more}


def blend(dataset: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(dataset / "index/qwen/dataset.yaml"), **more}


def keys(samples: Any) -> list[str]:
    return [sample.__key__ for sample in samples]


def by_source(names: Sequence[str]) -> dict[str, list[str]]:
    """Keys of each source, in order."""
    return {name: list(found) for name, found in itertools.groupby(names, lambda key: key.partition("/")[0])}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["0%", "40%"], slice(0, 10)),
        (["40%", "100%"], slice(10, 25)),
        ([5, 9], slice(5, 9)),
        ([20, "end"], slice(20, 25)),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_subset_is_a_range_of_the_samples_of_the_split(
    dataset: Path, tmp_path: Path, given: list[Any], expected: slice, num_workers: int
) -> None:
    whole = keys(one_pass(dataset / "sources/text", "train"))
    assert len(whole) == 25
    path = write_metadataset(tmp_path / "mine.yaml", "train", source(dataset, "text", subset={"range": given}))
    found = keys(one_pass(path, "train", config(num_workers=num_workers)))
    assert sorted(found) == sorted(whole[expected])


def test_halves_of_a_blend_are_all_of_it_and_ranges_are_of_ranges(dataset: Path, tmp_path: Path) -> None:
    whole = by_source(keys(one_pass(dataset / "index/qwen/dataset.yaml", "train")))
    assert set(whole) == set(WEIGHTS)
    halves: Counter[str] = Counter()
    for given in (["0%", "50%"], ["50%", "100%"]):
        path = write_metadataset(tmp_path / "half.yaml", "train", blend(dataset, subset={"range": given}))
        halves.update(keys(one_pass(path, "train")))
    assert halves == Counter(itertools.chain(*whole.values()))

    outer = {"blend": [blend(dataset, subset={"range": ["20%", "100%"]})], "subset": {"range": ["0%", "50%"]}}
    part = by_source(keys(one_pass(write_metadataset(tmp_path / "part.yaml", "train", outer), "train")))
    assert part["text"] == whole["text"][5:15]


def test_training_draws_from_its_subset_only(dataset: Path, tmp_path: Path) -> None:
    path = write_metadataset(tmp_path / "mine.yaml", "train", source(dataset, "text", subset={"range": ["20%", "40%"]}))
    drawn = keys(itertools.islice(energon.get_loader(train(path)), 10))
    assert sorted(drawn) == sorted(2 * keys(one_pass(dataset / "sources/text", "train"))[5:10])


def weights(path: Path) -> dict[str, float]:
    """What Energon makes of a metadataset: the probability of each source."""
    found = load_dataset(path).get_datasets(training=True, split_part="train", worker_config=config())
    total = sum(one.weight for one in found.datasets)
    return {one.dataset.path.name: one.weight / total for one in found.datasets}


def test_a_blend_in_a_blend_keeps_its_inner_weights(dataset: Path, tmp_path: Path) -> None:
    inner = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    assert weights(dataset / "index/qwen/dataset.yaml") == pytest.approx(inner)
    (tmp_path / "own.jsonl").write_text('{"text": "mine"}\n')
    assert energon.CrudeJsonlDatasetFactory.prepare_dataset(energon.epathlib.EPath(str(tmp_path / "own.jsonl"))) == 1
    mine = {"blend": [blend(dataset, weight=3), {"path": "own.jsonl", "weight": 1}]}
    found = weights(write_metadataset(tmp_path / "mine.yaml", "train", mine))
    assert found == pytest.approx({**{name: 0.75 * weight for name, weight in inner.items()}, "own.jsonl": 0.25})


def test_other_weights_are_given_by_naming_the_sources(dataset: Path, tmp_path: Path) -> None:
    mine = {"blend": [source(dataset, "docs", weight=1), source(dataset, "text", weight=3, subflavors={"mine": 1})]}
    path = write_metadataset(tmp_path / "mine.yaml", "train", mine)
    assert weights(path) == pytest.approx({"docs": 0.25, "text": 0.75})
    drawn = Counter(key.partition("/")[0] for key in keys(itertools.islice(energon.get_loader(train(path)), 400)))
    assert 200 < drawn["text"] < 380


def test_subflavors_of_both_files_reach_the_sample(dataset: Path, tmp_path: Path) -> None:
    path = write_metadataset(tmp_path / "mine.yaml", "train", {"blend": [blend(dataset, subflavors={"mine": 1})]})
    for sample in one_pass(path, "train"):
        assert sample.__subflavors__ == {"source": sample.__key__.partition("/")[0], "mine": 1}


def test_repetitions_are_exact(dataset: Path, tmp_path: Path) -> None:
    mine = {"blend_epochized": [source(dataset, "text"), source(dataset, "docs", repetitions=3)]}
    path = write_metadataset(tmp_path / "mine.yaml", "train", mine)
    drawn = Counter(keys(energon.get_loader(train(path, repeat=False))))
    text, docs = (keys(one_pass(dataset / "sources" / name, "train")) for name in ("text", "docs"))
    assert drawn == Counter({**dict.fromkeys(text, 1), **dict.fromkeys(docs, 3)})


REFUSED = [
    ("epochized", {"blend_epochized": [{"path": "BLEND"}]}, "Cannot mix blend with blend_epochized"),
    ("absolute", {"path": "BLEND", "subset": {"range": [0, 5]}}, "absolute subset ranges for a leaf dataset"),
    ("profile", {"path": "BLEND", "dataset_config": "profile-qwen.yaml"}, "Must not set dataset_config"),
    ("outside", {"path": "TEXT", "subset": {"range": [0, 1000]}}, "end_samples=1000 > total_samples=25"),
]


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_energon_does_not_do_with_a_blend_is_said(
    dataset: Path, tmp_path: Path, content: dict[str, Any], message: str
) -> None:
    paths = {"BLEND": blend(dataset)["path"], "TEXT": source(dataset, "text")["path"]}
    text = json.dumps(content)
    for word, path in paths.items():
        text = text.replace(word, path)
    with pytest.raises((AssertionError, ValueError), match=message):
        list(one_pass(write_metadataset(tmp_path / "mine.yaml", "train", json.loads(text)), "train"))


def test_a_drawn_sample_is_brought_back_by_its_key(dataset: Path) -> None:
    path = dataset / "index/qwen/dataset.yaml"
    drawn = list(itertools.islice(energon.get_savable_loader(train(path)), 40))
    assert len({sample.__key__.partition("/")[0] for sample in drawn}) > 2
    other = energon.get_savable_loader(train(path))
    for sample in reversed(drawn):
        assert other.restore_sample(sample.__restore_key__) == sample


def test_a_sample_of_a_worker_is_brought_back_without_it(dataset: Path) -> None:
    drawn = list(one_pass(dataset / "sources/text", "train", config(num_workers=2)))
    found = energon.get_val_dataset(
        dataset / "sources/text", split_part="train", worker_config=config(num_workers=2), batch_size=None, task_encoder=Rows()
    )
    other = energon.get_loader(found)
    assert [other.restore_sample(sample.__restore_key__) for sample in drawn] == drawn


MANY = 3000
FEW_DESCRIPTORS = """
import json, os, resource, sys, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
warnings.simplefilter("ignore")
from energon_rows import config, energon, one_pass, train
from megatron.energon.epathlib import EPath
from plugin import BundleReader
from plugin.dataset import IndexedSource

blend, source, reader = sys.argv[1], sys.argv[2], BundleReader(sys.argv[3])
keys = [[sample.__key__ for sample in one_pass(blend, "train", config(num_workers=n))] for n in (0, 2)]
drawn = [sample.__key__ for sample, _ in zip(energon.get_savable_loader(train(blend)), range(400))]
crude = IndexedSource(EPath(source), profile="qwen", training=False, worker_config=config()).build()
ids, shown = [], 0
for number, sample in enumerate(energon.get_loader(crude)):
    ids.append(reader.read_record(sample["row"])["id"])
    if number % 10 == 0:
        shown += sample.record.startswith("{")
print(json.dumps([keys, drawn, ids, shown, len(os.listdir("/proc/self/fd"))]))
"""


@pytest.fixture(scope="module")
def many_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source of as many parts as rows: each line is 32 bytes, and so is a range."""
    folder = tmp_path_factory.mktemp("many")
    write_byte_tokenizer(folder / "tokenizer.json")
    write_rows(folder / "rows.jsonl", ({"text": f"{number:019d}"} for number in range(MANY)))
    sources = "  - {name: rows, schema: text, files: rows.jsonl, range_bytes: 32}\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # most of the time of small files; none has to outlive a power cut
        pack_in_process(write_recipe(folder, sources=sources, profiles={"qwen": f"{{{QWEN}}}"}))
        index_in_process(folder / "out")
    return folder / "out"


def test_thousands_of_parts_need_few_descriptors(many_parts: Path) -> None:
    table = open_index(str(many_parts), "qwen")
    rows = [table.row(number) for number in range(len(table))]
    expected = [f"{row.source}/{row.part_id}/{row.line}" for row in rows]
    assert len({row.part_id for row in rows}) == MANY
    arguments = [many_parts / "index/qwen/dataset.yaml", many_parts / "sources/rows", many_parts]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"]))}
    command = [sys.executable, "-c", FEW_DESCRIPTORS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    (alone, by_workers), drawn, ids, shown, num_open = json.loads(done.stdout.splitlines()[-1])
    assert alone == expected
    assert sorted(by_workers) == sorted(expected)
    assert len(set(drawn)) == 400
    assert set(drawn) <= set(expected)
    assert len(set(ids)) == MANY
    assert shown == MANY / 10
    assert num_open < 128
