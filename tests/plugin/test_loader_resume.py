"""States of runs that were resumed themselves, as on a cluster where jobs are preempted; interrupts; what a state belongs to."""

from __future__ import annotations

import multiprocessing.connection
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from loading import PROFILE, SETTINGS, Epochs, digests, opened, write_stream
from megatron.energon.savable_loader import SavableDatasetCheckpoint, SavableDatasetWrapper

from packer.format.errors import UsageError
from plugin.loader import CHECKPOINT_SECONDS, PackLoader
from plugin.task_encoder import PackingTaskEncoder

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set as true",
    "ignore:This process .* is multi-threaded",
    "ignore:This DataLoader will create 3 worker processes",
)

LONG_AGO = CHECKPOINT_SECONDS
"""Workers note where they are so rarely that packs are built again after a restore, as in a trainer."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


@pytest.fixture(scope="module")
def epochs(url: str) -> Epochs:
    return Epochs(url)


@pytest.fixture
def copied(url: str, tmp_path: Path) -> str:
    return str(shutil.copytree(url, tmp_path / "out"))


# --- states of resumed runs


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_state_of_a_resumed_run_is_as_good_as_one_of_a_run_that_never_stopped(epochs: Epochs, num_workers: int) -> None:
    """However few packs after the resume: workers that gave none since then are where they were."""
    arguments = {"repeat": True, "num_workers": num_workers, "checkpoint_seconds": LONG_AGO}
    with epochs.open(**arguments) as stream:
        whole = digests(stream, 26)
    with epochs.open(**arguments) as stream:
        digests(stream, 8)
        state = stream.save_state()
    for number in range(num_workers + 2):
        with epochs.open(**arguments) as stream:
            stream.restore_state(state)
            digests(stream, number)
            second = stream.save_state()
        with epochs.open(**arguments) as stream:
            stream.restore_state(second)
            assert digests(stream, 10) == whole[8 + number : 18 + number], f"saved {number} packs after the resume"


def test_any_number_of_resumes_in_a_row_changes_nothing(epochs: Epochs) -> None:
    arguments = {"repeat": True, "num_workers": 3, "checkpoint_seconds": LONG_AGO}
    with epochs.open(**arguments) as stream:
        whole = digests(stream, 16)
        state = None
    found: list[str] = []
    for number in (4, 1, 0, 2, 1, 1, 3, 4):
        with epochs.open(**arguments) as stream:
            if state is not None:
                stream.restore_state(state)
            found += digests(stream, number)
            state = stream.save_state()
    assert found == whole


@pytest.mark.parametrize(("num_workers", "checkpoint_seconds"), [(0, 0), (1, LONG_AGO), (2, LONG_AGO), (2, 0)])
def test_the_end_of_an_epoch_is_kept_in_states_of_resumed_runs(
    url: str, tmp_path: Path, num_workers: int, checkpoint_seconds: float
) -> None:
    """Resumed shortly before, at and after the last pack; then saved after the last pack, and between two epochs."""
    epochs = Epochs(url, sources="pics")
    arguments: dict[str, Any] = {"num_workers": num_workers, "checkpoint_seconds": checkpoint_seconds}
    with epochs.open(**arguments) as stream:
        whole, states = [], [stream.save_state()]
        for pack in iter(lambda: digests(stream, 1), []):
            whole += pack
            states.append(stream.save_state())
        states.append(stream.save_state())
    last = len(whole)
    assert last > 5
    for step in (1, last - 1, last, last + 1):
        with epochs.open(**arguments) as stream:
            stream.restore_state(states[step])
            tail, at_end = [], stream.save_state()
            if step <= last:
                for pack in iter(lambda stream=stream: digests(stream, 1), []):
                    tail += pack
                    at_end = stream.save_state()
                assert tail == whole[step:]
            between = stream.save_state()
            following = digests(stream, 10_000)
        if step <= last:
            with epochs.open(**arguments) as stream:
                stream.restore_state(at_end)
                assert digests(stream, 10_000) == [], f"resumed at pack {step} of {last}, saved after the last"
        with epochs.open(**arguments) as stream:
            stream.restore_state(between)
            assert digests(stream, 10_000) == following, f"resumed at pack {step} of {last}, saved between epochs"
    Epochs(url)  # writes the blend of all sources again


@pytest.mark.parametrize(("num_workers", "checkpoint_seconds"), [(0, 0), (1, LONG_AGO), (2, LONG_AGO), (2, 0)])
def test_a_state_of_a_later_epoch_goes_on_in_it(url: str, num_workers: int, checkpoint_seconds: float) -> None:
    """A worker may have noted its place last at the end of the epoch before."""
    epochs = Epochs(url, sources="pics")
    arguments: dict[str, Any] = {"num_workers": num_workers, "checkpoint_seconds": checkpoint_seconds}
    with epochs.open(**arguments) as stream:
        digests(stream, 10_000)
        whole, states = [], []
        for pack in iter(lambda: digests(stream, 1), []):
            whole += pack
            states.append(stream.save_state())
    last = len(whole)
    for number in (1, 2, 3, last - 1, last):
        with epochs.open(**arguments) as stream:
            stream.restore_state(states[number - 1])
            second = stream.save_state()
            assert digests(stream, 10_000) == whole[number:], f"saved after pack {number} of {last} of the second epoch"
            assert len(digests(stream, 10_000)) >= last - 1, "and the third one is whole"
        with epochs.open(**arguments) as stream:
            stream.restore_state(second)
            assert digests(stream, 10_000) == whole[number:]
    Epochs(url)  # writes the blend of all sources again


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_worker_that_has_not_begun_is_where_it_was(url: str, monkeypatch: pytest.MonkeyPatch, is_resumed: bool) -> None:
    """Workers begin one after another, and one that is slow is asked before it has restored itself."""
    with opened(url, num_workers=2) as stream:
        whole = digests(stream, 14)
        state = None
    if is_resumed:
        with opened(url, num_workers=2) as stream:
            digests(stream, 4)
            state = stream.save_state()
    asked = SavableDatasetWrapper.get_checkpoint

    def of_one_that_has_not_begun(self: Any, counts: list[int]) -> Any:
        return SavableDatasetCheckpoint(state=None, offset=9) if self._worker_id == 1 else asked(self, counts)

    with monkeypatch.context() as patched, opened(url, num_workers=2) as stream:
        patched.setattr(SavableDatasetWrapper, "get_checkpoint", of_one_that_has_not_begun)
        if state is not None:
            stream.restore_state(state)
        begun = 4 if is_resumed else 0
        assert digests(stream, 1) == whole[begun : begun + 1]
        state = stream.save_state()
    with opened(url, num_workers=2) as stream:
        stream.restore_state(state)
        assert digests(stream, 8) == whole[begun + 1 : begun + 9]


def test_an_epoch_of_which_all_is_built_again_has_ended(url: str) -> None:
    """As where a state is saved after the last pack and before its worker has seen that no other comes."""
    epochs = Epochs(url, sources="pics")
    with epochs.open(num_workers=1, checkpoint_seconds=LONG_AGO) as stream:
        digests(stream, 2)
        state = stream.save_state()
        last = 2 + len(digests(stream, 10_000))
        following = digests(stream, 10_000)
    (worker,) = state["energon"].worker_states
    worker.offset = last - worker.state.sample_index
    with epochs.open(num_workers=1) as stream:
        stream.restore_state(state | {"num_packs": last})
        assert digests(stream, 10_000) == []
        assert digests(stream, 10_000) == following
    Epochs(url)  # writes the blend of all sources again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_of_several_restores_holds(url: str, num_workers: int) -> None:
    with opened(url, num_workers=num_workers) as stream:
        fresh = stream.save_state()
        whole = digests(stream, 8)
        later = stream.save_state()
    with opened(url, num_workers=num_workers) as stream:
        stream.restore_state(later)
        stream.restore_state(fresh)
        assert digests(stream, 8) == whole


# --- interrupts


@pytest.mark.timeout(120)
def test_a_state_can_be_saved_where_an_interrupt_struck_while_a_pack_was_handed_over(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of fetching a pack's memory from the worker that made it."""
    large = replace(SETTINGS, sequence_length=1024, max_patches_per_pack=4096)
    with opened(url, large, num_workers=2) as stream:
        whole = digests(stream, 8)
    answered = multiprocessing.connection.answer_challenge

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(multiprocessing.connection, "answer_challenge", answered)
        raise KeyboardInterrupt

    with opened(url, large, num_workers=2) as stream:
        before = digests(stream, 2)
        monkeypatch.setattr(multiprocessing.connection, "answer_challenge", interrupted)
        try:
            for _ in stream:
                before.append("")
        except KeyboardInterrupt:
            state = stream.save_state()  # as trainers do: while the interrupt is being handled
    with opened(url, large, num_workers=2) as stream:
        stream.restore_state(state)
        assert digests(stream, 8 - len(before)) == whole[len(before) :]


def test_a_stream_that_was_interrupted_while_it_chose_samples_is_not_saved(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url) as stream:
        digests(stream, 2)
        monkeypatch.setattr(PackingTaskEncoder, "shuffle_packs", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            digests(stream, 100)
        with pytest.raises(UsageError, match=r"found a stream that stopped in the midst of choosing samples.*KeyboardInterrupt"):
            stream.save_state()


def test_a_stream_that_was_interrupted_while_it_built_a_pack_is_saved(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url) as stream:
        whole = digests(stream, 6)
    with opened(url) as stream:
        digests(stream, 2)
        with monkeypatch.context() as patched:
            patched.setattr("plugin.pack_builder.build", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        state = stream.save_state()
    with opened(url) as stream:
        stream.restore_state(state)
        assert digests(stream, 4) == whole[2:]


@pytest.mark.timeout(120)
def test_an_interrupt_while_workers_are_forked_leaves_what_was_restored(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, num_workers=2) as stream:
        whole = digests(stream, 8)
    with opened(url, num_workers=2) as stream:
        digests(stream, 3)
        state = stream.save_state()
    with opened(url, num_workers=2) as stream, monkeypatch.context() as patched:
        stream.restore_state(state)
        patched.setattr("torch.utils.data.DataLoader._get_iterator", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        state = stream.save_state()
    with opened(url, num_workers=2) as stream:
        stream.restore_state(state)
        assert digests(stream, 5) == whole[3:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pack_that_nobody_got_is_not_passed_over(url: str, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    with opened(url, num_workers=num_workers) as stream:
        digests(stream, 2)
        monkeypatch.setattr("plugin.loader.StreamCounters.add", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        with pytest.raises(UsageError, match="found a pack that was taken from the stream and not handed out"):
            stream.save_state()


@pytest.mark.timeout(120)
def test_answers_to_a_call_that_was_interrupted_are_not_taken_for_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(url, num_workers=2) as stream:
        digests(stream, 2)
        with monkeypatch.context() as patched:
            patched.setattr("plugin.loader_workers._Answers.get", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                stream.save_state()
        digests(stream, 2)
        with pytest.raises(UsageError, match=r"found an earlier call that was interrupted \(KeyboardInterrupt\)"):
            stream.save_state()


def test_a_state_is_not_saved_in_the_middle_of_a_pack(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the handler of a signal, or another thread."""
    with opened(url) as stream:
        digests(stream, 2)
        monkeypatch.setattr("plugin.pack_builder.build", lambda *_, **__: stream.save_state())
        with pytest.raises(UsageError, match=r"being asked for a pack or a state.*set a flag, and save outside"):
            next(stream)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


# --- what failed before and is there now, and the other way round


@pytest.mark.parametrize("was_there", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_pack_that_is_skipped_whole_keeps_its_place(copied: str, num_workers: int, was_there: bool) -> None:
    """Its files are gone when the packs since the workers' last note are built again, or are back."""
    settings = replace(SETTINGS, on_failure="skip", max_failures=None, max_failure_share=None, sequence_length=128)
    arguments: dict[str, Any] = {"num_workers": num_workers}
    bundles = list(Path(copied).glob("sources/pics/*.zip"))
    _move(bundles, away=False)
    with opened(copied, settings, **arguments) as stream:
        healthy = digests(stream, 60)
    _move(bundles, away=not was_there)
    with opened(copied, settings, **arguments) as stream:
        before = digests(stream, 12)
        state = stream.save_state()
    _move(bundles, away=was_there)
    with opened(copied, settings, **arguments) as stream:
        stream.restore_state(state)
        after = digests(stream, 12)
    # Packs that came whole in either half are of the healthy run's, in its order; those of the second half follow the first's.
    places = [[healthy.index(pack) for pack in half if pack in healthy] for half in (before, after)]
    assert all(half == sorted(half) and half for half in places)
    assert max(places[0]) < min(places[1])
    if not was_there:
        assert after == healthy[places[1][0] : places[1][0] + 12], "all is back, so nothing is left out"


def _move(bundles: list[Path], *, away: bool) -> None:
    for bundle in bundles:
        here, there = bundle, bundle.with_suffix(".away")
        if away and here.exists():
            here.rename(there)
        elif not away and there.exists():
            there.rename(here)


# --- what a state and a stream belong to


def _blended(url: str, name: str, change: Any) -> str:
    """The profile's blend with something else in `train`."""
    folder = Path(url) / "index" / PROFILE
    blend = yaml.safe_load((folder / "dataset.yaml").read_text())
    change(blend["splits"]["train"])
    (folder / name).write_text(yaml.safe_dump(blend))
    return str(folder / name)


def _heavier(train: dict[str, Any]) -> None:
    train["blend"][0]["weight"] *= 5


def _once(train: dict[str, Any]) -> None:
    train["blend_epochized"] = train.pop("blend")
    for source in train["blend_epochized"]:
        del source["weight"]
        source["repetitions"] = 1


@pytest.mark.parametrize("change", [_heavier, _once])
def test_a_state_of_another_blend_of_the_same_sources_is_refused(copied: str, change: Any) -> None:
    with opened(copied) as stream:
        digests(stream, 2)
        state = stream.save_state()
    with (
        opened(copied, blend=_blended(copied, "other.yaml", change)) as stream,
        pytest.raises(UsageError, match=r"found sources \{.*blended otherwise; resume with what was trained on"),
    ):
        stream.restore_state(state)


def test_a_blend_of_another_profile_is_refused_as_it_opens(tmp_path: Path) -> None:
    url = write_stream(tmp_path / "job", PROFILE, "other")
    with pytest.raises(UsageError, match=f"found a blend of the profile 'other', expected one of '{PROFILE}'"):
        opened(url, blend=f"{url}/index/other/dataset.yaml")


def test_an_encoder_that_did_not_make_the_stream_is_refused(epochs: Epochs, url: str) -> None:
    with epochs.open() as stream, pytest.raises(UsageError, match="another `PackingTaskEncoder` made"):
        PackLoader(stream._loader, PackingTaskEncoder(url, PROFILE, SETTINGS))


def test_host_memory_is_limited_for_loaders_of_ones_own(url: str) -> None:
    with pytest.raises(UsageError, match="expected at most max_host_bytes 1,000"):
        Epochs(url, replace(SETTINGS, max_host_bytes=1000)).open()


# --- what a stream leaves as it is


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_trainers_random_numbers_are_its_own(url: str, num_workers: int) -> None:
    """A trainer restores them before the first pack is read: dropout of a resumed run must be that of the other."""
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with opened(url, num_workers=num_workers) as stream:
        digests(stream, 3)
        stream.save_state()
    assert torch.equal(torch.get_rng_state(), before)


def test_passes_leave_no_thread(url: str) -> None:
    with opened(url, split="val") as stream:
        digests(stream, 10_000)
        before = threading.active_count()
        for _ in range(4):
            assert digests(stream, 10_000)
        assert threading.active_count() == before
