"""Hugging Face's Trainer and accelerate over a real loader: exact packs, exact resume, loss by tokens, refusals by name."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import hf_rank
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState, PartialState
from loading import SETTINGS, Epochs, ids, opened, write_stream
from tiny_qwen import TEXT, tiny_qwen2, tiny_qwen25
from torch.utils.data import DataLoader, IterableDataset
from torchrun import torchrun
from transformers import Qwen2Config, Trainer, TrainingArguments

from packer.format.errors import FormatError, UsageError
from plugin.adapters.huggingface import (
    BayplanCallback,
    BayplanTrainerMixin,
    keep_data_state,
    refuse_unfit_balance,
    takes_mrope,
)
from plugin.adapters.rank_states import restore_rank, save_rank, state_file
from plugin.batch import to_hf
from plugin.loader import PackLoader
from plugin.reorder import BalancedPackLoader

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded")


class PackTrainer(BayplanTrainerMixin, Trainer):
    """Keeps what each batch was counted to have."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.__dict__.setdefault("counted", []).append(int(num_items_in_batch))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.fixture(autouse=True)
def no_state_of_accelerate() -> Iterator[None]:
    """It is kept for the whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("stream") / "job")


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(output),
            "max_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "ignore_data_skip": True,
            "remove_unused_columns": False,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "log_level": "error",
        }
        | changes
    )


def trainer_of(loader: Any, output: Path, model: Any = None, callbacks: Any = None, **changes: Any) -> PackTrainer:
    model = model or tiny_qwen25()
    return PackTrainer(model=model, args=arguments(output, **changes), train_dataset=loader, callbacks=callbacks)


def losses(trainer: PackTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def packs_of(loader: PackLoader) -> list[tuple[str, ...]]:
    return [loader.sample_ids(number) for number in sorted(loader._ids)]


@pytest.fixture(scope="module")
def whole_run(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[tuple[str, ...]]]:
    """Four steps of two packs each, with checkpoints at steps 2 and 4: its folder, losses and packs."""
    output = tmp_path_factory.mktemp("run")
    with opened(url) as loader:
        trainer = trainer_of(loader, output)
        trainer.train()
        return output, losses(trainer), packs_of(loader)


def test_trainer_trains_on_exactly_the_loaders_packs(url: str, whole_run: Any) -> None:
    _, found, packs = whole_run
    assert len(found) == 4
    assert all(torch.isfinite(torch.tensor(found)))
    with opened(url) as loader:
        assert packs == [next(loader).batch.sample_ids for _ in range(8)]


@pytest.mark.parametrize("resume", ["by path", "the latest"])
def test_a_resumed_run_has_the_same_losses_and_packs(url: str, whole_run: Any, tmp_path: Path, resume: str) -> None:
    output, expected, packs = whole_run
    checkpoint: Any = str(output / "checkpoint-2")
    if resume == "the latest":
        os.symlink(checkpoint, tmp_path / "checkpoint-2")
        checkpoint = str(tmp_path / "checkpoint-2")
    model = type(tiny_qwen25()).from_pretrained(checkpoint)
    with opened(url) as loader:
        trainer = trainer_of(loader, tmp_path, model)
        trainer.train(resume_from_checkpoint=True if resume == "the latest" else checkpoint)
        assert losses(trainer) == expected
        assert packs_of(loader) == packs[4:]
        assert loader.num_packs == 8


@pytest.mark.parametrize("build", [tiny_qwen2, tiny_qwen25])
def test_the_loss_of_a_step_is_the_mean_over_the_tokens_of_its_packs(url: str, tmp_path: Path, build: Callable[[], Any]) -> None:
    """Also of models that say their loss takes no number of tokens: Trainer would weigh packs equally."""
    with opened(url) as loader:
        trainer = trainer_of(loader, tmp_path, build(), max_steps=2, learning_rate=0.0, save_strategy="no")
        trainer.train()
    model, expected, counted = build(), [], []
    with opened(url) as loader, torch.no_grad():
        for _ in range(2):
            packs = [next(loader) for _ in range(2)]
            numbers = [pack.batch.num_loss_tokens for pack in packs]
            assert numbers[0] != numbers[1]
            sums = [
                float(model(**to_hf(pack, normalise=loader.normalise, mrope=True)).loss) * number
                for pack, number in zip(packs, numbers, strict=True)
            ]
            expected.append(sum(sums) / sum(numbers))
            counted += [sum(numbers)] * 2
    assert trainer.counted == counted
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)


def test_pixels_reach_trainers_loop_as_bytes(url: str, tmp_path: Path) -> None:
    with opened(url, replace(SETTINGS, ensure_image=True)) as loader:
        trainer = trainer_of(loader, tmp_path)
        item = next(iter(trainer.get_train_dataloader()))
        assert item["pack"].views["pixels"].dtype == torch.uint8
        given = trainer._prepare_inputs(item)
        expected = to_hf(item["pack"], normalise=loader.normalise, mrope=True)
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in given if name != "use_cache")
    assert given["position_ids"].shape[:2] == (4, 1)
    assert given["pixel_values"].dtype == torch.float32


class Wrapped(IterableDataset):  # type: ignore[type-arg]
    """What one would hand to torch's loader; accelerate takes it for a stream that no rank has cut."""

    def __init__(self, loader: PackLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self.loader


def test_accelerate_would_cut_a_wrapped_stream_again_and_leaves_ours_alone(url: str, tmp_path: Path) -> None:
    place = {"rank": 1, "world_size": 2}
    with opened(url, **place) as loader:
        expected = [next(loader).batch.sample_ids for _ in range(8)]
    with opened(url, **place) as loader:
        wrapped = DataLoader(Wrapped(loader), batch_size=1, collate_fn=itemgetter(0))
        prepared = prepare_data_loader(wrapped, num_processes=2, process_index=1, dispatch_batches=False, put_on_device=False)
        found = [pack.batch.sample_ids for _, pack in zip(range(4), prepared, strict=False)]
        assert found == expected[1::2], "the trap is as it was described"
    with opened(url, **place) as loader:
        assert Accelerator(cpu=True).prepare(loader) is loader
        trainer = trainer_of(opened(url), tmp_path)
        assert not isinstance(trainer.get_train_dataloader(), DataLoader)


def test_each_rank_trains_on_its_own_packs_and_all_tokens_count(url: str, tmp_path: Path) -> None:
    """Two processes over gloo."""
    torchrun(Path(hf_rank.__file__), url, str(tmp_path), num_ranks=2)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    numbers = []
    for rank in range(2):
        with opened(url, rank=rank, world_size=2) as loader:
            packs = [next(loader).batch for _ in range(3)]
            assert found[rank]["ids"] == [list(pack.sample_ids) for pack in packs]
            numbers.append([pack.num_loss_tokens for pack in packs])
            following = next(loader).batch.sample_ids
        with opened(url, rank=rank, world_size=2) as again:
            restore_rank(again, tmp_path / "checkpoint-3", step=3)
            assert next(again).batch.sample_ids == following
    assert found[0]["counted"] == found[1]["counted"] == [sum(pair) for pair in zip(*numbers, strict=True)]
    with opened(url, world_size=4) as other, pytest.raises(UsageError, match="found 2 data-parallel ranks, expected 4"):
        restore_rank(other, tmp_path / "checkpoint-3")


COST = replace(SETTINGS, cost="qwen2_5_vl_vit+qwen3_8b", ensure_image=True)


def test_ranks_train_on_the_packs_that_are_dealt_to_them(url: str, tmp_path: Path) -> None:
    """Two processes over gloo; the state that Trainer saved goes on behind the last step."""
    torchrun(Path(hf_rank.__file__), url, str(tmp_path), "balance", num_ranks=2)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    arrived: list[list[list[str]]] = []
    for rank in range(2):
        with opened(url, COST, rank=rank, world_size=2) as loader:
            arrived.append([list(next(loader).batch.sample_ids) for _ in range(8)])
    for step in range(3):
        batch = slice(2 * step, 2 * step + 2)
        assert sorted(found[0]["ids"][batch] + found[1]["ids"][batch]) == sorted(arrived[0][batch] + arrived[1][batch])
    assert found[0]["losses"] == found[1]["losses"]
    assert [len(one["ids"]) for one in found] == [6, 6]
    for rank in range(2):
        with opened(url, COST, rank=rank, world_size=2) as loader:
            with open(state_file(tmp_path / "checkpoint-3", rank), "rb") as file:
                state = pickle.load(file)["loader"]
            assert (state["step"], state["yielded"], state["num_packs"]) == (3, 0, 6)
            loader.restore_state(state["snapshot"])
            assert list(next(loader).batch.sample_ids) == arrived[rank][6]


def balanced(url: str, number: int = 2, **arguments: Any) -> BalancedPackLoader:
    return BalancedPackLoader(opened(url, COST, **arguments), num_microbatches=number)


@pytest.fixture(scope="module")
def balanced_run(url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    output = tmp_path_factory.mktemp("run")
    loader = balanced(url)
    trainer = trainer_of(loader, output)
    trainer.train()
    with pytest.raises(StopIteration):  # the end of the run closes it
        next(loader)
    return output, losses(trainer)


def test_a_balanced_run_has_the_losses_of_one_that_is_not(url: str, balanced_run: Any, tmp_path: Path) -> None:
    with opened(url, COST) as loader:
        trainer = trainer_of(loader, tmp_path)
        trainer.train()
    assert balanced_run[1] == pytest.approx(losses(trainer), rel=1e-3)


def test_a_balanced_run_that_is_resumed_has_the_same_losses(url: str, balanced_run: Any, tmp_path: Path) -> None:
    checkpoint = str(balanced_run[0] / "checkpoint-2")
    with balanced(url) as loader:
        trainer = trainer_of(loader, tmp_path, type(tiny_qwen25()).from_pretrained(checkpoint))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert losses(trainer) == balanced_run[1]
        assert loader.num_packs == 8


def test_a_run_leaves_balancing_between_two_steps_and_not_within_one(url: str, tmp_path: Path) -> None:
    with balanced(url) as loader:
        for _ in range(2):
            next(loader)
        save_rank(loader, tmp_path / "between")
        next(loader)
        save_rank(loader, tmp_path / "within")
    with opened(url, COST) as plain:
        following = [next(plain).batch.sample_ids for _ in range(3)][2]
    with opened(url, COST) as plain:
        with pytest.raises(UsageError, match="found the state of a balanced loader, expected one of a loader alone"):
            restore_rank(plain, tmp_path / "within")
        restore_rank(plain, tmp_path / "between")
        assert (plain.num_packs, next(plain).batch.sample_ids) == (2, following)


def test_a_balanced_loader_that_deals_other_steps_is_refused(url: str, tmp_path: Path) -> None:
    with balanced(url, 3) as loader, pytest.raises(UsageError, match=r"num_microbatches 3 and gradient_accumulation_steps 2,"):
        trainer_of(loader, tmp_path)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    with balanced(url) as loader, pytest.raises(UsageError, match=r"num_microbatches 2 and gradient_accumulation_steps 4,"):
        keep_data_state(accelerator, loader)
    with BalancedPackLoader(opened(url, COST), num_microbatches=lambda step: 2 + step // 3) as loader:
        with pytest.raises(UsageError, match=r"num_microbatches 3 and gradient_accumulation_steps 2,"):
            trainer_of(loader, tmp_path)
        trainer_of(loader, tmp_path, max_steps=3)


def test_ranks_that_meet_at_each_microbatch_should_be_balanced_so(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with balanced(url) as loader:
        refuse_unfit_balance(loader, 2, 4, shards_parameters=False)
        assert not caplog.records
        refuse_unfit_balance(loader, 2, 4, shards_parameters=True)
    assert "topology=Topology(num_ranks=1, synchronises='microbatch')" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_device_train_batch_size": 4}, "per_device_train_batch_size 4, expected 1: a pack is a batch"),
        ({"ignore_data_skip": False}, "ignore_data_skip False, expected True: the stream resumes by its state"),
        ({"remove_unused_columns": True}, "remove_unused_columns True, expected False"),
        ({"dataloader_num_workers": 2}, "dataloader_num_workers 2, expected 0: the loader has its own"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size True, expected False"),
    ],
)
def test_arguments_that_lose_or_repeat_data_are_refused(url: str, tmp_path: Path, change: Any, message: str) -> None:
    with opened(url) as loader, pytest.raises(UsageError, match=message):
        trainer_of(loader, tmp_path, **change)


def test_a_run_without_a_number_of_steps_is_refused(url: str, tmp_path: Path) -> None:
    """By Trainer itself where it looks, and by the callback of a trainer without the mixin."""
    with opened(url) as loader:
        with pytest.raises(ValueError, match="max_steps has to be specified"):
            trainer_of(loader, tmp_path, max_steps=-1)
        with pytest.raises(UsageError, match="max_steps -1, expected a number of steps"):
            BayplanCallback(loader).on_train_begin(arguments(tmp_path, max_steps=-1), None, None)


def test_a_model_with_another_token_for_images_is_refused(url: str, tmp_path: Path) -> None:
    """Its placeholders would not be found, or be taken for text."""
    with opened(url) as loader:
        trainer = trainer_of(loader, tmp_path / "run")
        trainer.model.config.image_token_id += 1  # type: ignore[union-attr]
        with pytest.raises(
            UsageError, match=r"found image tokens of id \d+ in a pack, expected \d+ as in the model's configuration"
        ):
            trainer.train()


def test_what_is_no_loader_of_this_rank_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found a train_dataset of list, expected a `PackLoader`"):
        trainer_of([1, 2], tmp_path)
    with (
        opened(url, rank=1, world_size=2) as loader,
        pytest.raises(UsageError, match=r"rank 1 of 2, expected rank 0 of 1.*open it"),
    ):
        trainer_of(loader, tmp_path)
    with opened(url) as loader, pytest.raises(UsageError, match="stream of packs as eval_dataset"):
        PackTrainer(model=tiny_qwen25(), args=arguments(tmp_path), train_dataset=loader, eval_dataset=loader)


def test_weights_that_trainer_would_pass_over_are_refused(url: str, whole_run: Any, tmp_path: Path) -> None:
    """Its checkpoints of this model have other names; it would go on with random weights and a warning."""
    with opened(url) as loader:
        trainer = trainer_of(loader, tmp_path)
        with pytest.raises(UsageError, match=r"found \d+ weights in .*Qwen2_5_VLForConditionalGeneration.from_pretrained"):
            trainer.train(resume_from_checkpoint=str(whole_run[0] / "checkpoint-2"))


def copied(checkpoint: Path, to: Path) -> Path:
    """A checkpoint whose files are links, so that a test may take some away."""
    to.mkdir(parents=True)
    for file in checkpoint.iterdir():
        os.symlink(file, to / file.name)
    return to


def test_a_checkpoint_without_data_state_is_refused_with_those_that_have_one(url: str, whole_run: Any, tmp_path: Path) -> None:
    checkpoint = copied(whole_run[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    state_file(checkpoint, 0).unlink()
    model = type(tiny_qwen25()).from_pretrained(checkpoint)
    with opened(url) as loader:
        trainer = trainer_of(loader, tmp_path, model)
        with pytest.raises(UsageError, match=r"no data state in .*checkpoint-2: found none beside it either; .*`starts_over`"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        copied(whole_run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
        with pytest.raises(UsageError, match=r"found those of steps 4 beside it; resume from one of them"):
            restore_rank(loader, checkpoint)


def test_a_data_state_of_another_step_is_refused(url: str, whole_run: Any, tmp_path: Path) -> None:
    with opened(url) as loader:
        with pytest.raises(UsageError, match=r"found one of step 2, expected step 4.*files of two checkpoints"):
            restore_rank(loader, whole_run[0] / "checkpoint-2", step=4)
        assert next(loader)


def test_data_starts_over_only_where_it_is_asked_for(
    url: str, whole_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = whole_run[0] / "checkpoint-2"
    model = type(tiny_qwen25()).from_pretrained(checkpoint)
    with opened(url) as loader, caplog.at_level(logging.INFO):
        callback = BayplanCallback(loader, starts_over=True, log_every_steps=2)
        trainer = trainer_of(loader, tmp_path, model, [callback])
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert packs_of(loader) == whole_run[2][:4]
    assert "the data starts over; the model has trained for 2 steps" in caplog.text
    assert "step 4: 4 packs; " in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no data state"),
        (pickle.dumps({"kind": "bayplan data state", "version": 1, "loader": Path("x")}), "it holds a pathlib"),
        (pickle.dumps(["else"]), "found a list, expected a data state"),
    ],
)
def test_a_file_that_is_no_state_is_refused_and_makes_no_object(url: str, tmp_path: Path, content: bytes, message: str) -> None:
    state_file(tmp_path, 0).write_bytes(content)
    with opened(url) as loader, pytest.raises(FormatError, match=message):
        restore_rank(loader, tmp_path)


def test_a_state_of_another_version_is_refused(url: str, tmp_path: Path) -> None:
    state_file(tmp_path, 0).write_bytes(pickle.dumps({"kind": "bayplan data state", "version": 9}))
    with opened(url) as loader, pytest.raises(UsageError, match="found version 9, expected 1"):
        restore_rank(loader, tmp_path)


@pytest.mark.parametrize(("open_loader", "num_workers"), [(opened, 0), (opened, 2), (balanced, 0)])
def test_accelerates_checkpoints_take_the_loader_along(
    url: str, tmp_path: Path, open_loader: Callable[..., Any], num_workers: int
) -> None:
    accelerator = Accelerator(cpu=True)
    with open_loader(url, num_workers=num_workers) as loader:
        stop_saving, stop_loading = keep_data_state(accelerator, loader)
        ids(pack for _, pack in zip(range(3), loader, strict=False))
        accelerator.save_state(str(tmp_path / "state"))
        following = [next(loader).batch.sample_ids for _ in range(3)]
        stop_saving(), stop_loading()
    with open_loader(url, num_workers=num_workers) as again:
        keep_data_state(accelerator, again)
        accelerator.load_state(str(tmp_path / "state"))
        assert [next(again).batch.sample_ids for _ in range(3)] == following


def test_a_loader_is_stateful_as_torchdata_asks(url: str) -> None:
    with opened(url) as loader:
        next(loader)
        state = loader.state_dict()
        following = next(loader).batch.sample_ids
    with opened(url) as again:
        again.load_state_dict(state)
        assert next(again).batch.sample_ids == following


def test_an_unfinished_write_leaves_the_state_that_was(url: str, tmp_path: Path) -> None:
    with opened(url) as loader:
        path = save_rank(loader, tmp_path)
        assert list(tmp_path.iterdir()) == [path]


def test_with_an_image_in_every_pack_each_step_runs_the_encoder(url: str) -> None:
    """What ZeRO-3, FSDP and DDP need of every rank; the grey image of a pack without any changes no weight."""
    model = tiny_qwen25()
    with Epochs(url, replace(SETTINGS, ensure_image=True), sources="text pics").open() as loader:
        seen = {0: 0, 1: 0}
        for pack in loader:
            model.zero_grad()
            model(**to_hf(pack, normalise=loader.normalise, mrope=True)).loss.backward()
            gradients = [parameter.grad for parameter in model.model.visual.parameters()]
            assert all(gradient is not None for gradient in gradients)
            has_image = pack.batch.num_images > 0
            assert any(bool(gradient.any()) for gradient in gradients) == has_image
            seen[has_image] += 1
            if min(seen.values()) > 2:
                break
    assert min(seen.values()) > 0
    Epochs(url)  # writes the blend of all sources again


def test_the_kind_of_positions_is_read_from_the_models_configuration() -> None:
    assert takes_mrope(tiny_qwen2().config)
    assert takes_mrope(tiny_qwen25().config)
    plain = {name: value for name, value in TEXT.items() if name != "rope_parameters"}
    assert not takes_mrope(Qwen2Config(**plain))
