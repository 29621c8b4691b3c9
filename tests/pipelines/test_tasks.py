import pytest

from packer.convert import Step
from packer.guard import NoGuard
from packer.retry import RetryTask
from pipelines.tasks import SCOUT_ROWS, ProbeTask, Scouted, ScoutTask, run_task


def run(kit, task, guard=None):
    return list(run_task(task, kit.storage().url, guard or NoGuard()))


def scout(kit, rows, source=None):
    path = kit.jsonl(rows)
    return run(kit, ScoutTask(source=source or kit.source("text"), work=kit.whole(path)))[-1]


def test_a_scout_looks_at_the_first_good_rows_and_writes_nothing(kit):
    found = scout(kit, [{"text": str(number)} for number in range(500)])
    assert (found.num_rows, found.num_good, found.all_refused) == (100, 100, False)
    assert not (kit.folder / "out").exists()


def test_a_source_whose_first_thousand_rows_are_all_refused_is_plainly_wrong(kit):
    found = scout(kit, b"\n" * 50 + b'{"txt":"a"}\n' * (SCOUT_ROWS + 5))
    assert (found.num_rows, found.all_refused, dict(found.reasons)) == (SCOUT_ROWS, True, {"schema_mismatch": SCOUT_ROWS})
    assert "50: schema_mismatch: field 'text' is missing" in found.first_refusal


@pytest.mark.parametrize("rows", [b'{"txt":"a"}\n' * (SCOUT_ROWS - 1), b'{"txt":"a"}\n' * (SCOUT_ROWS - 1) + b'{"text":"a"}\n'])
def test_fewer_bad_rows_or_one_good_one_condemn_no_source(kit, rows):
    assert not scout(kit, rows).all_refused


def test_ranges_are_sized_by_what_the_rows_become(kit):
    kit.image("big.png", size=(300, 300))
    row = {"content": [{"type": "image", "image": "big.png"}]}
    texts = scout(kit, [{"text": "x" * 5000}] * 120)
    images = scout(kit, [row] * 120, kit.source())
    assert images.num_images == 100
    for found in (texts, images):
        assert found.range_bytes & (found.range_bytes - 1) == 0
    assert images.range_bytes < texts.range_bytes
    assert 8 << 30 < images.range_bytes * (images.image_bytes / images.input_bytes) < 32 << 30
    assert Scouted().range_bytes > 1 << 30


def test_a_probe_works_on_its_rows_alone_and_keeps_nothing(kit):
    begun = []

    class Noting(NoGuard):
        def begin(self, byte_offset):
            begun.append(byte_offset)

    task = ProbeTask(
        source=kit.source("text"),
        work=kit.whole(kit.jsonl(b'{"text":"a"}\n{"text":"b"}\nbad\n{"text":"c"}\n')),
        first=13,
        last=26,
    )
    steps = run(kit, task, Noting())
    assert begun == [13, 26]
    assert [item.num_rows for item in steps if isinstance(item, Step)] == [0, 0]
    assert not (kit.folder / "out").exists()


def test_a_task_of_any_kind_gives_its_results_last(kit):
    kit.image("0.png")
    path = kit.jsonl([{"content": [{"type": "image", "image": f"{number}.png"}]} for number in range(2)])
    *_, part = run(kit, kit.task(path, kit.source()))
    kit.image("1.png", number=1)
    *_, again = run(kit, RetryTask(source=kit.source(), work=kit.whole(path), part=part))
    assert (part.num_written, again.num_written, again.supersedes.part_id) == (1, 1, part.part_id)
    assert run(kit, kit.task(path, kit.source())) == []
