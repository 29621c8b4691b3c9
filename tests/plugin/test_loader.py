"""The stream a trainer iterates, under the real Energon: exact restore at every pack, every sample once, refusals by name."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loading import NUM_SAMPLES, SETTINGS, Epochs, digests, ids, opened, write_stream

from indexer.table import open_index
from packer.format.errors import BayplanError, UsageError
from plugin.cost import cost_model, sample_costs
from plugin.loader import PackLoader
from plugin.settings import Peers
from plugin.tensors import image_tensors

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")

NUM_STEPS = 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


class Garbage:
    """Of the kind that only the collector finds; says in which process it was destroyed."""

    def __init__(self, file: Path) -> None:
        self.itself, self.file = self, file

    def __del__(self) -> None:
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()}\n")


def test_what_is_garbage_here_is_not_destroyed_by_workers(url: str, tmp_path: Path) -> None:
    """A group of gloo would end them: its threads are not there."""
    gc.disable()
    try:
        Garbage(tmp_path / "destroyed")
        with opened(url, num_workers=1) as stream:
            next(stream)
    finally:
        gc.enable()
    assert (tmp_path / "destroyed").read_text() == f"{os.getpid()}\n"


@pytest.fixture(scope="module")
def epochs(url: str) -> Epochs:
    return Epochs(url)


def followed(stream: PackLoader, number: int) -> tuple[list[str], list[Any]]:
    """Digests of the next packs, and the states before each and after the last."""
    states, whole = [stream.save_state()], []
    for _ in range(number):
        whole += digests(stream, 1)
        states.append(stream.save_state())
    return whole, states


@pytest.mark.timeout(1200)  # a loader with workers for each step: minutes where the machine has other work
@pytest.mark.parametrize(
    ("num_workers", "rank", "world_size", "stride"),
    [(0, 0, 1, 1), (1, 0, 1, 5), (2, 0, 1, 1), (0, 1, 2, 1), (2, 1, 2, 5)],
)
def test_the_stream_goes_on_exactly_where_it_was_saved(
    epochs: Epochs, num_workers: int, rank: int, world_size: int, stride: int
) -> None:
    """Over the end of an epoch: one of a rank of two is about 35 packs. `stride`: starting workers takes a second."""
    arguments = {"repeat": True, "num_workers": num_workers, "rank": rank, "world_size": world_size}
    with epochs.open(**arguments) as stream:
        whole, states = followed(stream, NUM_STEPS)
    assert len(set(whole)) >= NUM_STEPS - 3, "one large sample may fill a pack in both epochs"
    for step in range(0, NUM_STEPS, stride):
        with epochs.open(**arguments) as again:
            again.restore_state(states[step])
            assert digests(again, NUM_STEPS - step) == whole[step:], f"restored at step {step}"
            assert again.num_packs == NUM_STEPS


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_epoch_goes_on_to_its_end_wherever_it_was_saved(epochs: Epochs, num_workers: int) -> None:
    """Through the flush of the buffer, where workers end one after another; then comes the next epoch, not an empty one."""
    with epochs.open(num_workers=num_workers) as stream:
        whole, states = [], [stream.save_state()]
        while pack := digests(stream, 1):
            whole += pack
            states.append(stream.save_state())
        states.append(stream.save_state())
        following = digests(stream, 10_000)
    assert min(len(whole), len(following)) > 40
    last = range(len(whole) - 14, len(states))
    for step in [0, 20, *last] if num_workers != 1 else last:
        with epochs.open(num_workers=num_workers) as again:
            again.restore_state(states[step])
            if step <= len(whole):
                assert digests(again, 10_000) == whole[step:], f"restored at step {step}"
            if step in (20, last[-2], last[-1]):
                # After a restore Energon's workers take turns from another one on: the same packs in another order.
                assert sorted(digests(again, 10_000)) == sorted(following), f"the epoch after step {step}"


@pytest.mark.parametrize(("world_size", "num_workers"), [(1, 0), (2, 0), (1, 2), (2, 2)])
def test_every_sample_comes_once_an_epoch(epochs: Epochs, world_size: int, num_workers: int) -> None:
    seen: Counter[str] = Counter()
    for rank in range(world_size):
        with epochs.open(rank=rank, world_size=world_size, num_workers=num_workers) as stream:
            seen.update(ids(stream))
    assert seen == Counter(f"{kind} {number}" for kind, number in samples())


def samples() -> list[tuple[str, int]]:
    names = {"docs": "doc", "pics": "pic", "text": "text"}
    return [(names[source], number) for source, total in NUM_SAMPLES.items() for number in range(total)]


@pytest.mark.parametrize("size", [1, 39, 40, 41, 119, 120, 121])
def test_the_end_of_the_data_is_emitted_whatever_the_buffer_holds(url: str, size: int) -> None:
    """A buffer smaller than, as large as and larger than one source: the last packs are partly filled, and none is empty."""
    one = Epochs(url, replace(SETTINGS, buffer_size=size), sources="text")
    with one.open() as stream:
        assert Counter(ids(stream)) == Counter(f"text {number}" for number in range(NUM_SAMPLES["text"]))


def test_packs_are_full(url: str) -> None:
    with opened(url, replace(SETTINGS, max_patches_per_pack=None), shuffle_buffer_size=None) as stream:
        digests(stream, 100)
        counted = stream.counters()
    assert counted["packs"] == 100
    assert counted["efficiency"] > 0.99


def test_over_long_samples_are_counted_and_named(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(url, replace(SETTINGS, sequence_length=128)) as stream:
        digests(stream, 60)
        counted = stream.counters()
    assert counted["refused_samples"] == counted["refused_by_reason"]["over_long"] > 0
    assert "longer than a pack of 128 tokens" in caplog.text
    assert "text/" in caplog.text


def test_a_stream_in_which_nothing_fits_ends_with_a_word(url: str) -> None:
    with (
        opened(url, replace(SETTINGS, sequence_length=4)) as stream,
        pytest.raises(UsageError, match="none of the first 400 samples"),
    ):
        next(stream)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pack_comes_again_by_its_key(url: str, num_workers: int) -> None:
    with opened(url, num_workers=num_workers) as stream:
        for _ in range(5):
            pack = next(stream)
            assert stream.restore_key is not None
            if not num_workers:
                assert (stream.restore_sample(stream.restore_key).tensor == pack.tensor).all()
        key, packed = stream.restore_key, pack.tensor.clone()
    with opened(url, num_workers=num_workers) as other:
        assert (other.restore_sample(key).tensor == packed).all()


def test_ranks_of_one_replica_get_the_same_packs_and_only_the_first_stage_pixels(url: str) -> None:
    first, upper = (Peers(pipeline=2, pipeline_stage=stage) for stage in range(2))
    with opened(url, peers=first) as one, opened(url, peers=upper) as other:
        for _ in range(20):
            whole, bare = next(one).batch, next(other).batch
            assert bare.sample_ids == whole.sample_ids
            assert (bare.tokens == whole.tokens).all()
            assert (bare.labels == whole.labels).all()
            assert (bare.image_grid_thw == whole.image_grid_thw).all()
            assert not bare.has_pixels
        assert other.counters()["read_bytes"] == 0


def test_packs_without_an_image_get_one_if_asked(url: str) -> None:
    with opened(url, replace(SETTINGS, ensure_image=True)) as stream:
        packs = [next(stream).batch for _ in range(60)]
    ensured = [pack for pack in packs if not pack.num_images]
    assert ensured
    assert all(len(pack.image_sample) == 1 for pack in ensured)
    assert all(len(pack.tokens) == SETTINGS.sequence_length for pack in packs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1, "world_size": 4}, "found rank 0 in the state, 1 here.*found world_size 2 in the state, 4 here"),
        ({"num_workers": 1}, "found num_workers 0 in the state, 1 here: resume with as many"),
        ({"seed": 3}, "found seed 0 in the state, 3 here"),
        (
            {"settings": replace(SETTINGS, buffer_size=50)},
            "found choice {'buffer_size': 40} in the state, {'buffer_size': 50} here",
        ),
        ({"settings": replace(SETTINGS, max_age=2)}, "'max_age': 5} in the state, {'max_age': 2} here: other samples"),
        ({"shuffle_buffer_size": None}, "'shuffle_size': 20} in the state, {'shuffle_size': 1} here"),
        ({"settings": replace(SETTINGS, sequence_length=128)}, "'sequence_length': 256.* in the state, .*128"),
        ({"settings": replace(SETTINGS, max_patches_per_pack=64)}, "'max_patches': 512.* in the state, .*64"),
    ],
)
def test_a_state_of_another_stream_is_refused(url: str, change: dict[str, Any], message: str) -> None:
    arguments = {"rank": 0, "world_size": 2, "num_workers": 0}
    with opened(url, **arguments) as stream:
        next(stream)
        state = stream.save_state()
    with opened(url, **(arguments | change)) as other, pytest.raises(UsageError, match=f"(?s){message}"):
        other.restore_state(state)


def test_a_state_is_refused_where_it_is_none_or_too_late(url: str) -> None:
    with opened(url) as stream:
        with pytest.raises(UsageError, match="without a version"):
            stream.restore_state({})
        state = stream.save_state()
        with pytest.raises(UsageError, match="version 3, expected 2"):
            stream.restore_state(state | {"version": 3})
        next(stream)
        with pytest.raises(UsageError, match="found a stream that has begun"):
            stream.restore_state(state)


@pytest.mark.parametrize(
    ("settings", "peers", "message"),
    [
        ({"on_failure": "skip"}, Peers(tensor=2), "'skip' with 2 ranks a replica"),
        ({"alignment": 2}, Peers(context=2), "alignment 2, expected a multiple of 4"),
        ({"max_host_bytes": 1000}, Peers(), "expected at most max_host_bytes 1,000; lower num_workers"),
        ({"sequence_length": 6, "ensure_image": True}, Peers(), "which an ensured image takes"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_read(
    url: str, settings: dict[str, Any], peers: Peers, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        opened(url, replace(SETTINGS, **settings), peers=peers)


@pytest.mark.parametrize(
    "values",
    [{"buffer_size": 0}, {"on_failure": "ignore"}, {"max_failures": -1}, {"max_failure_share": 2}, {"sequence_length": 0}],
)
def test_settings_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"found {next(iter(values))}"):
        replace(SETTINGS, **values)


def test_ids_of_a_pack_can_be_asked_for(url: str) -> None:
    with opened(url) as stream:
        packs = [next(stream).batch.sample_ids for _ in range(3)]
        assert [stream.sample_ids(number) for number in range(3)] == packs
        with pytest.raises(UsageError, match="expected one of those whose ids are kept: 0 to 2"):
            stream.sample_ids(3)


def test_the_log_line_counts_what_came_since_the_last(url: str) -> None:
    with opened(url) as stream:
        digests(stream, 3)
        assert stream.log_line().startswith("3 packs; ")
        packs = [next(stream).batch for _ in range(2)]
        counted = stream.step_counters()
    assert counted["packs"] == 2
    assert counted["tokens"] == sum(pack.num_tokens for pack in packs)
    assert counted["tokens"] == sum(counted["tokens_by_source"].values())
    assert counted["patches"] == sum(pack.num_patches for pack in packs)


def test_a_loader_of_other_samples_is_refused(epochs: Epochs, url: str) -> None:
    """Another exclusion list makes other positions: going on would repeat and lose samples."""
    with epochs.open(repeat=True) as stream:
        next(stream)
        state = stream.save_state()
    with Epochs(url, sources="docs text").open(repeat=True) as other, pytest.raises(UsageError, match="sources"):
        other.restore_state(state)
    Epochs(url)  # writes the blend of all sources again


def test_packs_carry_the_costs_of_their_rows(url: str) -> None:
    model = cost_model("qwen2_5_vl_vit+qwen3_8b")
    table = open_index(url, "qwen")
    costs = np.concatenate([sample_costs(model, batch) for batch in table.batches()])
    starts = {source: table.rows_of_source(source).start for source in NUM_SAMPLES}
    with opened(url, replace(SETTINGS, cost="qwen2_5_vl_vit+qwen3_8b")) as stream:
        for _ in range(20):
            pack = next(stream).batch
            rows = [starts[pack.sources[place]] + row for place, row in zip(pack.sample_source, pack.sample_row, strict=True)]
            assert (pack.sample_costs == costs[rows]).all()
            assert pack.llm_cost > 0


def test_pixels_of_ones_own_take_the_place_of_ours(url: str) -> None:
    ours = image_tensors("qwen2_5_vl", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    with opened(url, tensors=ours) as stream:
        next(stream)
        assert stream.encoder.builder.tensors is ours
        assert stream.normalise is not None
        assert stream.normalise(torch.full((1, 588), 255, dtype=torch.uint8)).max() == 1


def test_a_pass_over_val_is_every_held_out_sample_once_and_is_not_resumed_in_its_midst(url: str) -> None:
    with opened(url, split="val") as stream:
        first = next(stream).batch.sample_ids
        state = stream.save_state()
        assert Counter([*first, *ids(stream)]) == Counter(f"{kind} {number}" for kind, number in samples())
    with opened(url, split="val") as other, pytest.raises(UsageError, match="found a pass over several sources"):
        other.restore_state(state)


def test_a_loader_of_no_packs_is_refused(epochs: Epochs) -> None:
    with pytest.raises(UsageError, match="whose dataset a `PackingTaskEncoder` made"):
        PackLoader(SimpleNamespace(dataset=None), epochs.encoder)


@pytest.fixture
def damaged(url: str, tmp_path: Path) -> str:
    """The dataset with bundles in which no image decodes, and a source without its records."""
    copy = shutil.copytree(url, tmp_path / "damaged")
    for bundle in copy.glob("sources/docs/*.zip"):
        bundle.write_bytes(b"x" * bundle.stat().st_size)
    for records in copy.glob("sources/pics/*.jsonl"):
        records.unlink()
    return str(copy)


def test_packs_are_freed_without_the_garbage_collector(url: str) -> None:
    """Which runs seldom."""
    with opened(url) as stream:
        next(stream)
        gc.collect()
        gc.disable()
        try:
            kept = [weakref.ref(next(stream).tensor) for _ in range(20)]
            assert [pack() for pack in kept[:-1]] == [None] * 19
        finally:
            gc.enable()


def test_a_sample_that_failed_is_freed_without_the_garbage_collector(damaged: str) -> None:
    """Errors hold their frames, and those the files and pixels of a pack."""
    settings = replace(SETTINGS, on_failure="skip", max_failures=None, max_failure_share=None, check_crc=False)
    with opened(damaged, settings) as stream:
        gc.collect()
        gc.disable()
        try:
            digests(stream, 30)
            assert stream.counters()["failed_samples"] > 0
            errors = [found for found in gc.get_objects() if isinstance(found, BayplanError)]
            assert len(errors) <= stream.encoder.builder.counters()["keys"] < stream.counters()["failed_samples"]
        finally:
            gc.enable()


CHANGES = [{"packs_ahead": 9}, {"packs_ahead": 1}, {"num_threads": 1}, {"prefetch_bytes": 1000}, {"num_decode_threads": 3}]


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_may_resume_with_other_settings_of_reading(url: str, change: dict[str, int]) -> None:
    """Which samples share a pack does not depend on them: packs a worker builds again would be others, and samples be lost."""
    with opened(url) as stream:
        digests(stream, 15)
        state = stream.save_state()
        whole = digests(stream, 40)
    with opened(url, replace(SETTINGS, **change)) as other:
        other.restore_state(state)
        assert digests(other, 40) == whole
