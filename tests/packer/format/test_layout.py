import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format import layout
from packer.format.layout import PartId, file_hash, part_file, part_of

COUNTS = st.integers(0, 10**7)
IDS = st.builds(PartId, st.from_regex(r"[0-9a-f]{12}", fullmatch=True), COUNTS, COUNTS, st.integers(0, 99))


@given(IDS)
def test_a_part_id_is_read_back_from_its_text(part_id):
    assert PartId.parse(str(part_id)) == part_id


@given(st.lists(IDS, max_size=20))
def test_part_ids_of_usual_size_sort_as_their_texts_do(part_ids):
    small = [part_id for part_id in part_ids if part_id.range_index < 10**5 and part_id.roll < 10**5 and not part_id.retry]
    assert sorted(map(str, small)) == [str(part_id) for part_id in sorted(small)]


def test_a_part_id_is_written_as_the_format_says():
    assert str(PartId("0123456789ab", 7, 12)) == "0123456789ab-r00007-p00012"
    assert str(PartId("0123456789ab", 7, 12, 3)) == "0123456789ab-r00007-p00012-retry3"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "source",
        "0123456789ab",
        "0123456789AB-r00000-p00000",
        "0123456789ab-r0-p0",
        "0123456789ab-r00000-p00000-x",
        "0123456789ab-r00000-p00000\n",
        "x0123456789ab-r00000-p00000",
        "0123456789ab-r00000-p00000-retry",
    ],
)
def test_other_names_are_no_part_ids(text):
    assert PartId.parse(text) is None


@given(IDS, st.sampled_from([*layout.PART_SUFFIXES, layout.MANIFEST_SUFFIX]))
def test_a_file_name_gives_its_part(part_id, suffix):
    name = part_file("web", str(part_id), suffix)
    assert name.startswith("sources/web/")
    assert part_of(name.rpartition("/")[2]) == str(part_id)


@pytest.mark.parametrize("name", ["source.json", ".nv-meta", "notes.jsonl", ".tmp-00-0123456789ab-r00000-p00000.zip", "a.zip"])
def test_generated_and_foreign_files_belong_to_no_part(name):
    assert part_of(name) is None


def test_files_of_one_base_name_in_different_folders_have_different_parts():
    assert file_hash("part0/0.jsonl") != file_hash("part1/0.jsonl") != file_hash("0.jsonl")
    assert len(file_hash("0.jsonl")) == 12
