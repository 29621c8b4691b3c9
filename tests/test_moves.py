"""Inputs move, grow and hide: part names stay, nothing is packed twice, and nothing is missed without a word."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from in_process import digests, pack_in_process
from rich.console import Console

from packer.format import layout
from pipelines.pack import JobReport
from pipelines.verifying import verify_dataset


def write_rows(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def recipe_of(folder: Path, *sources: str, more: str = "") -> Path:
    recipe = folder / "recipe.yaml"
    listed = "\n".join(f"  - {{{source}, schema: text}}" for source in sources)
    recipe.write_text(f"version: 1\nname: moves\noutput: out\n{more}sources:\n{listed}\n")
    return recipe


def counts(report: JobReport, source: str = "s") -> tuple[int, int]:
    totals = report.sources[source].totals
    return totals.num_read, totals.num_written


def problems(folder: Path) -> list[str]:
    return verify_dataset(str(folder / "out"), deep=False, workers=1, console=Console(quiet=True)).problems


def test_a_project_that_moves_or_is_reached_by_a_link_redoes_nothing(tmp_path: Path) -> None:
    write_rows(tmp_path / "one/a/x.jsonl", "1", "2")
    pack_in_process(recipe_of(tmp_path / "one", 'name: s, files: "a/*.jsonl"'))
    parts = {name: digest for name, digest in digests(tmp_path / "one/out").items() if name.startswith("sources")}
    (tmp_path / "one").rename(tmp_path / "two")
    (tmp_path / "alias").symlink_to(tmp_path / "two")
    for folder in ("two", "alias", "two"):
        report = pack_in_process(tmp_path / folder / "recipe.yaml")
        assert (report.exit_code, counts(report)) == (0, (2, 2))
        assert report.sources["s"].notes == []
    assert {name: digest for name, digest in digests(tmp_path / "two/out").items() if name.startswith("sources")} == parts
    assert problems(tmp_path / "two") == []


def test_a_pattern_outside_of_the_first_folder_is_refused_and_the_dataset_stays_usable(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/x.jsonl", "1")
    write_rows(tmp_path / "b/y.jsonl", "2")
    pack_in_process(recipe_of(tmp_path, "name: s, files: [a/*.jsonl]"))
    report = pack_in_process(recipe_of(tmp_path, "name: s, files: [a/*.jsonl, b/*.jsonl]"))
    assert "found a pattern outside of" in str(report.sources["s"].failure)
    assert pack_in_process(recipe_of(tmp_path, "name: s, files: [a/*.jsonl]")).exit_code == 0


def test_another_root_does_not_pack_the_same_rows_twice(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/x.jsonl", "1")
    pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl"'))
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl", root: .'))
    assert "it is gone, and a/x.jsonl is new and holds the same" in str(report.sources["s"].failure)
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl", root: .'), replace_changed=True)
    assert (report.exit_code, counts(report)) == (0, (1, 1))


def test_a_source_that_was_taken_out_and_comes_back_wider_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a/x.jsonl", "1")
    write_rows(tmp_path / "b/z.jsonl", "2")
    other = "name: other, files: b/z.jsonl"
    pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl"', other))
    report = pack_in_process(recipe_of(tmp_path, other))
    assert "not in the recipe any more" in report.notes[0]
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: ["a/*.jsonl", "b/*.jsonl"]', other))
    assert "found a pattern outside of" in str(report.sources["s"].failure)
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl", range_bytes: 2048', other))
    assert "range_bytes: found 2048" in str(report.sources["s"].failure)
    assert pack_in_process(recipe_of(tmp_path, 'name: s, files: "a/*.jsonl"', other)).exit_code == 0
    assert problems(tmp_path) == []


def test_the_dataset_is_never_its_own_input(tmp_path: Path) -> None:
    write_rows(tmp_path / "data/x.jsonl", "1", "2")
    recipe = recipe_of(tmp_path, 'name: s, files: "**/*.jsonl"')
    for _ in range(3):
        assert counts(pack_in_process(recipe)) == (2, 2)


def test_linked_folders_are_searched_and_loops_end(tmp_path: Path) -> None:
    write_rows(tmp_path / "elsewhere/x.jsonl", "1")
    write_rows(tmp_path / "data/sub/y.jsonl", "2")
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/sub/loop").symlink_to(tmp_path / "data")
    (tmp_path / "data/.hidden.jsonl").write_text("never")
    assert counts(pack_in_process(recipe_of(tmp_path, 'name: s, files: "data/*/*.jsonl"'))) == (2, 2)
    shutil.rmtree(tmp_path / "out")
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: "data/**/*.jsonl"'))
    assert (report.exit_code, counts(report)) == (0, (2, 2))


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_fails_its_source(tmp_path: Path) -> None:
    write_rows(tmp_path / "data/a/x.jsonl", "1")
    write_rows(tmp_path / "data/b/y.jsonl", "2")
    (tmp_path / "data/b").chmod(0)
    report = pack_in_process(recipe_of(tmp_path, 'name: s, files: "data/*/*.jsonl"'))
    (tmp_path / "data/b").chmod(0o700)
    assert "Permission denied" in str(report.sources["s"].failure)


def test_a_pipe_is_no_input_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    report = pack_in_process(recipe_of(tmp_path, "name: s, files: x.jsonl"))
    assert "found a pipe, socket or device" in str(report.sources["s"].failure)


def test_a_fixed_recipe_remakes_a_source_that_held_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "1"}\n')
    assert pack_in_process(recipe_of(tmp_path, "name: s, files: x.jsonl")).exit_code == 1
    report = pack_in_process(recipe_of(tmp_path, "name: s, files: x.jsonl, fields: {text: body}"))
    assert (report.exit_code, counts(report)) == (0, (1, 1))


def test_an_unfinished_dataset_does_not_verify(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", "1")
    write_rows(tmp_path / "y.jsonl", "2")
    pack_in_process(recipe_of(tmp_path, 'name: s, files: "*.jsonl"'))
    assert problems(tmp_path) == []
    gone = layout.file_hash("y.jsonl")
    for path in (tmp_path / "out/sources/s").glob(f"{gone}*"):
        path.unlink()
    assert any("y.jsonl: nothing is committed behind byte 0" in problem for problem in problems(tmp_path))


def test_a_part_in_another_sources_folder_is_found(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", "1")
    pack_in_process(recipe_of(tmp_path, "name: s, files: x.jsonl", "name: t, files: x.jsonl"))
    shutil.rmtree(tmp_path / "out/sources/s")
    shutil.copytree(tmp_path / "out/sources/t", tmp_path / "out/sources/s")
    assert any("of source 't': the file was moved here" in problem for problem in problems(tmp_path))


def test_a_trial_that_was_interrupted_keeps_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(50)))
    recipe = recipe_of(tmp_path, "name: s, files: x.jsonl")
    assert counts(pack_in_process(recipe, limit=20)) == (20, 20)
    assert counts(pack_in_process(recipe, limit=20)) == (20, 20)


def test_a_refused_source_leaves_a_recipe_that_can_be_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "x/d.jsonl", "1")
    write_rows(tmp_path / "y/d.jsonl", "1", "2")
    pack_in_process(recipe_of(tmp_path, "name: s, files: x/*.jsonl", "name: q, files: y/*.jsonl"))
    moved = ["name: s, files: y/*.jsonl, token_share: 0.5, keep: []", "name: q, files: y/*.jsonl, token_share: 0.5"]
    for _ in range(2):
        report = pack_in_process(recipe_of(tmp_path, *moved))
        assert "files changed" in str(report.sources["s"].failure)
        assert report.sources["q"].failure is None
    assert problems(tmp_path) == []
    assert pack_in_process(recipe_of(tmp_path, *moved), replace_changed=True).exit_code == 0


def test_a_trial_and_its_dataset_are_no_input_of_each_other(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", "1", "2", "3")
    recipe = recipe_of(tmp_path, 'name: s, files: "**/*.jsonl"')
    for limit, expected in ((2, 2), (None, 3), (2, 2), (None, 3)):
        assert counts(pack_in_process(recipe, limit=limit)) == (expected, expected)


def test_another_file_of_the_same_name_and_size_is_just_new(tmp_path: Path) -> None:
    write_rows(tmp_path / "x/day1/data.jsonl", "1")
    write_rows(tmp_path / "x/keep/k.jsonl", "k")
    recipe = recipe_of(tmp_path, 'name: s, files: "x/*/*.jsonl"')
    pack_in_process(recipe)
    shutil.rmtree(tmp_path / "x/day1")
    write_rows(tmp_path / "x/day2/data.jsonl", "2")
    report = pack_in_process(recipe)
    assert (report.exit_code, counts(report)) == (0, (3, 3))


def test_nothing_is_pinned_while_nothing_is_packed(tmp_path: Path) -> None:
    write_rows(tmp_path / "x/a.jsonl", "1")
    write_rows(tmp_path / "y/b.jsonl", "2")
    pack_in_process(recipe_of(tmp_path, "name: s, files: x/*.jsonl, fields: {text: body}"))
    wider = recipe_of(tmp_path, "name: s, files: [x/*.jsonl, y/*.jsonl], range_bytes: 1048576")
    report = pack_in_process(wider)
    assert (report.exit_code, counts(report)) == (0, (2, 2))
    assert problems(tmp_path) == []


def test_a_source_that_never_began_leaves_no_trace(tmp_path: Path) -> None:
    write_rows(tmp_path / "x.jsonl", "1")
    assert pack_in_process(recipe_of(tmp_path, "name: typo, files: nowhere.jsonl")).exit_code == 1
    assert pack_in_process(recipe_of(tmp_path, "name: good, files: x.jsonl")).exit_code == 0
    assert problems(tmp_path) == []
