"""A dataset whose index takes some seconds where it is told to: an image rule in a module beside the recipe takes its time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from byte_tokenizer import write_byte_tokenizer
from in_process import digests, index_in_process, pack_in_process
from PIL import Image
from small_job import write_rows

from packer.format import layout

RULE = """
import os, time

from indexer.image_rules import image_counts

def rule(sizes):
    time.sleep(float(os.environ.get("SLOW_RULE_SECONDS", "0")))
    if (sizes.widths == 13).any() and {kills}:
        os._exit(1)
    return image_counts(sizes, image_tokens=sizes.widths, patches=sizes.heights, grid=(1, 1), grid_unit="patches")
"""
SLOWLY = {"SLOW_RULE_SECONDS": "0.1"}
"""Environment of a job that must last long enough to be disturbed."""
KILLER = 57
"""The row of source `first` that kills, where one does."""


def write_slow_job(folder: Path, *, output: str = "out", kills: bool = False) -> Path:
    """A recipe of two sources, some sixty parts each."""
    folder.mkdir(parents=True)
    (folder / "slow_rule.py").write_text(RULE.format(kills=kills))
    write_byte_tokenizer(folder / "tokenizer.json")
    Image.new("RGB", (20, 10), "red").save(folder / "red.png")
    Image.new("RGB", (13, 10), "red").save(folder / "killer.png")
    for source in ("first", "second"):
        images = ["killer.png" if kills and (source, row) == ("first", KILLER) else "red.png" for row in range(250)]
        write_rows(
            folder / f"{source}.jsonl", ({"id": f"{source} {n}", "image_path": i, "caption": "x"} for n, i in enumerate(images))
        )
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nname: slow\noutput: {output}\ndefaults: {{schema: caption, image_root: {folder}, range_bytes: 256}}\n"
        f"sources:\n  - {{name: first, files: {folder}/first.jsonl}}\n  - {{name: second, files: {folder}/second.jsonl}}\n"
        f"profiles:\n  own: {{tokenizer: {folder}/tokenizer.json, template: document, image_rule: 'slow_rule:rule',"
        " image_layout: {kind: wrapped, parameters: {token: <|image_pad|>}}}\n"
    )
    return recipe


def packed(folder: Path, *, kills: bool = False) -> Path:
    """The dataset, packed in this process."""
    pack_in_process(write_slow_job(folder, kills=kills))
    return folder / "out"


def counted(dataset: Path) -> dict[Path, int]:
    """The index files of parts that are published, with the time they were."""
    files = (path for path in dataset.glob("index/*/parts/*/*.arrow") if not path.name.startswith(layout.TEMPORARY_PREFIX))
    return {path: path.stat().st_mtime_ns for path in files}


def index_digests(dataset: Path) -> dict[str, str]:
    """Digests of an index without the profile, which names the folder of its tokenizer."""
    found = digests(dataset)
    return {name: digest for name, digest in found.items() if name.startswith("index/") and name != layout.profile_file("own")}


def in_folder(folder: Path, job: Callable[[], object]) -> None:
    """Run a job that finds the modules of a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        job()


def undisturbed_index(folder: Path) -> dict[str, str]:
    """Digests of the index of a job that ran in this process."""
    dataset = packed(folder)
    in_folder(folder, lambda: index_in_process(dataset))
    return index_digests(dataset)
