"""The examples of `docs/trainers.md` run as they stand, on the example corpus, with a tiny model where they name a large one."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-energon is not installed", allow_module_level=True)

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from in_process import index_in_process, pack_in_process
from tiny_qwen import tiny_qwen25
from tokenizers import Tokenizer
from torchrun import torchrun
from transformers import TrainingArguments

from plugin import PackLoader, PackSettings, Peers, cost_model
from plugin.adapters.megatron_balance import balance_settings
from plugin.batch import Patches, to_hf, to_megatron
from plugin.host_memory import HostMemory

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "trainers.md").read_text()
README = (ROOT / "README.md").read_text()
MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true", "ignore:This process .* is multi-threaded"),
    pytest.mark.filterwarnings("ignore:The parameters have been moved"),
]


def section(title: str) -> str:
    return DOCUMENT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(title: str, language: str = "python") -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", section(title), re.MULTILINE | re.DOTALL)
    return str(block)


TITLES = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
EXAMPLES = [title for title in TITLES if "```python" in section(title)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `demo-dataset`, and a model below the name that the examples give."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "examples", folder / "examples")
    pack_in_process(folder / "examples" / "corpus" / "recipe.yaml")
    assert index_in_process(folder / "demo-dataset").exit_code == 0
    tokenizer = Tokenizer.from_file(str(folder / "examples" / "corpus" / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")}
    tiny_qwen25(ids, tokenizer.get_vocab_size()).save_pretrained(folder / MODEL)
    return folder


@pytest.fixture
def run(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], str]]:
    """Runs code in a folder of its own beside the dataset; what it printed."""
    for name in ("demo-dataset", "Qwen"):
        (tmp_path / name).symlink_to(demo / name)
    monkeypatch.chdir(tmp_path)

    def run_code(text: str) -> str:
        exec(compile(text, "docs/trainers.md", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    yield run_code
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_every_trainer_has_an_example_that_bounds_the_encoders_memory() -> None:
    linked = re.findall(r"\]\(#([a-z0-9-]+)\)", DOCUMENT.partition("\n## ")[0])
    linked.remove("balancing")  # no example of its own
    anchors = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in EXAMPLES]
    assert linked == anchors
    assert all("max_patches_per_pack" in code(title) for title in EXAMPLES if title != "Raw samples")


@pytest.mark.parametrize("title", EXAMPLES)
def test_what_an_example_imports_of_ours_is_there(title: str) -> None:
    for node in ast.walk(ast.parse(code(title))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("plugin") and node.module != "plugin.adapters.bridge":
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names)


def packs_and_losses(out: str) -> list[tuple[int, float]]:
    return [(int(number), float(loss)) for number, loss in re.findall(r"^pack (\d+): loss ([\d.]+)", out, re.MULTILINE)]


@pytest.mark.parametrize("title", ["PyTorch", "accelerate"])
def test_a_loop_runs_and_goes_on_where_it_was(run: Callable[[str], str], title: str) -> None:
    first, second = packs_and_losses(run(code(title))), packs_and_losses(run(code(title)))
    assert [number for number, _ in first + second] == list(range(1, 9))
    assert all(0 < loss < 100 for _, loss in first + second)


def test_the_log_line_that_is_shown_is_the_loaders(run: Callable[[str], str]) -> None:
    shown = re.findall(r"^    (1 packs; .*)$", DOCUMENT, re.MULTILINE)
    printed = [line.partition("; ")[2] for line in run(code("PyTorch")).splitlines()]
    (pattern,) = {re.sub(r"by source: .*", "", re.sub(r"[\d,.]+", "N", line)) for line in shown}
    assert {re.sub(r"by source: .*", "", re.sub(r"[\d,.]+", "N", line)) for line in printed} == {pattern}


@pytest.mark.parametrize(("title", "num_packs"), [("PyTorch on several ranks", 6), ("Balancing in PyTorch", 8)])
def test_ranks_run_and_go_on_where_they_were(demo: Path, tmp_path: Path, title: str, num_packs: int) -> None:
    for name in ("demo-dataset", "Qwen"):
        (tmp_path / name).symlink_to(demo / name)
    script = tmp_path / "train.py"
    script.write_text(code(title))
    outs = [torchrun(script, num_ranks=2) for _ in range(2)]
    lines = sorted(re.findall(r"^rank (\d) pack (\d): (.*)$", "".join(outs), re.MULTILINE))
    assert [line[:2] for line in lines] == [(str(rank), str(pack)) for rank in range(2) for pack in range(1, num_packs + 1)]
    assert len({ids for _, _, ids in lines}) == 2 * num_packs
    assert "dealt to" in outs[1] or not title.startswith("Balancing")


def test_energons_own_loader_runs(run: Callable[[str], str]) -> None:
    assert re.findall(r"^pack (\d): \d+ samples, \d+ tokens$", run(code("Megatron-Energon directly")), re.MULTILINE) == list(
        "0123"
    )


def test_trainer_runs_and_resumes(run: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = code("Hugging Face Trainer")
    run(text)
    state = json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())
    shutil.rmtree(tmp_path / "run/checkpoint-4")
    with caplog.at_level(logging.INFO):
        run(text)
    again = json.loads((tmp_path / "run/checkpoint-4/trainer_state.json").read_text())
    assert "the data goes on after pack 4" in caplog.text
    assert [entry["loss"] for entry in again["log_history"]] == [entry["loss"] for entry in state["log_history"]]


def test_a_balanced_trainer_runs_and_resumes(run: Callable[[str], str], tmp_path: Path) -> None:
    text = code("Balancing in Trainer and DeepSpeed")
    run(text)
    state = json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())
    shutil.rmtree(tmp_path / "run/checkpoint-2")
    run(text)
    again = json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())
    assert [entry["loss"] for entry in again["log_history"]] == [entry["loss"] for entry in state["log_history"]]


def test_rows_come(run: Callable[[str], str]) -> None:
    assert len(re.findall(r"^\S+ \[.*\] \[.*\]$", run(code("Raw samples")), re.MULTILINE)) == 4


def test_the_example_of_zero_3_is_trainers_with_an_image_in_every_pack() -> None:
    text = code("DeepSpeed ZeRO-3")
    calls = {getattr(node.func, "id", ""): node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}
    given = {keyword.arg for keyword in calls["TrainingArguments"].keywords}
    assert given <= {field.name for field in dataclasses.fields(TrainingArguments)}
    assert "ensure_image=True" in text
    config = json.loads(code("DeepSpeed ZeRO-3", "json"))
    assert (config["train_micro_batch_size_per_gpu"], config["zero_optimization"]["stage"]) == (1, 3)


@pytest.mark.parametrize("title", ["Megatron Bridge", "Balancing in Megatron Bridge"])
def test_the_example_of_bridge_names_what_there_is(title: str) -> None:
    """Bridge needs a GPU for a step; the classes are looked up without importing it."""
    classes = {node.name: node for node in ast.parse((ROOT / "plugin/adapters/bridge.py").read_text()).body
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    provider = {node.target.id for node in classes["BayplanDatasetProvider"].body if isinstance(node, ast.AnnAssign)}
    (made,) = (node for node in classes["BayplanCallback"].body if getattr(node, "name", "") == "__init__")
    example = ast.parse(code(title))
    calls = {getattr(node.func, "id", ""): node for node in ast.walk(example) if isinstance(node, ast.Call)}
    inherited = {"num_workers"}
    assert {keyword.arg for keyword in calls["BayplanDatasetProvider"].keywords} <= provider | inherited
    assert {keyword.arg for keyword in calls["BayplanCallback"].keywords} <= {argument.arg for argument in made.args.kwonlyargs}
    (imported,) = (node for node in example.body if isinstance(node, ast.ImportFrom) and node.module == "plugin.adapters.bridge")
    assert {name.name for name in imported.names} <= classes.keys()
    given = {keyword.arg: keyword.value for keyword in calls["BayplanDatasetProvider"].keywords}
    if "balance" in given:
        balance_settings(ast.literal_eval(given["balance"]))
        cost_model(ast.literal_eval(given["settings"])["cost"])


def test_the_document_lists_every_key_with_its_type(demo: Path) -> None:
    """Of a pack of several samples that are padded, with an image: what both exporters can give."""
    settings = PackSettings(sequence_length=1024, max_patches_per_pack=4096, alignment=8, ensure_image=True)
    with PackLoader.open(str(demo / "demo-dataset"), "qwen25vl", settings, num_workers=0) as loader:
        pack = next(loader)
        made = {
            "to_hf": to_hf(pack, normalise=loader.normalise, mrope=True, flash_attention=True),
            "to_megatron": to_megatron(pack, normalise=loader.normalise),
        }
    for name, values in made.items():
        table = section("What a batch holds").partition(f"| `{name}(...)`")[2].partition("\n\n")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines()[2:]]
        listed = {
            key: types.split(", ")[place] if ", " in types else types
            for keys, types, _ in rows
            for place, key in enumerate(re.findall(r"`(\w+)`", keys))
        }
        assert listed.keys() == values.keys()
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert f"torch.{listed[key]}" == str(value.dtype), key


def test_the_memory_that_is_shown_is_what_the_loader_works_out(demo: Path) -> None:
    settings = PackSettings(sequence_length=2048, max_patches_per_pack=8192, buffer_size=2000)
    form = Patches(patch_bytes=588, merge_size=2)
    found = HostMemory.of(settings, settings.limits(Peers()), form, num_workers=2, packs_queued=3, rows_waiting=2000 + 500)
    pack = 26 * 2048 + 588 * 8192 + (64 << 10)
    assert found.total_bytes == 2 * ((3 + 3) * pack + settings.prefetch_bytes + (2 << 10) * (2000 + 500)) + 2 * pack
