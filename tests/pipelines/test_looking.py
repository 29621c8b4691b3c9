"""The commands that look at a dataset: show, quarantine, status, verify. They read what is on disk and change nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from in_process import digests, pack_in_process
from PIL import Image

from pipelines.cli import main


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("looking")
    Image.new("RGB", (30, 20), "red").save(folder / "red.png")
    (folder / "bad.png").write_bytes(b"<html>not found</html>")
    rows = [
        {"id": "first", "messages": [{"role": "user", "content": "hello <b>"}], "score": 1.50},
        {"id": "42", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "red.png"}}]}]},
        {"id": "missing", "messages": [{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]},
        {"id": "bad", "messages": [{"role": "user", "content": [{"type": "image", "image": "bad.png"}]}]},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(
        "version: 1\nname: looking\noutput: out\nsources:\n  - {name: chats, schema: chat, files: rows.jsonl}\n"
    )
    pack_in_process(folder / "recipe.yaml")
    return folder / "out"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_show_by_place_by_id_and_by_a_numeric_id(dataset: Path, tmp_path: Path) -> None:
    first = run("show", dataset, "chats", "--to", tmp_path)
    assert first.startswith("id first, from rows.jsonl byte 0\n[user]\nhello <b>\nextra score: 1.5\n")
    by_place, by_id = run("show", dataset, "chats:1", "--to", tmp_path), run("show", dataset, "chats:42", "--to", tmp_path)
    assert by_place == by_id
    assert "image 0: 30x20 png RGB" in by_id
    assert (tmp_path / "000.png").read_bytes() == (dataset.parent / "red.png").read_bytes()


def test_show_writes_a_page_that_needs_nothing_else(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    run("show", dataset, "chats:0", "--open", "--to", tmp_path)
    run("show", dataset, "chats:1", "--open", "--to", tmp_path / "second")
    page = (tmp_path / "record.html").read_text()
    assert "hello &lt;b&gt;" in page
    assert "<b>" not in page
    assert 'src="data:image/png;base64,' in (tmp_path / "second/record.html").read_text()
    assert len(opened) == 2


@pytest.mark.parametrize(("what", "message"), [("none", "its sources: chats"), ("chats:7", "a place from 0 to 1 or an id")])
def test_show_says_what_there_is_instead(dataset: Path, what: str, message: str) -> None:
    result = CliRunner().invoke(main, ["show", str(dataset), what])
    assert result.exit_code == 2
    assert message in result.output


def test_quarantine_as_a_table_and_as_lines(dataset: Path) -> None:
    table = run("quarantine", dataset)
    assert "the reference names nothing that exists" in table
    assert f"none.png: {dataset.parent}/none.png: no such file" in table
    assert table.splitlines()[-1] == "2 rows quarantined, missing_image 1, not_an_image 1"
    lines = [json.loads(line) for line in run("quarantine", dataset, "--json").splitlines()]
    assert [(line["id"], line["reason"]) for line in lines] == [("missing", "missing_image"), ("bad", "not_an_image")]
    only = run("quarantine", dataset, "--reason", "missing_image", "--json").splitlines()
    assert [json.loads(line)["id"] for line in only] == ["missing"]


def test_status_and_verify_as_json(dataset: Path) -> None:
    status = json.loads(run("status", dataset, "--json"))
    assert status["totals"]["num_read"] == 4
    assert status["sources"]["chats"]["files_not_begun"] == []
    verdict = json.loads(run("verify", dataset, "--deep", "--workers", 1, "--json"))
    assert (verdict["problems"], verdict["num_images"]) == ([], 1)


def test_looking_changes_nothing(dataset: Path, tmp_path: Path) -> None:
    before = digests(dataset)
    for arguments in (["status"], ["verify", "--workers", "1"], ["quarantine"]):
        run(arguments[0], dataset, *arguments[1:])
    run("show", dataset, "chats", "--to", tmp_path)
    assert digests(dataset) == before
