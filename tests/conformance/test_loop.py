"""What the training loop does with the provider and its microbatches, by Bridge's and Core's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import bridge_classes
import pytest
import torch
import yaml

from packer.format.errors import UsageError
from plugin.batch import VisualInputs


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`vlm_step` moves every tensor; here they stay."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor, **_: tensor)


def build(provider: Any, groups: Any, *, train: int = 100, valid: int = 10) -> Any:
    """Through `get_dataset_provider`, as the setup calls it."""
    return bridge_classes.providing().get_dataset_provider(provider)([train, valid, 0], provider, pg_collection=groups)


def test_the_provider_is_one_of_bridges_and_its_streams_are_passed_through(provider: Any, groups: Any) -> None:
    from megatron.bridge.data.base import DatasetProvider
    from megatron.core.rerun_state_machine import RerunDataIterator

    assert isinstance(provider, DatasetProvider)
    config = SimpleNamespace(dataset=provider)
    train, valid, test = bridge_classes.iterators(config, lambda: build(provider, groups))
    assert isinstance(train, RerunDataIterator)
    assert isinstance(valid, RerunDataIterator)
    assert test.iterable is None if test is not None else True
    assert train.iterable is provider.train_stream
    assert next(train)["tokens"].shape == next(valid)["tokens"].shape == (1, 2048)


def test_without_validation_no_loader_is_opened_for_it(provider: Any, groups: Any) -> None:
    train, valid, test = build(provider, groups, valid=0)
    assert (train is not None, valid, test) == (True, None, None)


def test_validation_goes_on_beyond_one_pass(provider: Any, groups: Any) -> None:
    _, valid, _ = build(provider, groups)
    first, passed = next(valid)["tokens"], 1
    while not torch.equal(next(valid)["tokens"], first):
        passed += 1
    assert valid.position == passed + 1


def test_what_bridge_writes_into_a_checkpoint_is_plain(provider: Any, groups: Any) -> None:
    from megatron.training.config.container import ConfigContainerBase

    build(provider, groups)
    written = ConfigContainerBase._convert_value_to_dict(provider)
    assert yaml.safe_load(yaml.safe_dump(written)) == written
    assert written["settings"] == {"max_patches_per_pack": 4096, "buffer_size": 100}
    assert written["_target_"] == "plugin.adapters.bridge.BayplanDatasetProvider"


def test_settings_that_cannot_work_are_refused_when_bridge_finalizes_them(provider: Any) -> None:
    provider.dataloader_type = "single"
    with pytest.raises(UsageError, match="found dataloader_type 'single', expected 'external'"):
        provider.finalize()
    provider.dataloader_type = "external"
    provider.settings = {"bufer_size": 3}
    with pytest.raises(UsageError, match=r"found settings bufer_size, expected of .*buffer_size"):
        provider.finalize()


def test_a_rerun_replays_the_same_microbatches(provider: Any, groups: Any) -> None:
    from megatron.core import rerun_state_machine as rerun

    rerun.destroy_rerun_state_machine()  # any use makes a disabled one
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    try:
        stream, _, _ = build(provider, groups)
        iterator = rerun.RerunDataIterator(stream)
        first = [next(iterator) for _ in range(3)]
        kept = [microbatch["tokens"].clone() for microbatch in first]
        first[0].clear()  # what a step does to its own dict
        iterator.rewind()
        assert all(torch.equal(next(iterator)["tokens"], tokens) for tokens in kept)
        iterator.advance()
        after = next(iterator)["tokens"]
        assert not any(torch.equal(after, tokens) for tokens in kept)
    finally:
        rerun.destroy_rerun_state_machine()


def test_model_chunks_of_one_stage_see_the_same_microbatches(provider: Any, groups: Any) -> None:
    from megatron.bridge.data.iterator_utils import make_data_iterator_list

    stream, _, _ = build(provider, groups)
    one, other = make_data_iterator_list([object(), object()], stream)
    assert [next(one)["tokens"] is next(other)["tokens"] for _ in range(3)] == [True] * 3


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, False), (False, True)])
def test_vlm_step_takes_what_a_stage_needs(provider: Any, groups: Any, first: bool, last: bool) -> None:
    stream, _, _ = build(provider, groups)
    seen = 0
    for _ in range(6):
        microbatch = next(stream)
        taken = bridge_classes.batches().get_batch_from_iterator(
            iter([microbatch]), is_first_pp_stage=first, is_last_pp_stage=last
        )
        assert torch.equal(taken["tokens"], microbatch["tokens"])
        assert taken["attention_mask"] is None
        assert (taken["labels"] is not None, taken["loss_mask"] is not None) == (last, last)
        if microbatch["visual_inputs"] is not None:
            seen += 1
            kwargs = taken["visual_inputs"].normalized_for_model()
            assert set(kwargs) >= {"image_grid_thw"}
            assert ("pixel_values" in kwargs) == first
    assert seen


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize("alignment", [None, 8])
def test_attention_gets_the_samples_of_the_pack(provider: Any, groups: Any, alignment: int | None) -> None:
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    provider.settings["alignment"] = alignment
    stream, _, _ = build(provider, groups)
    step = bridge_classes.batches()
    microbatch = next(stream)
    taken = step.get_batch_from_iterator(iter([microbatch]), is_first_pp_stage=True, is_last_pp_stage=True)
    parameters = get_packed_seq_params({key: taken[key] for key in step._PACKED_SEQ_PARAM_KEYS if taken.get(key) is not None})
    assert parameters.qkv_format == "thd"
    assert torch.equal(parameters.cu_seqlens_q, microbatch["cu_seqlens_q"])
    assert parameters.cu_seqlens_q.dtype == torch.int32
    physical = parameters.cu_seqlens_q if parameters.cu_seqlens_q_padded is None else parameters.cu_seqlens_q_padded
    assert int(physical[-1]) == 2048
    assert parameters.max_seqlen_q == int(physical.diff().max())
    if alignment is not None:
        assert not (physical % alignment).any()
    starts = physical[:-1].long()
    assert not microbatch["position_ids"][0, starts].any()


def test_hybrid_models_get_the_number_of_each_samples_row(provider: Any, groups: Any) -> None:
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    stream, _, _ = build(provider, groups)
    microbatch = next(stream)
    keys = bridge_classes.batches()._PACKED_SEQ_PARAM_KEYS
    parameters = get_packed_seq_params({key: microbatch[key] for key in keys if microbatch.get(key) is not None})
    assert parameters.seq_idx.shape == (1, 2048)
    assert int(parameters.seq_idx[0, 0]) == 0


def test_visual_inputs_are_to_a_step_what_bridges_own_are(provider: Any, groups: Any) -> None:
    from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs

    stream, _, _ = build(provider, groups)
    ours = next(visual for _ in range(6) if (visual := next(stream)["visual_inputs"]) is not None)
    assert isinstance(ours, VisualInputs)
    theirs = GenericVisualInputs(**vars(ours))
    expected, found = theirs.normalized_for_model(), ours.normalized_for_model()
    assert list(found) == list(expected)
    assert all(found[name] is value for name, value in expected.items())
    assert {name for name, value in vars(ours).items() if not (value is None or isinstance(value, torch.Tensor))} == set()
