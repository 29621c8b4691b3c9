import os
import signal
import subprocess
import sys

import pytest

from packer.convert import convert_range
from pipelines.crumbs import Crumb, Suspects, take_crumb


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def left_by(path):
    """What a crumb says while its task is still running, as a reader sees it after the task's death."""
    copy = f"{path}.copy"
    with open(path, "rb") as source, open(copy, "wb") as target:
        target.write(source.read())
    return take_crumb(copy)


def test_rows_begun_and_not_finished_are_suspects():
    with Crumb(60) as crumb:
        assert left_by(crumb.path) is None
        crumb.begin(0)
        assert left_by(crumb.path) == Suspects(0, 0)
        crumb.begin(10)
        crumb.begin(25)
        assert left_by(crumb.path) == Suspects(0, 25)
        crumb.finish(10)
        assert left_by(crumb.path) == Suspects(10, 25)
        crumb.progress()
        crumb.finish(25)
        crumb.finish(40)
        assert left_by(crumb.path) is None
        crumb.begin(41)
        assert left_by(crumb.path) == Suspects(40, 41)


def test_a_task_that_ends_leaves_no_crumb():
    with Crumb(60) as crumb:
        crumb.begin(5)
    assert not os.path.exists(crumb.path)
    assert take_crumb(crumb.path) is None


def test_a_crumb_is_taken_once():
    with Crumb(60) as crumb:
        crumb.begin(5)
        path = f"{crumb.path}.copy"
        os.link(crumb.path, path)
    assert take_crumb(path) == Suspects(5, 5)
    assert take_crumb(path) is None


def test_a_damaged_crumb_suspects_nobody(tmp_path):
    (tmp_path / "short.crumb").write_bytes(b"\0" * 5)
    assert take_crumb(str(tmp_path / "short.crumb")) is None


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_crumb_survives_its_process_being_killed():
    code = """
import os, signal
from pipelines.crumbs import Crumb
crumb = Crumb(60)
print(crumb.path, flush=True)
crumb.begin(100); crumb.begin(200); crumb.finish(200)
os.kill(os.getpid(), signal.SIGKILL)
"""
    result = run(code)
    assert result.returncode == -signal.SIGKILL
    assert take_crumb(result.stdout.strip()) == Suspects(200, 200)


def test_a_row_that_hangs_ends_its_process_and_is_the_suspect():
    code = """
from pipelines.crumbs import Crumb
crumb = Crumb(0.5)
print(crumb.path, flush=True)
for offset in range(0, 300, 100):
    crumb.begin(offset); crumb.finish(offset + 100)
crumb.begin(300)
while True: pass
"""
    result = run(code)
    assert result.returncode == 1
    assert "Timeout" in result.stderr
    assert take_crumb(result.stdout.strip()) == Suspects(300, 300)


def test_the_watchdog_of_a_finished_task_ends_nobody():
    code = """
import time
from pipelines.crumbs import Crumb
with Crumb(0.5): pass
time.sleep(0.7)
print("alive")
"""
    assert run(code).stdout == "alive\n"


def test_a_conversion_tells_its_crumb_every_row(kit):
    path = kit.jsonl(b'{"text":"a"}\n\n{"text":"b"}\nbad\n')
    seen = []

    class Watching(Crumb):
        def begin(self, byte_offset):
            super().begin(byte_offset)
            seen.append(("begin", byte_offset))

        def finish(self, next_offset):
            super().finish(next_offset)
            seen.append(("finish", next_offset))

    with Watching(60) as crumb:
        list(convert_range(kit.task(path), kit.storage(), crumb))
        assert left_by(crumb.path) is None
    assert [offset for verb, offset in seen if verb == "begin"] == [0, 14, 27]
    assert [offset for verb, offset in seen if verb == "finish"] == [13, 14, 27, 31]
