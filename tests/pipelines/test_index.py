"""The index job, its tasks one after the other in this process: what is counted, counted again, and left alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from byte_tokenizer import QWEN_TOKENS, write_byte_tokenizer
from in_process import digests, index_in_process, pack_in_process, retry_in_process, run_here
from PIL import Image
from small_job import PROFILES, QWEN, SOURCES, records, write_job, write_recipe, write_rows

from indexer.encode import SampleRefused
from indexer.profile import open_stored
from indexer.rows import Status
from indexer.table import open_index
from packer.format import layout
from packer.format.digest import id_hash
from packer.format.errors import FormatError, UsageError
from packer.storage import open_storage
from pipelines.index import IndexJob
from pipelines.index_text import index_json, index_lines
from pipelines.ray_executor import Listener, Outcome
from pipelines.recipe import load_recipe
from pipelines.report_document import report_document
from pipelines.tasks import Task

ALL_SOURCES = ("docs", "none", "pics", "talk", "text")
STRICT = """\
{%- for message in messages -%}
{%- if message.role == 'critic' %}{{ raise_exception('no critics here') }}{% endif -%}
<|im_start|>{{ message.role }}
{% for part in message.content %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}<|im_end|>
{% endfor %}"""


@pytest.fixture(scope="module")
def packed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small job, packed; its missing image came later, so one source has a retry part."""
    folder = tmp_path_factory.mktemp("packed") / "job"
    pack_in_process(write_job(folder))
    Image.new("RGB", (50, 70), "blue").save(folder / "images/missing.png")
    retry_in_process(folder / "out")
    return folder


@pytest.fixture
def job(packed_once: Path, tmp_path: Path) -> Path:
    """The same at a place of its own: its recipe, packed again, finds all done."""
    folder = tmp_path / "job"
    shutil.copytree(packed_once, folder)
    pack_in_process(folder / "recipe.yaml")
    return folder


@pytest.fixture
def indexed(job: Path) -> Path:
    """The dataset of `job`, indexed."""
    assert index_in_process(job / "out").exit_code == 0
    return job / "out"


def times(dataset: Path) -> dict[str, int]:
    return {str(path.relative_to(dataset)): path.stat().st_mtime_ns for path in dataset.rglob("*") if path.is_file()}


def touched(before: dict[str, int], dataset: Path) -> set[str]:
    """Files that are new, written again or gone."""
    after = times(dataset)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def part_files(dataset: Path, source: str, profile: str = "qwen") -> list[Path]:
    return sorted((dataset / layout.index_parts_dir(profile, source)).iterdir())


def test_every_record_has_a_row_and_row_i_is_line_i(indexed: Path) -> None:
    table, encoder = open_index(str(indexed), "qwen"), open_stored(open_storage(str(indexed)), "qwen").encoder
    assert table.sources == ALL_SOURCES
    assert {source: len(table.rows_of_source(source)) for source in ALL_SOURCES} == {
        "docs": 12, "none": 0, "pics": 9, "talk": 5, "text": 30,
    }  # fmt: skip
    assert len(part_files(indexed, "docs")) == 4
    assert any("-retry1" in path.name for path in part_files(indexed, "pics"))
    for source in ALL_SOURCES:
        for number, record in zip(table.rows_of_source(source), records(indexed, source), strict=True):
            row = table.row(number)
            with open(indexed / row.record_file, "rb") as file:
                file.seek(row.record_offset)
                assert json.loads(file.read(row.record_size)) == record
            assert row.id_hash == id_hash(record["id"])
            if row.status:
                assert (row.num_tokens, row.num_images) == (0, 0)
                with pytest.raises(SampleRefused):
                    encoder.encode(record)
                continue
            sample = encoder.encode(record)
            assert (row.num_tokens, row.num_loss_tokens) == (len(sample.ids), sample.loss_mask.sum())
            assert row.num_image_tokens == sample.feature_mask.sum()
            assert [(image.width, image.height) for image in row.images] == [
                (image["width"], image["height"]) for image in record["images"]
            ]


def test_a_rerun_does_nothing(indexed: Path) -> None:
    before = times(indexed)
    assert index_in_process(indexed).exit_code == 0
    assert touched(before, indexed) == set()


def test_a_new_part_costs_only_itself(job: Path, indexed: Path) -> None:
    before = times(indexed)
    write_rows(job / "docs-2.jsonl", [{"id": "new", "content": [{"type": "text", "text": "new"}]}])
    pack_in_process(job / "recipe.yaml")
    report = index_in_process(indexed)
    assert report.profiles["qwen"]["docs"].num_rows == 13
    in_index = {name for name in touched(before, indexed) if name.startswith("index/")}
    (new,) = in_index - {"index/qwen/docs.arrow", "index/qwen/docs.ids.arrow"}
    assert new.startswith("index/qwen/parts/docs/")
    assert new not in before


def test_profiles_lie_side_by_side(job: Path, indexed: Path) -> None:
    before = times(indexed)
    second = "{tokenizer: tokenizer.json, template: document, image_rule: null, bos: <|endoftext|>}"
    recipe = write_recipe(job, profiles={"qwen": PROFILES["qwen"], "bare": second})
    report = index_in_process(indexed, recipe=recipe, profiles=["bare"])
    assert list(report.profiles) == ["bare"]
    changed = touched(before, indexed) - {"recipe.yaml"}
    assert all(name.startswith("index/bare/") or "/.nv-meta/" in name for name in changed)
    tables = [open_index(str(indexed), profile) for profile in ("qwen", "bare")]
    assert tables[0].num_rows == tables[1].num_rows
    assert tables[0].profile_fingerprint != tables[1].profile_fingerprint
    again = index_in_process(indexed)
    assert sorted(again.profiles) == ["bare", "qwen"], "a profile of the dataset is kept up to date, whoever brought it"
    statuses = again.profiles["bare"]["docs"].stats
    assert statuses is not None
    assert statuses.status == {"image_refused": 9, "usable": 3}


def test_any_order_of_tasks_gives_the_same_bytes(job: Path, indexed: Path) -> None:
    expected = digests(indexed)
    for seed in range(3):
        shutil.rmtree(indexed / "index")
        index_in_process(indexed, random.Random(seed))
        assert digests(indexed) == expected


def test_a_changed_profile_is_refused_with_both_values_until_told_otherwise(job: Path, indexed: Path) -> None:
    before = times(indexed)
    settings = PROFILES["qwen"].replace("qwen2_5_vl", "{name: qwen2_5_vl, parameters: {max_pixels: 3136}}")
    changed = write_recipe(job, profiles={"qwen": settings})
    with pytest.raises(UsageError) as caught:
        index_in_process(indexed, recipe=changed)
    assert str(caught.value).startswith(
        "profile 'qwen' changed since it was indexed: image_rule.max_pixels: found 3136, the index has"
    )
    assert "`--replace-changed`" in str(caught.value)
    assert touched(before, indexed) == set()
    old = digests(indexed)
    assert open_index(str(indexed), "qwen").row(3).images[-1].num_image_tokens == 8
    assert index_in_process(indexed, recipe=changed, replace_changed=True).exit_code == 0
    assert open_index(str(indexed), "qwen").row(3).images[-1].num_image_tokens == 2
    replaced = digests(indexed)
    assert {name for name in old if old[name] == replaced[name]} >= {name for name in old if name.startswith("sources/")}
    shutil.rmtree(indexed / "index")
    index_in_process(indexed, recipe=changed)
    assert digests(indexed) == replaced


def test_a_changed_profile_that_no_recipe_has_can_be_replaced(job: Path, indexed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that counts otherwise meets a profile that came by `--recipe` and is in no recipe at hand."""
    recipe = write_recipe(job, profiles={"extra": f"{{{QWEN}}}"})
    index_in_process(indexed, recipe=recipe)
    monkeypatch.setattr("indexer.profile.opening.COUNTING_VERSION", 2)
    with pytest.raises(
        UsageError, match=r"profile 'extra' changed since it was indexed: counting_version: found 2, the index has 1"
    ):
        index_in_process(indexed, profiles=["extra"])
    assert index_in_process(indexed, profiles=["extra"], replace_changed=True).exit_code == 0
    assert index_in_process(indexed, profiles=["extra"]).exit_code == 0


def test_the_copy_of_a_tokenizer_that_is_gone_is_used(job: Path, indexed: Path) -> None:
    (job / "tokenizer.json").unlink()
    write_rows(job / "docs-2.jsonl", [{"id": "new", "content": [{"type": "text", "text": "twelve bytes"}]}])
    pack_in_process(job / "recipe.yaml")
    report = index_in_process(indexed)
    assert f"profile 'qwen': {job}/tokenizer.json is gone; its copy in the dataset is used" in report.notes
    table = open_index(str(indexed), "qwen")
    (row,) = table.find("new")
    assert table.row(row).num_text_tokens == 12


def test_another_tokenizer_at_the_same_place_is_a_changed_profile(job: Path, indexed: Path) -> None:
    write_byte_tokenizer(job / "tokenizer.json", (*QWEN_TOKENS, "<think>"))
    with pytest.raises(
        UsageError, match=r"profile 'qwen' changed since it was indexed: the tokenizer's file: found other contents than"
    ):
        index_in_process(indexed)


def test_a_tokenizer_that_moved_is_no_change(job: Path, indexed: Path) -> None:
    (job / "tokenizer.json").rename(job / "moved.json")
    moved = write_recipe(job, profiles={"qwen": PROFILES["qwen"].replace("tokenizer.json", "moved.json")})
    before = times(indexed)
    assert index_in_process(indexed, recipe=moved).exit_code == 0
    assert touched(before, indexed) == {"index/qwen/profile.json", "recipe.yaml"}
    (job / "moved.json").unlink()
    assert "moved.json is gone; its copy in the dataset is used" in index_in_process(indexed, recipe=moved).notes[0]


def test_a_part_packed_again_is_named_and_it_alone_is_counted_again(job: Path, indexed: Path) -> None:
    rows = (job / "docs.jsonl").read_text()
    (job / "docs.jsonl").write_text(rows.replace("before 11", "BEFORE 11"))
    pack_in_process(job / "recipe.yaml", replace_changed=True)
    last = part_files(indexed, "docs")[-1]
    with pytest.raises(FormatError) as caught:
        open_index(str(indexed), "qwen")
    assert f"source 'docs': 1 parts are stale (packed again after they were counted): {last.stem}: index again" in str(
        caught.value
    )
    before = times(indexed)
    assert index_in_process(indexed).exit_code == 0
    assert touched(before, indexed) == {
        str(last.relative_to(indexed)), "index/qwen/docs.arrow", "index/qwen/docs.ids.arrow",
    }  # fmt: skip
    assert open_index(str(indexed), "qwen").num_rows == 56


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _half_written(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _other_text(file: Path) -> None:
    file.write_text("not an Arrow file")


def _of_another_part(file: Path) -> None:
    shutil.copyfile(next(path for path in sorted(file.parent.iterdir()) if path != file), file)


def _of_another_source(file: Path) -> None:
    shutil.copyfile(next(file.parents[1].glob("talk/*")), file)


def _gone(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [_cut, _half_written, _emptied, _other_text, _of_another_part, _of_another_source, _gone])
def test_a_part_that_is_not_what_it_says_is_counted_again(indexed: Path, damage: Any) -> None:
    expected = digests(indexed)
    damage(part_files(indexed, "docs")[1])
    (indexed / layout.index_table_file("qwen", "docs")).unlink()
    assert index_in_process(indexed).exit_code == 0
    assert digests(indexed) == expected


@pytest.mark.parametrize("damage", [_cut, _half_written, _emptied, _other_text, _gone])
@pytest.mark.parametrize("name", [layout.index_table_file, layout.index_ids_file])
def test_a_table_that_is_not_what_it_says_is_put_together_again(indexed: Path, damage: Any, name: Any) -> None:
    expected = digests(indexed)
    damage(indexed / name("qwen", "docs"))
    assert index_in_process(indexed).exit_code == 0
    assert digests(indexed) == expected


def test_a_part_counted_by_another_profile_is_counted_again(job: Path, indexed: Path) -> None:
    recipe = write_recipe(job, profiles={"qwen": PROFILES["qwen"], "other": f"{{{QWEN}, bos: <|endoftext|>}}"})
    index_in_process(indexed, recipe=recipe)
    expected = digests(indexed)
    mine, other = part_files(indexed, "docs")[0], part_files(indexed, "docs", "other")[0]
    shutil.copyfile(other, mine)
    (indexed / layout.index_table_file("qwen", "docs")).unlink()
    index_in_process(indexed, recipe=recipe)
    assert digests(indexed) == expected


def test_files_of_parts_that_are_gone_are_removed(job: Path, indexed: Path) -> None:
    assert [path.name for path in (indexed / layout.index_quarantine_dir("qwen", "pics")).iterdir()]
    write_rows(job / "pics.jsonl", [{"id": "only", "image_path": "0.png", "caption": "one"}])
    pack_in_process(job / "recipe.yaml", replace_changed=True)
    (indexed / layout.index_parts_dir("qwen", "docs") / "notes.txt").write_text("a stray file")
    (indexed / layout.index_table_file("qwen", "docs")).unlink()
    assert index_in_process(indexed).exit_code == 0
    for source in ("docs", "pics"):
        parts = json.loads((indexed / layout.source_file(source)).read_text())["parts"]
        assert [path.stem for path in part_files(indexed, source)] == [part["part_id"] for part in parts]
    assert list((indexed / layout.index_quarantine_dir("qwen", "pics")).iterdir()) == []


def quarantined(dataset: Path, source: str, profile: str = "qwen") -> list[dict[str, Any]]:
    files = sorted((dataset / layout.index_quarantine_dir(profile, source)).glob("*"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_refused_record_has_a_status_zeros_and_a_quarantine_line(indexed: Path) -> None:
    table = open_index(str(indexed), "qwen")
    (number,) = table.find("pic 5")
    row = table.row(number)
    counts = (row.num_tokens, row.num_text_tokens, row.num_image_tokens, row.num_loss_tokens, row.num_images, row.num_patches)
    assert (row.status, counts, row.images) == (Status.IMAGE_REFUSED, (0,) * 6, ())
    (line,) = quarantined(indexed, "pics")
    assert (line["line"], line["id"], line["status"]) == (row.line, "pic 5", "image_refused")
    assert "500x2" in line["detail"]
    assert "250" in line["detail"]
    assert line["origin"]["file"] == "pics.jsonl"


def test_a_template_that_fails_on_one_record_costs_that_record(job: Path) -> None:
    (job / "strict.jinja").write_text(STRICT)
    recipe = write_recipe(job, profiles={"strict": f"{{{QWEN.replace('chatml', 'strict.jinja')}}}"})
    report = index_in_process(job / "out", recipe=recipe)
    assert report.exit_code == 0
    stats = report.profiles["strict"]["talk"].stats
    assert stats is not None
    assert stats.status == {"template_failed": 1, "usable": 4}
    (line,) = quarantined(job / "out", "talk", "strict")
    assert line["id"] == "talk 4"
    assert "no critics here" in line["detail"]


def test_other_sequence_lengths_need_no_counting(job: Path, indexed: Path) -> None:
    before = times(indexed)
    recipe = write_recipe(job, profiles={"qwen": f"{{{QWEN}, sequence_lengths: [7]}}"})
    index_in_process(indexed, recipe=recipe)
    assert touched(before, indexed) == {"index/qwen/profile.json", "recipe.yaml"}
    document = report_document(open_storage(str(indexed)), (), num_cards=0, seed=0)
    assert [entry["sequence_length"] for entry in document["profiles"]["qwen"]["all"]["over_long"]] == [7]


def blend(dataset: Path, split: str) -> dict[str, float]:
    document = yaml.safe_load((dataset / layout.profile_dataset_file("qwen")).read_text())
    assert (document["__module__"], document["__class__"]) == ("megatron.energon", "MetadatasetV2")
    assert list(document["splits"]) == ["train", "val"]
    entries = document["splits"][split]["blend"]
    for entry in entries:
        assert (dataset / "index/qwen" / entry["path"]).resolve() == dataset / "sources" / entry["subflavors"]["source"]
        loader = dataset / "sources" / entry["subflavors"]["source"] / ".nv-meta" / entry["dataset_config"]
        assert yaml.safe_load(loader.read_text())["profile"] == "qwen"
    return {entry["subflavors"]["source"]: entry["weight"] for entry in entries}


def weighted(key: str, values: dict[str, float], val: Sequence[str] = ()) -> str:
    lines = []
    for line in SOURCES.splitlines():
        name = line.partition("name: ")[2].partition(",")[0]
        more = f", {key}: {values[name]}" + (", val: 0.25" if name in val else "")
        lines.append(line[:-1] + more + "}\n")
    return "".join(lines)


def test_weights_are_shares_of_samples_without_sources_that_have_none(job: Path) -> None:
    values = {"docs": 3, "talk": 2, "pics": 1, "text": 4, "none": 7}
    pack_in_process(write_recipe(job, sources=weighted("weight", values, val=["docs", "text"])))
    report = index_in_process(job / "out")
    assert blend(job / "out", "train") == {"docs": 0.3, "talk": 0.2, "pics": 0.1, "text": 0.4}
    assert blend(job / "out", "val") == {"docs": 0.3, "text": 0.4}
    assert any("source 'none' has no usable sample: its weight 7.0 cannot be met" in note for note in report.notes)


def test_token_shares_become_weights_by_mean_length(job: Path) -> None:
    values = {"docs": 0.4, "talk": 0.3, "pics": 0.1, "text": 0.1, "none": 0.1}
    pack_in_process(write_recipe(job, sources=weighted("token_share", values)))
    report = index_in_process(job / "out")
    found = blend(job / "out", "train")
    assert blend(job / "out", "val") == found
    assert any("no source holds samples out" in note for note in report.notes)
    drawn = {}
    for source in found:
        stats = report.profiles["qwen"][source].stats
        assert stats is not None
        drawn[source] = found[source] * stats.num_tokens / stats.num_usable
    total = sum(drawn.values())
    assert {source: tokens / total for source, tokens in drawn.items()} == pytest.approx(
        {"docs": 4 / 9, "talk": 3 / 9, "pics": 1 / 9, "text": 1 / 9}
    )


def test_a_source_whose_packing_has_not_ended_is_named_and_the_others_are_counted(job: Path) -> None:
    (job / "out" / layout.source_file("talk")).unlink()
    report = index_in_process(job / "out")
    assert report.exit_code == 0
    assert sorted(report.profiles["qwen"]) == ["docs", "none", "pics", "text"]
    (note,) = [note for note in report.notes if note.startswith("not counted: ")]
    assert "'talk'" in note
    assert "talk" not in blend(job / "out", "train")
    assert any("leaves out what is not counted: talk" in note for note in report.notes)


def test_a_source_that_fails_leaves_the_others_counted(job: Path) -> None:
    records_file = next((job / "out/sources/talk").glob(f"*{layout.RECORDS_SUFFIX}"))
    records_file.write_bytes(records_file.read_bytes().replace(b"what", b"WHAT"))
    report = index_in_process(job / "out")
    assert report.exit_code == 1
    failed = {source: state.failure for source, state in report.profiles["qwen"].items() if state.failure}
    assert list(failed) == ["talk"]
    assert "its bytes are not those its manifest names: run `bayplan verify`" in str(failed["talk"])
    assert open_index(str(job / "out"), "qwen", sources=["docs", "text"]).num_rows == 42


def test_exclusion_lists_change_no_index_and_are_shown(indexed: Path) -> None:
    before = times(indexed)
    (indexed / "exclude").mkdir()
    (indexed / "exclude/bad.txt").write_text("doc 3\npic 0\nno such id\n")
    index_in_process(indexed)
    assert touched(before, indexed) == {"exclude/bad.txt"}
    excluded = report_document(open_storage(str(indexed)), (), num_cards=0, seed=0)["excluded"]
    assert excluded["lists"] == {"exclude/bad.txt": {"num_ids": 3, "num_matched": 2, "num_rows": 2, "unmatched": ["no such id"]}}
    assert {source: effect["num_rows"] for source, effect in excluded["sources"].items() if effect["num_rows"]} == {
        "docs": 1, "pics": 1,
    }  # fmt: skip


def test_what_a_job_prints_adds_up(job: Path) -> None:
    (job / "out" / layout.source_file("none")).unlink()
    report = index_in_process(job / "out")
    *sources, _, _, total = [line for line in index_lines(report) if not line.startswith("note: not counted")]
    assert [line.partition(":")[0] for line in sources[:4]] == ["qwen / docs", "qwen / pics", "qwen / talk", "qwen / text"]
    assert total.startswith("qwen: 4 of 4 sources counted, 56 samples (not counted: image_refused 1), 28 images, ")
    document = json.loads(index_json(report))
    assert (document["exit_code"], document["dataset"]) == (0, str(job / "out"))
    counted = document["profiles"]["qwen"]
    assert counted["pics"]["status"] == {"image_refused": 1, "usable": 8}
    for source in counted.values():
        kinds = ("num_text_tokens", "num_image_tokens", "num_other_tokens")
        assert source["num_tokens"] == sum(source[kind] for kind in kinds)
    tokens = sum(source["num_tokens"] for source in counted.values())
    assert f" {tokens:,} tokens (" in total
    assert document["notes"] == report.notes


def test_small_parts_share_a_task(tmp_path: Path) -> None:
    write_job(tmp_path)
    write_rows(tmp_path / "many.jsonl", ({"text": f"text {number}"} for number in range(200)))
    pack_in_process(write_recipe(tmp_path, sources="  - {name: many, schema: text, files: many.jsonl, range_bytes: 64}\n"))
    given: list[Task] = []

    def run_tasks(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        given.extend(task for _, task in tasks)
        return run_here(str(tmp_path / "out"))(tasks, listener)

    report = IndexJob(str(tmp_path / "out"), run_tasks=run_tasks).run()
    assert report.profiles["qwen"]["many"].num_rows == 200
    assert len(part_files(tmp_path / "out", "many")) >= 60
    assert [type(task).__name__ for task in given] == ["IndexTask", "ConsolidateTask"]


def test_a_task_that_runs_again_leaves_its_committed_parts_alone(job: Path, indexed: Path) -> None:
    """As after the death of its worker: the executor gives the same task to another one."""
    given: list[tuple[str, Task]] = []

    def record(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
        given.extend(tasks)
        return run_here(str(indexed))(tasks, listener)

    shutil.rmtree(indexed / "index")
    IndexJob(str(indexed), recipe=load_recipe(job / "recipe.yaml"), run_tasks=record).run()
    last = part_files(indexed, "docs")[-1]
    last.unlink()
    before = times(indexed)
    assert run_here(str(indexed))([unit for unit in given if unit[0] == "qwen / docs"], Listener()).failures == {}
    assert touched(before, indexed) == {str(last.relative_to(indexed))}


def test_a_recipe_given_once_is_what_the_dataset_keeps(job: Path, indexed: Path) -> None:
    changed = write_recipe(job, profiles={"qwen": PROFILES["qwen"].replace("qwen2_5_vl", "qwen3_vl")})
    index_in_process(indexed, recipe=changed, replace_changed=True)
    before = times(indexed)
    assert index_in_process(indexed).exit_code == 0
    assert touched(before, indexed) == set()


def test_other_weights_of_a_given_recipe_are_not_taken_and_said(job: Path, indexed: Path) -> None:
    heavier = write_recipe(job, sources=SOURCES.replace("{name: docs,", "{weight: 7, name: docs,"))
    report = index_in_process(indexed, recipe=heavier)
    assert any("other weights, shares or `val` for docs: run `bayplan pack`" in note for note in report.notes)


@pytest.mark.parametrize("name", ["split", "dataset"])
def test_a_profile_may_have_the_name_of_a_file_of_energon(job: Path, indexed: Path, name: str) -> None:
    index_in_process(indexed, recipe=write_recipe(job, profiles={"qwen": PROFILES["qwen"], name: PROFILES["qwen"]}))
    folder = indexed / "sources" / "text" / ".nv-meta"
    assert "split_parts" in yaml.safe_load((folder / "split.yaml").read_text())
    assert yaml.safe_load((folder / "dataset.yaml").read_text())["profile"] == "qwen"


def test_a_damaged_source_file_fails_its_source_and_leaves_the_blend(job: Path, indexed: Path) -> None:
    blend_before = blend(indexed, "train")
    path = indexed / layout.source_file("docs")
    path.write_bytes(path.read_bytes()[:-20])
    report = index_in_process(indexed)
    assert report.exit_code == 1
    assert "the file is cut or damaged" in str(report.profiles["qwen"]["docs"].failure)
    assert blend(indexed, "train") == blend_before
    assert any("is left as it was, since docs failed" in note for note in report.notes)


def test_a_source_nobody_can_count_fails(job: Path) -> None:
    pack_in_process(write_recipe(job, profiles={"bare": "{tokenizer: tokenizer.json, template: document, image_rule: null}"}))
    report = index_in_process(job / "out")
    failure = str(report.profiles["bare"]["pics"].failure)
    assert failure.startswith("none of its 9 samples can be counted (image_refused 9): see index/bare/quarantine/pics/")
    assert report.profiles["bare"]["text"].failure is None


def test_excluded_samples_count_for_nothing_in_the_mixture(job: Path) -> None:
    shares = "  - {name: text, schema: text, files: 'text.jsonl.gz', token_share: 0.5}\n"
    shares += "  - {name: talk, schema: chat, files: talk.jsonl, image_root: images, token_share: 0.5}\n"
    pack_in_process(write_recipe(job, sources=shares))
    index_in_process(job / "out")
    whole = blend(job / "out", "train")
    longest = max(records(job / "out", "text"), key=lambda record: len(record["content"][0]["text"]))
    (job / "out" / "exclude").mkdir()
    (job / "out" / "exclude" / "longest.txt").write_text(f"{longest['id']}\n")
    index_in_process(job / "out")
    table = open_index(str(job / "out"), "qwen")
    means = {}
    for source in ("text", "talk"):
        rows = map(table.row, table.rows_of_source(source))
        lengths = [row.num_tokens for row in rows if row.status == 0 and row.id_hash != id_hash(longest["id"])]
        means[source] = sum(lengths) / len(lengths)
    now = blend(job / "out", "train")
    assert now["text"] > whole["text"]
    assert now["text"] / now["talk"] == pytest.approx(means["talk"] / means["text"])


def test_a_list_that_cannot_be_read_stops_before_anything_is_counted(job: Path) -> None:
    pack_in_process(job / "recipe.yaml")
    (job / "out" / "exclude").mkdir()
    (job / "out" / "exclude" / "ids.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=r"ids\.csv"):
        index_in_process(job / "out")
    assert not (job / "out" / "index").exists()


def test_the_text_of_a_template_that_is_gone_is_kept(job: Path) -> None:
    template = job / "own.jinja"
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    part = "{% if p.type == 'text' %}{{ p.text }}{% else %}" + image + "{% endif %}"
    template.write_text("{% for m in messages %}{% for p in m.content %}" + part + "{% endfor %}<|im_end|>{% endfor %}")
    pack_in_process(write_recipe(job, profiles={"qwen": f"{{{QWEN.replace('chatml', 'own.jinja')}}}"}))
    index_in_process(job / "out")
    template.unlink()
    before = times(job / "out")
    report = index_in_process(job / "out")
    assert report.exit_code == 0
    assert any("own.jinja is gone; its copy in the dataset is used" in note for note in report.notes)
    assert touched(before, job / "out") == set()


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_lost_or_damaged_copy_of_the_tokenizer_is_mended(job: Path, indexed: Path, damage: str) -> None:
    copy = indexed / "index/qwen/tokenizer.json"
    good = copy.read_bytes()
    if damage == "gone":
        copy.unlink()
    else:
        copy.write_text("{}")
    assert index_in_process(indexed, recipe=job / "recipe.yaml").exit_code == 0
    assert copy.read_bytes() == good


def test_a_source_file_of_another_source_is_told(indexed: Path) -> None:
    shutil.copy(indexed / layout.source_file("talk"), indexed / layout.source_file("docs"))
    before = times(indexed)
    report = index_in_process(indexed)
    assert "found parts of source 'talk', expected 'docs'" in str(report.profiles["qwen"]["docs"].failure)
    assert not {name for name in touched(before, indexed) if "/docs" in name}
