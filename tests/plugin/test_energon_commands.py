"""The real `energon` command on a counted source and on its blend: what works, and what is refused without harm."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from in_process import index_in_process, pack_in_process
from small_job import QWEN, SOURCES, records, write_job, write_recipe

from indexer.table import open_index
from packer.format import layout

energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
from energon_rows import config, one_pass  # noqa: E402
from megatron.energon.cli.main import main  # noqa: E402
from megatron.energon.epathlib import EPath  # noqa: E402

from plugin.dataset import IndexedSource  # noqa: E402
from plugin.row_sample import RowSample  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

ROOT = Path(__file__).parents[2]
PROFILES = {"qwen": f"{{{QWEN}}}", "bare": "{tokenizer: tokenizer.json, template: chatml, image_rule: null}"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    write_job(folder)
    pack_in_process(write_recipe(folder, sources=SOURCES.replace("{name: text", "{val: 0.25, name: text"), profiles=PROFILES))
    index_in_process(folder / "out")
    return folder / "out"


def run_installed(*arguments: str | Path, answers: str = "") -> tuple[int, str]:
    """The command as a user starts it; its exit code and what it said."""
    command = [sys.executable, "-m", "megatron.energon.cli.main", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, input=answers, text=True, check=False, timeout=120, env=env, **pipes)
    return done.returncode, done.stdout


def run(*arguments: str | Path, answers: str = "") -> tuple[int, str]:
    """The same in this process, without the seconds that its imports take."""
    done = CliRunner().invoke(main, [*map(str, arguments)], input=answers)
    return done.exit_code, f"{done.output}\n{type(done.exception).__name__}: {done.exception}"


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def samples(dataset: Path, source: str, profile: str = "qwen", split: str = "train") -> list[RowSample]:
    """The crude samples of a split, in order."""
    found = IndexedSource(
        EPath(str(dataset / "sources" / source)), profile=profile, training=False, worker_config=config(), split_part=split
    )
    return list(energon.get_loader(found.build()))


@pytest.mark.parametrize("options", [(), ("--dataset-config", "profile-bare.yaml"), ("--dataset-config", "profile-qwen.yaml")])
def test_info_says_how_many_records_and_parts_a_source_has(dataset: Path, options: tuple[str, ...]) -> None:
    code, said = run("info", dataset / "sources" / "pics", *options)
    num_records = len(records(dataset, "pics"))
    files = [path for path in (dataset / "sources" / "pics").glob("*.jsonl") if ".quarantine" not in path.name]
    assert code == 0, said
    assert re.search(rf"\({num_records} samples, [\d.]+ KiB in {len(files)} shards\)", said)
    for split in ("train", "val"):
        assert f"* `{split}`: 100%, {num_records} samples in {len(files)} shards" in said


def previewed(text: str) -> list[dict[str, Any]]:
    """The samples that were shown."""
    found = []
    for shown in re.split(r"Sample \d+\n", text)[1:]:
        fields, _, record = shown.partition(" - record (str): ")
        values = dict(re.findall(r" - (\w+) \(\w+\): (.*)\n", fields))
        found.append({**values, "record": json.JSONDecoder().raw_decode(record)[0]})
    return found


def expected(sample: RowSample, by_id: dict[str, Any]) -> dict[str, Any]:
    row = sample["row"]
    names = ("num_tokens", "num_text_tokens", "num_image_tokens", "num_loss_tokens", "num_images")
    record = json.loads(sample.record)
    assert by_id[record["id"]] == record
    return {"key": repr(sample["__key__"]), **{name: str(getattr(row, name)) for name in names}, "record": record}


@pytest.mark.parametrize("source", ["docs", "talk"])
def test_preview_shows_counts_and_records(dataset: Path, source: str) -> None:
    code, said = run_installed("preview", dataset / "sources" / source, answers="y\ny\nn\nn\n")
    assert code == 0, said
    assert said.count("Exiting Preview") == 2
    assert "Dataset test is empty. Skipping." in said
    by_id = {record["id"]: record for record in records(dataset, source)}
    train, val = samples(dataset, source), samples(dataset, source, split="val")
    assert previewed(said) == [expected(sample, by_id) for sample in [*train[:3], val[0]]]
    assert any(sample["row"].num_images for sample in train[:3])


def test_preview_shows_another_profile_and_the_samples_held_out(dataset: Path) -> None:
    options = ("--dataset-config", "profile-bare.yaml", "--split-parts", "val")
    code, said = run("preview", dataset / "sources" / "text", *options, answers="n\n")
    assert code == 0, said
    (shown,) = previewed(said)
    table = open_index(str(dataset), "bare", sources=["text"])
    row = table.row(table.find(shown["record"]["id"])[0])
    assert shown["num_tokens"] == str(row.num_tokens)
    first = next(one_pass(dataset / "sources" / "text", "val"))
    assert shown["key"] == repr(first.__key__)


def test_preview_goes_on_after_a_record_that_cannot_be_read(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "set")
    row = samples(tmp_path / "set", "text")[0]["row"]
    path = tmp_path / "set" / row.record_file
    data = path.read_bytes()
    place = row.record_offset
    path.write_bytes(data[:place] + b"#" * (row.record_size - 1) + data[place + row.record_size - 1 :])
    code, said = run("preview", tmp_path / "set/sources/text", "--split-parts", "train", answers="y\nn\n")
    assert code == 0, said
    assert re.search(rf"record \(str\): not read: .*{row.part_id}", said)
    assert "Sample 1" in said


def test_a_long_record_is_cut(dataset: Path, tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "word " * 2000}) + "\n")
    pack_in_process(write_recipe(tmp_path, sources="  - {name: long, schema: text, files: long.jsonl}\n"))
    index_in_process(tmp_path / "out")
    (sample,) = samples(tmp_path / "out", "long")
    assert 4000 < len(sample.record) < 4100
    assert re.search(r"\.\.\. \(10,\d\d\d characters\)$", sample.record)


def test_training_reads_no_record(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "set")
    before = [sample.text for sample in one_pass(tmp_path / "set/sources/text", "train")]
    for path in (tmp_path / "set/sources/text").glob("*.jsonl"):
        path.unlink()
    assert [sample.text for sample in one_pass(tmp_path / "set/sources/text", "train")] == before


def test_a_row_sample_is_a_dict_that_can_be_copied_and_sent(dataset: Path) -> None:
    sample = samples(dataset, "docs")[0]
    for other in (copy.copy(sample), copy.deepcopy(sample), pickle.loads(pickle.dumps(sample))):
        assert type(other) is RowSample
        assert other == sample
        assert other.record == sample.record
    assert set(sample) == {"__key__", "__shard__", "__restore_key__", "__sources__", "__subflavors__", "row", "number"}
    with pytest.raises(AttributeError, match="'RowSample' object has no attribute 'records'"):
        _ = sample.records


REFUSED = [
    # Its first step opens a `.tar.idx` for every shard; nothing of a dataset's class is asked before.
    (("lint", "sources/text"), 1, r"FileNotFoundError: .*-p00000\.tar\.idx"),
    # Energon's own datasets that are files, its plain JSONL and its metadatasets, fail at the same step without a reason.
    (("lint", "index/qwen/dataset.yaml"), 1, "is not a directory, therefore the index will not be checked"),
    (("info", "index/qwen/dataset.yaml"), 2, "Invalid value for 'PATH': Directory .* is a file"),
    (("preview", "index/qwen/dataset.yaml"), 2, "Invalid value for 'PATH': Directory .* is a file"),
    # Nothing has to be prepared, and nothing is lost by trying.
    (("prepare", "--non-interactive", "sources/text"), 1, "Dataset has already been prepared"),
    (("prepare", "--non-interactive", "--force-overwrite", "sources/text"), 0, "Did not find any tar files"),
    (("prepare", "index/qwen/dataset.yaml"), 0, "Preparing metadataset"),
]


@pytest.mark.parametrize(
    ("arguments", "code", "message"), REFUSED, ids=lambda value: "-".join(value) if type(value) is tuple else ""
)
def test_what_energon_refuses_leaves_the_dataset_as_it_was(
    dataset: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = digests(dataset)
    found, said = run(*arguments[:-1], dataset / arguments[-1])
    assert found == code, said
    assert re.search(message, said)
    assert digests(dataset) == before


@pytest.mark.filterwarnings("ignore:The handler kwarg is deprecated")
def test_lint_would_not_take_a_crude_dataset_with_its_files_either(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "set")
    for path in (tmp_path / "set/sources/text").glob("*.jsonl.idx"):
        shutil.copy(path, path.with_suffix("").with_suffix(".tar.idx"))
    code, said = run("lint", tmp_path / "set/sources/text")
    assert code == 1
    assert "AssertionError: No cookers registered, but got crude dataset." in said


def test_prepare_of_a_record_file_writes_the_offsets_that_are_there(dataset: Path) -> None:
    (path,) = (dataset / "sources/text").glob(f"*-p00000{layout.RECORDS_SUFFIX}")
    before = digests(dataset)
    _, said = run("prepare", path)
    assert "Found 30 samples" in said
    assert digests(dataset) == before


# One run for each rank: two of one worker first, then one of two workers.
TRAIN = """
import json, os, sys, warnings
import torch
from energon_rows import energon, train

warnings.simplefilter("ignore")
blend, folder, (rank, world_size, num_workers), state = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
logs = {"worker_debug_path": f"{folder}/{world_size}/{rank}-{{worker_id}}.jsonl", "worker_log_level": 3}
os.makedirs(f"{folder}/{world_size}", exist_ok=True)
found = energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, **logs)
loader = energon.get_savable_loader(train(blend, found, batch_size=1))
if state:
    loader.restore_state_rank(torch.load(state[0], weights_only=False))
stream = iter(loader)
if not state:
    for _ in range(6):
        next(stream)
    torch.save(loader.save_state_rank(), f"{folder}/rank{rank}.pt")
print(json.dumps([next(stream).__key__[0] for _ in range(6 * num_workers)]), flush=True)
os._exit(0)  # workers of endless loaders are not waited for
"""


def trained(dataset: Path, folder: Path, *place: int, state: Sequence[Path] = ()) -> list[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests/support"]))}
    arguments = [dataset / "index/qwen/dataset.yaml", folder, json.dumps(place), *state]
    command = [sys.executable, "-c", TRAIN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_checkpoint_goes_on_exactly_on_other_ranks_and_its_logs_are_read(dataset: Path, tmp_path: Path) -> None:
    tails = [trained(dataset, tmp_path, rank, 2, 1) for rank in (0, 1)]
    states = [tmp_path / f"rank{rank}.pt" for rank in (0, 1)]
    code, said = run("checkpoint", "info", *states)
    assert code == 0, said
    assert "Number of DP ranks: 2" in said
    (tmp_path / "new").mkdir()  # Energon does not make it
    code, said = run("checkpoint", "redist", *states, tmp_path / "new", "--new-world-size", "1")
    assert code == 0, said
    again = trained(dataset, tmp_path, 0, 1, 2, state=[tmp_path / "new/rank0.pt"])
    assert again == [key for pair in zip(*tails, strict=True) for key in pair]

    picture = tmp_path / "heatmap.png"
    code, said = run_installed("analyze-debug", tmp_path / "1", "--heatmap-path", picture)
    assert code == 0, said
    assert f"train {dataset / 'sources'}" in said
    assert picture.exists()
