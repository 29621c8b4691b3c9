import dataclasses
from collections import Counter

import msgspec
import orjson
import pytest

from packer.format.errors import FormatError
from packer.format.manifest import (
    FileEntry,
    InputSpan,
    PartManifest,
    Supersedes,
    check_supersedes,
    decode_manifest,
    decode_source,
    encode_manifest,
    encode_source,
    total,
)

PART = "0123456789ab-r00000-p00000"


def part(part_id=PART, **changes):
    defaults = {
        "part_id": part_id,
        "source": "web",
        "input": InputSpan(file="rows.jsonl", byte_start=0, byte_end=100, file_size=100, digest="d" * 64),
        "recipe_fingerprint": "f" * 32,
        "num_read": 5,
        "num_written": 3,
        "num_quarantined": 2,
        "quarantined_by_reason": {"invalid_json": 1, "missing_image": 1},
        "num_images": 4,
        "num_images_stored": 3,
        "check": "structure",
        "files": {f"{part_id}.jsonl": FileEntry(size=10, digest="e" * 64)},
        "is_last_of_range": True,
    }
    return PartManifest(**(defaults | changes))


def retry(number, offsets, by_reason, parent=PART):
    return part(
        f"{parent}-retry{number}", num_read=len(offsets), num_written=len(offsets), num_quarantined=0, quarantined_by_reason={},
        is_last_of_range=False, supersedes=Supersedes(part_id=parent, byte_offsets=offsets, by_reason=by_reason),
    )  # fmt: skip


def test_a_manifest_is_read_back_as_written():
    for manifest in (part(), retry(1, (20, 40), {"missing_image": 2}), part(num_blank_lines=2, num_non_finite=1)):
        assert decode_manifest(encode_manifest(manifest), "here") == manifest


def test_a_manifest_begins_with_its_format_version_and_leaves_defaults_out():
    document = orjson.loads(encode_manifest(part()))
    assert list(document)[:3] == ["format", "format_version", "kind"]
    assert (document["format"], document["format_version"], document["kind"]) == ("bayplan", 1, "part")
    assert "supersedes" not in document
    assert "num_blank_lines" not in document


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_read": 6}, "read 6, but written 3 [+] quarantined 2"),
        ({"num_written": 4}, "read 5, but written 4 [+] quarantined 2"),
        ({"quarantined_by_reason": {"invalid_json": 1}}, "reasons do not add up to 2"),
    ],
)
def test_counts_that_do_not_add_up_cannot_be_written_nor_read(changes, message):
    with pytest.raises(ValueError, match=message):
        part(**changes)
    document = orjson.loads(encode_manifest(part())) | changes
    with pytest.raises(FormatError, match=f"p.part.json: .*{message}"):
        decode_manifest(orjson.dumps(document), "p.part.json")


def test_a_manifest_cut_at_any_byte_is_refused():
    data = encode_manifest(part()).rstrip()
    for length in range(len(data)):
        with pytest.raises(FormatError, match=r"p\.part\.json: .*(cut|expected a JSON object)"):
            decode_manifest(data[:length], "p.part.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "found format version 2, this release reads 1"),
        ({"format": "other"}, "found format 'other', expected 'bayplan'"),
        ({"kind": "source"}, "found kind 'source', expected 'part'"),
        ({"num_samples": 3}, "unknown field `num_samples`"),
        ({"num_read": "5"}, r"Expected `int`, got `str` - at `\$.num_read`"),
        ({"files": None}, r"Expected `object`, got `null` - at `\$.files`"),
    ],
)
def test_a_foreign_or_misspelt_manifest_is_refused(change, message):
    with pytest.raises(FormatError, match=f"p.part.json: .*{message}"):
        decode_manifest(orjson.dumps(orjson.loads(encode_manifest(part())) | change), "p.part.json")


def test_source_json_holds_every_manifest_in_part_order_whatever_order_they_came_in():
    manifests = [part(f"0123456789ab-r{index:05d}-p00000") for index in (2, 100_000, 0, 1)]
    data = encode_source("web", manifests)
    assert data == encode_source("web", reversed(manifests))
    assert [manifest.identity.range_index for manifest in decode_source(data, "here")] == [0, 1, 2, 100_000]
    assert orjson.loads(data)["totals"]["num_read"] == 20


def test_source_json_cut_by_one_character_or_without_parts_is_refused():
    data = encode_source("web", [part()]).rstrip()
    with pytest.raises(FormatError, match=r"source\.json: found \d+ bytes that are not JSON"):
        decode_source(data[:-1], "source.json")
    with pytest.raises(FormatError, match=r"source\.json: expected a list `parts`"):
        decode_source(orjson.dumps({**orjson.loads(data), "parts": None}), "source.json")


def test_sums_count_a_retried_row_once_and_as_written():
    whole, again = part(), retry(1, (20,), {"missing_image": 1})
    totals = total([whole, again])
    assert (totals.num_read, totals.num_written, totals.num_quarantined) == (5, 4, 1)
    assert totals.quarantined_by_reason == {"invalid_json": 1}
    assert totals.num_parts == 2


def test_sums_of_many_parts_do_not_depend_on_how_they_are_grouped():
    manifests = [part(num_blank_lines=2, images_dropped_by_reason={"empty_image": 1}), part("0123456789ab-r00001-p00000")]
    sums = total(manifests)
    assert Counter(sums.quarantined_by_reason) == Counter(invalid_json=2, missing_image=2)
    assert (sums.num_images, sums.num_images_stored, sums.num_blank_lines, sums.num_bytes) == (8, 6, 2, 20)
    assert sums.images_dropped_by_reason == {"empty_image": 1}
    assert total([]) == total(iter(()))


def test_a_row_claimed_by_two_retries_is_refused_with_both_names():
    manifests = [part(), retry(1, (20, 40), {"missing_image": 2}), retry(2, (40,), {"missing_image": 1})]
    check_supersedes(manifests[:2])
    with pytest.raises(FormatError, match=rf"{PART}-retry1 and {PART}-retry2 both hold the retried row at byte 40"):
        check_supersedes(manifests)
    with pytest.raises(FormatError, match="both hold"):
        encode_source("web", manifests)


def test_a_retry_without_its_part_is_refused():
    with pytest.raises(FormatError, match=f"{PART}-retry1 retries part {PART}, which is not in this source"):
        check_supersedes([retry(1, (20,), {"missing_image": 1})])


def test_the_fingerprint_of_a_part_changes_with_its_files_and_with_nothing_else():
    same = part(num_blank_lines=3, recipe_fingerprint="0" * 32)
    other = part(files={f"{PART}.jsonl": FileEntry(size=10, digest="0" * 64)})
    assert part().fingerprint == same.fingerprint != other.fingerprint
    assert len(part().fingerprint) == 32


def test_a_manifest_cannot_be_changed_in_memory():
    with pytest.raises(AttributeError):
        part().num_read = 7
    with pytest.raises(FormatError, match="not a part id of format version 1"):
        _ = msgspec.structs.replace(part(), part_id="nonsense").identity
    assert dataclasses.is_dataclass(part().identity)
