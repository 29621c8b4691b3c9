"""`bayplan forecast`: its tables and its JSON over a small dataset, what it refuses, and the report that shows it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from in_process import index_in_process, pack_in_process
from loading import NUM_SAMPLES, PROFILE, write_stream
from report_document import build_forecast
from small_job import PROFILES, write_job, write_recipe

from packer.storage import open_storage
from pipelines.cli import main

QUICK = ("--buffer-size", "60", "--batches", "3")
SETTING = ("--dp", "4", "--microbatches", "4", "--sequence-length", "256")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_stream(tmp_path_factory.mktemp("forecast") / "job")


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["forecast", *map(str, words)], catch_exceptions=False)


def document(*words: object) -> dict[str, Any]:
    result = run(*words, *QUICK, "--json", "-")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*words: object, code: int = 2) -> str:
    result = run(*words, *QUICK)
    assert (result.exit_code, result.stdout) == (code, "")
    return result.stderr


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    for one in found["balance"]:
        for mode in one["modes"]:
            assert mode.pop("solver_seconds") > 0
    return found


def test_json_is_the_same_for_the_same_seed_alone(url: str) -> None:
    first, again, other = (without_times(document(url, *SETTING, "--seed", seed)) for seed in (7, 7, 8))
    assert first == again != other
    # Both are forecasts of one thing, within their errors.
    one, two = (found["packing"][0]["samples_per_pack"] for found in (first, other))
    assert abs(one["value"] - two["value"]) < 6 * (one["error"] + two["error"])


def test_json_has_what_readers_of_it_know(url: str) -> None:
    """The page's tests use a forecast made up; it must look like a real one."""
    found = document(url, *SETTING, "--expert-parallel", 2)
    like = build_forecast(PROFILE, "")
    assert found.keys() == like.keys()
    for part in ("cost", "settings"):
        assert found[part].keys() == like[part].keys()
    for part in ("packing", "balance", "sources"):
        assert found[part][0].keys() == like[part][0].keys()
    assert found["balance"][0]["modes"][0].keys() == like["balance"][0]["modes"][0].keys()
    assert [source["num_train"] for source in found["sources"]] == list(NUM_SAMPLES.values())
    assert found["cost"]["name"] == "qwen2_5_vl_vit+qwen3_8b"
    assert found["cost"]["is_default"]


def test_figures_agree_with_each_other(url: str) -> None:
    found = document(url, "--dp", "8", "--microbatches", "16", "--sequence-length", "256", "--expert-parallel", "2")
    (packing,), (balance,) = found["packing"], found["balance"]
    assert 0.9 < packing["efficiency"]["value"] <= packing["bound"]["value"] <= 1
    assert packing["pack_bytes"]["value"] > packing["patches_per_pack"]["value"] * 588
    assert [mode["mode"] for mode in balance["modes"] if mode["is_auto"]] == ["ep"]
    for mode in balance["modes"]:
        assert 1 <= balance["bound"]["value"] <= mode["imbalance"]["value"] <= balance["arrival"]["value"]
        assert mode["gain"]["value"] == pytest.approx(balance["arrival"]["value"] / mode["imbalance"]["value"] - 1, rel=0.1)
        assert 0 <= mode["off_node_share"]["value"] <= mode["moved_share"]["value"] < 1
    local, expert, _ = balance["modes"]
    assert local["moved_bytes"]["value"] == 0 < expert["moved_bytes"]["value"]
    # All eight ranks stand in one machine.
    assert expert["off_node_bytes"]["value"] == 0
    # 128 packs take more samples than there are; a third of them are from each source.
    repeats = {name: balance["num_samples"] / 3 / number for name, number in NUM_SAMPLES.items()}
    assert balance["epochs_per_batch"] == pytest.approx(repeats, rel=1e-9)


def test_many_settings_are_a_product_and_share_their_packs(url: str) -> None:
    found = document(url, "--dp", "2,4", "--microbatches", "2,8", "--sequence-length", "256,512", "--synchronises", "microbatch")
    settings = [(one["sequence_length"], one["num_ranks"], one["num_microbatches"]) for one in found["balance"]]
    assert settings == [(s, dp, number) for s in (256, 512) for dp in (2, 4) for number in (2, 8)]
    assert [one["sequence_length"] for one in found["packing"]] == [256, 512]
    assert {mode["mode"] for one in found["balance"] for mode in one["modes"]} == {"local", "fsdp"}


def test_tables_and_what_stands_below_them(url: str, tmp_path: Path) -> None:
    result = run(
        url, "--dp", "16", "--microbatches", "64", *QUICK, "--sequence-length", "64", "--json", tmp_path / "new" / "f.json"
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"{url}, profile qwen, costs of qwen2_5_vl_vit+qwen3_8b (default)"
    assert lines[1].split() == "tokens full bound samples images patches MB a pack no image encoder fit no pack".split()
    assert any(line.split()[:5] == ["64", "16", "x", "64", "arrival"] for line in lines)
    assert "± standard error" in result.stdout.replace(":", "")
    assert "ranks meet at the end of the global batch only" in result.stdout
    saved = json.loads((tmp_path / "new" / "f.json").read_text())
    (packing,) = saved["packing"]
    counts = packing["refused"]
    total = sum(counts.values())
    assert total == sum(sum(found.values()) for found in packing["refused_by_source"].values()) > 10
    assert f"64 tokens: {total} of 360 samples ({total / 360:.1%}) fit no pack and are left out" in result.stdout
    assert f"{packing['num_packs']:,} packs were really packed, in 12 independent streams" in result.stdout
    assert "more than all 360 of the dataset; as in training, 3 of 3 sources are repeated within it" in result.stdout
    assert lines[-1] == f"written to {tmp_path}/new/f.json"


def test_a_source_of_which_nothing_fits_is_named_and_is_not_reckoned_with(url: str) -> None:
    result = run(url, "--dp", "2", "--microbatches", "64", *QUICK, "--sequence-length", "13")
    assert result.exit_code == 0, result.stderr
    assert "NOTHING fits of pics: their part of the blend is not trained on" in result.stdout
    found = document(url, "--dp", "2", "--microbatches", "64", *QUICK, "--sequence-length", "13")
    assert found["packing"][0]["in_vain"] == ["pics"]
    assert found["balance"][0]["epochs_per_batch"].keys() <= {"docs", "text"}


def test_more_packs_than_were_packed_are_drawn_again_and_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from plugin.forecast import pool

    monkeypatch.setattr(pool.pack_pool, "__kwdefaults__", pool.pack_pool.__kwdefaults__ | {"max_packs": 30})
    result = run(url, "--dp", "64", "--microbatches", "64", "--sequence-length", "256", *QUICK)
    assert "64 x 64 packs of 256 tokens: 12,288 packs were drawn, some more than once, since fewer were packed" in result.stdout


def test_one_batch_tells_no_error(url: str) -> None:
    result = run(url, *SETTING, "--buffer-size", "60", "--batches", "1")
    assert "one global batch only, so no error is known" in result.stdout
    assert "±" not in result.stdout


def test_the_profiles_own_lengths_are_the_default(url: str) -> None:
    found = document(url, "--dp", "2", "--microbatches", "2")
    assert [one["sequence_length"] for one in found["packing"]] == [20, 60]


def test_settings_of_the_packer_count(url: str) -> None:
    one = document(url, *SETTING, "--max-images-per-pack", "1", "--max-patches-per-pack", "64", "--alignment", "32")
    (packing,) = one["packing"]
    assert packing["most_images"] == 1
    assert packing["most_patches"] <= 64
    assert packing["alignment_loss"]["value"] > 0.01
    assert packing["refused"].keys() == {"too_many_images"}
    few = document(url, *SETTING, "--max-patches-per-pack", "16")["packing"][0]
    assert few["refused"].keys() == {"too_many_patches"}
    assert few["most_patches"] <= 16


def test_settings_that_cannot_be(url: str) -> None:
    assert "found 6 data-parallel ranks with expert parallel 4, expected a divisor of 6" in refused(
        url, "--dp", "8,6", "--microbatches", "4", "--sequence-length", "256", "--expert-parallel", "4"
    )
    assert "found 'many', expected whole numbers with commas" in refused(url, "--dp", "many", "--microbatches", "4")
    assert "found 0, expected at least 1" in refused(url, "--dp", "8,0", "--microbatches", "4")
    large = "found global batches of up to 16,777,216 packs (4,096 ranks x 4,096 microbatches), expected at most 4,194,304"
    assert large in refused(url, "--dp", "1,4096", "--microbatches", "4096,4")
    for option in ("--dp", "--microbatches", "--sequence-length"):
        assert "found 100000000000000000000, expected at most 16,777,216" in refused(url, *SETTING, option, 10**20)
    few = refused(url, "--dp", "2", "--microbatches", "4", "--sequence-length", "4")
    assert "found no sample that fits a pack of 4 tokens among 360 (360 over long; the shortest has" in few
    assert "the last 6 tokens of a pack could never be used" in refused(url, *SETTING[:-1], "256", "--alignment", "50")


def test_costs_that_cannot_be(url: str, tmp_path: Path) -> None:
    assert "found no encoder 'qwen3_vl_vi'" in refused(url, *SETTING, "--cost", "qwen3_vl_vi+qwen3_8b")
    (tmp_path / "cost.json").write_text('{"bayplan_cost": 2}')
    assert "found bayplan_cost 2, expected 1" in refused(url, *SETTING, "--cost", tmp_path / "cost.json", code=1)
    assert "No such file" in refused(url, *SETTING, "--cost", tmp_path / "none.json", code=1)


def test_no_dataset_no_index_no_profile(url: str, tmp_path: Path) -> None:
    assert "found no bayplan.json, expected a dataset" in refused(tmp_path, *SETTING)
    pack_in_process(write_job(tmp_path / "job"))
    out = tmp_path / "job" / "out"
    assert "found no index, expected at least one profile: run `bayplan index` first" in refused(out, *SETTING)
    bare = "{tokenizer: tokenizer.json, template: document, image_rule: null}"
    index_in_process(out, recipe=write_recipe(tmp_path / "job", profiles={**PROFILES, "bare": bare}))
    assert "found 2 profiles (bare, qwen), expected one; choose by --profile" in refused(out, *SETTING)
    assert "found no profile 'qwe' in its index; did you mean 'qwen'" in refused(out, *SETTING, "--profile", "qwe")
    # Under the profile without an image rule only samples of text are counted.
    found = document(out, *SETTING, "--profile", "bare")
    assert found["packing"][0]["encoder_share"]["value"] == 0
    assert any(note.startswith("no sample has an image: the encoder does nothing") for note in found["notes"])


@pytest.fixture
def changed(url: str, tmp_path: Path) -> Path:
    """A copy of the dataset whose blend may be changed."""
    shutil.copytree(url, tmp_path / "out")
    return tmp_path / "out"


def write_blend(dataset: Path, entries: Iterable[str]) -> None:
    listed = "".join(f"    - {entry}\n" for entry in entries)
    (dataset / "index" / PROFILE / "dataset.yaml").write_text(f"splits:\n  train:\n    blend:\n{listed}")


def test_a_blend_of_one_source(changed: Path) -> None:
    write_blend(changed, ["{path: ../../sources/text, weight: 1}"])
    found = document(changed, *SETTING)
    assert [source["name"] for source in found["sources"]] == ["text"]
    assert found["packing"][0]["images_per_pack"]["value"] == 0
    assert found["packing"][0]["without_image"]["value"] == 1


def test_blends_that_cannot_be_read(changed: Path) -> None:
    write_blend(changed, ["{path: ../../sources/text, weight: -1}"])
    assert "found weight -1 of source 'text', expected a number above 0" in refused(changed, *SETTING, code=1)
    write_blend(changed, ["{path: ../../sources/text, weight: .inf}"])
    assert "found weight inf of source 'text', expected a number above 0 and at most" in refused(changed, *SETTING, code=1)
    write_blend(changed, ["text"])
    assert "found no splits.train.blend with a path for each source" in refused(changed, *SETTING, code=1)
    write_blend(changed, [])
    blend = changed / "index" / PROFILE / "dataset.yaml"
    blend.write_text("splits: {train: {blend: []}}")
    assert "found no source to train on" in refused(changed, *SETTING)
    blend.write_text("splits: [")
    assert "not valid YAML" in refused(changed, *SETTING, code=1)
    blend.unlink()
    assert "found no file, expected what `bayplan index` writes at its end" in refused(changed, *SETTING)


def test_a_dataset_behind_a_url_gives_the_same(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remote = open_storage("memory://forecast/out")
    for path in Path(url).rglob("*"):
        if path.is_file():
            remote.publish_bytes(str(path.relative_to(url)), path.read_bytes())
    far, near = (without_times(document(place, *SETTING)) for place in ("memory://forecast/out", url))
    assert far.pop("dataset") != near.pop("dataset")
    assert far == near


def test_the_report_shows_a_forecast_of_its_own_profile_only(url: str, tmp_path: Path) -> None:
    file = tmp_path / "forecast.json"
    assert run(url, *SETTING, *QUICK, "--json", file).exit_code == 0

    def report(given: Path) -> Result:
        words = ["report", url, "--cards", "0", "--to", str(tmp_path / "page"), "--forecast", str(given)]
        return CliRunner().invoke(main, words, catch_exceptions=False)

    assert report(file).exit_code == 0
    shown = json.loads((tmp_path / "page" / "report.json").read_text())["forecast"]
    assert shown["balance"] == json.loads(file.read_text())["balance"]
    assert shown["lines"][0].startswith("imbalance: predicted time over the same work without waiting")
    assert 'href="#forecast"' in (tmp_path / "page" / "report.html").read_text()

    other = json.loads(file.read_text()) | {"profile_fingerprint": "0" * 32}
    file.write_text(json.dumps(other))
    foreign = report(file)
    assert (foreign.exit_code, "make it again with `bayplan forecast`" in foreign.stderr) == (2, True)
    file.write_text('{"bayplan_forecast": 9}')
    assert "found bayplan_forecast 9, expected 1" in report(file).stderr
    file.write_text("{")
    assert (report(file).exit_code, "not valid JSON" in report(file).stderr) == (1, True)
