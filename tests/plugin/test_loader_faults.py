"""Damage under a running stream: every policy and limit through the real loader. The promised pack or a refusal by name."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import faulty_store as faults
import numpy as np
import orjson
import pytest
from loading import PROFILE, SETTINGS, Epochs, digest, digests, opened, write_stream

from indexer.encode import EncodedSample
from packer.format.errors import BayplanError
from plugin import FileChanged, ReadError
from plugin.batch import IGNORED, ImageState, PackedBatch, PackSample
from plugin.failures import SampleFailed, TooManyFailures
from plugin.loader import PackLoader
from plugin.loader_workers import WorkerDied
from plugin.settings import PackSettings, Peers

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")

GREY = 128
NUM_PACKS = 12
BLANK = replace(SETTINGS, on_failure="blank", max_failures=None, max_failure_share=None)
SKIP = replace(BLANK, on_failure="skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A record where it stands."""

    source: str
    file: Path
    offset: int
    size: int
    record: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.record["id"])


def lines_of(url: str) -> Iterator[Line]:
    for file in sorted(Path(url).glob("sources/*/*.jsonl")):
        offset = 0
        for line in file.read_bytes().splitlines(keepends=True):
            yield Line(source=file.parent.name, file=file, offset=offset, size=len(line), record=orjson.loads(line))
            offset += len(line)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


@pytest.fixture(scope="module")
def clean(pristine: str) -> list[PackedBatch]:
    """The first packs of the undamaged stream."""
    with opened(pristine) as stream:
        return [next(stream).batch for _ in range(NUM_PACKS)]


@pytest.fixture
def url(pristine: str, tmp_path: Path) -> str:
    """A dataset to damage."""
    return str(shutil.copytree(pristine, tmp_path / "out"))


@pytest.fixture
def victim(url: str, clean: list[PackedBatch]) -> Line:
    """A sample with several images, from the fourth pack on."""
    first = [name for pack in clean[3:] for name in pack.sample_ids]
    lines = {line.id: line for line in lines_of(url)}
    return next(lines[name] for name in first if len(lines[name].record["images"]) > 1)


def bundle_of(line: Line) -> Path:
    return line.file.parent / str(line.record["images"][0]["bundle"])


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def damage_bytes(line: Line) -> None:
    entry = line.record["images"][0]
    overwrite(bundle_of(line), entry["offset"] + entry["size"] // 2, b"damaged")


def cut_bundle(line: Line) -> None:
    os.truncate(bundle_of(line), line.record["images"][0]["offset"] + 1)


def lose_bundle(line: Line) -> None:
    bundle_of(line).unlink()


def damage_record(line: Line) -> None:
    overwrite(line.file, line.offset, b"#" * (line.size - 1))


def lose_records(line: Line) -> None:
    line.file.unlink()


IMAGE_DAMAGES = [damage_bytes, cut_bundle, lose_bundle]


def name_another_image(line: Line) -> None:
    """Still a record, of the right id and as many images."""
    text = line.file.read_bytes()[line.offset : line.offset + line.size]
    assert text.count(b'"image":0') == 1
    overwrite(line.file, line.offset + text.index(b'"image":0'), b'"image":9')


DAMAGES: list[Callable[[Line], None]] = [*IMAGE_DAMAGES, damage_record]


def lost_images(url: str, damage: Callable[[Line], None], victim: Line) -> set[tuple[str, int]]:
    """Sample id and index of every image that the damage takes. Samples may share the bytes of an image."""
    first = victim.record["images"][0]
    return {
        (line.id, index)
        for line in lines_of(url)
        for index, entry in enumerate(line.record["images"])
        if entry["bundle"] == first["bundle"]
        and (damage is not damage_bytes or entry["offset"] == first["offset"])
        and (damage is not cut_bundle or entry["offset"] >= first["offset"])
    }


def lost_samples(url: str, damage: Callable[[Line], None], victim: Line) -> set[str]:
    if damage is damage_record:
        return {victim.id}
    return {name for name, _ in lost_images(url, damage, victim)}


def first_pack_with(packs: list[PackedBatch], samples: set[str]) -> int:
    return next(number for number, pack in enumerate(packs) if samples & set(pack.sample_ids))


# on_failure "stop"


@pytest.mark.parametrize("damage", DAMAGES)
def test_stop_names_the_sample_the_file_and_the_way_out(
    url: str, clean: list[PackedBatch], victim: Line, damage: Callable[[Line], None]
) -> None:
    """And what came before is what it always is."""
    reached = first_pack_with(clean, lost_samples(url, damage, victim))
    damage(victim)
    file = victim.file if damage is damage_record else bundle_of(victim)
    with opened(url) as stream:
        assert [bytes(next(stream).batch.buffer) for _ in range(reached)] == [bytes(pack.buffer) for pack in clean[:reached]]
        with pytest.raises(SampleFailed) as caught:
            next(stream)
    message = str(caught.value)
    assert message.startswith(f"sample {victim.source}/")
    assert file.name in message
    assert "resumed with 'blank' it goes on" in message
    assert "`exclude/`" in message


def test_a_record_that_names_an_image_it_does_not_have_stops_by_name(url: str, victim: Line) -> None:
    """It is read as it was indexed, and fails when its pack is encoded."""
    name_another_image(victim)
    with opened(url) as stream, pytest.raises(SampleFailed, match="found a record that cannot be encoded") as caught:
        digests(stream, 500)
    assert str(caught.value).startswith(f"sample {victim.source}/")
    assert repr(victim.id) in str(caught.value)


@pytest.mark.parametrize("damage", [damage_bytes, damage_record])
def test_stop_in_a_worker_is_an_error_of_the_trainer(url: str, victim: Line, damage: Callable[[Line], None]) -> None:
    damage(victim)
    file = victim.file if damage is damage_record else bundle_of(victim)
    with opened(url, num_workers=2) as stream, pytest.raises(BayplanError) as caught:
        digests(stream, 500)
    message = str(caught.value)
    for part in ("SampleFailed", f"sample {victim.source}/", file.name, "resumed with 'blank' it goes on", "`exclude/`"):
        assert part in message


# Images that do not decode, one after the other and several at once


def spoil(line: Line) -> None:
    """An image that is read as it stands, and is none."""
    entry = line.record["images"][1]
    overwrite(bundle_of(line), entry["offset"], b"x" * entry["size"])


@pytest.mark.parametrize("settings", [BLANK, SKIP])
def test_threads_that_decode_change_no_pack_and_no_failure(url: str, victim: Line, settings: PackSettings) -> None:
    spoil(victim)
    found = []
    for num_threads in (1, 4):
        with opened(url, replace(settings, check_crc=False, num_decode_threads=num_threads)) as stream:
            found.append((digests(stream, 3 * NUM_PACKS), stream.counters()["failed_samples"]))
            assert any(thread.name.startswith("bayplan-decode") for thread in threading.enumerate()) == (num_threads > 1)
    assert found[0] == found[1]
    assert found[0][1] > 0
    assert not any(thread.name.startswith("bayplan-decode") for thread in threading.enumerate())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_that_a_thread_cannot_decode_stops_by_name(url: str, victim: Line, num_workers: int) -> None:
    spoil(victim)
    settings = replace(SETTINGS, check_crc=False, num_decode_threads=4)
    with opened(url, settings, num_workers=num_workers) as stream, pytest.raises(BayplanError) as caught:
        digests(stream, 500)
    for part in (f"sample {victim.source}/", "resumed with 'blank' it goes on"):
        assert part in str(caught.value)


@pytest.mark.parametrize("settings", [BLANK, SKIP])
@pytest.mark.parametrize("checked", [False, True])
def test_what_failed_holds_no_images_until_garbage_is_collected(
    url: str, victim: Line, settings: PackSettings, checked: bool
) -> None:
    spoil(victim)
    with opened(url, replace(settings, check_crc=checked)) as stream:
        next(stream)
        gc.collect()
        gc.disable()
        try:
            digests(stream, 3 * NUM_PACKS)
            kept = [item for item in gc.get_objects() if isinstance(item, EncodedSample | PackSample)]
        finally:
            gc.enable()
        assert stream.counters()["failed_samples"] > 0
    assert kept == []


# on_failure "blank"


def tokens_of(pack: PackedBatch, place: int) -> slice:
    return slice(int(pack.cu_seqlens_padded[place]), int(pack.cu_seqlens_padded[place + 1]))


def pixels_of(pack: PackedBatch) -> list[np.ndarray[Any, Any]]:
    """Of each image."""
    ends = np.cumsum(pack.image_grid_thw.prod(axis=1))
    return np.split(pack.pixels, ends[:-1]) if len(ends) else []


PER_TOKEN = ("tokens", "labels", "position_ids", "loss_mask", "feature_mask")


def assert_as_promised(found: PackedBatch, expected: PackedBatch, lost: set[str], images: set[tuple[str, int]]) -> None:
    """A pack in which some images are lost is the clean one but for their pixels and their samples' labels."""
    assert found.sample_ids == expected.sample_ids
    for name in ("tokens", "position_ids", "feature_mask", "cu_seqlens", "cu_seqlens_padded", "image_grid_thw", "image_span"):
        assert (getattr(found, name) == getattr(expected, name)).all(), name
    for place, sample in enumerate(expected.sample_ids):
        where = tokens_of(expected, place)
        if sample in lost:
            assert (found.labels[where] == IGNORED).all()
            assert not found.loss_mask[where].any()
        else:
            assert all((getattr(found, name)[where] == getattr(expected, name)[where]).all() for name in PER_TOKEN)
    for number, (mine, theirs) in enumerate(zip(pixels_of(found), pixels_of(expected), strict=True)):
        key = expected.sample_ids[expected.image_sample[number]], int(expected.image_index[number])
        if key in images:
            assert found.image_state[number] == ImageState.BLANK
            assert (mine == GREY).all()
        else:
            assert found.image_state[number] == ImageState.REAL
            assert (mine == theirs).all()


@pytest.mark.parametrize("damage", IMAGE_DAMAGES)
def test_blank_keeps_the_pack_and_takes_the_sample_out_of_the_loss(
    url: str, clean: list[PackedBatch], victim: Line, damage: Callable[[Line], None], caplog: pytest.LogCaptureFixture
) -> None:
    images, lost = lost_images(url, damage, victim), lost_samples(url, damage, victim)
    damage(victim)
    with opened(url, BLANK) as stream:
        for expected in clean:
            assert_as_promised(next(stream).batch, expected, lost, images)
        counted = stream.counters()
    seen = [name for pack in clean for name in pack.sample_ids if name in lost]
    blank = [
        number
        for pack in clean
        for number in range(pack.num_images)
        if (pack.sample_ids[pack.image_sample[number]], int(pack.image_index[number])) in images
    ]
    assert counted["failed_samples"] == len(seen) > 0
    assert counted["blank_images"] == len(blank) > 0
    assert f"on_failure 'blank': {victim.source}/" in caplog.text
    assert bundle_of(victim).name in caplog.text


@pytest.mark.parametrize("damage", [damage_record, lose_records, name_another_image])
def test_a_lost_record_keeps_its_length(
    url: str, clean: list[PackedBatch], victim: Line, damage: Callable[[Line], None], caplog: pytest.LogCaptureFixture
) -> None:
    lost = {line.id for line in lines_of(url) if line.file == victim.file and damage is lose_records} | {victim.id}
    damage(victim)
    with opened(url, BLANK) as stream:
        packs = [next(stream).batch for _ in clean]
        counted = stream.counters()
    for found, expected in zip(packs, clean, strict=True):
        assert (found.cu_seqlens_padded == expected.cu_seqlens_padded).all()
        assert (found.sample_row == expected.sample_row).all()
        for place, sample in enumerate(expected.sample_ids):
            where = tokens_of(expected, place)
            if sample in lost:
                assert found.sample_ids[place].startswith(f"{victim.source}/"), "its id stood in its record"
                assert (found.labels[where] == IGNORED).all()
                assert all(
                    (one == GREY).all() for one, of in zip(pixels_of(found), found.image_sample, strict=True) if of == place
                )
            else:
                assert found.sample_ids[place] == sample
                assert all((getattr(found, name)[where] == getattr(expected, name)[where]).all() for name in PER_TOKEN)
    assert counted["failed_samples"] == sum(name in lost for pack in clean for name in pack.sample_ids) > 0
    assert victim.file.name in caplog.text


@pytest.mark.parametrize("damage", [damage_bytes, damage_record])
def test_blank_is_blank_for_every_pipeline_stage(
    url: str, clean: list[PackedBatch], victim: Line, damage: Callable[[Line], None]
) -> None:
    """The last stage computes the loss, and has no pixels to see what failed."""
    damage(victim)
    first, last = (Peers(pipeline=2, pipeline_stage=stage) for stage in range(2))
    with opened(url, BLANK, peers=first) as one, opened(url, BLANK, peers=last) as other:
        for _ in clean:
            whole, bare = next(one).batch, next(other).batch
            assert bare.sample_ids == whole.sample_ids
            assert all((getattr(bare, name) == getattr(whole, name)).all() for name in PER_TOKEN)
            assert (bare.image_state == whole.image_state).all()
            assert (bare.image_grid_thw == whole.image_grid_thw).all()
            assert not bare.has_pixels
        assert one.counters()["failed_samples"] == other.counters()["failed_samples"] > 0


# on_failure "skip"


@pytest.mark.parametrize("damage", DAMAGES)
def test_skip_leaves_the_sample_out(url: str, clean: list[PackedBatch], victim: Line, damage: Callable[[Line], None]) -> None:
    lost = lost_samples(url, damage, victim)
    damage(victim)
    expected = [tuple(name for name in pack.sample_ids if name not in lost) for pack in clean]
    with opened(url, SKIP) as stream:
        packs = [next(stream).batch for names in expected if names]
        counted = stream.counters()
    assert [pack.sample_ids for pack in packs] == [names for names in expected if names]
    assert counted["blank_images"] == 0


def test_a_pack_of_skipped_samples_alone_is_not_handed_out(url: str) -> None:
    """A source nothing of which can be read leaves the packs of the others."""
    for file in Path(url).glob("sources/docs/*.jsonl"):
        file.unlink()
    with Epochs(url, SKIP).open() as stream:
        packs = [pack.batch for pack in stream]
    seen = sorted(name for pack in packs for name in pack.sample_ids)
    assert seen == sorted(line.id for line in lines_of(url))
    assert all(pack.num_samples for pack in packs)


# limits


@pytest.fixture
def ruined(url: str) -> str:
    """Nothing of it can be read."""
    for file in Path(url).glob("sources/*/*.jsonl"):
        file.write_bytes(b"#" * file.stat().st_size)
    return url


@pytest.mark.parametrize("on_failure", ["blank", "skip"])
@pytest.mark.parametrize("limit", [0, 3])
def test_more_failures_than_the_limit_stop(ruined: str, on_failure: Any, limit: int) -> None:
    settings = replace(BLANK, on_failure=on_failure, max_failures=limit)
    with opened(ruined, settings) as stream, pytest.raises(TooManyFailures, match=f"above max_failures {limit}; the latest"):
        digests(stream, limit + 1)


def test_as_many_failures_as_the_limit_do_not_stop(url: str, clean: list[PackedBatch], victim: Line) -> None:
    damage_record(victim)
    with opened(url, replace(BLANK, max_failures=1)) as stream:
        digests(stream, NUM_PACKS)
        assert stream.counters()["failed_samples"] == 1
    with opened(url, replace(BLANK, max_failures=0)) as stream, pytest.raises(TooManyFailures, match=r"^1 of "):
        digests(stream, NUM_PACKS)


def test_unlimited_blank_goes_on(ruined: str) -> None:
    with opened(ruined, BLANK) as stream:
        packs = [next(stream).batch for _ in range(NUM_PACKS)]
        assert stream.counters()["failed_samples"] == sum(pack.num_samples for pack in packs)
    assert all((pack.labels == IGNORED).all() for pack in packs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_of_which_nothing_can_be_read_ends(ruined: str, num_workers: int) -> None:
    """With every limit taken away `skip` would look for a sample that can be read for ever."""
    with opened(ruined, SKIP, num_workers=num_workers) as stream, pytest.raises(BayplanError, match="so no pack comes any more"):
        next(stream)


def packs_until_too_many(stream: PackLoader) -> tuple[list[str], list[Any], str]:
    """Digests, a state before each pack, and the word it ended with."""
    found, states = [], [stream.save_state()]
    try:
        for pack in stream:
            found.append(digest(pack))
            states.append(stream.save_state())
    except TooManyFailures as error:
        return found, states, str(error)
    raise AssertionError(f"none in {len(found)} packs")


def test_failures_are_counted_on_over_a_resume(url: str, victim: Line) -> None:
    lose_bundle(victim)
    settings = replace(BLANK, max_failures=6)
    with opened(url, settings) as stream:
        whole, states, why = packs_until_too_many(stream)
    assert len(whole) > 3
    for step in (len(whole) // 2, len(whole)):
        with opened(url, settings) as again:
            again.restore_state(states[step])
            found, _, word = packs_until_too_many(again)
        assert found == whole[step:]
        assert word.split(";")[0] == why.split(";")[0]


# a store that misbehaves


@pytest.fixture
def store(pristine: str, quick_retries: None) -> Iterator[type[faults.FaultyFileSystem]]:
    faults.FaultyFileSystem.reset()
    yield faults.FaultyFileSystem
    faults.FaultyFileSystem.hanging.set()
    faults.FaultyFileSystem.reset()


def from_store(pristine: str, settings: PackSettings = SETTINGS) -> PackLoader:
    """Records and images come from the store, the index from the disk beside it."""
    return opened(f"faulty://{pristine}", settings, blend=f"{pristine}/index/{PROFILE}/dataset.yaml")


ANSWERS = [faults.short, faults.empty, faults.one_too_many, faults.wrong, faults.time_out, faults.lost]


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_store_that_is_wrong_now_and_then_changes_nothing(
    pristine: str, clean: list[PackedBatch], store: type[faults.FaultyFileSystem], fault: faults.Fault
) -> None:
    """One thread reads, so that what is read again after a fault is the next read."""

    def at_every_third(data: bytes) -> bytes:
        return data if len(store.reads) % 3 else fault(data)

    with from_store(pristine, replace(SETTINGS, num_threads=1)) as stream:
        store.always = staticmethod(at_every_third)
        assert [bytes(next(stream).batch.buffer) for _ in clean] == [bytes(pack.buffer) for pack in clean]
        assert stream.counters()["read_retries"] >= len(clean)


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_store_that_is_always_wrong_is_refused_by_name(
    pristine: str, store: type[faults.FaultyFileSystem], fault: faults.Fault
) -> None:
    with from_store(pristine) as stream:
        store.always = staticmethod(fault)
        with pytest.raises(SampleFailed, match=r"at offset .*resumed with 'blank' it goes on") as caught:
            next(stream)
    assert isinstance(caught.value.__cause__, ReadError)


def test_another_object_under_a_name_is_refused(url: str, victim: Line, store: type[faults.FaultyFileSystem]) -> None:
    """As large as the one that was packed."""
    bundle = bundle_of(victim)
    bundle.write_bytes(bundle.read_bytes()[::-1])
    with from_store(url) as stream, pytest.raises(SampleFailed, match=bundle.name) as caught:
        digests(stream, NUM_PACKS)
    assert isinstance(caught.value.__cause__, FileChanged)


@pytest.mark.parametrize("on_failure", ["stop", "blank"])
def test_a_read_that_never_returns_is_made_again(
    pristine: str, clean: list[PackedBatch], store: type[faults.FaultyFileSystem], on_failure: Any
) -> None:
    settings = replace(SETTINGS, on_failure=on_failure, read_deadline_seconds=0.5)
    with from_store(pristine, settings) as stream:
        store.once.append(store.never)
        for expected in clean:
            assert bytes(next(stream).batch.buffer) == bytes(expected.buffer)
        assert stream.counters()["read_abandoned"] >= 1
        assert stream.counters()["failed_samples"] == 0


def test_a_store_that_never_answers_is_refused_by_name(pristine: str, store: type[faults.FaultyFileSystem]) -> None:
    with from_store(pristine, replace(SETTINGS, read_deadline_seconds=0.2)) as stream:
        store.always = store.never
        with pytest.raises(SampleFailed, match="faulty://"):
            next(stream)


# workers that die


def test_a_killed_worker_is_an_error_of_the_trainer(pristine: str) -> None:
    with opened(pristine, num_workers=2) as stream:
        digests(stream, 3)
        os.kill(stream._loader._iterator._workers[0].pid, signal.SIGKILL)
        # torch's handler of the signal raises wherever the trainer is just then; ours names the worker where it is missed.
        with pytest.raises((WorkerDied, RuntimeError), match=r"worker 0 killed by SIGKILL|killed by signal: Killed"):
            digests(stream, 1000)
        with pytest.raises(WorkerDied, match="save_state: found worker 0 killed by SIGKILL"):
            stream.save_state()
