"""Whole jobs on a real Ray: 130 sources with three bad ones among them, and submission to a running cluster."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from in_process import digests, index_in_process, pack_in_process, run_in_process
from PIL import Image
from processes import REPOSITORY, environment, run, wait_until
from slow_index import write_slow_job

from packer.format import layout

pytestmark = pytest.mark.timeout(400)
NUM_SOURCES = 130


def many_sources(folder: Path) -> Path:
    """130 sources: one whose file is missing, one of another schema, one that is empty, 127 good ones."""
    folder.mkdir()
    Image.new("RGB", (20, 10), "red").save(folder / "red.png")
    sources = []
    for number in range(NUM_SOURCES):
        name = f"source-{number:03d}"
        schema, row = "caption", {"image_path": "red.png", "caption": f"caption {number}"}
        if number % 3 == 1:
            schema, row = "text", {"text": f"text {number}"}
        if number == 50:
            row = {"wrong": 1}
        lines = "" if number == 60 else "".join(json.dumps(row) + "\n" for _ in range(5))
        path = folder / f"{name}.jsonl{'.gz' if number % 5 == 0 else ''}"
        path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" and lines else lines.encode())
        sources.append(f"  - {{name: {name}, schema: {schema}, files: '{name}.jsonl*', image_root: .}}")
    (folder / "source-040.jsonl.gz").unlink()
    recipe = folder / "recipe.yaml"
    recipe.write_text("version: 1\nname: many\noutput: out\nsources:\n" + "\n".join(sources) + "\n")
    return recipe


def test_three_bad_sources_do_not_stop_the_other_127(tmp_path: Path) -> None:
    recipe = many_sources(tmp_path / "job")
    code, out, _ = run("pack", recipe, "--workers", "2", cwd=tmp_path)
    lines = out.splitlines()
    assert code == 1
    failed = [line for line in lines if line.startswith("FAILED")]
    assert len(failed) == 2
    assert failed[0].startswith("FAILED source-040: ")
    assert "found no file" in failed[0]
    assert failed[1].startswith("FAILED source-050: all 5 rows are quarantined (schema_mismatch 5)")
    assert "source-060: note: source-060.jsonl.gz: empty file" in lines
    assert lines[-2].startswith("128 of 130 sources done")
    assert lines[-1].startswith("read 640, written 635, quarantined 5 (schema_mismatch 5)")
    before = _times(tmp_path / "job/out")
    (tmp_path / "job/source-001.jsonl.more").write_text(json.dumps({"text": "one more"}) + "\n")
    code, out, _ = run("pack", recipe, "--workers", "2", cwd=tmp_path)
    assert code == 1
    assert out.splitlines()[-1].startswith("read 641, written 636, quarantined 5")
    assert before.items() <= _times(tmp_path / "job/out").items()


def _times(dataset: Path) -> dict[str, int]:
    parts = [path for path in dataset.rglob("*") if layout.part_of(path.name)]
    return {str(path): path.stat().st_mtime_ns for path in parts}


def test_a_bare_failure_has_exit_code_1_and_quarantine_above_the_limit_3(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nname: limit\noutput: out\nlimits: {max_quarantined_share: 0.1}\n"
        "sources: [{name: rows, schema: text, files: rows.jsonl}]\n"
    )
    code, out, _ = run("pack", recipe, "--workers", "1", cwd=tmp_path)
    assert code == 3
    assert "above the recipe's limit: 50.00% of rows quarantined, the recipe allows 10.00%" in out.splitlines()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `ray start --head` of our own, with its job server; yields the server's address."""
    gcs, dashboard, client, agent = _free_ports(4)
    ray = Path(sys.executable).with_name("ray")
    temp = Path(f"/tmp/bp-{gcs}")  # short: Ray's sockets live below it
    command = [ray, "start", "--head", "--block", f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=2"]
    command += [
        f"--dashboard-agent-listen-port={agent}",
        f"--ray-client-server-port={client}",
        f"--temp-dir={temp}",
        "--dashboard-host=127.0.0.1",
    ]
    head = subprocess.Popen(
        command, env=environment(PYTHONPATH=str(REPOSITORY)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: _accepts(dashboard), 90)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _accepts(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


SCHEMA = """
import time

def schema(row):
    time.sleep(0.01)
    return {"content": [{"type": "text", "text": row["text"]}], "used": ["text"]}
"""


def submitted_job(folder: Path) -> Path:
    """A working directory with its recipe, its input and a schema of its own that takes its time."""
    folder.mkdir()
    (folder / "slow_schema.py").write_text(SCHEMA)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(1500)))
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"version: 1\nname: submitted\noutput: {folder.parent / 'out'}\nsources:\n"
        f"  - {{name: rows, schema: 'python:slow_schema:schema', files: {folder}/rows.jsonl, range_bytes: 4096}}\n"
    )
    return recipe


def submit(
    cluster: str, folder: Path, *options: str, job: Sequence[str | Path] = ("pack", "recipe.yaml")
) -> subprocess.CompletedProcess[str]:
    ray = Path(sys.executable).with_name("ray")
    command = [ray, "job", "submit", "--address", cluster, "--working-dir", folder, *options, "--"]
    command += [sys.executable, "-m", f"pipelines.{job[0]}", *job[1:]]
    path = environment(PYTHONPATH=str(REPOSITORY))
    for _ in range(10):
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=180, check=False)
        if "No available agent" not in done.stdout + done.stderr:  # the head listens before its agent is up
            break
        time.sleep(3)
    return done


def test_a_submitted_job_stopped_and_submitted_again(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = submitted_job(tmp_path / "job")
    first = submit(cluster, recipe.parent, "--no-wait", "--submission-id", "first")
    assert first.returncode == 0, first.stderr
    wait_until(lambda: len(list((tmp_path / "out").rglob(f"*{layout.MANIFEST_SUFFIX}"))) >= 2, 120)
    ray = Path(sys.executable).with_name("ray")
    stop = [ray, "job", "stop", "--address", cluster, "first"]
    subprocess.run(stop, env=environment(), capture_output=True, timeout=120, check=True)
    assert not (tmp_path / "out/stock.yaml").exists()
    second = submit(cluster, recipe.parent)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "read 1500, written 1500, quarantined 0" in second.stdout
    assert re.search(r"rows: \d+/\d+ ranges, \d+ rows, \d+ rows/s", second.stdout)
    submitted = digests(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "submitted")
    monkeypatch.syspath_prepend(str(recipe.parent))
    pack_in_process(recipe)
    assert digests(tmp_path / "out") == submitted


def test_a_submitted_index_is_that_of_this_process(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its image rule lies in the working dir, which Ray copies to where the workers run."""
    recipe, output = write_slow_job(tmp_path / "job", output=str(tmp_path / "out")), tmp_path / "out"
    pack_in_process(recipe)
    done = submit(cluster, recipe.parent, job=["index", output])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "own: 2 of 2 sources counted, 500 samples, 500 images, " in done.stdout
    submitted = digests(output)
    shutil.rmtree(output / "index")
    monkeypatch.syspath_prepend(str(recipe.parent))
    index_in_process(output)
    assert digests(output) == submitted


def test_a_submitted_run_is_that_of_this_process(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, output = write_slow_job(tmp_path / "job", output=str(tmp_path / "out")), tmp_path / "out"
    done = submit(cluster, recipe.parent, job=["run", "recipe.yaml"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "own: 2 of 2 sources counted, 500 samples, 500 images, " in done.stdout
    assert f"report: {output}/report/report.html" in done.stdout.replace("\n", "")
    assert "read 500, written 500, quarantined 0" in done.stdout
    submitted = digests(output)
    output.rename(tmp_path / "submitted")
    monkeypatch.syspath_prepend(str(recipe.parent))
    assert run_in_process(recipe).exit_code == 0
    assert digests(output) == submitted
