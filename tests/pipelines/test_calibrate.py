"""`bayplan calibrate`: a table, a file that `cost_model` reads, JSON; bad lines on stderr."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipelines.cli import main
from plugin.cost import cost_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "timings.jsonl"


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["calibrate", *words], catch_exceptions=False)


def test_the_example_gives_the_model_it_was_made_from(tmp_path: Path) -> None:
    """Its times are those of this preset at 400 TFLOP/s, with 3% of noise, and 2 and 8 ms for each microbatch."""
    result = run(str(EXAMPLE), "--to", str(tmp_path / "new" / "cost.json"))
    assert (result.exit_code, result.stderr) == (0, "")
    found, preset = cost_model(tmp_path / "new" / "cost.json"), cost_model("qwen3_vl_vit+qwen3_8b")
    per_femtosecond = 400e12 / 1e15
    assert found.encoder.linear * per_femtosecond == pytest.approx(preset.encoder.linear, rel=0.05)
    assert found.encoder.quadratic * per_femtosecond == pytest.approx(preset.encoder.quadratic, rel=0.1)
    assert found.llm.linear * per_femtosecond == pytest.approx(preset.llm.linear, rel=0.05)
    assert found.llm.quadratic * per_femtosecond == pytest.approx(preset.llm.quadratic, rel=0.2)
    lines = result.stdout.splitlines()
    assert lines[0] == "encoder: 120 microbatches"
    assert lines[1].split() == "column nanoseconds each +- of the time".split()
    assert [line.split()[0] for line in lines[2:6]] == ["num_patches", "sum_squared_attention", "num_images", "constant"]
    assert lines[6].startswith("  R^2 0.99")
    assert "num_tokens varies by 0.0% only, and stands for it" in result.stdout
    assert lines[-2:] == [f"fingerprint {found.fingerprint}; 120 good lines, 0 bad", f"written to {tmp_path}/new/cost.json"]


def test_json_holds_the_model_and_the_fit(tmp_path: Path) -> None:
    result = run("--json", str(EXAMPLE))
    document = json.loads(result.stdout)
    assert document["num_bad_lines"] == 0
    assert [part["part"] for part in document["fit"]["parts"]] == ["encoder", "llm"]
    assert document["fit"]["warnings"] == []
    assert set(document["fit"]["parts"][0]["columns"][0]) == {"name", "seconds", "error", "share", "note"}
    # The same numbers, whatever the order of the lines.
    lines = EXAMPLE.read_text().splitlines(keepends=True)
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl"]
    files[0].write_text("".join(lines[50:]))
    files[1].write_text("".join(lines[:50]))
    other = json.loads(run("--json", *map(str, files)).stdout)
    assert other["encoder"]["linear"] == pytest.approx(document["encoder"]["linear"], rel=1e-6)


def test_bad_lines_are_named_and_the_others_used(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    shutil.copy(EXAMPLE, path)
    with path.open("a") as file:
        file.write("{}\n" * 7 + '{"version":1,"num_pa')
    result = run(str(path))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        *(f"{path} line {line} left out: Object missing required field version" for line in range(121, 126)),
        "3 more bad lines left out",
    ]
    assert result.stdout.splitlines()[-1].endswith("; 120 good lines, 8 bad")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        (["empty.jsonl"], 1, "found no good line of timings and 0 bad ones"),
        (["few.jsonl"], 2, "encoder: found 2 lines for 4 coefficients, expected 10 lines for each"),
        (["few.jsonl", "--to", "cost.yaml"], 2, "found --to cost.yaml, expected a name ending in .json"),
        ([], 2, "Missing argument 'TIMINGS...'"),
    ],
)
def test_what_cannot_be_fitted(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("few.jsonl").write_text("".join(EXAMPLE.read_text().splitlines(keepends=True)[:2]))
    result = run(*words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert not Path("cost.yaml").exists()
