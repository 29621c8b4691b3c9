"""A stream used as it should not be, and states saved around errors: a word for it, nothing lost, nobody left waiting."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from loading import SETTINGS, Epochs, digest, digests, ids, opened, write_stream

from packer.format.errors import BayplanError, UsageError
from plugin.failures import SampleFailed, TooManyFailures
from plugin.loader_workers import WorkerDied

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")

NUM_PACKS = 24
BLANK = replace(SETTINGS, on_failure="blank", max_failures=None, max_failure_share=None)
NO_MORE = "no pack comes of this stream any more"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


@pytest.fixture(scope="module")
def clean(url: str) -> list[str]:
    with opened(url) as stream:
        return digests(stream, NUM_PACKS)


@pytest.fixture
def damaged(url: str, tmp_path: Path) -> str:
    """No image of the documents can be read."""
    folder = shutil.copytree(url, tmp_path / "out")
    for bundle in Path(folder).glob("sources/docs/*.zip"):
        bundle.rename(bundle.with_suffix(".away"))
    return str(folder)


def repair(url: str) -> None:
    for bundle in Path(url).glob("sources/docs/*.away"):
        bundle.rename(bundle.with_suffix(".zip"))


# --- errors, and what is saved after them


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failed_stream_fails_again_and_goes_on_from_its_state_once_repaired(url: str, damaged: str, num_workers: int) -> None:
    """The next call must not look like the end of the data, and the failed pack is built once its files are back."""
    with opened(url, num_workers=num_workers) as stream:
        whole = digests(stream, NUM_PACKS)
    before: list[str] = []
    with opened(damaged, num_workers=num_workers) as stream:
        with pytest.raises(SampleFailed, match=r"(?s)sample docs/.*found no file.*Training stops here"):
            before.extend(digest(pack) for pack in stream)
        with pytest.raises(UsageError, match=f"(?s){NO_MORE}: it ended with SampleFailed.*Open it again") as caught:
            next(stream)
        assert isinstance(caught.value.__cause__, SampleFailed)
        state = stream.save_state()
    repair(damaged)
    with opened(damaged, num_workers=num_workers) as stream:
        stream.restore_state(state)
        assert before + digests(stream, NUM_PACKS - len(before)) == whole


def test_the_pack_that_passed_the_limit_is_not_lost(damaged: str) -> None:
    with opened(damaged, BLANK) as stream:
        whole = digests(stream, NUM_PACKS)
    before: list[str] = []
    with opened(damaged, replace(BLANK, max_failures=4)) as stream:
        with pytest.raises(TooManyFailures, match="above max_failures 4; the latest: docs/"):
            before.extend(digest(pack) for pack in stream)
        state = stream.save_state()
    assert 0 < len(before) < NUM_PACKS
    with opened(damaged, BLANK) as stream:
        stream.restore_state(state)
        assert before + digests(stream, NUM_PACKS - len(before)) == whole


def test_a_share_is_judged_after_a_thousand_samples(damaged: str) -> None:
    """No sooner, however large it is."""
    with (
        opened(damaged, replace(BLANK, max_failure_share=0.01)) as stream,
        pytest.raises(TooManyFailures, match=r"of 1\d\d\d samples of this loader worker .* above max_failure_share 0\.01"),
    ):
        digests(stream, 1000)


def test_packs_that_are_skipped_whole_are_told(damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    for path in Path(damaged).glob("sources/[dp]*/*.jsonl"):
        path.unlink()
    with Epochs(damaged, replace(BLANK, on_failure="skip", sequence_length=128)).open() as stream:
        found = Counter(ids(stream))
        counted = stream.counters()
    assert set(found.values()) == {1}
    assert all(name.startswith("text ") for name in found)
    named = caplog.text.count("on_failure 'skip'")
    assert counted["failed_samples"] == named > 0
    assert named + counted["refused_samples"] + len(found) == 360


# --- hostile use


def test_a_closed_stream_gives_nothing_and_closes_again(url: str) -> None:
    stream = opened(url)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(UsageError, match=f"{NO_MORE}: it was closed"):
        next(stream)


def test_the_state_of_a_closed_stream_is_refused_where_it_was_with_its_workers(url: str) -> None:
    with opened(url, num_workers=1) as stream:
        next(stream)
    with pytest.raises(UsageError, match="save_state: found a stream that was closed"):
        stream.save_state()
    with opened(url) as stream:
        next(stream)
    assert stream.save_state()["num_packs"] == 1


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_a_stream_may_be_closed_while_it_is_read(url: str) -> None:
    stream = opened(url)
    next(stream)
    thread, errors = in_thread(lambda: list(islice(stream, 10_000)))
    stream.close()
    thread.join(60)
    assert not thread.is_alive()
    (error,) = errors
    assert isinstance(error, BayplanError), error


def test_a_second_thread_is_told_and_takes_nothing(url: str, clean: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    is_building, may_go_on = threading.Event(), threading.Event()
    with opened(url) as stream:
        build = stream.encoder.builder.build

        def slowly(chosen: Any) -> Any:
            is_building.set()
            assert may_go_on.wait(60)
            return build(chosen)

        monkeypatch.setattr(stream.encoder.builder, "build", slowly)
        found: list[str] = []
        thread, errors = in_thread(lambda: found.extend(digests(stream, 2)))
        assert is_building.wait(60)
        with pytest.raises(UsageError, match="two threads that ask one stream for packs at once"):
            next(stream)
        may_go_on.set()
        thread.join(60)
        assert not errors
        assert found + digests(stream, 3) == clean[:5]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_forked_child_reads_alone_or_is_refused_and_the_parent_reads_on(url: str, num_workers: int) -> None:
    with opened(url, num_workers=num_workers) as stream:
        whole = digests(stream, 8)
    with opened(url, num_workers=num_workers) as stream:
        before = digests(stream, 2)
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                said = " ".join(digests(stream, 3))
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        assert before + digests(stream, 6) == whole
    if num_workers:
        assert f"found a stream with loader workers of process {os.getpid()} in process {child}" in said
    else:
        assert said.split() == whole[2:5]


def test_a_worker_that_is_killed_is_an_error_and_no_state_is_waited_for(url: str) -> None:
    """Torch's own word comes by a signal, anywhere in the trainer; ours where the worker is missed."""
    with opened(url, num_workers=2) as stream:
        next(stream)
        os.kill(stream._loader._iterator._workers[0].pid, signal.SIGKILL)
        with pytest.raises((WorkerDied, RuntimeError), match=r"killed by|exited unexpectedly"):
            digests(stream, 1000)
        with pytest.raises((WorkerDied, RuntimeError), match=r"killed by|exited unexpectedly"):
            stream.save_state()
        with pytest.raises(UsageError, match=NO_MORE):
            next(stream)


def test_a_state_may_be_restored_over_another(url: str, clean: list[str]) -> None:
    with opened(url) as stream:
        states = [(stream.save_state(), digests(stream, 5))[0] for _ in range(3)]
    with opened(url) as stream:
        stream.restore_state(states[2])
        stream.restore_state(states[1])
        assert digests(stream, 10) == clean[5:15]


def test_a_state_may_be_restored_again_and_again(url: str) -> None:
    """A stream that was restored from it must not write into it."""
    with opened(url) as stream:
        digests(stream, 5)
        state = stream.save_state()
        following = digests(stream, 12)
    for _ in range(3):
        with opened(url) as stream:
            stream.restore_state(state)
            assert digests(stream, 12) == following


def test_an_interrupt_ends_the_stream_and_its_state_is_that_of_the_last_pack(
    url: str, clean: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(url) as stream:
        digests(stream, 3)
        with monkeypatch.context() as patch:
            patch.setattr(stream.encoder.builder, "build", lambda chosen: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        with pytest.raises(UsageError, match=f"{NO_MORE}: it ended with KeyboardInterrupt"):
            next(stream)
        state = stream.save_state()
    with opened(url) as stream:
        stream.restore_state(state)
        assert digests(stream, 5) == clean[3:8]
