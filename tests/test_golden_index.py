"""A golden index of format version 1, made once by the release that introduced it and never edited.

`dataset/` is the golden dataset of `v1` with the index of two profiles, `tokenizer.json` what both were counted with. Where one
of these tests fails, the code is wrong, or lengths changed: then COUNTING_VERSION rises, and a golden index of its own is added.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from in_process import run_here

from indexer.profile import (
    ImageSettings,
    Profile,
    TemplateSettings,
    TokenizerSettings,
    open_profile,
    open_stored,
    profile_names,
    read_profile,
    write_profile,
)
from indexer.rows import Status
from indexer.table import open_index
from packer.format import layout
from packer.format.manifest import decode_source
from packer.storage import LocalStorage
from pipelines.blend import dataset_yaml
from pipelines.index_tasks import ConsolidateTask, IndexTask, source_stats
from pipelines.ray_executor import Listener
from pipelines.recipe import Recipe, Source

GOLDEN = Path(__file__).parent / "golden" / "v1-index"
SOURCES = ("chat", "web")
TOKENIZER = TokenizerSettings()
PROFILES = {
    "qwen": Profile(
        name="qwen",
        tokenizer=TOKENIZER,
        template=TemplateSettings(name="chatml", eos="<|endoftext|>"),
        images=ImageSettings(rule="qwen2_5_vl"),
        sequence_lengths=[16, 64],
    ),
    "bare": Profile(name="bare", tokenizer=TOKENIZER, template=TemplateSettings(name="chatml"), images=ImageSettings(rule=None)),
}


def write_index(folder: Path) -> None:
    """Index the golden dataset as a job does, without the recipe, which would name the folder of its inputs."""
    storage = LocalStorage(str(folder))
    sources = tuple(Source(schema="text", name=name, files=("rows.jsonl",)) for name in SOURCES)
    recipe = Recipe(version=1, name="golden", output="out", sources=sources)
    for name, profile in PROFILES.items():
        opened = open_profile(profile, str(GOLDEN / "tokenizer.json"))
        write_profile(storage, opened, "tokenizer.json", (GOLDEN / "tokenizer.json").read_bytes())
        common = {"profile": name, "fingerprint": opened.fingerprint}
        for source in SOURCES:
            parts = decode_source(storage.read_bytes(layout.source_file(source)), source)
            tasks = [IndexTask(source=source, parts=tuple(parts), **common), ConsolidateTask(source=source, **common)]
            assert run_here(str(folder))([(source, task) for task in tasks], Listener()).failures == {}
        stats = {source: source_stats(storage, name, source) for source in SOURCES}
        storage.publish_bytes(layout.profile_dataset_file(name), dataset_yaml(recipe, name, stats, {})[0])


def test_the_golden_files_themselves_were_not_edited(tree_digest: Any) -> None:
    digests = (GOLDEN / "DIGESTS").read_text().splitlines()
    found = {name: digest for name, digest in tree_digest(GOLDEN).items() if name not in ("DIGESTS", "README.md")}
    assert [f"{digest} {name}" for name, digest in found.items()] == digests


def test_its_dataset_is_the_golden_dataset(tree_digest: Any) -> None:
    assert tree_digest(GOLDEN / "dataset/sources") == tree_digest(GOLDEN.parent / "v1/dataset/sources")


def with_golden_versions(file: Path) -> None:
    """Write the versions of the golden libraries into a profile: others may count it, as long as they give the same ids."""
    golden = json.loads((GOLDEN / "dataset" / file.relative_to(file.parents[2])).read_bytes())
    document = json.loads(file.read_bytes())
    document["counted_with"]["libraries"] = golden["counted_with"]["libraries"]
    file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def test_todays_writer_gives_the_golden_bytes(tmp_path: Path, tree_digest: Any) -> None:
    shutil.copytree(GOLDEN / "dataset/sources", tmp_path / "dataset/sources")
    write_index(tmp_path / "dataset")
    for name in PROFILES:
        with_golden_versions(tmp_path / "dataset" / layout.profile_file(name))
    assert tree_digest(tmp_path / "dataset") == tree_digest(GOLDEN / "dataset")


@pytest.mark.parametrize("profile", PROFILES)
def test_todays_encoder_is_the_one_it_was_counted_with(profile: str) -> None:
    storage = LocalStorage(str(GOLDEN / "dataset"))
    assert profile_names(storage) == ["bare", "qwen"]
    stored = read_profile(storage, profile)
    assert stored is not None
    assert stored.profile == PROFILES[profile]
    assert open_stored(storage, profile).fingerprint == stored.fingerprint


NUMBERS = {
    "qwen": [
        # source, status, text, image, all, loss, sizes and tokens of images
        ("chat", Status.TEMPLATE_FAILED, 0, 0, 0, 0, []),
        ("chat", Status.USABLE, 37, 6, 49, 10, [(9, 7, 6)]),
        ("web", Status.USABLE, 23, 12, 40, 24, [(9, 7, 6), (12, 16, 6)]),
        ("web", Status.USABLE, 15, 6, 24, 16, [(9, 7, 6)]),
        ("web", Status.USABLE, 0, 14, 21, 1, [(5, 5, 4), (5, 5, 4), (6, 4, 6)]),
        ("web", Status.USABLE, 13, 0, 14, 14, []),
    ],
    "bare": [
        ("chat", Status.TEMPLATE_FAILED, 0, 0, 0, 0, []),
        *[(source, Status.IMAGE_REFUSED, 0, 0, 0, 0, []) for source in ("chat", "web", "web", "web")],
        ("web", Status.USABLE, 13, 0, 13, 13, []),
    ],
}


@pytest.mark.parametrize("profile", PROFILES)
def test_todays_reader_reads_the_golden_index(profile: str) -> None:
    table = open_index(str(GOLDEN / "dataset"), profile)
    rows = [table.row(number) for number in range(len(table))]
    assert [
        (row.source, row.status, row.num_text_tokens, row.num_image_tokens, row.num_tokens, row.num_loss_tokens,
         [(image.width, image.height, image.num_image_tokens) for image in row.images])
        for row in rows
    ] == NUMBERS[profile]  # fmt: skip
    assert [(row.part_id[-7:], row.line) for row in rows] == [
        ("-p00000", 0), ("-retry1", 0), ("-p00000", 0), ("-p00000", 1), ("-p00001", 0), ("-p00001", 1),
    ]  # fmt: skip
    for row, sample_id in zip(rows, ["c2", "c1", "doc-1", "7", "f2362f11f18e:412", "text-only"], strict=True):
        with open(GOLDEN / "dataset" / row.record_file, "rb") as file:
            file.seek(row.record_offset)
            assert json.loads(file.read(row.record_size))["id"] == sample_id
        assert [table.row(number) for number in table.find(sample_id)] == [row]


def test_todays_reader_reads_golden_statistics() -> None:
    stats = source_stats(LocalStorage(str(GOLDEN / "dataset")), "qwen", "web")
    assert (stats.num_samples, stats.num_images, stats.num_tokens, stats.num_patches) == (4, 6, 99, 128)
    assert stats.images.orientations == {"1": 5, "6": 1}
