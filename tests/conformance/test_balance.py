"""Balancing through Bridge's and Core's own classes in one process: settings, calculators, model chunks, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bridge_classes
import pytest
import torch
import yaml
from bridge_balance import COST, config, fire

from packer.format.errors import UsageError
from plugin.adapters.megatron_balance import Microbatches

SETTINGS = {"max_patches_per_pack": 4096, "buffer_size": 100, "cost": COST}


@pytest.fixture
def calculator() -> Iterator[Any]:
    """Sets Megatron's calculator of the whole process."""
    from megatron.core import num_microbatches_calculator as core

    def init(dp_size: int = 1, **arguments: Any) -> Any:
        core.destroy_num_microbatches_calculator()
        core.init_num_microbatches_calculator(0, None, micro_batch_size=1, data_parallel_size=dp_size, **arguments)
        return core._GLOBAL_NUM_MICROBATCHES_CALCULATOR

    yield init
    core.destroy_num_microbatches_calculator()


def remade(provider: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(provider, **{"settings": SETTINGS, "balance": {}} | changes)


def built(provider: Any, groups: Any) -> Any:
    from megatron.bridge.data.base import DatasetBuildContext

    context = DatasetBuildContext(train_samples=1, valid_samples=0, test_samples=0, pg_collection=groups)
    return provider.build_datasets(context)[0]


@pytest.fixture
def ready(provider: Any, groups: Any, calculator: Any) -> Iterator[Any]:
    """A provider whose run balances, global batches of four packs."""
    calculator(global_batch_size=4)
    made = remade(provider)
    fire(made, "on_data_init_start", groups=groups)
    yield made
    if made.train_stream is not None:
        made.train_stream.close()


def test_settings_that_cannot_work_are_refused_when_bridge_finalizes_them(provider: Any) -> None:
    with pytest.raises(UsageError, match="found balance and settings without cost, expected settings="):
        remade(provider, settings={"max_patches_per_pack": 4096}).finalize()
    with pytest.raises(UsageError, match="found balance lookahead, expected of mode, "):
        remade(provider, balance={"lookahead": 2}).finalize()
    remade(provider).finalize()


def test_what_bridge_writes_of_a_balanced_provider_is_plain(ready: Any, groups: Any) -> None:
    from megatron.training.config.container import ConfigContainerBase

    ready.balance = {"mode": "dp", "slow_seconds": 60.0}
    built(ready, groups)
    written = ConfigContainerBase._convert_value_to_dict(ready)
    assert yaml.safe_load(yaml.safe_dump(written)) == written
    assert written["balance"] == {"mode": "dp", "slow_seconds": 60.0}


def test_without_the_callback_nobody_says_how_the_model_trains(provider: Any, groups: Any, calculator: Any) -> None:
    calculator(global_batch_size=4)
    with pytest.raises(UsageError, match="found balance and no BayplanCallback"):
        built(remade(provider), groups)


def test_without_megatrons_calculator_it_is_refused(provider: Any, groups: Any, calculator: Any) -> None:
    from megatron.core import num_microbatches_calculator as core

    core.destroy_num_microbatches_calculator()
    made = remade(provider)
    fire(made, "on_data_init_start", groups=groups)
    with pytest.raises(UsageError, match="found a NoneType as Megatron's calculator"):
        built(made, groups)


def walked(live: Any, dp_size: int, steps: int) -> list[int]:
    """As the training loop comes by."""
    numbers, consumed = [], 0
    for _ in range(steps):
        live.update(consumed, False)
        numbers.append(live.get())
        consumed += live.get() * dp_size
    return numbers


@pytest.mark.parametrize(
    "arguments",
    [
        {"global_batch_size": 32},
        {"global_batch_size": 30, "decrease_batch_size_if_needed": True},
        {"step_batch_size_schedule": "0:8 50:16 200:32"},
        {"step_batch_size_schedule": "0:8 100K:16 400K:64", "seq_length": 2048},
    ],
)
def test_steps_ahead_are_those_of_cores_calculators(calculator: Any, arguments: dict[str, Any]) -> None:
    live = calculator(dp_size=4, **arguments)
    ahead = Microbatches(live, dp_size=4)
    found = [ahead(step) for step in range(40)]
    assert live.get() == found[0], "it was left as it stood"
    assert found == walked(live, 4, 40)
    assert len(set(found)) == (3 if "step_batch_size_schedule" in arguments else 1)


def test_a_schedule_goes_on_by_what_the_run_had_consumed(provider: Any, groups: Any, calculator: Any, tmp_path: Path) -> None:
    """Steps of 2 packs, and of 4 from the sixth pack on; saved in the middle of the first larger one."""
    from megatron.core.rerun_state_machine import RerunDataIterator

    calculator(step_batch_size_schedule="0:2 6:4")
    checkpointing = bridge_classes.checkpointing()
    tails = []
    for resumes in (False, True):
        made = remade(provider)
        fire(made, "on_data_init_start", groups=groups)
        iterator = RerunDataIterator(built(made, groups))
        if resumes:
            checkpointing.maybe_load_dataloader_state(iterator, 4, str(tmp_path), pg_collection=groups)
        else:
            for _ in range(8):
                next(iterator)
            checkpointing.maybe_save_dataloader_state([], iterator, 4, str(tmp_path), pg_collection=groups)
        loader = iterator.iterable.loader
        tails.append([next(iterator)["tokens"] for _ in range(6)])
        assert (loader.num_packs, loader.balance.step, loader.balance.num_packs) == (14, 4, 4)
        fire(made, "on_train_start", "on_train_end", groups=groups, step=4, consumed=14)
    assert all(torch.equal(one, other) for one, other in zip(*tails, strict=True))


def test_model_chunks_share_one_stream_whose_state_bridge_saves(ready: Any, groups: Any, tmp_path: Path) -> None:
    """Lists of iterators are made anew inside each step, so that what is saved between steps is the one stream behind them."""
    from megatron.bridge.data.iterator_utils import make_data_iterator_list
    from megatron.core.rerun_state_machine import RerunDataIterator

    def step(iterator: Any) -> list[torch.Tensor]:
        one, other = make_data_iterator_list([object(), object()], iterator)
        first = [next(one)["tokens"] for _ in range(4)]
        assert all(next(other)["tokens"] is tokens for tokens in first)
        return first

    iterator = RerunDataIterator(built(ready, groups))
    step(iterator)
    bridge_classes.checkpointing().maybe_save_dataloader_state([], iterator, 1, str(tmp_path), pg_collection=groups)
    expected = step(iterator)
    fire(ready, "on_train_start", "on_train_end", groups=groups, step=2, consumed=8)
    again = remade(ready)
    fire(again, "on_data_init_start", groups=groups)
    resumed = RerunDataIterator(built(again, groups))
    bridge_classes.checkpointing().maybe_load_dataloader_state(resumed, 1, str(tmp_path), pg_collection=groups)
    assert all(torch.equal(one, other) for one, other in zip(step(resumed), expected, strict=True))
    fire(again, "on_train_end", groups=groups)


def test_a_stream_for_each_model_chunk_is_refused(ready: Any, groups: Any) -> None:
    built(ready, groups)
    with pytest.raises(UsageError, match=r"found a second training stream with balance, expected one for all model chunks"):
        built(ready, groups)
    fire(ready, "on_train_end", groups=groups)
    built(ready, groups)


def test_a_run_begins_to_balance_and_leaves_it_between_steps(
    ready: Any, provider: Any, groups: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator

    save = bridge_classes.checkpointing().maybe_save_dataloader_state
    load = bridge_classes.checkpointing().maybe_load_dataloader_state

    def opened(balance: Any, step: int) -> tuple[Any, Any]:
        made = remade(provider, balance=balance)
        fire(made, "on_data_init_start", groups=groups)
        iterator = RerunDataIterator(built(made, groups))
        if step:
            load(iterator, step, str(tmp_path), pg_collection=groups)
        return made, iterator

    _, whole = opened(None, 0)
    arrived = [next(whole)["tokens"].numpy().tobytes() for _ in range(12)]
    seen = []
    for step, balance in enumerate((None, {}, None)):
        made, iterator = opened(balance, step)
        seen += [next(iterator)["tokens"].numpy().tobytes() for _ in range(4)]
        fire(made, "on_train_start", groups=groups, step=step + 1, consumed=4 * (step + 1))
        save([], iterator, step + 1, str(tmp_path), pg_collection=groups)
        iterator.iterable.close()
    for step in range(3):
        assert sorted(seen[4 * step : 4 * step + 4]) == sorted(arrived[4 * step : 4 * step + 4])


def test_data_that_was_not_restored_is_seen_at_the_first_step(ready: Any, groups: Any) -> None:
    built(ready, groups)
    with pytest.raises(UsageError, match=r"at its beginning \(no data state was restored\) and the model at 20 packs"):
        fire(ready, "on_train_start", groups=groups, step=5, consumed=20)


def test_the_loss_is_weighed_as_the_model_says(ready: Any, groups: Any) -> None:
    fire(ready, "on_data_init_start", groups=groups, cfg=config(model__calculate_per_token_loss=True, dist__use_torch_fsdp2=True))
    loader = built(ready, groups).loader
    assert str(loader.mode) == "fsdp"
    assert loader.topology.synchronises == "microbatch"
