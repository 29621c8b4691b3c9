"""The example's training is exact: stopped and resumed, with any number of loader workers, on several ranks, balanced or not."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-energon is not installed", allow_module_level=True)

import numpy as np
import torch
from loading import PROFILE, write_stream
from pack_samples import pack_sample, patch_image
from rank_processes import RankProcesses
from tiny_training import (
    EXAMPLES,
    SIZES,
    PacksInMemory,
    new_model,
    normalise,
    packed,
    some_packs,
    train_in_memory,
    train_on_dataset,
)
from tiny_vlm import TinyVlm
from torchrun import torchrun
from train_tiny_vlm import Settings, main, train

from packer.format.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")
]


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """The script's own last. One thread is faster for a model of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankProcesses]:
    ranks = RankProcesses(2)
    yield ranks
    assert ranks.close() == [0, 0]


def test_the_loss_falls_and_only_because_images_are_seen() -> None:
    """Eight images that differ in nothing but pixels, each with a word of its own: without them 1 of 8 is right."""
    samples = [pack_sample([1, patch_image(2, 4, seed), 1], str(seed)) for seed in range(8)]
    for word, sample in enumerate(samples):
        sample.encoded.ids[0], sample.encoded.ids[-1] = 1, 10 + word
        sample.encoded.loss_mask[:-1] = False
    losses = train(PacksInMemory([packed(samples)]), new_model(), Settings(steps=60, learning_rate=3e-3))
    assert losses[0] > math.log(8)
    assert losses[-1] < 0.5
    blind = [replace(sample, images=(patch_image(2, 4),)) for sample in samples]
    losses = train(PacksInMemory([packed(blind)]), new_model(), Settings(steps=60, learning_rate=3e-3))
    assert losses[-1] > 0.99 * math.log(8)


def test_stopped_and_resumed_at_any_step_it_goes_on_to_the_bit(tmp_path: Path) -> None:
    at_once = Settings(steps=9, accumulation=2, save=tmp_path / "all", save_every=1)
    losses = train(PacksInMemory(some_packs(12)), new_model(), at_once)
    assert len(set(losses)) == 9
    for stop in (1, 4, 8):
        save = tmp_path / str(stop)
        first = Settings(steps=stop, accumulation=2, save=save, losses=tmp_path / "losses")
        assert train(PacksInMemory(some_packs(12)), new_model(), first) == losses[:stop]
        resumed = replace(first, steps=9, resume=True)
        torch.manual_seed(stop)
        other_weights = TinyVlm(SIZES, normalise)
        assert train(PacksInMemory(some_packs(12)), other_weights, resumed) == losses[stop:]
        lines = [json.loads(line) for line in (tmp_path / "losses").read_text().splitlines()]
        assert [(line["step"], line["loss"]) for line in lines] == list(enumerate(losses, start=1))


def test_steps_after_the_checkpoint_are_taken_again(tmp_path: Path) -> None:
    """A run that was killed has written more losses than it has saved, and maybe half a checkpoint."""
    run = Settings(steps=4, save=tmp_path / "save", save_every=2, losses=tmp_path / "losses")
    losses = train(PacksInMemory(some_packs(12)), new_model(), run)
    (newest,) = (tmp_path / "save" / "step-000004").iterdir()
    newest.rename(newest.with_suffix(".tmp"))
    assert train(PacksInMemory(some_packs(12)), new_model(), replace(run, steps=5, resume=True))[:2] == losses[2:]
    assert [json.loads(line)["step"] for line in (tmp_path / "losses").read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    for save in (None, tmp_path):
        with pytest.raises(UsageError, match="found no checkpoint of 1 ranks in"):
            train(PacksInMemory(some_packs(1)), new_model(), Settings(steps=1, save=save, resume=True))


def test_each_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        (loss,) = train(PacksInMemory(some_packs(2)), new_model(), Settings(steps=1, accumulation=2))
    number = sum(pack.num_loss_tokens for pack in some_packs(2))
    assert [record.message for record in caplog.records] == [f"step 1: loss {loss:.4f} of {number} tokens; 2 packs"]


def losses_in(path: Path, first: int = 1) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(first, first + len(lines)))
    return [line["loss"] for line in lines]


def test_two_ranks_train_as_one(two_ranks: RankProcesses) -> None:
    """The same global batches of four packs; in one step a rank has no image, and ranks differ in loss tokens."""
    packs = some_packs(12)
    assert packs[5].num_images == packs[7].num_images == 0, "the second rank's packs of the second step"
    alone = train(PacksInMemory(packs), new_model(), Settings(steps=8, accumulation=4))
    one, other = two_ranks.run(train_in_memory, Settings(steps=8, accumulation=2))
    assert one is not None
    assert other is not None
    assert one.value == other.value, one.error
    # Sums are of another order, and steps amplify their last bits.
    assert one.value == pytest.approx(alone, rel=1e-5)


# A dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


def words(url: str, folder: Path, name: str, *more: str) -> list[str]:
    """Twelve steps, saved at the sixth and at the end."""
    made = ["--dataset", url, "--profile", PROFILE, "--steps", "12", "--save-every", "6", "--save", str(folder / "save")]
    made += ["--sequence-length", "256", "--max-patches-per-pack", "512", "--buffer-size", "40"]
    return [*made, "--learning-rate", "1e-2", "--hidden", "32", "--layers", "1", "--losses", str(folder / name), *more]


def forget_the_end(folder: Path) -> None:
    """As if the run had been killed behind its middle step."""
    shutil.rmtree(max((folder / "save").iterdir()))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_the_script_trains_on_a_dataset_and_resumes_to_the_bit(dataset: str, tmp_path: Path, num_workers: int) -> None:
    workers = ("--num-workers", str(num_workers))
    main(words(dataset, tmp_path, "at once", *workers))
    at_once = losses_in(tmp_path / "at once")
    assert len(set(at_once)) == 12
    assert np.mean(at_once[-3:]) < 0.8 * np.mean(at_once[:3])
    forget_the_end(tmp_path)
    main(words(dataset, tmp_path, "resumed", *workers, "--resume"))
    assert losses_in(tmp_path / "resumed", first=7) == at_once[6:]


def test_two_ranks_train_on_a_dataset_and_other_processes_resume_to_the_bit(
    dataset: str, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    outcomes = two_ranks.run(main, words(dataset, tmp_path, "at once", "--num-workers", "0"))
    assert [outcome.error if outcome else "died" for outcome in outcomes] == [None, None]
    at_once = losses_in(tmp_path / "at once")
    assert len(set(at_once)) == 12
    assert {path.name for path in (tmp_path / "save" / "step-000006").iterdir()} == {"rank-0-of-2.pt", "rank-1-of-2.pt"}
    forget_the_end(tmp_path)
    resumed = words(dataset, tmp_path, "resumed", "--num-workers", "0", "--resume")
    torchrun(EXAMPLES / "train_tiny_vlm.py", *resumed, num_ranks=2)
    assert losses_in(tmp_path / "resumed", first=7) == at_once[6:]
    with pytest.raises(UsageError, match="found no checkpoint of 1 ranks"):
        main(words(dataset, tmp_path, "alone", "--num-workers", "0", "--resume"))


# Balanced


def balanced_words(url: str, folder: Path, name: str, *more: str) -> list[str]:
    """Four packs of a rank in a step, enough to deal; six steps, saved at the third."""
    folder.mkdir(exist_ok=True)
    made = ["--num-workers", "0", "--accumulation", "4", "--steps", "6", "--save-every", "3", *more]
    return words(url, folder, name, *made)


def steps_in(path: Path) -> list[tuple[int, int]]:
    """Steps and the loss tokens they were divided by."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["num_loss_tokens"]) for line in lines]


def run_both(ranks: RankProcesses, line: list[str]) -> list[str]:
    """The script on both ranks of a world; what the first logged."""
    outcomes = ranks.run(train_on_dataset, line)
    assert [outcome.error if outcome else "died" for outcome in outcomes] == [None, None]
    assert outcomes[0] is not None
    return outcomes[0].logs


def test_dealt_packs_give_the_losses_of_packs_as_they_come_and_resume_to_the_bit(
    dataset: str, tmp_path: Path, two_ranks: RankProcesses
) -> None:
    """The same global batches, so the same losses; sums are of another order, and steps amplify their last bits."""
    run_both(two_ranks, balanced_words(dataset, tmp_path / "as they come", "losses"))
    logs = run_both(two_ranks, balanced_words(dataset, tmp_path / "dealt", "losses", "--balance"))
    moved = [int(found) for line in logs for found in re.findall(r"best; (\d+) of 8 packs moved", line)]
    assert sum(moved) > 0, "otherwise nothing is shown here"
    came, dealt = (losses_in(tmp_path / name / "losses") for name in ("as they come", "dealt"))
    assert dealt != came
    assert dealt == pytest.approx(came, rel=1e-5)
    assert steps_in(tmp_path / "dealt" / "losses") == steps_in(tmp_path / "as they come" / "losses")
    forget_the_end(tmp_path / "dealt")
    run_both(two_ranks, balanced_words(dataset, tmp_path / "dealt", "resumed", "--balance", "--resume"))
    assert losses_in(tmp_path / "dealt" / "resumed", first=4) == dealt[3:]


def test_a_run_may_begin_to_balance_and_leave_it_again(dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Alone nothing moves, but packs are taken in another order."""
    main(balanced_words(dataset, tmp_path, "at once", "--steps", "7"))
    forget_the_end(tmp_path)
    forget_the_end(tmp_path)
    with caplog.at_level(logging.INFO):
        main(balanced_words(dataset, tmp_path, "resumed", "--balance", "local", "--resume"))
    assert losses_in(tmp_path / "resumed", first=4) == pytest.approx(losses_in(tmp_path / "at once")[3:6], rel=1e-5)
    assert any(re.search(r"step 6: loss .*; imbalance \S+ dealt to", record.message) for record in caplog.records)
    main(balanced_words(dataset, tmp_path, "left", "--resume", "--steps", "7"))
    assert losses_in(tmp_path / "left", first=7) == pytest.approx(losses_in(tmp_path / "at once")[6:], rel=1e-5)


def test_costs_are_of_a_known_model(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found no language model 'qwen9'"):
        main(balanced_words(dataset, tmp_path, "losses", "--balance", "--cost", "qwen2_5_vl_vit+qwen9"))
