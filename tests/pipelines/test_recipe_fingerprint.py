import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.recipe import (
    ImagePolicy,
    Pin,
    Source,
    differing_fields,
    dump_recipe,
    fingerprint_keys,
    load_recipe,
    source_fingerprint,
)

BASE = {"name": "a", "files": "in/*.jsonl", "schema": "llava"}


def source_of(folder: Path, **keys: Any) -> Source:
    folder.mkdir(exist_ok=True)
    path = folder / "r.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "name": "d", "output": "o", "sources": [BASE | keys]}))
    return load_recipe(path).sources[0]


CHANGING: list[tuple[dict[str, Any], list[str]]] = [
    ({"schema": "chat"}, ["fields.conversations", "fields.image", "fields.messages", "schema"]),
    ({"fields": {"image": "x"}}, ["fields.image"]),
    ({"placeholder": "<i>"}, ["placeholder"]),
    ({"literal_placeholders": "text"}, ["literal_placeholders"]),
    ({"image_root": "x"}, ["image_root"]),
    ({"archive": "x.zip"}, ["archive"]),
    ({"allow_hosts": ["x.org"]}, ["allow_hosts"]),
    ({"keep": ["x"]}, ["keep"]),
    ({"non_finite": "null"}, ["non_finite"]),
    ({"max_line_bytes": 5}, ["max_line_bytes"]),
    ({"target_bundle_bytes": 5}, ["target_bundle_bytes"]),
    ({"images": {"max_per_sample": 1}}, ["images.max_per_sample"]),
    ({"images": {"over_max": "keep_first"}}, ["images.over_max"]),
    ({"images": {"min_side": 2}}, ["images.min_side"]),
    ({"images": {"max_pixels": 2}}, ["images.max_pixels"]),
    ({"images": {"max_aspect_ratio": 3}}, ["images.max_aspect_ratio"]),
    ({"images": {"max_bytes": 2}}, ["images.max_bytes"]),
    ({"images": {"check": "decode"}}, ["images.check"]),
    ({"images": {"on_error": "drop_image"}}, ["images.on_error"]),
    ({"images": {"convert": {"longest_side": 9}}}, ["images.convert"]),
]
NOT_CHANGING: list[dict[str, Any]] = [
    {},
    {"name": "b"},
    {"files": ["other/*.jsonl", "in/x.jsonl"]},
    {"root": "."},
    {"weight": 3},
    {"token_share": 1},
    {"val": 0.1},
    {"range_bytes": 1024},
    {"row_timeout_seconds": 1},
    {"fields": {"image": "image"}},
    {"keep": "all"},
    {"max_line_bytes": "64MiB"},
    {"images": {"min_side": 1}},
]


@pytest.mark.parametrize(("keys", "names"), CHANGING)
def test_keys_that_change_bytes_change_the_fingerprint(tmp_path: Path, keys: dict[str, Any], names: list[str]) -> None:
    before, after = source_of(tmp_path), source_of(tmp_path, **keys)
    assert source_fingerprint(before) != source_fingerprint(after)
    assert differing_fields(fingerprint_keys(before), fingerprint_keys(after)) == names


@pytest.mark.parametrize("keys", NOT_CHANGING)
def test_other_keys_do_not(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert source_fingerprint(source_of(tmp_path, **keys)) == source_fingerprint(source_of(tmp_path))


def test_every_key_of_a_source_is_judged_above() -> None:
    judged = {key for keys, _ in CHANGING for key in keys} | {key for keys in NOT_CHANGING for key in keys}
    keys = {field.alias or name for name, field in Source.model_fields.items()}
    assert judged == keys - {"as_written"}
    assert {key for keys, _ in CHANGING for key in keys.get("images", {})} == set(ImagePolicy.model_fields)


def test_inner_keys_of_a_conversion_are_named(tmp_path: Path) -> None:
    one, two = (source_of(tmp_path, images={"convert": {"format": "webp", "quality": q}}) for q in (1, 2))
    assert differing_fields(fingerprint_keys(one), fingerprint_keys(two)) == ["images.convert.quality"]


def test_fingerprint_of_the_defaults_stays_what_it_was(tmp_path: Path) -> None:
    assert source_fingerprint(source_of(tmp_path)) == "548d7dbd3ee9057cdb7a7d90d75656b1"


def test_order_and_case_of_hosts_do_not_count(tmp_path: Path) -> None:
    one, two = source_of(tmp_path, allow_hosts=["a.org", "B.org"]), source_of(tmp_path, allow_hosts=["b.org", "a.org"])
    assert source_fingerprint(one) == source_fingerprint(two)


def test_a_moved_folder_keeps_its_fingerprints(tmp_path: Path) -> None:
    keys = {"image_root": "./img/", "archive": "../a.zip"}
    one, two = source_of(tmp_path / "one", **keys), source_of(tmp_path / "two", **keys | {"image_root": "img"})
    assert one.image_root != two.image_root
    assert source_fingerprint(one) == source_fingerprint(two)


def test_a_dump_keeps_the_fingerprint_until_its_path_is_edited(tmp_path: Path) -> None:
    source = source_of(tmp_path / "one", image_root="img", root=".")
    path = tmp_path / "dump.yaml"
    dumped = dump_recipe(load_recipe(tmp_path / "one/r.yaml"), {"a": Pin(root=str(tmp_path), range_bytes=8)})
    path.write_text(dumped)
    assert source_fingerprint(load_recipe(path).sources[0]) == source_fingerprint(source)
    path.write_text(dumped.replace(f"image_root: {tmp_path}/one/img", "image_root: other"))
    edited = load_recipe(path).sources[0]
    assert (edited.image_root, edited.as_written) == (f"{tmp_path}/other", {"image_root": "other"})
    assert source_fingerprint(edited) != source_fingerprint(source)


def test_keys_survive_json(tmp_path: Path) -> None:
    images = {"max_aspect_ratio": 3, "convert": {"format": "png"}}
    keys = fingerprint_keys(source_of(tmp_path, keep=["x"], allow_hosts=["x.org"], image_root="i", images=images))
    assert differing_fields(json.loads(json.dumps(keys)), keys) == []


def test_keys_only_one_side_has_are_named() -> None:
    assert differing_fields({"a": None, "b": {"c": 1}}, {"b": {"c": 1, "d": None}, "e": 2}) == ["a", "b.d", "e"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "modules"
    (folder / "recipe_test_pkg").mkdir(parents=True)
    (folder / "recipe_test_pkg/__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "recipe_test_pkg/inner.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize("module", ["recipe_test_pkg", "recipe_test_pkg.inner"])
def test_a_schema_functions_file_counts_and_is_not_imported(tmp_path: Path, modules: Path, module: str) -> None:
    source = source_of(tmp_path, schema=f"python:{module}:read")
    before = fingerprint_keys(source), source_fingerprint(source)
    file = modules / ("recipe_test_pkg/inner.py" if module.endswith("inner") else "recipe_test_pkg/__init__.py")
    file.write_text("def read(row): ...\n")
    assert differing_fields(before[0], fingerprint_keys(source)) == ["schema_digest"]
    assert source_fingerprint(source) != before[1]
    assert "recipe_test_pkg" not in sys.modules


@pytest.mark.parametrize("module", ["recipe_test_pkg.nope", "recipe_test_nope.x", "sys", "_json"])
def test_a_module_without_a_file_counts_by_name(tmp_path: Path, modules: Path, module: str) -> None:
    keys = fingerprint_keys(source_of(tmp_path, schema=f"python:{module}:read"))
    assert (keys["schema"], keys["schema_digest"]) == (f"python:{module}:read", None)
