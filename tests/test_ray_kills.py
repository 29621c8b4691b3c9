"""Processes are killed in the middle of a job on a real Ray: nothing is lost, nothing doubled, no innocent row condemned."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from in_process import digests, pack_in_process
from processes import descendants, finish, run, start, wait_until
from slow_index import KILLER, SLOWLY, counted, index_digests, packed, undisturbed_index

from indexer.rows import Status
from indexer.table import open_index
from packer.format import layout

pytestmark = pytest.mark.timeout(600)  # jobs that start Ray, again and again: minutes where the machine has other work

SCHEMA = """
import os, signal, time

def schema(row):
    time.sleep(row.get("sleep", 0.002))
    if row["text"] == "kill" and "{kills}":
        os.kill(os.getpid(), signal.SIGKILL)
    if row["text"] == "hang" and "{kills}":
        time.sleep(3600)
    return {{"content": [{{"type": "text", "text": row["text"]}}], "used": ["text", "sleep"]}}
"""


def make_job(folder: Path, texts: list[str], *, kills: bool = False, timeout_seconds: float = 60.0) -> Path:
    """A recipe of two sources over the same rows, cut into many small ranges and parts."""
    folder.mkdir(parents=True)
    (folder / "slow_schema.py").write_text(SCHEMA.format(kills="yes" if kills else ""))
    rows = [json.dumps({"id": f"row {number}", "text": text}) for number, text in enumerate(texts)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "version: 1\nname: killed\noutput: out\n"
        f"defaults: {{schema: 'python:slow_schema:schema', row_timeout_seconds: {timeout_seconds}, range_bytes: 4096}}\n"
        "sources:\n  - {name: first, files: rows.jsonl}\n  - {name: second, files: rows.jsonl}\n"
    )
    return recipe


def num_parts(recipe: Path) -> int:
    return len(list((recipe.parent / "out").rglob(f"*{layout.MANIFEST_SUFFIX}")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of a run that nobody disturbed, in this process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    recipe = make_job(folder, TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        pack_in_process(recipe)
    return without_paths(recipe)


def without_paths(recipe: Path) -> dict[str, str]:
    """Digests of a dataset without the resolved recipe, which names the folder of its inputs."""
    return {name: digest for name, digest in digests(recipe.parent / "out").items() if name != layout.RECIPE_FILE}


TEXTS = [f"text {number}" for number in range(1500)]


def test_a_killed_worker_costs_nothing(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    recipe = make_job(tmp_path / "job", TEXTS)
    job = start("pack", recipe, "--workers", "2", cwd=recipe.parent)
    wait_until(lambda: num_parts(recipe) >= 3)
    descendants(job, "ray::_work")[0].kill()
    code, out, err = finish(job)
    assert code == 0, err
    assert "a worker died" in err
    assert out.splitlines()[-1].startswith("read 3000, written 3000, quarantined 0")
    assert without_paths(recipe) == undisturbed


@pytest.mark.parametrize("victim", ["raylet", "driver"])
def test_a_killed_node_or_driver_is_made_good_by_a_rerun(victim: str, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    recipe = make_job(tmp_path / "job", TEXTS)
    job = start("pack", recipe, "--workers", "2", cwd=recipe.parent)
    wait_until(lambda: num_parts(recipe) >= 3)
    processes = descendants(job, "")
    job.kill() if victim == "driver" else next(p for p in processes if p.name() == "raylet").kill()
    code, _, err = finish(job)
    assert code == (-signal.SIGKILL if victim == "driver" else 1)
    assert victim == "driver" or "run the same command again" in err
    psutil.wait_procs(processes, timeout=30)
    assert num_parts(recipe) < len([name for name in undisturbed if name.endswith(layout.MANIFEST_SUFFIX)])
    code, _, err = run("pack", recipe, "--workers", "2", cwd=recipe.parent)
    assert code == 0, err
    assert without_paths(recipe) == undisturbed


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    recipe = make_job(tmp_path / "job", TEXTS)
    job = start("pack", recipe, "--workers", "2", cwd=recipe.parent)
    wait_until(lambda: num_parts(recipe) >= 3)
    job.send_signal(signal.SIGINT)
    code, _, err = finish(job)
    assert code == 1
    assert err.splitlines()[-1] == "error: stopped; what is committed stays: run the same command again to go on", repr(err)
    assert "Traceback" not in err
    pack = run("pack", recipe, "--workers", "1", cwd=recipe.parent)
    assert pack[0] == 0, pack[2]
    assert without_paths(recipe) == undisturbed


def test_two_jobs_on_one_output_do_no_harm(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    recipe = make_job(tmp_path / "job", TEXTS)
    jobs = [start("pack", recipe, "--workers", "1", cwd=recipe.parent) for _ in range(2)]
    for code, _, err in [finish(job) for job in jobs]:
        assert code == 0, err
    assert without_paths(recipe) == undisturbed


def test_a_row_that_kills_and_one_that_hangs_are_quarantined_and_no_other(tmp_path: Path) -> None:
    """Workers are killed at random at the same time; only the two guilty rows may be blamed."""
    texts = list(TEXTS[:600])
    texts[100], texts[300] = "kill", "hang"
    recipe = make_job(tmp_path / "job", texts, kills=True, timeout_seconds=2.0)
    job = start("pack", recipe, "--workers", "2", cwd=recipe.parent)
    stop = threading.Event()
    killer = threading.Thread(target=_kill_at_random, args=(job, stop, 3))
    killer.start()
    code, out, err = finish(job, 400)
    stop.set()
    killer.join()
    assert code == 0, err
    assert out.splitlines()[-1].startswith("read 1200, written 1196, quarantined 4 (kills_worker 4)")
    files = (tmp_path / "job/out").rglob(f"*{layout.QUARANTINE_SUFFIX}")
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert sorted((row["source"], row["id"]) for row in rows) == [
        (source, row) for source in ("first", "second") for row in ("row 100", "row 300")
    ]


def _kill_at_random(job: subprocess.Popen[str], stop: threading.Event, times: int) -> None:
    dice = random.Random(7)
    for _ in range(times):
        while not stop.is_set() and job.poll() is None:
            time.sleep(dice.uniform(0.5, 2.0))
            try:
                workers = descendants(job, "ray::_work")
            except psutil.NoSuchProcess:
                return
            if workers:
                dice.choice(workers).kill()
                break


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of an index job that nobody disturbed, in this process."""
    return undisturbed_index(tmp_path_factory.mktemp("indexed") / "job")


def test_a_killed_worker_costs_an_index_nothing(tmp_path: Path, indexed: dict[str, str]) -> None:
    dataset = packed(tmp_path / "job")
    job = start("index", dataset, "--workers", "2", cwd=dataset.parent, **SLOWLY)
    wait_until(lambda: len(counted(dataset)) >= 5)
    descendants(job, "ray::_work")[0].kill()
    code, out, err = finish(job)
    assert code == 0, err
    assert "a worker died" in err
    assert out.splitlines()[-1].startswith("own: 2 of 2 sources counted, 500 samples, 500 images, ")
    assert index_digests(dataset) == indexed


def test_ctrl_c_stops_an_index_and_a_rerun_goes_on(tmp_path: Path, indexed: dict[str, str]) -> None:
    dataset = packed(tmp_path / "job")
    job = start("index", dataset, "--workers", "2", cwd=dataset.parent, **SLOWLY)
    wait_until(lambda: len(counted(dataset)) >= 5)
    job.send_signal(signal.SIGINT)
    code, out, err = finish(job)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "error: stopped; what is committed stays: run the same command again to go on", repr(err)
    before = counted(dataset)
    assert 5 <= len(before) < sum("/parts/" in name for name in indexed)
    code, _, err = run("index", dataset, "--workers", "2", cwd=dataset.parent)
    assert code == 0, err
    assert index_digests(dataset) == indexed
    assert before.items() <= counted(dataset).items()


def test_a_record_that_kills_while_it_is_counted_is_refused_and_no_other(tmp_path: Path) -> None:
    dataset = packed(tmp_path / "job", kills=True)
    code, out, err = run("index", dataset, "--workers", "2", cwd=dataset.parent)
    assert code == 0, err
    (line,) = [json.loads(line) for path in dataset.glob("index/own/quarantine/*/*") for line in path.read_text().splitlines()]
    assert (line["id"], line["status"]) == (f"first {KILLER}", "kills_worker")
    assert f"line {line['line']} of part " in err
    assert "killed two workers when alone: it goes to quarantine" in err
    assert "first: 250 samples (not counted: kills_worker 1), 249 images" in out
    assert out.splitlines()[-1].startswith("own: 2 of 2 sources counted, 500 samples (not counted: kills_worker 1), 499 images")
    table = open_index(str(dataset), "own")
    (row,) = table.find(f"first {KILLER}")
    assert [number for number in range(len(table)) if table.row(number).status] == [row]
    assert (table.row(row).status, table.row(row).num_tokens) == (Status.KILLS_WORKER, 0)
