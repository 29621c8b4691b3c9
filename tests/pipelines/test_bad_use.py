"""Wrong use and a hostile world: each gets one clear message and its exit code, and nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from in_process import digests, index_in_process, pack_in_process, run_in_process
from small_job import PROFILES, QWEN, write_job
from small_job import write_recipe as write_small_recipe

from packer.format import layout
from packer.format.errors import BayplanError, OutputError, UsageError
from pipelines.cli import main
from pipelines.index_text import index_lines
from pipelines.run import run_json

RECIPE = "version: 1\nname: {name}\noutput: {output}\nsources:\n  - {{name: rows, schema: {schema}, files: rows.jsonl{more}}}\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(5)))
    return write_recipe(tmp_path)


def write_recipe(folder: Path, *, name: str = "good", output: str = "out", schema: str = "text", more: str = "") -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(name=name, output=output, schema=schema, more=more))
    return recipe


def bayplan(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_no_such_recipe(tmp_path: Path) -> None:
    code, output = bayplan("pack", tmp_path / "none.yaml")
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "none.yaml" in output


def test_all_four_mistakes_of_one_source_are_shown(tmp_path: Path) -> None:
    more = ", weight: heavy, imges: {}, val: 0.9, images: {max_pixls: 5}"
    code, output = bayplan("pack", write_recipe(tmp_path, more=more))
    assert code == 2
    assert len(output.splitlines()) == 4
    for field in ("weight", "imges", "val", "max_pixls"):
        assert sum(field in line and "'rows'" in line for line in output.splitlines()) == 1


def test_an_output_with_another_dataset_is_refused(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    before = digests(tmp_path / "out")
    with pytest.raises(UsageError, match="found dataset 'good', expected 'other'"):
        pack_in_process(write_recipe(tmp_path, name="other"))
    assert digests(tmp_path / "out") == before


def test_an_output_with_other_files_is_refused(job: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"found a folder with other files \(thesis\.tex\)"):
        pack_in_process(job)
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_an_output_that_cannot_be_written(tmp_path: Path, job: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OutputError, match=r"cannot write to .*Not a directory"):
        pack_in_process(write_recipe(tmp_path, output="file/out"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_stops_the_job_and_a_rerun_goes_on(small_disk: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"{n} " + "x" * 1000}) for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    recipe = write_recipe(tmp_path, output="disk/out", more=", range_bytes: 16384")
    with pytest.raises(OutputError, match=r"No space left on device: free space .* then run the same command again"):
        pack_in_process(recipe)
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    report = pack_in_process(recipe)
    assert report.sources["rows"].totals.num_written == 80


def test_a_reference_that_climbs_out_of_its_root(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"image_path": "../secret.png", "caption": "?"}) + "\n")
    report = pack_in_process(write_recipe(tmp_path, schema="caption"))
    assert report.sources["rows"].totals.quarantined_by_reason == {"reference_outside_root": 1}


def test_http_without_permission(tmp_path: Path) -> None:
    row = {"image_path": "http://user:pass@example.org/a.png?token=secret", "caption": "?"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    report = pack_in_process(write_recipe(tmp_path, schema="caption"))
    assert report.sources["rows"].totals.quarantined_by_reason == {"remote_not_allowed": 1}
    (quarantined,) = [json.loads(path.read_text()) for path in (tmp_path / "out").rglob("*.quarantine.jsonl")]
    assert "example.org" in quarantined["detail"]
    assert "allow_hosts" in quarantined["detail"]
    assert "secret" not in quarantined["detail"]


def test_a_changed_input_is_refused_until_told_otherwise(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace("text 3", "TEXT 3"))
    report = pack_in_process(job)
    assert report.exit_code == 1
    failure = report.sources["rows"].failure
    assert failure is not None
    assert "1 files changed since their parts were made: rows.jsonl: its bytes 0 to 95" in failure
    assert "--replace-changed" in failure
    assert pack_in_process(job, replace_changed=True).exit_code == 0
    assert "TEXT 3" in next((tmp_path / "out").rglob("*-p00000.jsonl")).read_text()


def test_a_touched_input_is_no_change(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    assert pack_in_process(job).exit_code == 0


def test_a_changed_recipe_names_the_fields(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    report = pack_in_process(write_recipe(tmp_path, more=", images: {min_side: 2}, keep: []"))
    assert "(in images.min_side, keep)" in str(report.sources["rows"].failure)


def test_a_vanished_input_is_named_and_its_parts_stay(job: Path, tmp_path: Path) -> None:
    (tmp_path / "rows-2.jsonl").write_text('{"text": "more"}\n')
    recipe = write_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("rows.jsonl", "'rows*.jsonl'"))
    pack_in_process(recipe)
    (tmp_path / "rows-2.jsonl").unlink()
    report = pack_in_process(recipe)
    assert report.exit_code == 0
    assert report.sources["rows"].notes == ["rows-2.jsonl: not among the inputs any more; its 1 parts are kept"]
    assert report.sources["rows"].totals.num_written == 6


@pytest.mark.parametrize("command", ["verify", "show", "quarantine", "status", "index", "report"])
def test_a_folder_that_is_no_dataset(command: str, tmp_path: Path) -> None:
    more = ["rows:0"] if command == "show" else []
    code, output = bayplan(command, tmp_path, *more)
    assert code == 2
    assert "found no bayplan.json, expected a dataset" in output


def test_a_damaged_dataset_fails_verify_with_exit_code_1(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    records = next((tmp_path / "out").rglob("*-p00000.jsonl"))
    records.write_bytes(records.read_bytes()[:-1])
    code, output = bayplan("verify", tmp_path / "out", "--workers", "1")
    assert code == 1
    assert f"{records.name}: found 697 bytes, the manifest says 698" in output


def test_limit_makes_a_trial_beside_the_dataset(job: Path, tmp_path: Path) -> None:
    report = pack_in_process(job, limit=2)
    assert report.output == f"{tmp_path}/out.limit-2"
    assert report.sources["rows"].totals.num_written == 2
    assert not (tmp_path / "out").exists()


def test_a_refused_source_keeps_the_recipe_its_parts_were_made_by(job: Path, tmp_path: Path) -> None:
    pack_in_process(job)
    before = digests(tmp_path / "out")
    changed = write_recipe(tmp_path, more=", keep: []")
    for _ in range(2):
        assert "(in keep)" in str(pack_in_process(changed).sources["rows"].failure)
    assert digests(tmp_path / "out") == before
    assert pack_in_process(write_recipe(tmp_path)).exit_code == 0


def test_an_input_that_changes_while_it_is_packed_fails_its_source(job: Path, tmp_path: Path) -> None:
    (tmp_path / "touching.py").write_text(
        "import os\ndef schema(row):\n    os.utime(row['file'], (1, 1))\n"
        "    return {'content': [{'type': 'text', 'text': row['text']}], 'used': ['text']}\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "a", "file": str(rows)}) + "\n")
    recipe = write_recipe(tmp_path, schema="'python:touching:schema'", more=", range_bytes: 4096")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        report = pack_in_process(recipe)
    assert report.exit_code == 1
    assert "rows.jsonl: it changed while it was packed" in str(report.sources["rows"].failure)


def test_recipe_check_looks_at_the_places_a_source_names(job: Path, tmp_path: Path) -> None:
    assert bayplan("recipe", "check", job)[0] == 0
    code, output = bayplan("recipe", "check", write_recipe(tmp_path, schema="caption", more=", image_root: nowhere"))
    assert code == 1
    assert f"image_root: found no folder {tmp_path}/nowhere" in output


@pytest.mark.parametrize("url", ["foo://bucket/out", "/proc/self/nowhere/out"])
def test_an_output_nobody_can_write_is_one_line(tmp_path: Path, job: Path, url: str) -> None:
    recipe = write_recipe(tmp_path, output=url)
    code, output = bayplan("status", url)
    assert code == 2
    assert len(output.splitlines()) == 1
    with pytest.raises((BayplanError, OSError)):
        pack_in_process(recipe)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The folder of the small job, packed; its index is still to come."""
    pack_in_process(write_job(tmp_path))
    return tmp_path


def refused(folder: Path, *arguments: str | Path, code: int = 2) -> list[str]:
    """The lines of a command that must fail, start no Ray and leave the dataset as it was."""
    before = digests(folder / "out")
    found, output = bayplan(*arguments)
    assert found == code, output
    assert digests(folder / "out") == before
    assert "Traceback" not in output
    assert all(line.startswith("error: ") for line in output.splitlines())
    return output.splitlines()


def test_an_unknown_profile_names_the_nearest(small: Path) -> None:
    (line,) = refused(small, "index", small / "out", "--profile", "qwem")
    assert line == "error: found no profile 'qwem' in the recipe or the index; did you mean 'qwen'?"
    assert len(refused(small, "index", small / "out", "--profile", "qwem", "--profile", "qwen", "--profile", "other")) == 2


def test_no_profile_at_all(small: Path) -> None:
    recipe = write_small_recipe(small, profiles={})
    (line,) = refused(small, "index", small / "out", "--recipe", recipe)
    assert "found no profile, expected at least one: add `profiles` to the recipe" in line
    (line,) = refused(small, "run", recipe)
    assert "profiles: found none, expected at least one" in line


WRONG = {
    "preset": ("image_rule: qwen2_5_vl", "image_rule: qwen2_5_v", "did you mean 'qwen2_5_vl'"),
    "rule-module": ("image_rule: qwen2_5_vl", "image_rule: 'nowhere:rule'", "put the module on PYTHONPATH"),
    "rule-parameter": (
        "image_rule: qwen2_5_vl", "image_rule: {name: qwen2_5_vl, parameters: {max_pixel: 9}}", "did you mean 'max_pixels'",
    ),
    "tokenizer-missing": ("tokenizer: tokenizer.json", "tokenizer: nowhere.json", "nowhere.json"),
    "tokenizer-kind": ("tokenizer: tokenizer.json", "tokenizer: {file: tokenizer.json, kind: sentencepiece}", "tokenizer.json"),
    "tokenizer-foreign": ("tokenizer: tokenizer.json", "tokenizer: images/0.png", "0.png"),
    "template-missing": ("template: chatml", "template: nowhere.jinja", "nowhere.jinja: cannot be read: No such file"),
    "template-broken": ("template: chatml", "template: broken.jinja", "the chat template has a mistake in line 1"),
    "eos": ("eos: <|endoftext|>", "eos: <|end|>", "'<|end|>' is not a special token of the tokenizer"),
    "layout": ("image_rule: qwen2_5_vl", "image_rule: qwen2_5_vl, image_layout: {kind: wraped}", "did you mean 'wrapped'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_profile_that_cannot_be_used_is_one_line(small: Path, mistake: str) -> None:
    old, new, said = WRONG[mistake]
    (small / "broken.jinja").write_text("{% for message in messages %}")
    recipe = write_small_recipe(small, profiles={"qwen": f"{{{QWEN.replace(old, new)}}}"})
    (line,) = refused(small, "index", small / "out", "--recipe", recipe)
    assert line.startswith("error: profile 'qwen': ")
    assert said in line
    assert refused(small, "run", recipe) == [line]


def test_all_wrong_profiles_are_named_at_once_and_the_good_one_is_not_begun(small: Path) -> None:
    profiles = {name: f"{{{QWEN.replace(old, new)}}}" for name, (old, new, _) in WRONG.items() if name != "template-broken"}
    recipe = write_small_recipe(small, profiles={"a-good-one": PROFILES["qwen"], **profiles})
    lines = refused(small, "index", small / "out", "--recipe", recipe)
    assert [line.split("'")[1] for line in lines] == list(profiles)
    assert not (small / "out/index").exists()


def test_a_run_with_a_wrong_profile_packs_nothing(tmp_path: Path) -> None:
    write_job(tmp_path)
    recipe = write_small_recipe(tmp_path, profiles={"qwen": f"{{{QWEN.replace('tokenizer.json', 'nowhere.json')}}}"})
    code, output = bayplan("run", recipe)
    assert code == 2
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_changed_profile_is_refused_before_anything_is_packed(small: Path) -> None:
    index_in_process(small / "out")
    recipe = write_small_recipe(small, profiles={"qwen": f"{{{QWEN}, bos: <|im_start|>}}"})
    (small / "docs-2.jsonl").write_text('{"content": [{"type": "text", "text": "new"}]}\n')
    (line,) = refused(small, "index", small / "out", "--recipe", recipe)
    assert "profile 'qwen' changed since it was indexed: template.bos: found '<|im_start|>', the index has None: " in line
    assert "--replace-changed" in line
    assert refused(small, "run", recipe) == [line]
    assert run_in_process(recipe, replace_changed=True).exit_code == 0


def test_a_template_that_fails_on_a_record_is_counted_and_no_failure(small: Path) -> None:
    (small / "strict.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critics') }}{% endif %}<|im_start|>"
        "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    recipe = write_small_recipe(small, profiles={"strict": f"{{{QWEN.replace('chatml', 'strict.jinja')}}}"})
    report = index_in_process(small / "out", recipe=recipe)
    assert report.exit_code == 0
    lines = list(index_lines(report))
    assert any(line.startswith("strict / talk: 5 samples (not counted: template_failed 1), ") for line in lines)
    assert "(not counted: image_refused 1, template_failed 1)" in lines[-1]


def test_a_report_before_the_index(small: Path) -> None:
    (line,) = refused(small, "report", small / "out")
    assert "found no index, expected at least one profile: run `bayplan index` first" in line


def test_a_report_of_unknown_profiles_names_them_all(small: Path) -> None:
    index_in_process(small / "out")
    lines = refused(small, "report", small / "out", "--profile", "qwem", "--profile", "other")
    assert "found no profile 'qwem' in its index; did you mean 'qwen'?" in lines[0]
    assert "found no profile 'other'" in lines[1]


def test_a_report_over_a_part_packed_again_names_it(small: Path) -> None:
    index_in_process(small / "out")
    (small / "talk.jsonl").write_text((small / "talk.jsonl").read_text().replace("it is 3", "IT IS 3"))
    pack_in_process(small / "recipe.yaml", replace_changed=True)
    lines = refused(small, "report", small / "out", code=1)
    assert len(lines) == 2
    assert "index 'qwen' of " in lines[0]
    assert "source 'talk': 1 parts are stale (packed again after they were counted): " in lines[1]
    assert lines[1].endswith(": index again")


@pytest.mark.parametrize("name", ["talk.arrow", "talk.ids.arrow"])
def test_a_report_over_a_half_written_table_names_it(small: Path, name: str) -> None:
    index_in_process(small / "out")
    file = small / "out" / layout.index_dir("qwen") / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    lines = refused(small, "report", small / "out", code=1)
    assert f"{name}: not a whole Arrow file" in lines[-1]
    assert "index again" in lines[-1]
    assert index_in_process(small / "out").exit_code == 0
    assert bayplan("report", small / "out")[0] == 0


def test_a_damaged_profile_is_one_line(small: Path) -> None:
    index_in_process(small / "out")
    file = small / "out" / layout.profile_file("qwen")
    file.write_bytes(file.read_bytes()[:-20])
    for command in ("index", "report"):
        (line,) = refused(small, command, small / "out", code=1)
        assert "profile.json: found " in line
        assert "the file is cut or damaged" in line


def tamper(dataset: Path, source: str) -> None:
    """Other bytes in the records of a source, which its index has not seen."""
    for records in (dataset / layout.source_dir(source)).glob(f"*{layout.RECORDS_SUFFIX}"):
        records.write_bytes(records.read_bytes().replace(b'"text":"', b'"text":" ', 1))


def test_a_run_reports_what_it_could_count(small: Path) -> None:
    tamper(small / "out", "talk")
    outcome = run_in_process(small / "recipe.yaml")
    assert outcome.exit_code == 1
    assert outcome.index is not None
    assert outcome.report is not None
    assert "its bytes are not those its manifest names" in str(outcome.index.profiles["qwen"]["talk"].failure)
    assert outcome.index.profiles["qwen"]["docs"].num_rows == 12
    assert "profile 'qwen': not counted yet: talk; run `bayplan index`" in outcome.report.document["notes"]


def test_a_run_without_a_report_still_tells_why(tmp_path: Path) -> None:
    write_job(tmp_path)
    recipe = write_small_recipe(
        tmp_path, sources="  - {name: docs, schema: interleaved, files: docs.jsonl, image_root: images}\n"
    )
    pack_in_process(recipe)
    tamper(tmp_path / "out", "docs")
    outcome = run_in_process(recipe)
    assert (outcome.exit_code, outcome.report) == (1, None)
    assert outcome.index is not None
    assert "its bytes are not those its manifest names" in str(outcome.index.profiles["qwen"]["docs"].failure)
    assert "found no counted source of profile 'qwen'" in str(outcome.report_failure)
    assert json.loads(run_json(outcome))["report_failure"] == outcome.report_failure
