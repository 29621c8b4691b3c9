"""`bayplan image-tokens`: sizes from the command line and from stdin, as a table and as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from indexer.image_rules import PRESETS
from pipelines.cli import main


def run(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["image-tokens", *words], input=stdin, catch_exceptions=False)


def test_a_table_of_named_rules() -> None:
    result = run("--rule", "qwen3_vl", "--rule", "pixtral_hf", "1920x1080", "1x3000")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "size         rule        image tokens  wrapper tokens  patches  grid (rows x columns)",
        "1920x1080    qwen3_vl           2,040               2    8,160  68 x 120 patches",
        "1920x1080    pixtral_hf         2,304              36    2,304  36 x 64 patches",
        "1x3000       qwen3_vl    refused: absolute aspect ratio must be smaller than 200, got 3000.0",
        "1x3000       pixtral_hf  refused: Size must contain 'height' and 'width' keys, or 'max_height' and 'max_width', or "
        "'shortest_edge' key. Got SizeDict(height=1024, width=0)",
    ]


def test_all_rules_without_a_name_as_json_lines() -> None:
    rows = [json.loads(line) for line in run("--json", "1920x1080").stdout.splitlines()]
    assert [row["rule"] for row in rows] == list(PRESETS)
    assert rows[0] == {
        "width": 1920,
        "height": 1080,
        "rule": "qwen2_5_vl",
        "num_image_tokens": 2691,
        "num_wrapper_tokens": 2,
        "num_patches": 10764,
        "num_padded_patches": 10764,
        "num_segments": 180,
        "sum_squared_attention": (9 * 8**2 + 6**2) * (17 * 8**2 + 2**2),
        "grid_rows": 78,
        "grid_columns": 138,
        "num_newline_runs": 0,
        "num_text_chars": 0,
        "num_overview_tokens": 0,
        "grid_unit": "patches",
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("words", "expected"), [((), ["3x4", "5x6"]), (("-",), ["3x4", "5x6"]), (("1x2", "-"), ["1x2", "3x4", "5x6"])]
)
def test_sizes_from_stdin(words: tuple[str, ...], expected: list[str]) -> None:
    result = run("--rule", "gemma3", *words, stdin="3x4\n\n  5X6 ")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == expected


def test_more_sizes_than_are_counted_at_once() -> None:
    sizes = [f"{number % 4000 + 1}x9" for number in range(9000)]
    result = run("--rule", "kimi_k25", "--json", stdin="\n".join(sizes))
    assert [f"{row['width']}x{row['height']}" for row in map(json.loads, result.stdout.splitlines())] == sizes


def test_no_sizes_at_all_print_nothing() -> None:
    assert run(stdin="").stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1920",), "'1920' is not a size, expected WIDTHxHEIGHT as in 1920x1080"),
        (("0x4",), "0x4 has a side outside 1 to 16,777,216"),
        (("20000000x4",), "20000000x4 has a side outside 1 to 16,777,216"),
        (("9" * 30 + "x4",), "is not a size"),
        (("--rule", "gema3", "1x1"), "did you mean 'gemma3'?"),
    ],
)
def test_wrong_use_is_one_message(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_bytes_that_are_no_text_are_no_size() -> None:
    result = CliRunner().invoke(main, ["image-tokens"], input=b"\xff\xfe", catch_exceptions=False)
    assert result.exit_code == 2
    assert "stdin is not text" in result.stderr


def test_your_own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rule_of_cli.py").write_text(
        "from indexer.image_rules import image_counts\n"
        "def one(sizes):\n"
        "    return image_counts(sizes, image_tokens=1, patches=4, grid=(2, 2), grid_unit='patches')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lines = run("--rule", "own_rule_of_cli:one", "7x7").stdout.splitlines()
    assert lines[1].split() == ["7x7", "own_rule_of_cli:one", "1", "0", "4", "2", "x", "2", "patches"]
