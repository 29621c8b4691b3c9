"""A process may end before any storage operation: whatever the place, and again in the rerun, the dataset is the same.

The whole pack job runs in this process, its tasks one after the other. The index job's turn is in `test_index_crash_points`.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuse import Fuse
from in_process import digests, pack_in_process
from PIL import Image
from rich.console import Console

from packer.format import layout
from pipelines.verifying import verify_dataset


@pytest.fixture
def small_recipe(tmp_path: Path) -> Path:
    """Two sources: images in several rolls of two ranges with bad rows among them, and a gzip file of text."""
    images = tmp_path / "images"
    images.mkdir()
    rows = []
    for number in range(9):
        Image.effect_noise((24, 24), 50 + number).save(images / f"{number}.png")
        name = "missing.png" if number == 4 else f"{number}.png"
        rows.append(json.dumps({"image_path": name, "caption": f"number {number}", "extra": number}))
    rows.insert(3, "{broken")
    (tmp_path / "pictures.jsonl").write_text("\n".join(rows) + "\n")
    with gzip.open(tmp_path / "text.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"text {number}"}) + "\n" for number in range(4))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nname: small\noutput: out\nsources:\n"
        "  - {name: pictures, schema: caption, files: pictures.jsonl, image_root: images, range_bytes: 512,"
        " target_bundle_bytes: 1300}\n"
        "  - {name: text, schema: text, files: text.jsonl.gz}\n"
    )
    return recipe


def test_ends_anywhere_and_again_in_the_rerun(small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted all the same, and a hundred times as fast
    fuse = Fuse(monkeypatch)
    output = tmp_path / "out"
    report = fuse.run(lambda: pack_in_process(small_recipe), None)
    assert report is not None
    totals = report.sources["pictures"].totals
    assert (totals.num_read, totals.num_written, totals.num_quarantined) == (10, 8, 2)
    assert totals.num_parts >= 4
    whole, undisturbed = fuse.count, digests(output)
    _remove(output)
    for length in range(whole):
        assert fuse.run(lambda: pack_in_process(small_recipe), length) is None, f"operation {length} of {whole} was never reached"
        fuse.run(lambda: pack_in_process(small_recipe), random.Random(length).randrange(whole))
        assert fuse.run(lambda: pack_in_process(small_recipe), None) is not None
        assert digests(output) == undisturbed, f"ended before operation {length}"
        _remove(output)


def test_a_finished_run_touches_nothing(small_recipe: Path, tmp_path: Path) -> None:
    pack_in_process(small_recipe)
    before = _times(tmp_path / "out")
    pack_in_process(small_recipe)
    assert _times(tmp_path / "out") == before


def test_any_order_of_tasks_gives_the_same_dataset(small_recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    found = []
    for seed in range(4):
        pack_in_process(small_recipe, random.Random(seed))
        found.append(digests(output))
        _remove(output)
    assert all(one == other for one, other in itertools.pairwise(found))


def test_the_dataset_proves_itself(small_recipe: Path, tmp_path: Path) -> None:
    pack_in_process(small_recipe)
    verdict = verify_dataset(str(tmp_path / "out"), deep=True, workers=1, console=Console(quiet=True))
    assert verdict.problems == []
    assert verdict.num_images == 8


def test_adding_a_file_touches_no_old_part(small_recipe: Path, tmp_path: Path) -> None:
    recipe = small_recipe.read_text().replace("files: pictures.jsonl", 'files: "pict*.jsonl"')
    small_recipe.write_text(recipe)
    pack_in_process(small_recipe)
    before = {name: time for name, time in _times(tmp_path / "out").items() if layout.part_of(name.rpartition("/")[2])}
    (tmp_path / "pictures-2.jsonl").write_text(json.dumps({"image_path": "1.png", "caption": "one more"}) + "\n")
    report = pack_in_process(small_recipe)
    assert report.sources["pictures"].totals.num_written == 9
    assert report.sources["pictures"].notes == ["pictures-2.jsonl: new file"]
    after = _times(tmp_path / "out")
    assert before.items() <= after.items()


def _times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def _remove(folder: Path) -> None:
    for path in sorted(_everything(folder), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _everything(folder: Path) -> Iterator[Path]:
    yield folder
    yield from folder.rglob("*")
