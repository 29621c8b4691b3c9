"""Saving and resuming by Bridge's own functions: the files, the allow-list that reads them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bridge_classes
import pytest
import torch

from packer.format.errors import UsageError


def iterator(provider: Any, groups: Any) -> Any:
    from megatron.bridge.data.base import DatasetBuildContext
    from megatron.core.rerun_state_machine import RerunDataIterator

    context = DatasetBuildContext(train_samples=1, valid_samples=0, test_samples=0, pg_collection=groups)
    return RerunDataIterator(provider.build_datasets(context)[0])


def tokens(iterator: Any, number: int) -> list[torch.Tensor]:
    return [next(iterator)["tokens"] for _ in range(number)]


def save(iterator: Any, step: int, folder: Path, groups: Any) -> None:
    bridge_classes.checkpointing().maybe_save_dataloader_state([], iterator, step, str(folder), pg_collection=groups)


def load(iterator: Any, step: int, folder: Path, groups: Any) -> None:
    bridge_classes.checkpointing().maybe_load_dataloader_state(iterator, step, str(folder), pg_collection=groups)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("num_before", [0, 1, 7])
def test_a_resumed_run_sees_the_packs_that_were_to_come(
    provider: Any, groups: Any, tmp_path: Path, num_workers: int, num_before: int
) -> None:
    provider.num_workers = num_workers
    first = iterator(provider, groups)
    tokens(first, num_before)
    save(first, 10, tmp_path, groups)
    second = iterator(provider, groups)
    load(second, 10, tmp_path, groups)
    assert second.iterable.position == num_before
    for one, other in zip(tokens(first, 6), tokens(second, 6), strict=True):
        assert torch.equal(one, other)
    for each in (first, second):
        each.iterable.loader.close()


def test_the_allow_list_reads_the_file_that_bridge_writes(provider: Any, groups: Any, tmp_path: Path) -> None:
    from megatron.bridge.utils.safe_pickle import energon_torch_load

    saved = iterator(provider, groups)
    tokens(saved, 3)
    save(saved, 10, tmp_path, groups)
    file = tmp_path / "iter_0000010" / "train_dataloader_dprank000.pt"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
    content = energon_torch_load(str(file))
    assert list(content) == ["dataloader_state_dict"]
    state = content["dataloader_state_dict"]
    assert (state["kind"], state["position"], state["loader"]["num_packs"]) == ("bayplan data state", 3, 3)


def test_bridge_alone_starts_over_in_silence_without_a_folder(provider: Any, groups: Any, tmp_path: Path) -> None:
    resumed = iterator(provider, groups)
    load(resumed, 10, tmp_path / "absent", groups)
    assert resumed.iterable.position == 0
    with pytest.raises(RuntimeError, match="missing"):
        load(resumed, 10, tmp_path, groups)


def test_a_state_of_another_loader_is_refused_by_name(provider: Any, groups: Any, tmp_path: Path) -> None:
    saved = iterator(provider, groups)
    tokens(saved, 2)
    energon = saved.iterable.loader.save_state()["energon"]
    save(SimpleNamespace(iterable=SimpleNamespace(save_state=lambda: energon)), 10, tmp_path, groups)
    with pytest.raises(UsageError, match="found a SavableDataLoaderState of another data loader"):
        load(iterator(provider, groups), 10, tmp_path, groups)


def test_a_state_of_another_profile_shape_or_seed_is_refused(provider: Any, groups: Any, tmp_path: Path) -> None:
    saved = iterator(provider, groups)
    tokens(saved, 2)
    save(saved, 10, tmp_path, groups)
    provider.seed = 5
    with pytest.raises(UsageError, match="found seed 0 in the state, 5 here"):
        load(iterator(provider, groups), 10, tmp_path, groups)
    provider.seed, provider.sequence_length = 0, 1024
    with pytest.raises(UsageError, match=r"found limits .*2048.*1024"):
        load(iterator(provider, groups), 10, tmp_path, groups)


class Run:
    """A run of the training loop as far as callbacks see it."""

    def __init__(self, provider: Any, groups: Any, folder: Path, *, step: int, consumed: int, **options: Any) -> None:
        from megatron.bridge.training.callbacks import CallbackContext, CallbackManager

        from plugin.adapters.bridge import BayplanCallback

        model = torch.nn.Linear(1, 1)
        model.pg_collection = groups
        self.config = SimpleNamespace(
            train=SimpleNamespace(micro_batch_size=1, iterations_to_skip=[]),
            model=SimpleNamespace(
                seq_length=2048, sequence_parallel=False, context_parallel_size=1, pipeline_model_parallel_size=3
            ),
            dist=SimpleNamespace(eval_context_parallel_size=None),
            checkpoint=SimpleNamespace(load=str(folder), save=str(folder)),
        )
        train_state = SimpleNamespace(step=step, consumed_train_samples=consumed)
        self.context = CallbackContext(state=SimpleNamespace(cfg=self.config, train_state=train_state), model=[model])
        self.manager = CallbackManager()
        self.manager.add(BayplanCallback(provider, **options))

    def fire(self, *events: str) -> None:
        for event in events:
            self.manager.fire(event, self.context)


def test_a_run_resumed_at_its_step_goes_on(provider: Any, groups: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = iterator(provider, groups)
    tokens(first, 8)
    save(first, 4, tmp_path / "energon", groups)
    run = Run(provider, groups, tmp_path, step=4, consumed=8, log_every_steps=2)
    run.fire("on_data_init_start")
    second = iterator(provider, groups)
    load(second, 4, tmp_path / "energon", groups)
    with caplog.at_level("INFO"):
        run.fire("on_train_start", "on_train_step_end")
    assert sum("step 4: " in record.message for record in caplog.records) == 1
    assert torch.equal(tokens(first, 1)[0], tokens(second, 1)[0])


def test_a_step_without_data_state_is_said_before_the_data_is_opened(provider: Any, groups: Any, tmp_path: Path) -> None:
    first = iterator(provider, groups)
    run = Run(provider, groups, tmp_path, step=10, consumed=20)
    with pytest.raises(UsageError, match=r"no data state for step 10 in .*energon.*found none of any step.*starts_over"):
        run.fire("on_data_init_start")
    save(first, 20, tmp_path / "energon", groups)
    with pytest.raises(UsageError, match=r"no data state for step 10 in .*energon.*found those of steps 20"):
        run.fire("on_data_init_start")


def test_data_that_was_not_restored_is_seen_at_the_first_step(provider: Any, groups: Any, tmp_path: Path) -> None:
    iterator(provider, groups)
    with pytest.raises(UsageError, match=r"at its beginning \(no data state was restored\) and the model at 20 packs"):
        Run(provider, groups, tmp_path, step=10, consumed=20).fire("on_train_start")


def test_the_user_may_start_the_data_over(provider: Any, groups: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dataloader_load None, expected ''"):
        Run(provider, groups, tmp_path, step=10, consumed=20, starts_over=True)
    provider.dataloader_load = ""
    run = Run(provider, groups, tmp_path, step=10, consumed=20, starts_over=True)
    run.fire("on_data_init_start")
    stream = iterator(provider, groups)
    run.fire("on_train_start")
    tokens(stream, 2)
    save(stream, 11, tmp_path / "energon", groups)
    provider.dataloader_load = None
    later = Run(provider, groups, tmp_path, step=11, consumed=22)
    later.fire("on_data_init_start")
    load(iterator(provider, groups), 11, tmp_path / "energon", groups)
    later.fire("on_train_start")


def test_a_new_run_asks_for_no_state(provider: Any, groups: Any, tmp_path: Path) -> None:
    run = Run(provider, groups, tmp_path, step=0, consumed=0)
    iterator(provider, groups)
    run.fire("on_data_init_start", "on_train_start")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("train", "micro_batch_size", 2),
        ("model", "seq_length", 4096),
        ("model", "sequence_parallel", True),
        ("dist", "eval_context_parallel_size", 2),
    ],
)
def test_a_model_that_the_data_does_not_fit_is_refused(
    provider: Any, groups: Any, tmp_path: Path, part: str, name: str, value: Any
) -> None:
    run = Run(provider, groups, tmp_path, step=0, consumed=0)
    setattr(getattr(run.config, part), name, value)
    with pytest.raises(UsageError, match=rf"{part}\.{name} {value}, expected"):
        run.fire("on_data_init_start")


def test_steps_that_bridge_skips_on_some_stages_only_are_refused(provider: Any, groups: Any, tmp_path: Path) -> None:
    run = Run(provider, groups, tmp_path, step=0, consumed=0)
    run.config.train.iterations_to_skip = [7]
    with pytest.raises(UsageError, match=r"found train.iterations_to_skip \[7\] and 3 pipeline stages, expected at most 2"):
        run.fire("on_data_init_start")
    run.config.model.pipeline_model_parallel_size = 2
    run.fire("on_data_init_start")
