"""Cases of public trackers about packing and reading for training, each the smallest trigger, through the real stream."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import QWEN_TOKENS, write_byte_tokenizer
from in_process import index_in_process, pack_in_process
from loading import Epochs, ids, opened
from PIL import Image
from small_job import PROFILES, write_recipe, write_rows

from indexer.profile import open_stored
from packer.format.errors import UsageError
from plugin.adapters.data_state import require_state, state_file
from plugin.batch import mrope_positions
from plugin.failures import TooManyFailures
from plugin.settings import PackSettings, Peers

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")

PROFILE = "qwen"
SETTINGS = PackSettings(sequence_length=64, buffer_size=4, num_threads=2)
TEXT = "  - {name: text, schema: text, files: text.jsonl}\n"
BOTH = TEXT + "  - {name: docs, schema: interleaved, files: docs.jsonl, image_root: images}\n"


def dataset(folder: Path, lengths: Iterable[int], documents: Iterable[Mapping[str, Any]] = (), profile: str = "") -> str:
    """Texts of so many tokens, the end among them, and documents."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder / "tokenizer.json")
    write_rows(folder / "text.jsonl", ({"id": f"{n}", "text": "w" * (size - 1)} for n, size in enumerate(lengths)))
    write_rows(folder / "docs.jsonl", documents)
    profiles = {PROFILE: profile or PROFILES[PROFILE]}
    pack_in_process(write_recipe(folder, sources=BOTH if documents else TEXT, profiles=profiles))
    assert index_in_process(folder / "out").exit_code == 0
    return str(folder / "out")


def document(number: int, *parts: str) -> dict[str, Any]:
    kinds = [{"type": "image", "image": p} if p.endswith(".png") else {"type": "text", "text": p} for p in parts]
    return {"id": f"doc {number}", "content": kinds}


# 29, one descriptor for four forked and four spawned readers, is in test_reader.py; 40 and 42 to 44, reordering, are in
# test_reorder_gradients.py.


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("on_failure", ["blank", "skip"])
def test_case_31_a_tolerance_of_nothing_stops_at_the_first(tmp_path: Path, on_failure: Any, limit: int) -> None:
    """NVIDIA-NeMo/RL#4108, NVIDIA/Megatron-Energon#181: 100 samples, all unreadable, and a tolerance of 0 that never stops."""
    url = dataset(tmp_path, [60] * 100)
    for path in Path(url).glob("sources/text/*.jsonl"):
        path.write_bytes(b"#" * path.stat().st_size)
    settings = replace(SETTINGS, on_failure=on_failure, max_failures=limit, max_failure_share=None)
    with opened(url, settings) as stream:
        number = limit + 1
        with pytest.raises(TooManyFailures, match=rf"^{number} of {number} samples .* above max_failures {limit}; the latest"):
            list(stream)
        assert stream.num_packs == (limit if on_failure == "blank" else 0)


@pytest.mark.parametrize("on_failure", ["blank", "skip"])
def test_case_31_unlimited_is_spelled_out_and_still_ends_where_nothing_comes(tmp_path: Path, on_failure: Any) -> None:
    """NVIDIA-NeMo/RL#4108: a run in which every sample fails goes on for ever."""
    url = dataset(tmp_path, [60] * 100)
    for path in Path(url).glob("sources/text/*.jsonl"):
        path.unlink()
    with opened(url, replace(SETTINGS, on_failure=on_failure, max_failures=None, max_failure_share=None)) as stream:
        if on_failure == "blank":
            assert not any(next(stream).batch.loss_mask.any() for _ in range(100))
        else:
            with pytest.raises(TooManyFailures, match="samples of this loader worker in a row could not be used"):
                next(stream)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dataset(tmp_path_factory.mktemp("many"), [20 + n % 40 for n in range(200)])


def test_case_32a_a_resumed_run_sees_the_next_ten_steps(many: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3993, #5245: resume reports success while the stream starts over."""
    with opened(many, SETTINGS) as stream:
        first = [next(stream).batch.sample_ids for _ in range(10)]
        state = stream.save_state()
        following = [next(stream).batch.sample_ids for _ in range(10)]
    with opened(many, SETTINGS) as again:
        again.restore_state(state)
        assert [next(again).batch.sample_ids for _ in range(10)] == following != first


def test_case_32b_another_number_of_ranks_is_refused_with_both(many: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5637: saved with 2 ranks, resumed with 1, one rank's place is dropped."""
    with opened(many, SETTINGS, rank=0, world_size=2) as stream:
        next(stream)
        state = stream.save_state()
    with (
        opened(many, SETTINGS) as alone,
        pytest.raises(UsageError, match="found world_size 2 in the state, 1 here: resume on as many data-parallel ranks"),
    ):
        alone.restore_state(state)


def test_case_32c_a_step_without_data_state_is_said_and_the_user_chooses(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5593: resume step 10 while only step 20 has data state."""
    file = state_file(tmp_path, 20, 0)
    file.parent.mkdir(parents=True)
    file.touch()
    with pytest.raises(
        UsageError, match=r"no data state for step 10 in .*found those of steps 20; resume from one.*`starts_over`"
    ):
        require_state([tmp_path], 10, rank=0, size=1)
    assert require_state([tmp_path], 20, rank=0, size=1) == file


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 7])
def test_case_34_the_end_of_the_data_is_emitted_once(tmp_path: Path, number: int) -> None:
    """NVIDIA/Megatron-Energon#114: 7 samples, a buffer of 4, no repeat, and an assertion after the epoch."""
    url = dataset(tmp_path, [40] * number)
    with Epochs(url, SETTINGS, sources="text").open() as stream:
        for _ in range(2):
            packs = list(stream)
            assert Counter(ids(iter(packs))) == Counter(map(str, range(number)))
            assert all(pack.batch.num_samples for pack in packs)


def test_case_35_an_over_long_sample_is_counted_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NVIDIA-NeMo/RL#4070, baidu-baige/LoongForge#149: lengths 100, 9000, 100 and a pack of 4096; tensors are printed."""
    caplog.set_level(logging.WARNING)
    url = dataset(tmp_path, [100, 9000, 100])
    with Epochs(url, replace(SETTINGS, sequence_length=4096), sources="text").open() as stream:
        assert sorted(ids(stream)) == ["0", "2"]
        counted = stream.counters()
    assert (counted["tokens"], counted["slots"]) == (200, 4096), "a sample costs what it takes in its pack"
    said = [record.getMessage() for record in caplog.records if "fit no pack" in record.getMessage()]
    assert len(said) == 1
    assert all(part in said[0] for part in ("source 'text'", "text/", "/1", "9000", "4096"))
    assert len(said[0]) < 400


def test_case_36_an_image_is_never_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """QwenLM/Qwen3-VL#556, hiyouga/LlamaFactory#5964: two images of 360 tokens each, limit 500: one is cut."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20 * 28, 18 * 28), "red").save(tmp_path / "images" / "a.png")
    documents = [document(0, "one", "a.png"), document(1, "a.png", "between", "a.png"), document(2, "a.png", "end")]
    url = dataset(tmp_path, [30], documents)
    with Epochs(url, replace(SETTINGS, sequence_length=500), sources="text docs").open() as stream:
        packs = [pack.batch for pack in stream]
    samples = {sample.sample_id: sample for pack in packs for sample in pack.unpack()}
    assert set(samples) == {"0", "doc 0", "doc 2"}
    assert "longer than a pack of 500 tokens" in caplog.text
    for name in ("doc 0", "doc 2"):
        assert samples[name].num_image_tokens == 360
        assert [image.grid_thw for image in samples[name].images] == [(1, 36, 40)]
    for pack in packs:
        assert int(pack.feature_mask.sum()) * 4 == len(pack.pixels)


@pytest.mark.parametrize("alignment", [1, 16])
def test_case_38_each_sample_comes_out_as_it_went_in(tmp_path: Path, alignment: int) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#4507, alibaba/ROLL#452: padding goes in and real tokens go out, 3 x T positions forgotten."""
    (tmp_path / "images").mkdir()
    Image.effect_noise((84, 56), 50).convert("RGB").save(tmp_path / "images" / "a.png")
    documents = [document(n, "x" * (n + 1), "a.png", "end") for n in range(9)]
    url = dataset(tmp_path, [5, 17, 33], documents)
    encoder = open_stored(url, PROFILE).encoder
    sizes = [{"width": 84, "height": 56}]
    with Epochs(url, replace(SETTINGS, alignment=alignment), sources="text docs").open() as stream:
        packs = [pack.batch for pack in stream]
    assert any(pack.num_samples > 1 for pack in packs)
    found = {}
    for pack in packs:
        positions = mrope_positions(pack)
        assert positions.shape == (3, len(pack.tokens))
        for place, sample in enumerate(pack.unpack()):
            start = int(pack.cu_seqlens_padded[place])
            assert start % alignment == 0
            assert (positions[:, start] == 0).all(), "positions of every row begin anew"
            found[sample.sample_id] = (sample.encoded.ids.tolist(), positions[:, start : start + len(sample.encoded.ids)])
    assert set(found) == {"0", "1", "2", *(f"doc {n}" for n in range(9))}
    for number in range(9):
        content = [{"type": "text", "text": "x" * (number + 1)}, {"type": "image", "image": 0}, {"type": "text", "text": "end"}]
        whole = encoder.encode({"id": "", "content": content, "images": sizes})
        ids_found, positions = found[f"doc {number}"]
        assert ids_found == whole.ids.tolist()
        assert len(np.unique(positions[1][whole.feature_mask])) == 2, "rows of the image"
        assert len(np.unique(positions[2][whole.feature_mask])) == 3, "columns of the image"


QWEN = "template: chatml, eos: <|endoftext|>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("tokenizer", "found profile_fingerprint .* in the state, .* here: the profile counts otherwise now"),
        ("max_pixels", "found profile_fingerprint .* in the state, .* here: the profile counts otherwise now"),
        (
            "context",
            r"found limits \{'alignment': 1\} in the state, \{'alignment': 4\} here: packs were planned with other limits",
        ),
    ],
)
def test_case_39_a_plan_of_other_settings_is_refused_by_the_field(tmp_path: Path, change: str, message: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#1867, axolotl-ai-cloud/axolotl#1265, mosaicml/composer#1061: a plan used for another."""
    url = dataset(tmp_path / "a", [30] * 20)
    with opened(url, SETTINGS) as stream:
        next(stream)
        state = stream.save_state()
    other, peers = url, Peers()
    if change == "context":
        peers = Peers(context=2)
    else:
        folder = tmp_path / "b"
        folder.mkdir()
        write_byte_tokenizer(folder / "other.json", [*QWEN_TOKENS, "<|one more|>"])
        tokenizer = "other.json" if change == "tokenizer" else "tokenizer.json"
        pixels = "{name: qwen2_5_vl, parameters: {max_pixels: 50000}}" if change == "max_pixels" else "qwen2_5_vl"
        other = dataset(folder, [30] * 20, profile=f"{{tokenizer: {tokenizer}, {QWEN}, image_rule: {pixels}}}")
    with opened(other, SETTINGS, peers=peers) as stream, pytest.raises(UsageError, match=message):
        stream.restore_state(state)
