"""Golden datasets: one folder for each released format version, made once by the release that introduced it and never edited.

`inputs/` are JSONL files and images, `dataset/` is what was made of them. Bytes on disk decide: where one of these tests
fails, the code is wrong, or the change needs a new format version with a folder of its own.
"""

from pathlib import Path

import orjson
import pytest

from packer.convert import ConvertTask, Step, convert_range
from packer.format import layout
from packer.format.manifest import decode_source, encode_source, total
from packer.images import CheckLevel, ImageLimits
from packer.loading import ImagePolicy
from packer.references import ReferenceRules
from packer.retry import RetryTask, quarantined_rows, retry_part
from packer.row_source import SourceConfig
from packer.schemas import DEFAULT_FIELDS, SchemaConfig
from packer.sources import InputRange
from packer.storage import LocalStorage
from packer.verify import read_image, verify_part, verify_source

GOLDEN = Path(__file__).parent / "golden" / "v1"
CONDEMNED = {"web": frozenset(), "chat": frozenset({0})}
"""Rows that killed their worker when the dataset was made; the retry of `chat` then went well."""
SOURCES = {"web": ("interleaved", "web.jsonl"), "chat": ("chat", "chat.jsonl.gz")}


def golden_source(name):
    schema, _ = SOURCES[name]
    return SourceConfig(
        name=name,
        schema=SchemaConfig(name=schema, fields=DEFAULT_FIELDS[schema]),
        references=ReferenceRules(image_root=str(GOLDEN / "inputs/images"), archive=None, allow_hosts=(), max_bytes=1 << 20),
        images=ImagePolicy(
            limits=ImageLimits(),
            check=CheckLevel.STRUCTURE,
            conversion=None,
            drops_image=False,
            max_per_sample=None,
            keeps_first=False,
        ),
        keep=None,
        nulls_non_finite=False,
        max_line_bytes=1 << 20,
        target_bundle_bytes=700,
        fingerprint="0123456789abcdef0123456789abcdef",
    )


def write_golden(folder):
    """Make the dataset of the golden inputs."""
    storage = LocalStorage(str(folder))
    for name, (_, file) in SOURCES.items():
        path = GOLDEN / "inputs" / file
        source, work = golden_source(name), InputRange(url=str(path), file=file, file_size=path.stat().st_size)
        task = ConvertTask(source=source, work=work, condemned=CONDEMNED[name])
        manifests = [item for item in convert_range(task, storage) if not isinstance(item, Step)]
        retries = [RetryTask(source=source, work=work, part=part) for part in manifests if name == "chat"]
        manifests += [item for retry in retries for item in retry_part(retry, storage) if not isinstance(item, Step)]
        storage.publish_bytes(layout.source_file(name), encode_source(name, manifests))


@pytest.fixture
def dataset():
    return LocalStorage(str(GOLDEN / "dataset"))


def manifests_of(dataset, source):
    return decode_source(dataset.read_bytes(layout.source_file(source)), source)


def test_the_golden_files_themselves_were_not_edited(tree_digest):
    digests = (GOLDEN / "DIGESTS").read_text().splitlines()
    found = {name: digest for name, digest in tree_digest(GOLDEN).items() if name != "DIGESTS"}
    assert [f"{digest} {name}" for name, digest in found.items()] == digests


def test_todays_writer_gives_the_golden_bytes(tmp_path, tree_digest):
    write_golden(tmp_path / "dataset")
    assert tree_digest(tmp_path / "dataset") == tree_digest(GOLDEN / "dataset")


@pytest.mark.parametrize("source", SOURCES)
def test_todays_readers_find_the_golden_dataset_whole(dataset, source):
    manifests = manifests_of(dataset, source)
    assert verify_source(dataset, source, manifests) == []
    assert [verify_part(dataset, manifest, deep=True).problems for manifest in manifests] == [[]] * len(manifests)


def test_todays_readers_read_what_the_golden_dataset_holds(dataset):
    manifests = manifests_of(dataset, "web")
    totals = total(manifests)
    assert (len(manifests), totals.num_read, totals.num_written, totals.num_quarantined) == (2, 8, 4, 4)
    assert totals.quarantined_by_reason == {
        "lone_surrogate": 1, "non_finite_number": 1, "truncated_image": 1, "unsupported_media": 1,
    }  # fmt: skip
    assert (totals.num_images, totals.num_images_stored, totals.num_blank_lines) == (6, 4, 1)
    quarantined = [row for manifest in manifests for row in quarantined_rows(dataset, manifest)]
    assert [row.sample_id for row in quarantined] == ["f2362f11f18e:354", "two-bad", "f2362f11f18e:652", "video"]


def test_todays_readers_read_golden_records_and_their_images(dataset):
    lines = [
        line
        for manifest in manifests_of(dataset, "web")
        for line in dataset.read_bytes(layout.part_file("web", manifest.part_id, layout.RECORDS_SUFFIX)).splitlines()
    ]
    records = [orjson.loads(line) for line in lines]
    assert [record["id"] for record in records] == ["doc-1", "7", "f2362f11f18e:412", "text-only"]
    assert b'"extra":{"score":1.50,"big":18446744073709551616}' in lines[0]
    for record in records:
        for entry in record["images"]:
            assert read_image(dataset, "web", entry) == (GOLDEN / "inputs/images" / entry["ref"]).read_bytes()
    photo = records[0]["images"][1]
    assert (photo["width"], photo["height"], photo["orientation"], photo["format"]) == (12, 16, 6, "jpeg")


def test_todays_readers_read_a_golden_retry(dataset):
    part, retry = manifests_of(dataset, "chat")
    assert (retry.part_id, retry.supersedes.part_id) == (f"{part.part_id}-retry1", part.part_id)
    assert (retry.supersedes.byte_offsets, retry.supersedes.by_reason) == ((0,), {"kills_worker": 1})
    totals = total([part, retry])
    assert (totals.num_read, totals.num_written, totals.quarantined_by_reason) == (3, 2, {"schema_mismatch": 1})
