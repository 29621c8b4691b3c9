import os

import pytest

from packer.format import layout
from packer.format.errors import FormatError, InputError
from packer.format.manifest import decode_source, total
from packer.storage import stat_url
from pipelines import dataset
from pipelines.inputs import InputFile
from pipelines.ledger import check_coverage, drop_parts, open_ledger, read_manifests, whole_file
from pipelines.tasks import resume, run_task


def inputs_of(kit, *names):
    return [InputFile(stat=stat_url(str(kit.inputs / name)), file=name) for name in names]


def ledger(kit, *names, source=None, known=None, range_bytes=1 << 30, limit=None):
    manifests = read_manifests(kit.storage(), "web")
    inputs = inputs_of(kit, *names)
    inventory = {item.file: (item.stat.size, item.stat.stamp) for item in inputs} if known is None else known
    return open_ledger(source or kit.source("text"), inputs, manifests, inventory, range_bytes, limit)


def rolling_source(kit):
    """One image a part."""
    for number in range(4):
        kit.image(f"{number}.png", number=number)
    kit.jsonl([{"content": [{"type": "image", "image": f"{number}.png"}]} for number in range(4)])
    return kit.source(target_bundle_bytes=1)


def test_everything_is_left_at_first_and_nothing_at_the_end(kit, convert_all):
    kit.jsonl([{"text": "a" * 30}] * 9, "b/rows.jsonl")
    kit.jsonl([{"text": "a"}], "a/rows.jsonl")
    before = ledger(kit, "a/rows.jsonl", "b/rows.jsonl", range_bytes=100)
    assert [(task.work.file, task.work.range_index) for task in before.tasks] == [("a/rows.jsonl", 0)] + [
        ("b/rows.jsonl", index) for index in range(4)
    ]
    for task in before.tasks:
        convert_all(task, kit.storage())
    after = ledger(kit, "a/rows.jsonl", "b/rows.jsonl", range_bytes=100)
    assert (after.tasks, after.changed, after.stale, after.notes) == ([], {}, [], [])
    assert len(after.done) == 5
    assert check_coverage(inputs_of(kit, "a/rows.jsonl", "b/rows.jsonl"), after.done) == []


def test_a_range_goes_on_behind_its_last_committed_part(kit, convert_all, tree_digest):
    source = rolling_source(kit)
    parts = kit.convert(kit.inputs / "rows.jsonl", source)
    whole = tree_digest(kit.folder / "out")
    for done in range(4):
        drop_parts(kit.storage(), parts[done:])
        [task] = ledger(kit, "rows.jsonl", source=source).tasks
        assert (task.next_roll, task.resume_at) == (done, parts[done - 1].input.byte_end if done else None)
        assert convert_all(task, kit.storage()) == parts[done:]
        assert tree_digest(kit.folder / "out") == whole


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_part_whose_manifest_was_lost_is_made_again_wherever_it_stood(kit, tree_digest, lost):
    source = rolling_source(kit)
    parts = kit.convert(kit.inputs / "rows.jsonl", source)
    whole = tree_digest(kit.folder / "out")
    kit.file(parts[lost], layout.MANIFEST_SUFFIX).unlink()
    assert check_coverage(inputs_of(kit, "rows.jsonl"), read_manifests(kit.storage(), "web"))
    [task] = ledger(kit, "rows.jsonl", source=source).tasks
    list(run_task(task, kit.storage().url, guard=Quiet()))
    assert tree_digest(kit.folder / "out") == whole
    assert ledger(kit, "rows.jsonl", source=source).tasks == []


class Quiet:
    def begin(self, byte_offset):
        pass

    def progress(self):
        pass

    def finish(self, next_offset):
        pass


def test_a_task_sees_the_parts_that_another_job_committed_meanwhile(kit):
    source = rolling_source(kit)
    [task] = ledger(kit, "rows.jsonl", source=source).tasks
    parts = kit.convert(kit.inputs / "rows.jsonl", source)
    assert resume(task, kit.storage()) is None
    drop_parts(kit.storage(), parts[2:])
    again = resume(task, kit.storage())
    assert (again.next_roll, again.resume_at) == (2, parts[1].input.byte_end)


def test_a_new_file_costs_itself_alone_and_is_noted(kit):
    kit.jsonl([{"text": "a"}])
    kit.convert(kit.inputs / "rows.jsonl", kit.source("text"))
    known = {item.file: (item.stat.size, item.stat.stamp) for item in inputs_of(kit, "rows.jsonl")}
    kit.jsonl([{"text": "b"}], "new.jsonl")
    state = ledger(kit, "new.jsonl", "rows.jsonl", known=known)
    assert [task.work.file for task in state.tasks] == ["new.jsonl"]
    assert state.notes == ["new.jsonl: new file"]


def test_a_file_that_is_gone_keeps_its_parts_and_is_noted(kit):
    kit.dataset([{"text": "a"}], kit.source("text"))
    state = ledger(kit)
    assert len(state.done) == 1
    assert state.notes == ["rows.jsonl: not among the inputs any more; its 1 parts are kept"]


def test_an_empty_file_is_a_note_and_no_task(kit):
    kit.jsonl(b"")
    state = ledger(kit, "rows.jsonl")
    assert (state.tasks, state.notes) == ([], ["rows.jsonl: empty file"])
    assert check_coverage(inputs_of(kit, "rows.jsonl"), []) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes() + b'{"text":"c"}\n'), "found 39 bytes, its parts were made from 26"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"a", b"z")), "its bytes 0 to 26 are not those part"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'b"}\n', b'b\n"}')), "its bytes 0 to 26 are not those part"),
    ],
    ids=["grown", "changed in place", "lines end elsewhere"],
)
def test_a_changed_file_is_listed_and_its_parts_are_stale(kit, change, message):
    [part] = kit.convert([{"text": "a"}, {"text": "b"}], kit.source("text"))
    change(kit.inputs / "rows.jsonl")
    state = ledger(kit, "rows.jsonl", known={"rows.jsonl": (26, "of then")})
    assert message in state.changed["rows.jsonl"]
    assert (state.done, state.stale, len(state.tasks)) == ([], [part], 1)


def test_a_new_time_stamp_alone_is_no_change(kit):
    kit.convert([{"text": "a"}], kit.source("text"))
    os.utime(kit.inputs / "rows.jsonl", (1, 1))
    assert ledger(kit, "rows.jsonl", known={"rows.jsonl": (13, "of then")}).changed == {}
    assert ledger(kit, "rows.jsonl", known={}).changed == {}


def test_another_recipe_makes_all_parts_of_a_source_stale(kit):
    kit.convert([{"text": "a"}], kit.source("text"))
    state = ledger(kit, "rows.jsonl", source=kit.source("text", fingerprint="0" * 32))
    assert state.changed == {"rows.jsonl": "the recipe of its source changed"}


def test_dropped_parts_leave_nothing(kit, tree_digest):
    parts = kit.convert([{"text": "a"}, b"bad"], kit.source("text"))
    drop_parts(kit.storage(), parts)
    assert tree_digest(kit.folder / "out") == {}
    drop_parts(kit.storage(), parts)


def test_a_trial_takes_its_rows_from_all_files(kit, convert_all):
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        kit.jsonl([{"text": name}] * 9, name)
    tasks = ledger(kit, "a.jsonl", "b.jsonl", "c.jsonl", limit=6, range_bytes=10).tasks
    parts = [part for task in tasks for part in convert_all(task, kit.storage())]
    assert [part.num_read for part in parts] == [2, 2, 2]


def test_bytes_that_no_part_was_made_from_are_listed(kit):
    source = rolling_source(kit)
    parts = kit.convert(kit.inputs / "rows.jsonl", source)
    inputs = inputs_of(kit, "rows.jsonl")
    assert check_coverage(inputs, parts) == []
    assert check_coverage(inputs, parts[:-1]) == [f"rows.jsonl: nothing is committed behind byte {parts[-2].input.byte_end}"]
    begins = (
        f"rows.jsonl: part {parts[2].part_id} begins at byte {parts[2].input.byte_start}, expected {parts[1].input.byte_start}"
    )
    assert check_coverage(inputs, [parts[0], *parts[2:]]) == [begins]
    kit.jsonl((kit.inputs / "rows.jsonl").read_bytes() + b"{}\n")
    end = parts[-1].input.byte_end
    assert check_coverage(inputs_of(kit, "rows.jsonl"), parts) == [
        f"rows.jsonl: its parts end at byte {end}, the file at {end + 3}"
    ]
    assert check_coverage(inputs, []) == ["rows.jsonl: nothing is committed behind byte 0"]


def test_sums_after_a_rerun_are_those_of_an_uninterrupted_run(kit, convert_all):
    source = rolling_source(kit)
    parts = kit.convert(kit.inputs / "rows.jsonl", source)
    drop_parts(kit.storage(), parts[2:])
    [task] = ledger(kit, "rows.jsonl", source=source).tasks
    convert_all(task, kit.storage())
    assert dataset.consolidate(kit.storage(), "web") == parts
    stored = decode_source(kit.storage().read_bytes(layout.source_file("web")), "here")
    assert total(stored) == total(parts)


def test_a_damaged_manifest_is_named(kit):
    [part] = kit.convert([{"text": "a"}], kit.source("text"))
    path = kit.file(part, layout.MANIFEST_SUFFIX)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match=rf"sources/web/{path.name}: found \d+ bytes that are not JSON"):
        read_manifests(kit.storage(), "web")


def test_a_retry_needs_the_file_its_part_was_made_from(kit):
    [part] = kit.convert([{"text": "a"}], kit.source("text"))
    inputs = {item.file: item for item in inputs_of(kit, "rows.jsonl")}
    assert whole_file(kit.source("text"), inputs, part).byte_end is None
    with pytest.raises(InputError, match=r"rows\.jsonl: found no such file among the inputs of source 'web'"):
        whole_file(kit.source("text"), {}, part)
