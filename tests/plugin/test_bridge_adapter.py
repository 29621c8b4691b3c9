"""What of Megatron Bridge's adapter needs no Bridge: the stream and its position, and which data states a checkpoint has.

Against Bridge's own classes: `tests/conformance`.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from endless_packs import HandMadeLoader
from hypothesis import given
from hypothesis import strategies as st
from pack_samples import PATCHES, pack_sample, patch_image
from packed import Packed

from packer.format.errors import UsageError
from plugin.adapters.data_state import ranks_with_state, require_state, state_file
from plugin.adapters.megatron_stream import MegatronStream
from plugin.batch import PackedBatch, build, to_megatron
from plugin.loader import PackLoader
from plugin.settings import PackSettings

PACKS = [
    build([pack_sample([5, patch_image(2, 4, seed), 3], f"image {seed}", seed)], form=PATCHES, sequence_length=32, pad_id=0)
    for seed in range(3)
] + [build([pack_sample([9], "text", 4)], form=PATCHES, sequence_length=32, pad_id=0)]


def normalise(patches: torch.Tensor) -> torch.Tensor:
    return patches.float().repeat(1, 2) / 255


def stream(packs: list[PackedBatch] = PACKS, *, size: int = 1, device: str = "cpu", mrope: bool = False) -> MegatronStream:
    return MegatronStream(HandMadeLoader(packs), size=size, normalise=normalise, device=device, mrope=mrope)


def same(one: Any, other: Any) -> bool:
    """Whether two microbatches are equal, visual inputs too."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and list(one) == list(other) and all(same(value, other[name]) for name, value in one.items())
        )
    if hasattr(one, "normalized_for_model"):
        return type(one) is type(other) and same(vars(one), vars(other))
    return bool(one == other)


@pytest.mark.parametrize("mrope", [False, True])
def test_a_microbatch_is_what_the_exporter_makes_of_the_pack(mrope: bool) -> None:
    made = stream(mrope=mrope)
    for pack in PACKS:
        assert same(next(made), to_megatron(pack, normalise=normalise, mrope=mrope))


def test_pixels_are_normalised_and_doubled_in_time_by_the_stream() -> None:
    visual = next(stream())["visual_inputs"]
    assert visual.pixel_values.dtype == torch.float32
    assert visual.pixel_values.shape == (8, 2 * PATCHES.patch_bytes)


def test_a_later_stage_gets_grids_of_a_pack_with_pixels() -> None:
    """One that its replica's reader has sent it."""
    made = MegatronStream(HandMadeLoader(PACKS), size=1, normalise=normalise, device="cpu", takes_pixels=False)
    visual = next(made)["visual_inputs"]
    assert visual.pixel_values is None
    assert torch.equal(visual.image_grid_thw, next(stream())["visual_inputs"].image_grid_thw)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_is_on_the_device_but_the_longest_sample() -> None:
    made, expected = next(stream(device="cuda")), next(stream())
    on_host = {name for name, value in made.items() if isinstance(value, torch.Tensor) and not value.is_cuda}
    assert on_host == {"max_seqlen_q", "max_seqlen_kv"}
    assert made["visual_inputs"].pixel_values.is_cuda
    assert torch.equal(made["visual_inputs"].pixel_values.cpu(), expected["visual_inputs"].pixel_values)
    assert all(torch.equal(made[name].cpu(), expected[name]) for name in ("tokens", "labels", "cu_seqlens_q"))


def test_a_stream_has_no_end(caplog: pytest.LogCaptureFixture) -> None:
    made = stream()
    with caplog.at_level(logging.INFO):
        tokens = [next(made)["tokens"] for _ in range(2 * len(PACKS) + 1)]
    assert all(torch.equal(tokens[place], tokens[place % len(PACKS)]) for place in range(len(tokens)))
    assert sum("begins anew" in record.message for record in caplog.records) == 2


def test_a_rank_without_any_pack_is_refused_instead_of_asked_for_ever() -> None:
    with pytest.raises(UsageError, match=r"found no pack for this rank .* each of 4 ranks"):
        next(stream([], size=4))


def test_an_iterator_of_a_stream_still_has_its_state() -> None:
    made = stream()
    assert iter(made) is made


@given(num_before=st.integers(0, 10), num_after=st.integers(0, 10))
def test_a_stream_goes_on_where_it_was_saved(num_before: int, num_after: int) -> None:
    first, second = stream(size=2), stream(size=2)
    for _ in range(num_before):
        next(first)
    second.restore_state(first.save_state())
    for _ in range(num_after):
        assert same(next(first), next(second))
    assert first.position == second.position == 2 * (num_before + num_after)


def test_a_state_that_cannot_be_taken_up_is_refused() -> None:
    started = stream()
    next(started)
    state = started.save_state()
    with pytest.raises(UsageError, match="read from"):
        started.restore_state(state)
    with pytest.raises(UsageError, match=r"found a tuple of another data loader.*starts_over"):
        stream().restore_state(("foreign",))
    with pytest.raises(UsageError, match=r"found a dict of another data loader"):
        stream().restore_state({"place": 3})
    with pytest.raises(UsageError, match=r"version 2, expected 1"):
        stream().restore_state(state | {"version": 2})


def test_a_stream_that_stands_elsewhere_than_the_model_is_refused() -> None:
    made = stream(size=4)
    made.refuse_other_position(0)
    with pytest.raises(UsageError, match=r"at its beginning \(no data state was restored\) and the model at 40 packs"):
        made.refuse_other_position(40)
    for _ in range(5):
        next(made)
    made.refuse_other_position(20)
    with pytest.raises(UsageError, match=r"found the data at 20 packs and the model at 40 packs"):
        made.refuse_other_position(40)


def test_data_that_starts_over_on_purpose_counts_on_with_the_model() -> None:
    made = stream(size=4)
    made.start_over(37)
    assert torch.equal(next(made)["tokens"], next(stream())["tokens"])
    resumed = stream(size=4)
    resumed.restore_state(made.save_state())
    resumed.refuse_other_position(41)
    with pytest.raises(UsageError, match="at 41 packs"):
        resumed.start_over(41)


def test_a_closed_stream_still_says_where_it_stands() -> None:
    """Bridge saves a checkpoint of the last step behind the end of training."""
    made = stream(size=4)
    for _ in range(3):
        next(made)
    state = made.save_state()
    made.close()
    made.close()
    assert made.is_closed
    assert made.loader.packs == (), "it is closed too"  # type: ignore[attr-defined]
    assert made.save_state() == state
    resumed = stream(size=4)
    resumed.restore_state(made.save_state())
    assert (resumed.position, same(next(resumed), next(stream(PACKS[3:])))) == (12, True)


class BalancedLoader(HandMadeLoader):
    """As far as states go."""

    def save_state(self) -> Any:
        return {
            "step": self.num_packs // 3,
            "yielded": self.num_packs % 3,
            "has_snapshot": True,
            "snapshot": {"place": self.place - self.num_packs % 3},
        }

    def restore_state(self, state: Any) -> None:
        self.place, self.num_packs = state["snapshot"]["place"] + state["yielded"], 3 * state["step"] + state["yielded"]


class Schedule:
    begun: tuple[int, int] | None = None

    def begin(self, step: int, num_consumed: int) -> None:
        self.begun = step, num_consumed


def balanced(schedule: Schedule) -> MegatronStream:
    return MegatronStream(BalancedLoader(PACKS * 3), size=2, normalise=normalise, device="cpu", schedule=schedule)


def test_a_schedule_hears_what_was_consumed_before_the_step_that_goes_on() -> None:
    first, heard = balanced(Schedule()), Schedule()
    for _ in range(5):
        next(first)
    second = balanced(heard)
    second.restore_state(first.save_state())
    assert (heard.begun, second.position) == ((1, 6), 10)
    assert same(next(first), next(second))
    balanced(heard).start_over(40)
    assert heard.begun == (0, 40)


def test_a_stream_without_balancing_takes_up_a_balanced_one_between_two_steps() -> None:
    made = balanced(Schedule())
    for _ in range(3):
        next(made)
    plain = stream(PACKS * 3, size=2)
    plain.restore_state(made.save_state())
    assert plain.position == 6
    assert same(next(plain), next(made))


def test_counters_are_the_loaders_and_the_position() -> None:
    made = stream(size=2)
    next(made)
    assert made.counters() == {"packs": 1, "position": 2}
    assert made.log_line() == "1 packs"


def opened(corpus: Packed, *, rank: int = 0, size: int = 2, sequence_length: int = 1024) -> MegatronStream:
    settings = PackSettings(sequence_length=sequence_length, max_patches_per_pack=4096, buffer_size=50)
    loader = PackLoader.open(corpus.url, "qwen25vl", settings, rank=rank, world_size=size, num_workers=0)
    return MegatronStream(loader, size=size, normalise=loader.normalise, device="cpu")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_real_loader_goes_on_where_it_was_saved_and_nowhere_else(corpus: Packed) -> None:
    first, second = opened(corpus, rank=1), opened(corpus, rank=1)
    for _ in range(3):
        next(first)
    state = first.save_state()
    second.restore_state(state)
    for _ in range(3):
        assert same(next(first), next(second))
    with pytest.raises(UsageError, match=r"world_size 2 in the state, 1 here"):
        opened(corpus, size=1).restore_state(state)
    with pytest.raises(UsageError, match=r"rank 1 in the state, 0 here"):
        opened(corpus, rank=0).restore_state(state)
    with pytest.raises(UsageError, match=r"sequence_length': 1024.*sequence_length': 2048"):
        opened(corpus, rank=1, sequence_length=2048).restore_state(state)


def save(folder: Path, *, step: int, ranks: range | list[int]) -> Path:
    for rank in ranks:
        file = state_file(folder, step, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return folder


def test_the_state_of_a_rank_is_found_in_whichever_folder_has_the_step(tmp_path: Path) -> None:
    old, new = save(tmp_path / "old", step=10, ranks=range(2)), save(tmp_path / "new", step=20, ranks=range(2))
    assert require_state([tmp_path / "none", old, new], 20, rank=1, size=2) == state_file(new, 20, 1)
    assert str(state_file("f", 20, 1)) == "f/iter_0000020/train_dataloader_dprank001.pt"
    assert ranks_with_state(new) == {20: frozenset({0, 1})}


def test_a_step_without_state_is_said_with_the_steps_that_have_one(tmp_path: Path) -> None:
    save(tmp_path, step=20, ranks=range(2))
    save(tmp_path, step=1_234_567, ranks=range(2))
    (tmp_path / "iter_0000030").mkdir()
    with pytest.raises(UsageError, match=r"no data state for step 10 in .*found those of steps 20, 1234567; resume.*starts_over"):
        require_state([tmp_path], 10, rank=0, size=2)
    with pytest.raises(UsageError, match=r"no data state for step 10 in .*found none of any step.*starts_over"):
        require_state([tmp_path / "absent"], 10, rank=0, size=2)
    with pytest.raises(UsageError, match=r"no data state for step 10 in any folder"):
        require_state([], 10, rank=0, size=2)


@pytest.mark.parametrize(("saved", "now"), [(2, 1), (2, 4), (1, 2)])
def test_states_of_another_number_of_ranks_are_refused_with_both_numbers(tmp_path: Path, saved: int, now: int) -> None:
    save(tmp_path, step=10, ranks=range(saved))
    with pytest.raises(UsageError, match=rf"found {saved} data-parallel ranks, expected {now}.*data-parallel size {saved},"):
        require_state([tmp_path], 10, rank=0, size=now)


def test_a_checkpoint_that_lost_a_rank_is_not_taken_for_one_of_fewer(tmp_path: Path) -> None:
    save(tmp_path, step=10, ranks=[0, 3])
    with pytest.raises(UsageError, match=r"found none of data-parallel ranks 1, 2: the checkpoint is not whole"):
        require_state([tmp_path], 10, rank=0, size=2)


def test_without_bridge_the_adapter_says_what_to_install() -> None:
    if importlib.util.find_spec("megatron.bridge") is not None:
        pytest.skip("Megatron Bridge is installed")
    with pytest.raises(ImportError, match=r"found no megatron\.bridge.*pip install 'megatron-bridge>=0\.6\.2'"):
        importlib.import_module("plugin.adapters.bridge")


def test_the_stream_alone_loads_neither_torch_nor_megatron() -> None:
    code = "import sys, plugin.adapters.megatron_stream; print({'torch', 'megatron'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert found.stdout.strip() == "set()"
