"""An index job may end before any storage operation: whatever the place, and again in the rerun, the index is the same."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fuse import Fuse
from in_process import digests, index_in_process, pack_in_process
from small_job import PROFILES, QWEN, write_job, write_recipe, write_rows

from indexer.table import open_index
from packer.format import layout
from pipelines.index_tasks import _encoder

SOURCES = """\
  - {name: pics, schema: caption, files: 'pics*.jsonl', image_root: images}
  - {name: text, schema: text, files: text.jsonl.gz}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Two sources, two parts each where it has two files; one record that the profile refuses."""
    write_job(tmp_path)
    for number, names in enumerate([["0.png", "long.png", "1.png"], ["upright.jpg", "2.png"]]):
        write_rows(tmp_path / f"pics-{number}.jsonl", ({"id": name, "image_path": name, "caption": name} for name in names))
    (tmp_path / "pics.jsonl").unlink()
    (tmp_path / "text-2.jsonl").write_text('{"text": "more"}\n')
    pack_in_process(write_recipe(tmp_path, sources=SOURCES.replace("text.jsonl.gz", "'text*'")))
    return tmp_path


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> Fuse:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted all the same, and a hundred times as fast
    return Fuse(monkeypatch)


def end_anywhere(fuse: Fuse, output: Path, run: Callable[[], object]) -> dict[str, str]:
    """The files of a job that nobody disturbed, which ones that ended at every place and at another one must equal."""
    before = output.parent / "before"
    shutil.copytree(output, before)

    def begin() -> None:
        shutil.rmtree(output)
        shutil.copytree(before, output)

    def job() -> object:
        _encoder.cache_clear()  # another process
        return run()

    assert fuse.run(job, None) is not None
    whole, undisturbed = fuse.count, digests(output)
    for length in range(whole):
        begin()
        assert fuse.run(job, length) is None, f"operation {length} of {whole} was never reached"
        fuse.run(job, random.Random(length).randrange(whole))
        assert fuse.run(job, None) is not None
        assert digests(output) == undisturbed, f"ended before operation {length}"
    return undisturbed


def test_a_first_index_ends_anywhere(job: Path, fuse: Fuse) -> None:
    output = job / "out"
    files = end_anywhere(fuse, output, lambda: index_in_process(output))
    assert sum(layout.index_parts_dir("qwen", "") in name for name in files) == 4
    assert sum("/quarantine/" in name for name in files) == 1
    assert open_index(str(output), "qwen").num_rows == 36


def test_replacing_an_index_ends_anywhere(job: Path, fuse: Fuse) -> None:
    """The profile changed and one part was packed again: no mixture of old and new may survive."""
    output = job / "out"
    index_in_process(output)
    sources = SOURCES.replace("text.jsonl.gz", "'text*'")
    write_rows(job / "pics-0.jsonl", [{"id": "other", "image_path": "3.png", "caption": "other"}])
    fuse.run(lambda: pack_in_process(write_recipe(job, sources=sources), replace_changed=True), None)
    changed = write_recipe(job, sources=sources, profiles={"qwen": f"{{{QWEN}, bos: <|endoftext|>}}"})
    files = end_anywhere(fuse, output, lambda: index_in_process(output, recipe=changed, replace_changed=True))
    assert not any("/quarantine/" in name for name in files)


def test_a_replacement_that_ended_anywhere_is_taken_back(job: Path, fuse: Fuse) -> None:
    """The old profile again: what it counted is there, but beside the index quarantine of the other one."""
    output = job / "out"
    sources = SOURCES.replace("text.jsonl.gz", "'text*'")
    bare = "{tokenizer: tokenizer.json, template: document, image_rule: null}"

    def replaced_by(profile: str) -> Callable[[], object]:
        recipe = write_recipe(job, sources=sources, profiles={"qwen": profile}).rename(job / f"{len(profile)}.yaml")

        def run() -> object:
            _encoder.cache_clear()
            return index_in_process(output, recipe=recipe, replace_changed=True)

        return run

    other, back = replaced_by(bare), replaced_by(PROFILES["qwen"])
    back()
    expected = digests(output)
    assert fuse.run(other, None) is not None
    whole = fuse.count
    assert digests(output) != expected
    for length in range(whole):
        fuse.run(back, None)
        assert fuse.run(other, length) is None
        assert fuse.run(back, None) is not None
        assert digests(output) == expected, f"ended before operation {length}"
