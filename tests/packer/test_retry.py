import dataclasses
import gzip

import orjson
import pytest
import zstandard

from packer.convert import Step
from packer.format import layout
from packer.format.errors import InputError
from packer.format.manifest import check_supersedes, total
from packer.retry import RetryTask, lines_at, quarantined_rows, retries_of, retry_part
from packer.verify import verify_part


def rows_with_images(count):
    return [{"id": str(number), "content": [{"type": "image", "image": f"{number}.png"}]} for number in range(count)]


def retry(kit, part, source=None, name="rows.jsonl", **changes):
    task = RetryTask(source=source or kit.source(), work=kit.whole(kit.inputs / name), part=part, **changes)
    return [item for item in retry_part(task, kit.storage()) if not isinstance(item, Step)]


def ids(rows):
    return [row["id"] for row in rows]


@pytest.mark.parametrize(
    ("name", "pack"), [("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress), ("rows.jsonl.zst", zstandard.compress)]
)
def test_rows_whose_images_came_back_become_records_and_the_sums_say_so(kit, name, pack):
    data = b"".join(orjson.dumps(row) + b"\n" for row in rows_with_images(6))
    for number in (0, 3):
        kit.image(f"{number}.png", number=number)
    [part] = kit.convert(pack(data), kit.source(), name=name)
    assert (part.num_written, part.num_quarantined) == (2, 4)
    images = {str(number): kit.image(f"{number}.png", number=number) for number in (1, 4, 5)}
    [again] = retry(kit, part, name=name)
    assert again.part_id == f"{part.part_id}-retry1"
    assert {row["id"]: kit.stored(again, row["images"][0]) for row in kit.records([again])} == images
    assert again.supersedes.byte_offsets == tuple(row["origin"]["byte_offset"] for row in kit.records([again]))
    totals = total([part, again])
    assert (totals.num_read, totals.num_written, totals.num_quarantined) == (6, 5, 1)
    assert totals.quarantined_by_reason == {"missing_image": 1}
    assert verify_part(kit.storage(), again, deep=True).problems == []


def test_doing_it_twice_changes_nothing(kit, tree_digest):
    [part] = kit.convert(rows_with_images(3), kit.source())
    kit.image("1.png")
    assert len(retry(kit, part)) == 1
    before = tree_digest(kit.folder)
    assert retry(kit, part) == []
    assert tree_digest(kit.folder) == before


def test_a_retry_that_gains_nothing_writes_nothing(kit, tree_digest):
    [part] = kit.convert(rows_with_images(3), kit.source())
    before = tree_digest(kit.folder)
    assert retry(kit, part) == []
    assert tree_digest(kit.folder) == before


def test_each_retry_takes_what_the_ones_before_left(kit):
    [part] = kit.convert(rows_with_images(4), kit.source())
    made = []
    for number in (2, 0, 3):
        kit.image(f"{number}.png", number=number)
        made += retry(kit, part)
    assert [manifest.part_id.rpartition("-")[2] for manifest in made] == ["retry1", "retry2", "retry3"]
    assert ids(kit.records(made)) == ["2", "0", "3"]
    assert retries_of(kit.storage(), part) == made
    check_supersedes([part, *made])
    assert total([part, *made]).num_quarantined == 1


def test_a_retry_rolls_like_any_part_and_supersedes_each_row_once(kit):
    [part] = kit.convert(rows_with_images(9), kit.source())
    for number in range(9):
        kit.image(f"{number}.png", number=number)
    made = retry(kit, part, kit.source(target_bundle_bytes=900))
    assert len(made) > 2
    assert ids(kit.records(made)) == [str(number) for number in range(9)]
    check_supersedes([part, *made])
    assert total([part, *made]).num_quarantined == 0


def test_a_retry_that_died_after_its_first_part_goes_on_with_the_rows_left(kit, tree_digest):
    [part] = kit.convert(rows_with_images(9), kit.source())
    for number in range(9):
        kit.image(f"{number}.png", number=number)
    task = RetryTask(source=kit.source(target_bundle_bytes=900), work=kit.whole(kit.inputs / "rows.jsonl"), part=part)
    running = retry_part(task, kit.storage())
    first = next(item for item in running if not isinstance(item, Step))
    running.close()
    rest = retry(kit, part, task.source)
    assert ids(kit.records([first, *rest])) == [str(number) for number in range(9)]
    check_supersedes([part, first, *rest])
    assert all(verify_part(kit.storage(), made).problems == [] for made in (first, *rest))


@pytest.mark.parametrize("change", ["another line", "moved", "cut"])
def test_a_file_that_changed_under_its_quarantined_rows_is_refused(kit, change):
    [part] = kit.convert(rows_with_images(3), kit.source())
    kit.image("1.png")
    data = (kit.inputs / "rows.jsonl").read_bytes()
    changed = {"another line": data.replace(b"1.png", b"2.png"), "moved": b"\n" + data, "cut": data[:-40]}[change]
    path = kit.jsonl(changed)
    with pytest.raises(InputError, match=r"changed|replace-changed"):
        retry(kit, part)
    assert path.read_bytes() == changed
    assert retries_of(kit.storage(), part) == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_lines_are_found_at_their_offsets_and_a_wrong_offset_is_refused(kit, name):
    data = b"0\n11\n222\n3333\n"
    work = kit.whole(kit.jsonl(gzip.compress(data) if name.endswith("gz") else data, name))
    assert [line.raw for line in lines_at(work, [0, 2, 9], 100)] == [b"0\n", b"11\n", b"3333\n"]
    with pytest.raises(InputError, match="no line starts at byte 99"):
        list(lines_at(work, [2, 99], 100))


def test_a_line_above_the_limit_and_one_with_a_byte_order_mark_are_known_again(kit):
    data = b'\xef\xbb\xbf{"content":[{"type":"image","image":"a.png"}]}\n' + b"x" * 500 + b"\n"
    source = kit.source(max_line_bytes=100)
    [part] = kit.convert(data, source)
    assert part.quarantined_by_reason == {"line_too_long": 1, "missing_image": 1}
    kit.image("a.png")
    [again] = retry(kit, part, source)
    assert again.supersedes.by_reason == {"missing_image": 1}


def test_a_row_whose_signed_urls_were_not_written_down_is_known_again(kit):
    row = {"content": [{"type": "image", "image": "a.png"}], "src": "https://host/a.png?X-Amz-Signature=secret"}
    [part] = kit.convert([row], kit.source())
    assert b"secret" not in kit.file(part, layout.QUARANTINE_SUFFIX).read_bytes()
    kit.image("a.png")
    [again] = retry(kit, part)
    assert again.num_written == 1


def test_a_row_that_kills_its_worker_stays_where_it_is(kit):
    [part] = kit.convert(rows_with_images(2), kit.source())
    kit.image("0.png")
    kit.image("1.png")
    [again] = retry(kit, part, condemned=frozenset({0}))
    assert ids(kit.records([again])) == ["1"]


def test_quarantined_rows_are_listed_in_file_order(kit):
    parts = kit.convert([b"bad", b'{"text":"a"}', b"worse"], kit.source("text"))
    assert [(row.byte_offset, row.line) for row in quarantined_rows(kit.storage(), parts[0])] == [(0, "bad"), (17, "worse")]
    clean = dataclasses.replace(parts[0].identity, roll=9)
    assert retries_of(kit.storage(), parts[0]) == []
    assert layout.PartId.parse(str(clean)) == clean
