"""Counted sources under the real Energon: every usable sample once an epoch, splits by id, exact restore, refusals by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import index_in_process, pack_in_process
from small_job import SOURCES, records, write_job, write_recipe

from indexer.splits import held_out
from indexer.table import open_index
from packer.format import layout
from packer.format.digest import id_hash
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import decode_source, encode_source

energon = pytest.importorskip("megatron.energon", reason="megatron-energon is not installed")
from megatron.energon.epathlib import EPath  # noqa: E402

from plugin.dataset import IndexedSource  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")


@energon.stateless
def cook(sample: Any) -> Any:
    return energon.TextSample(**energon.basic_sample_keys(sample), text=f"{sample['row'].source} {sample['row'].num_tokens}")


class Rows(energon.DefaultTaskEncoder):
    cookers = (energon.Cooker(cook),)

    def batch(self, samples: list[Any]) -> Any:
        return samples


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("energon")
    write_job(folder)
    sources = SOURCES.replace("{name: ", "{val: 0.25, name: ")
    pack_in_process(write_recipe(folder, sources=sources))
    index_in_process(folder / "out")
    return folder / "out"


def config(rank: int = 0, world_size: int = 1, num_workers: int = 0) -> Any:
    return energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers)


def one_pass(dataset: Path, source: str, split: str, worker_config: Any) -> Iterator[str]:
    """Keys of one source, in order, once."""
    found = energon.get_val_dataset(
        dataset / "sources" / source, split_part=split, worker_config=worker_config, batch_size=1, task_encoder=Rows()
    )
    for batch in energon.get_loader(found):
        yield batch[0].__key__


def keys(dataset: Path, source: str) -> set[str]:
    table = open_index(str(dataset), "qwen", sources=[source])
    rows = (table.row(k) for k in range(table.num_rows) if table.usable[k])
    return {f"{row.source}/{row.part_id}/{row.line}" for row in rows}


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (3, 0), (2, 2)])
def test_train_and_val_are_every_usable_sample_once(dataset: Path, world_size: int, num_workers: int) -> None:
    seen: Counter[str] = Counter()
    for split in ("train", "val"):
        for rank in range(world_size):
            seen.update(one_pass(dataset, "text", split, config(rank, world_size, num_workers)))
    assert seen == Counter(keys(dataset, "text"))


def test_val_is_decided_by_the_id(dataset: Path) -> None:
    ids = [record["id"] for record in records(dataset, "text")]
    held = held_out(np.array([id_hash(one) for one in ids], np.uint64), 0.25)
    val = set(one_pass(dataset, "text", "val", config()))
    assert 0 < len(val) < len(ids)
    assert len(val) == held.sum()


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_a_larger_share_holds_out_more_of_the_same(one: float, other: float, hashes: list[int]) -> None:
    small, large = (held_out(np.array(hashes, np.uint64), share) for share in sorted((one, other)))
    assert not (small & ~large).any()
    assert not held_out(np.array(hashes, np.uint64), 0.0).any()


RESTORE = """
import json, os, sys, warnings
from test_dataset import Rows, config, energon

def loader():
    more = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None, "task_encoder": Rows()}
    found = energon.get_train_dataset(sys.argv[1], worker_config=config(num_workers=int(sys.argv[2])), **more)
    return energon.get_savable_loader(found)

def keys(stream, count):
    return [batch[0].__key__ for _, batch in zip(range(count), stream)]

warnings.simplefilter("ignore")
whole, states, first = [], [], loader()
for _, batch in zip(range(24), first):
    whole.append(batch[0].__key__)
    states.append(first.save_state_rank())
tails = []
for state in states[::8]:
    again = loader()
    again.restore_state_rank(state)
    tails.append(keys(again, 12))
print(json.dumps([whole, tails]), flush=True)
os._exit(0)  # workers of endless loaders are not waited for
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_blend_goes_on_exactly_where_it_was_saved(dataset: Path, num_workers: int) -> None:
    blend = dataset / "index" / "qwen" / "dataset.yaml"
    path = os.pathsep.join(map(str, [Path(__file__).parents[2], Path(__file__).parent, Path(__file__).parents[1] / "support"]))
    command = [sys.executable, "-c", RESTORE, str(blend), str(num_workers)]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    whole, tails = json.loads(done.stdout.splitlines()[-1])
    assert len({key.partition("/")[0] for key in whole}) > 1
    for number, tail in enumerate(tails):
        expected = whole[8 * number + 1 :]
        assert tail[: len(expected)] == expected[:12]


def test_refused_samples_are_never_drawn(dataset: Path) -> None:
    drawn = set(one_pass(dataset, "pics", "train", config()))
    assert drawn
    assert drawn <= keys(dataset, "pics")
    assert len(keys(dataset, "pics")) < len(records(dataset, "pics"))


def test_excluded_samples_are_never_drawn(dataset: Path) -> None:
    before = list(one_pass(dataset, "text", "train", config()))
    line = int(before[0].rpartition("/")[2])
    (dataset / "exclude").mkdir()
    (dataset / "exclude" / "one.txt").write_text(f"{records(dataset, 'text')[line]['id']}\n")
    try:
        after = list(one_pass(dataset, "text", "train", config()))
    finally:
        (dataset / "exclude" / "one.txt").unlink()
        (dataset / "exclude").rmdir()
    assert after == before[1:]


def test_a_source_whose_part_was_packed_again_is_refused(dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "set")
    path = tmp_path / "set" / layout.source_file("text")
    first, *others = decode_source(path.read_bytes(), "source.json")
    changed = {name: msgspec.structs.replace(entry, digest="0" * 64) for name, entry in first.files.items()}
    again = msgspec.structs.replace(first, files=changed)
    path.write_bytes(encode_source("text", [again, *others]))
    with pytest.raises(FormatError, match=rf"1 parts are stale \(packed again after they were counted\): {first.part_id}"):
        list(one_pass(tmp_path / "set", "text", "train", config()))


def test_an_option_it_does_not_have_is_named(dataset: Path) -> None:
    path = EPath(str(dataset / "sources" / "text"))
    with pytest.raises(UsageError, match="found options that sources of bayplan do not have: shards, zap; remove them"):
        IndexedSource(path, profile="qwen", training=True, worker_config=config(), zap=1, shards=2)


def test_the_table_keeps_no_mask_of_its_rows(dataset: Path) -> None:
    path = EPath(str(dataset / "sources" / "text"))
    found = IndexedSource(path, profile="qwen", val=0.25, training=True, worker_config=config())
    assert 0 < len(found) < 30
    assert "usable" not in vars(found._table)


def test_wrong_use_is_one_message(dataset: Path) -> None:
    with pytest.raises(UsageError, match=r"found the split 'test', expected one of train, val"):
        list(one_pass(dataset, "text", "test", config()))


def test_energon_info_knows_the_source(dataset: Path) -> None:
    command = [sys.executable, "-m", "megatron.energon.cli.main", "info", str(dataset / "sources" / "text")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert "30 samples" in done.stdout
