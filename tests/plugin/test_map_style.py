"""Samples by number: every usable one of a split once, as it was packed, in any process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from loading import opened, write_stream
from packed import Packed
from PIL import ImageChops
from torch.utils.data import DataLoader, RandomSampler

from packer.format.errors import UsageError
from plugin.adapters.map_style import RawSamples
from plugin.failures import SampleFailed
from plugin.tensors import decode

PROFILE = "qwen25vl"
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")


def first(samples: list[Any]) -> Any:
    return samples[0]


def test_every_usable_sample_is_there_as_it_was_packed(corpus: Packed) -> None:
    samples = RawSamples(corpus.url, PROFILE, split="all")
    usable = [place for place, row in enumerate(corpus.rows) if row.status == 0]
    assert len(samples) == len(usable) > 200
    for number, place in enumerate(usable):
        if number % 7:
            continue
        sample, record = samples[number], corpus.records[place]
        assert sample["id"] == record["id"]
        assert sample["source"] == corpus.rows[place].source
        assert sample["prompt"] == record.get("messages", record.get("content"))
        assert sample["extra"] == record["extra"]
        assert [image.size for image in sample["images"]] == [(entry["width"], entry["height"]) for entry in record["images"]]
        assert all(image.mode == "RGB" for image in sample["images"])
        for image, data in zip(sample["images"], corpus.images[place], strict=True):
            assert ImageChops.difference(image, decode(data).convert("RGB")).getbbox() is None
        assert ("image" in sample) == (len(record["images"]) == 1)


def test_carried_fields_stand_beside_the_keys_that_are_ours(corpus: Packed) -> None:
    samples = RawSamples(corpus.url, PROFILE, split="all")
    carried = [sample for sample in map(samples.__getitem__, range(0, len(samples), 5)) if sample["extra"]]
    ours = {"id", "source", "prompt", "images", "image", "extra"}
    assert len(carried) > 5
    for sample in carried:
        assert set(sample) - ours == set(sample["extra"]) - ours
        assert all(sample[name] == value for name, value in sample["extra"].items() if name not in ours)


def test_splits_are_those_of_the_packed_stream(corpus: Packed) -> None:
    held_out, rest, whole = (RawSamples(corpus.url, PROFILE, split=split) for split in ("val", "train", "all"))
    ids = {split: {(s["source"], s["id"]) for s in map(each.__getitem__, range(len(each)))} for split, each in
           (("val", held_out), ("train", rest))}  # fmt: skip
    assert len(held_out) + len(rest) == len(whole)
    assert 0 < len(held_out) < len(rest)
    assert ids["val"].isdisjoint(ids["train"])
    with opened(corpus.url, profile=PROFILE, split="val", shuffle_buffer_size=None) as loader:
        packed = set(chain.from_iterable(pack.batch.sample_ids for pack in loader))
        refused = loader.counters()["refused_samples"]
    assert packed <= {name for _, name in ids["val"]}
    assert len(packed) + refused >= len({name for _, name in ids["val"]})


def test_torchs_loader_and_samplers_take_it(corpus: Packed) -> None:
    samples = RawSamples(corpus.url, PROFILE, sources=["icons", "wordnet"])
    samples[0]  # descriptors and all are open when the workers are forked
    sampler = RandomSampler(samples, num_samples=40)
    loader = DataLoader(samples, batch_size=4, sampler=sampler, num_workers=2, collate_fn=list)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4] * 10
    assert {sample["source"] for batch in batches for sample in batch} == {"icons", "wordnet"}
    in_order = DataLoader(samples, batch_size=1, num_workers=2, collate_fn=first)
    assert [sample["id"] for sample in in_order] == [sample["id"] for sample in samples]


def test_a_pickled_one_reads_the_same(corpus: Packed) -> None:
    samples = RawSamples(corpus.url, PROFILE)
    again = pickle.loads(pickle.dumps(samples))
    assert len(again) == len(samples)
    assert again[5]["prompt"] == samples[5]["prompt"]


def test_numbers_count_from_the_end_too_and_end(corpus: Packed) -> None:
    samples = RawSamples(corpus.url, PROFILE)
    assert samples[-1]["id"] == samples[len(samples) - 1]["id"]
    for number in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError, match="found sample"):
            samples[number]
    with pytest.raises(UsageError, match="found the split 'test', expected one of train, val, all"):
        RawSamples(corpus.url, PROFILE, split="test")  # type: ignore[arg-type]


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    url = write_stream(tmp_path / "job")
    samples = RawSamples(url, "qwen", sources=["pics"])
    for bundle in Path(url, "sources", "pics").glob("*.zip"):
        bundle.unlink()
    with pytest.raises(SampleFailed, match=r"sample pics/.*/3: .*\.zip.*`exclude/` leaves it out"):
        samples[3]


def test_it_needs_neither_energon_nor_torch() -> None:
    code = "import sys, plugin.adapters.map_style; print({'torch', 'megatron'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"
