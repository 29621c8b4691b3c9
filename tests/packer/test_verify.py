import shutil
import zipfile

import msgspec
import orjson
import pytest

from packer.format import layout
from packer.format.digest import digest_of_file
from packer.format.errors import FormatError
from packer.format.manifest import FileEntry, Supersedes, decode_manifest, encode_manifest, encode_source
from packer.verify import read_image, verify_part, verify_source

SUFFIXES = (layout.BUNDLE_SUFFIX, layout.RECORDS_SUFFIX, layout.OFFSETS_SUFFIX, layout.QUARANTINE_SUFFIX)


@pytest.fixture
def parts(kit):
    """A dataset of two parts with images, text and quarantined rows."""
    rows = [{"id": str(n), "content": [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "t"}]} for n in range(6)]
    for number in range(5):
        kit.image(f"{number}.png", number=number)
    parts = kit.dataset([rows[5], b"bad", *rows[:5], rows[5]], kit.source(target_bundle_bytes=900))
    assert len(parts) == 2
    return parts


def problems(kit, part, **options):
    return verify_part(kit.storage(), part, **options).problems


def with_digests_of_now(kit, part, **changes):
    """The manifest a forger would write: sizes and digests of the files as they are."""
    found = {name: digest_of_file(str(kit.folder / "out/sources/web" / name)) for name in part.files}
    files = {name: FileEntry(size=digest.size, digest=digest.hexdigest()) for name, digest in found.items()}
    return msgspec.structs.replace(part, files=files, **changes)


@pytest.mark.parametrize("deep", [False, True])
def test_a_clean_dataset_has_no_problems_and_everything_in_it_was_looked_at(kit, parts, deep):
    verdicts = [verify_part(kit.storage(), part, deep=deep) for part in parts]
    assert [verdict.problems for verdict in verdicts] == [[], []]
    assert verify_source(kit.storage(), "web", parts) == []
    assert sum(verdict.num_records for verdict in verdicts) == sum(verdict.num_images for verdict in verdicts) == 5
    assert sum(verdict.num_bytes for verdict in verdicts) == sum(entry.size for part in parts for entry in part.files.values())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_by_its_last_byte_is_named_with_both_sizes(kit, parts, suffix):
    path = kit.file(parts[0], suffix)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"sources/web/{path.name}: found {len(data) - 1} bytes, the manifest says {len(data)}" in problems(kit, parts[0])[0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_any_flipped_bit_of_any_file_is_found_and_never_an_exception(kit, parts, suffix):
    path = kit.file(parts[0], suffix)
    data = path.read_bytes()
    for place in range(0, len(data), 1 if suffix != layout.BUNDLE_SUFFIX else 3):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        found = problems(kit, parts[0])
        assert found
        assert f"sources/web/{path.name}: found blake3" in found[0]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_file_is_named(kit, parts, suffix):
    path = kit.file(parts[0], suffix)
    path.unlink()
    assert f"sources/web/{path.name}: found nothing, the manifest names it: the file was removed" in problems(kit, parts[0])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_bit_is_found_even_where_the_manifest_was_made_to_fit(kit, parts, suffix):
    path = kit.file(parts[0], suffix)
    data = path.read_bytes()
    place = {
        layout.BUNDLE_SUFFIX: 100,
        layout.RECORDS_SUFFIX: data.index(b'"offset":') + 9 if suffix == layout.RECORDS_SUFFIX else 0,
    }
    at = place.get(suffix, 8 if suffix == layout.OFFSETS_SUFFIX else data.find(b"_json") + 1)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert problems(kit, with_digests_of_now(kit, parts[0]))


def test_a_changed_image_is_named_by_bundle_member_and_offset(kit, parts):
    [record, *_] = kit.records(parts)
    entry = record["images"][0]
    path = kit.file(parts[0], layout.BUNDLE_SUFFIX)
    data = bytearray(path.read_bytes())
    data[entry["offset"] + 40] ^= 1
    path.write_bytes(data)
    found = [problem for problem in problems(kit, parts[0]) if "image" in problem]
    assert f"{path.name}: image {entry['digest']}.png at offset {entry['offset']}: found crc32" in found[0]
    with pytest.raises(FormatError, match=rf"{path.name} offset {entry['offset']}: found crc32"):
        read_image(kit.storage(), "web", entry)


def test_an_image_is_read_by_its_entry(kit, parts):
    entry = kit.records(parts)[0]["images"][0]
    assert read_image(kit.storage(), "web", entry) == (kit.inputs / "0.png").read_bytes()


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED], ids=["compressed", "stored in another order"])
def test_a_bundle_that_was_zipped_anew_is_found_even_where_the_manifest_was_made_to_fit(kit, parts, method):
    path = kit.file(parts[0], layout.BUNDLE_SUFFIX)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert len(members) > 1
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in reversed(members):
            archive.writestr(name, members[name])
    assert "manifest says" in problems(kit, parts[0])[0]
    expected = "is compressed; bundles are stored" if method == zipfile.ZIP_DEFLATED else "tells another size or crc32"
    assert any(expected in problem for problem in problems(kit, with_digests_of_now(kit, parts[0])))


def edited(kit, part, change):
    """Change the first record, write its file and offsets to fit, and forge the manifest."""
    path = kit.file(part, layout.RECORDS_SUFFIX)
    lines = path.read_bytes().splitlines(keepends=True)
    record = orjson.loads(lines[0])
    change(record)
    lines[0] = orjson.dumps(record) + b"\n"
    path.write_bytes(b"".join(lines))
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    kit.file(part, layout.OFFSETS_SUFFIX).write_bytes(b"".join(offset.to_bytes(8, "little") for offset in offsets))
    return with_digests_of_now(kit, part)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record["images"][0].update(offset=7), "the zip directory names"),
        (lambda record: record["images"][0].update(size=7), "tells another size or crc32"),
        (lambda record: record["images"][0].update(crc32=7), "tells another size or crc32"),
        (lambda record: record["images"][0].update(digest="0" * 32), "found digest"),
        (lambda record: record["images"][0].update(width=99), "found width 8, the record says 99"),
        (lambda record: record["images"][0].update(orientation=6), "found orientation 1, the record says 6"),
        (lambda record: record["images"][0].update(bundle="other.zip"), "found an image in bundle 'other.zip'"),
        (lambda record: record["images"].clear(), "does not name each of its 0 images once"),
        (lambda record: record["content"][0].update(image=1), "does not name each of its 1 images once"),
        (lambda record: record.pop("origin"), "not a record line"),
        (lambda record: record.update(messages=[]), "exactly one of content and messages"),
    ],
)
def test_an_edited_record_is_found_even_where_everything_else_was_made_to_fit(kit, parts, change, message):
    assert any(message in problem for problem in problems(kit, edited(kit, parts[0], change)))


def test_an_edited_text_is_found_by_the_digest_of_the_record_file(kit, parts):
    manifest = edited(kit, parts[0], lambda record: record["content"][1].update(text="T"))
    assert problems(kit, manifest) == []
    assert "found blake3" in problems(kit, parts[0])[0]


@pytest.mark.parametrize("changes", [{"num_images": 9}, {"num_images_stored": 9}, {"num_written": 9, "num_read": 10}])
def test_counts_of_a_manifest_that_are_not_those_of_its_files_are_named(kit, parts, changes):
    part = parts[1]
    assert part.num_quarantined == 1
    [problem] = problems(kit, msgspec.structs.replace(part, **changes))
    assert "the manifest says 9" in problem


def test_quarantine_lines_that_are_not_those_of_the_manifest_are_named(kit, parts):
    path = kit.file(parts[0], layout.QUARANTINE_SUFFIX)
    path.write_bytes(path.read_bytes().replace(b'"reason":"invalid_json"', b'"reason":"invalid_utf8"'))
    [problem] = problems(kit, with_digests_of_now(kit, parts[0]))
    assert "found {'missing_image': 1, 'invalid_utf8': 1}, the manifest says {'invalid_json': 1, 'missing_image': 1}" in problem


def test_a_foreign_version_of_a_manifest_or_of_source_json_is_refused_by_name(kit, parts):
    data = encode_manifest(parts[0]).replace(b'"format_version": 1', b'"format_version": 2')
    with pytest.raises(FormatError, match=r"x\.part\.json: found format version 2, this release reads 1"):
        decode_manifest(data, "x.part.json")
    path = kit.folder / "out" / layout.source_file("web")
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 2'))
    assert "source.json: found format version 2, this release reads 1" in verify_source(kit.storage(), "web", parts)[0]


def test_source_json_that_is_missing_cut_or_of_another_state_is_named(kit, parts):
    path = kit.folder / "out" / layout.source_file("web")
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert "are not JSON" in verify_source(kit.storage(), "web", parts)[0]
    path.write_bytes(encode_source("web", parts[:1]))
    assert "source.json: does not hold the manifests that are there" in verify_source(kit.storage(), "web", parts)[0]
    path.unlink()
    assert "source.json: found nothing: the run did not end" in verify_source(kit.storage(), "web", parts)[0]


def test_a_gap_between_parts_is_named_with_its_place(kit, parts):
    (kit.folder / "out" / layout.source_file("web")).write_bytes(encode_source("web", parts[1:]))
    found = verify_source(kit.storage(), "web", parts[1:])
    assert f"web: part {parts[1].part_id} begins at byte {parts[1].input.byte_start} of rows.jsonl, expected 0" in found


def test_files_that_belong_to_no_committed_part_are_named_and_others_are_not(kit, parts):
    folder = kit.folder / "out/sources/web"
    stray = parts[0].part_id.replace("p00000", "p00007")
    for suffix in SUFFIXES:
        shutil.copy(kit.file(parts[0], suffix), folder / f"{stray}{suffix}")
    (folder / "notes.txt").write_text("of the user")
    (folder / ".tmp-00-x.zip").write_text("work in progress")
    found = verify_source(kit.storage(), "web", parts)
    assert found == [
        f"sources/web/{stray}{suffix}: belongs to no committed part: an unfinished run; run `bayplan pack` again"
        for suffix in sorted(SUFFIXES)
    ]


def test_two_retries_that_claim_one_row_are_named(kit, parts):
    claim = Supersedes(part_id=parts[0].part_id, byte_offsets=(0,), by_reason={"missing_image": 1})
    retries = [
        msgspec.structs.replace(
            parts[1], part_id=f"{parts[0].part_id}-retry{number}", supersedes=claim, num_read=parts[1].num_written,
            num_quarantined=0, quarantined_by_reason={},
        )
        for number in (1, 2)
    ]  # fmt: skip
    found = verify_source(kit.storage(), "web", [parts[0], *retries, parts[1]])
    assert f"parts {retries[0].part_id} and {retries[1].part_id} both hold the retried row at byte 0" in found[0]


def test_one_bad_part_hides_no_other(kit, parts):
    for part in parts:
        kit.file(part, layout.OFFSETS_SUFFIX).write_bytes(b"junk")
        kit.file(part, layout.BUNDLE_SUFFIX).unlink()
        found = problems(kit, part)
        assert any(".zip: found nothing" in problem for problem in found)
        assert any(".jsonl.idx: found 4 bytes, the manifest says" in problem for problem in found)
