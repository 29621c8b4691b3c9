"""What the documents say is true: their commands run, their readers read, and the command's surface cannot grow unseen."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from packer.format.reasons import EXPLANATIONS
from pipelines.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FORMAT = (ROOT / "packer" / "format" / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "packer/format/README.md",
    ROOT / "examples/corpus/README.md",
    *sorted(ROOT.glob("docs/*.md")),
]

SURFACE = {
    "recipe check": {"RECIPE"},
    "recipe schema": set(),
    "pack": {"RECIPE", "--workers", "--address", "--limit", "--replace-changed", "--json"},
    "index": {"DATASET", "--workers", "--address", "--profile", "--recipe", "--replace-changed", "--json"},
    "run": {"RECIPE", "--workers", "--address", "--replace-changed", "--json"},
    "report": {"DATASET", "--profile", "--cards", "--seed", "--to", "--forecast", "--json"},
    "estimate": {"RECIPE", "--workers", "--address", "--cores", "--json"},
    "verify": {"DATASET", "--deep", "--workers", "--json"},
    "show": {"DATASET", "SOURCE[:N|:ID]", "--open", "--to"},
    "quarantine": {"DATASET", "--source", "--reason", "--examples", "--json"},
    "retry": {"DATASET", "--workers", "--address", "--source", "--json"},
    "status": {"DATASET", "--json"},
    "image-tokens": {"[SIZE]...", "--rule", "--json"},
    "calibrate": {"TIMINGS...", "--to", "--json"},
    "forecast": {
        *("DATASET", "--profile", "--dp", "--microbatches", "--sequence-length", "--expert-parallel", "--synchronises"),
        *("--gpus-per-node", "--cost", "--max-images-per-pack", "--max-patches-per-pack", "--alignment", "--buffer-size"),
        *("--batches", "--seed", "--json"),
    },
}
"""Every command with its arguments and flags. Few flags; the recipe carries the rest."""


def commands(group: click.Group = main, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def names_of(parameter: click.Parameter) -> list[str]:
    return [str(parameter.metavar)] if isinstance(parameter, click.Argument) else parameter.opts


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def example_of(command: click.Command) -> str:
    return (command.help or "").partition("Example: ")[2].strip()


def walked(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words after `bayplan` name, and the rest of them."""
    command: click.Command = main
    while isinstance(command, click.Group) and words:
        command, words = command.commands[words[0]], words[1:]
    return command, words


README_LINES = [line for block in blocks(README, "bash") for line in block.splitlines() if line]
RUN_ELSEWHERE = [line for line in README_LINES if line.startswith(("make ", "ray ", "git ")) or "--address" in line]
EXAMPLES = [example_of(command) for _, command in commands()]
RUN_HERE = [line for line in dict.fromkeys(README_LINES + EXAMPLES) if line not in RUN_ELSEWHERE]


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line as a person would: in a shell, the commands of this environment on the path, no Ray cluster around."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "disabled", "BROWSER": "true", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example corpus, packed and counted as the README says."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(ROOT / "examples", folder / "examples")
    done = run("bayplan run examples/corpus/recipe.yaml", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("line", RUN_HERE)
def test_every_command_of_readme_and_help_runs_as_it_stands(line: str, demo: Path) -> None:
    done = run(line, demo)
    assert done.returncode == 0, done.stderr
    assert done.stdout or ">" in line
    assert "Traceback" not in done.stderr


def test_readme_shows_every_command() -> None:
    shown = {name for name, _ in commands() for line in README_LINES if line.startswith(f"bayplan {name} ")}
    assert shown == SURFACE.keys()


@pytest.mark.parametrize("line", RUN_ELSEWHERE)
def test_commands_that_need_more_than_this_test_exist(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "ray":
        assert words[:3] == ["ray", "job", "submit"]
        words = words[words.index("--") + 1 :]
    command, rest = walked(words[1:])
    command.make_context(command.name, rest)


def test_commands_and_flags_are_the_known_ones() -> None:
    found = {name: {option for item in command.params for option in names_of(item)} for name, command in commands()}
    assert found == SURFACE


def test_every_command_and_option_explains_itself() -> None:
    for name, command in commands():
        assert example_of(command).startswith(f"bayplan {name} ") or example_of(command) == f"bayplan {name}"
        assert all(option.help for option in command.params if isinstance(option, click.Option)), name


@pytest.mark.parametrize("name", ["", *SURFACE])
def test_help_names_every_flag(name: str) -> None:
    command, _ = walked(name.split())
    text = command.get_help(click.Context(command, info_name=name or "bayplan"))
    assert all(option in text for option in SURFACE.get(name, {"pack", "verify"}))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_flags_and_links_in_documents_exist(path: Path) -> None:
    text = path.read_text()
    options = {option for _, command in commands() for item in command.params for option in names_of(item)}
    for span in re.findall(r"`(bayplan [^`]+)`", text):
        command, rest = walked([word for word in span.split()[1:] if not word.isupper()])
        assert {word for word in rest if word.startswith("--")} <= {name for item in command.params for name in names_of(item)}
    assert set(re.findall(r"`(--[a-z-]+)`", text)) <= options
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / link).exists(), link


def test_map_of_the_tree_is_right() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README.partition("## Map of the tree")[2], re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "examples/corpus/LICENSES.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_no_machine(path: Path) -> None:
    assert re.findall(r"/(?:home|root|work|Users|tmp/\w)[/\w]*", path.read_text()) == []


def test_reader_of_the_specification_reads_everything(demo: Path) -> None:
    scope: dict[str, Any] = {}
    exec(blocks(FORMAT, "python")[0], scope)
    num_records = num_images = 0
    for source in (demo / "demo-dataset" / "sources").iterdir():
        for record, images in scope["read_source"](demo / "demo-dataset", source.name):
            num_records += 1
            num_images += len(images)
            if source.name == "stamps":
                assert images == [(demo / "examples/corpus/stamps" / record["images"][0]["ref"]).read_bytes()]
    assert (num_records, num_images) == (691, 714)


def test_specification_lists_every_reason_code() -> None:
    section = FORMAT.partition("The reason codes:")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE) == [
        (code.value, why) for code, why in EXPLANATIONS.items()
    ]


def test_code_of_the_readme_that_looks_up_a_length_runs(demo: Path) -> None:
    (demo / "lengths.py").write_text(blocks(README, "python")[2])
    done = run("python lengths.py", demo)
    assert done.returncode == 0, done.stderr
    assert re.match(r"691 samples; \d+ usable; tokens of the first: \d+\n\d+ tokens, images at \[\(\d+, \d+\)", done.stdout)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-energon is not installed")
def test_energon_code_of_the_readme_runs(demo: Path) -> None:
    (demo / "packs.py").write_text(blocks(README, "python")[0])
    packs = run("python packs.py", demo)
    assert packs.returncode == 0, packs.stderr
    assert len(re.findall(r"^1 packs; [\d,]+ tokens .*% full;", packs.stdout, re.MULTILINE)) == 3
    (demo / "balanced.py").write_text(blocks(README, "python")[1])
    balanced = run("python balanced.py", demo)
    assert balanced.returncode == 0, balanced.stderr
    assert re.match(r"\d+ tokens in the loss of this global batch; 4 packs; .* imbalance ", balanced.stdout)
    (demo / "rows.py").write_text(blocks(README, "python")[3])
    rows = run("python rows.py", demo)
    assert rows.returncode == 0, rows.stderr
    assert len(re.findall(r"^[\w-]+ line \d+: \d+ tokens$", rows.stdout, re.MULTILINE)) == 6
    (demo / "trainer.py").write_text(blocks(README, "python")[4])
    done = run("python trainer.py", demo)
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if re.fullmatch(r".+ \[[\d, ]*\]", line)]
    assert len(shown) >= 6
