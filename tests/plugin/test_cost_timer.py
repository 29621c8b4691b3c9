from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_samples import PATCHES, TILES, pack_sample, patch_image, tile_image

from indexer.image_rules.smart_resize import SmartResize
from packer.format.errors import FormatError, UsageError
from plugin.batch import EnsuredImage, PackedBatch, build
from plugin.cost import StepTimer, features_of, read_timings
from plugin.cost import timer as timer_module

ROOT = Path(__file__).parents[2]


def pack(pieces: list[Any] | None = None, **arguments: Any) -> PackedBatch:
    """A sample of 3 + 8 + 4 tokens with an image of 4 x 6 patches, and one of 7; a pack of 40 tokens."""
    samples = [pack_sample(pieces or [3, patch_image(4, 6), 4], "a"), pack_sample([7], "b")]
    return build(samples, **({"form": PATCHES, "sequence_length": 40, "pad_id": 0} | arguments))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_features_are_what_is_computed() -> None:
    found = features_of([pack()])
    assert (found.num_patches, found.sum_squared_attention, found.sum_squared_patches, found.num_images) == (24, 576, None, 1)
    assert (found.num_tokens, found.sum_squared_tokens) == (40, 15**2 + 7**2)
    both = features_of([pack(), pack()])
    assert (both.num_patches, both.num_tokens, both.sum_squared_tokens) == (48, 80, 2 * 274)


def test_features_of_tiles_windows_and_images_that_nobody_trains_on() -> None:
    tiles = pack([3, tile_image(2), tile_image(1)], form=TILES)
    found = features_of([tiles], patches_per_tile=1024)
    assert (found.num_patches, found.sum_squared_attention, found.num_images) == (3072, 3 * 1024**2, 2)
    with pytest.raises(UsageError, match="found a pack of tiles, expected patches_per_tile"):
        features_of([tiles])
    windowed = features_of([pack()], window_patches=4)
    assert (windowed.sum_squared_attention, windowed.sum_squared_patches) == (16**2 + 8**2, 576)
    ensured = EnsuredImage(ids=(90,), feature_mask=(True,), image=PATCHES.smallest())
    text = features_of([pack([3], ensure_image=ensured)])
    assert (text.num_patches, text.num_images, text.num_tokens, text.sum_squared_tokens) == (4, 1, 40, 9 + 49 + 1)
    assert features_of([pack([3])]).num_images == 0
    blind = features_of([pack([3, patch_image(4, 6, pixels=None)])])
    assert (blind.num_patches, blind.num_images) == (0, 0)


@given(st.integers(1, 30), st.integers(1, 30))
def test_windows_are_those_of_the_image_rule(rows: int, columns: int) -> None:
    rule = SmartResize(patch_size=14, min_pixels=1, max_pixels=10**8, window_patches=8)
    from indexer.image_rules import ImageSizes

    counts = rule(ImageSizes.of([(28 * columns, 28 * rows)]))
    found = features_of([pack([1, patch_image(2 * rows, 2 * columns)], sequence_length=2000)], window_patches=8)
    assert counts.sum_squared_attention.tolist() == [found.sum_squared_attention]
    assert counts.num_patches.tolist() == [found.num_patches]


def test_microbatches_are_written_one_a_line_and_read_back(tmp_path: Path) -> None:
    with StepTimer(tmp_path / "new", rank=3, skip=1) as timer:
        for _ in range(3):
            with timer.microbatch(pack()):
                for _ in range(2):
                    with timer.part("encoder"):
                        pass
                with timer.part("llm"):
                    pass
    path = tmp_path / "new" / "timings-rank00003.jsonl"
    written = lines(path)
    assert [line["step"] for line in written] == [2, 3]
    for line in written:
        assert 0 < line["encoder_seconds"] + line["llm_seconds"] < line["seconds"] < 10
        del line["encoder_seconds"], line["llm_seconds"], line["seconds"], line["step"]
        assert line == {
            "version": 1,
            "rank": 3,
            "num_patches": 24,
            "sum_squared_attention": 576,
            "num_images": 1,
            "num_tokens": 40,
            "sum_squared_tokens": 274,
        }
    found = read_timings([path])
    assert (len(found.rows), found.bad) == (2, ())
    assert found.places == (f"{path} line 1", f"{path} line 2")


def test_nothing_is_opened_while_it_is_off_or_warming_up(tmp_path: Path) -> None:
    for timer in (StepTimer(tmp_path / "a", enabled=False, skip=0), StepTimer(tmp_path / "b")):
        for _ in range(5):
            with timer.microbatch(pack()), timer.part("encoder"):
                pass
        timer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_microbatch_that_fails_is_not_written(tmp_path: Path) -> None:
    timer = StepTimer(tmp_path, skip=0)
    with pytest.raises(ZeroDivisionError), timer.microbatch(pack()), timer.part("llm"):
        _ = 1 / 0
    with timer.microbatch(pack()):
        pass
    timer.close()
    assert [line["step"] for line in lines(timer.path)] == [2]


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    timer = StepTimer(tmp_path, skip=0)
    with pytest.raises(UsageError, match="found the part 'vision', expected encoder or llm"), timer.part("vision"):  # type: ignore[arg-type]
        pass
    with timer.microbatch(pack()), pytest.raises(UsageError, match="found a microbatch within a microbatch"):
        with timer.microbatch(pack()):
            pass
    with pytest.raises(UsageError, match="found skip -1, expected at least 0"):
        StepTimer(tmp_path, skip=-1)
    with pytest.raises(UsageError, match="found clock 'gpu', expected auto, cuda or host"):
        StepTimer(tmp_path, clock="gpu")  # type: ignore[arg-type]


def test_modules_of_torch_are_watched(tmp_path: Path) -> None:
    import torch

    class Encoder(torch.nn.Module):
        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            if not len(numbers):
                raise ValueError("empty")
            return numbers * 2

    encoder, timer = Encoder(), StepTimer(tmp_path, skip=0)
    handles = timer.watch(encoder, "encoder")
    encoder(torch.ones(1))  # outside of a microbatch
    with timer.microbatch(pack()):
        encoder(torch.ones(1))
        with pytest.raises(ValueError, match="empty"):
            encoder(torch.ones(0))
        encoder(torch.ones(1))
    for handle in handles:
        handle.remove()
    with timer.microbatch(pack()):
        encoder(torch.ones(1))
    timer.close()
    first, second = lines(timer.path)
    assert 0 < first["encoder_seconds"] < first["seconds"]
    assert "encoder_seconds" not in second


class LateSpan:
    """Like an event on a device: done when it is said so, or waited for."""

    made: list[LateSpan]

    def __init__(self) -> None:
        self.done = self.stopped = self.waited = False
        self.made.append(self)

    def stop(self) -> None:
        self.stopped = True

    def seconds(self, wait: bool) -> float | None:
        assert self.stopped
        self.waited |= wait
        return 0.5 if self.done or wait else None


def test_lines_wait_for_the_device_and_the_trainer_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LateSpan.made = []
    monkeypatch.setattr(timer_module, "_CudaSpan", LateSpan)
    timer = StepTimer(tmp_path, clock="cuda", skip=0)
    for _ in range(3):
        with timer.microbatch(pack()), timer.part("encoder"):
            pass
    assert not timer.path.exists()
    for span in LateSpan.made[:4]:
        span.done = True
    with timer.microbatch(pack()):
        pass
    assert [line["step"] for line in lines(timer.path)] == [1, 2]
    assert not any(span.waited for span in LateSpan.made)
    for _ in range(timer_module._PENDING):
        with timer.microbatch(pack()):
            pass
    assert [line["step"] for line in lines(timer.path)] == [1, 2, 3, 4]
    timer.close()
    assert [line["step"] for line in lines(timer.path)] == list(range(1, 69))


@pytest.mark.gpu
def test_on_a_gpu_events_time_the_device(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    numbers = torch.ones(4096, 4096, device="cuda")
    timer = StepTimer(tmp_path, skip=2)
    for _ in range(6):
        with timer.microbatch(pack()), timer.part("encoder"):
            for _ in range(20):
                numbers = numbers @ numbers * 1e-4
    timer.close()
    written = lines(timer.path)
    assert len(written) == 4
    # 2.7 TFLOP in float32 take more than a launch, and less than a second.
    assert all(1e-3 < line["encoder_seconds"] <= line["seconds"] < 1 for line in written)


def test_a_full_disk_ends_the_measuring_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timer = StepTimer(tmp_path, skip=0)
    monkeypatch.setattr(timer, "path", Path("/dev/full"))
    monkeypatch.setattr(timer_module, "_opened", lambda path: os.open(path, os.O_WRONLY))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with timer.microbatch(pack()):
                pass
    timer.close()
    assert [record.getMessage() for record in caplog.records] == [
        "timings of rank 0 end here, training goes on: [Errno 28] No space left on device"
    ]


def test_a_kill_costs_no_line_and_a_cut_line_costs_itself(tmp_path: Path) -> None:
    code = """
import os, signal, sys
sys.path.append(sys.argv[2])
from pack_samples import PATCHES, pack_sample
from plugin.batch import build
from plugin.cost import StepTimer
batch = build([pack_sample([3], "a")], form=PATCHES, sequence_length=40, pad_id=0)
timer = StepTimer(sys.argv[1], skip=0, clock="host")
for number in range(20):
    with timer.microbatch(batch):
        pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path), str(ROOT / "tests" / "support")]
    path = tmp_path / "timings-rank00000.jsonl"
    for run in (1, 2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = read_timings([path])
        assert len(found.rows) == 20 * run
        if run == 1:
            path.write_bytes(path.read_bytes() + b'{"version":1,"num_pat')
            assert [bad.place for bad in read_timings([path]).bad] == [f"{path} line 21"]
    assert [bad.place for bad in found.bad] == [f"{path} line 21"]


GOOD = {
    "version": 1,
    "num_patches": 4,
    "sum_squared_attention": 16,
    "num_images": 1,
    "num_tokens": 8,
    "sum_squared_tokens": 64,
    "seconds": 0.5,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_patches": -1}, "Expected int >= 0 - at $.num_patches"),
        ({"num_patches": 1.5}, "Expected int, got float - at $.num_patches"),
        ({"num_tokens": None}, "Expected int, got null - at $.num_tokens"),
        ({"version": 2}, "Expected int <= 1 - at $.version"),
        ({"seconds": 0}, "Expected float > 0.0 - at $.seconds"),
        ({"seconds": None}, "found none of encoder_seconds, llm_seconds, seconds, expected at least one"),
        ({"second": 1.0}, "Object contains unknown field second"),
    ],
)
def test_a_bad_line_costs_itself_and_is_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD | change)}\n{json.dumps(GOOD)}\n")
    found = read_timings([path])
    assert len(found.rows) == 2
    assert [(bad.place, bad.reason) for bad in found.bad] == [(f"{path} line 3", reason)]
    np.testing.assert_array_equal(found.column("encoder_seconds"), [np.nan, np.nan])


def test_bytes_that_are_no_text_cost_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xff\xfe{"a"}\n' + json.dumps(GOOD).encode())
    found = read_timings([path])
    assert (len(found.rows), [bad.place for bad in found.bad]) == (1, [f"{path} line 1"])


def test_files_without_a_good_line_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n[]")
    with pytest.raises(FormatError, match=r"no good line of timings and 2 bad ones; the first, .*a.jsonl line 1: Object missing"):
        read_timings([path])
    path.write_text("")
    with pytest.raises(FormatError, match=r"found no good line of timings and 0 bad ones$"):
        read_timings([path])
