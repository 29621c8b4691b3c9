"""The report in a terminal: fits its width, is plain text elsewhere, and says what failed."""

from __future__ import annotations

from typing import Any

import pytest
from report_document import build_document

from pipelines.report_page import visible
from pipelines.report_terminal import human, summary


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(12, is_hostile=True)


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0, "0"), (9_999, "9,999"), (10_000, "10k"), (999_499, "999k"), (999_600, "1M"), (340_200_000, "340M"),
     (2_104_000_123_456, "2.1T"), (7 * 10**15, "7,000T")],
)  # fmt: skip
def test_numbers_for_people(number: int | None, text: str) -> None:
    assert human(number) == text


@pytest.mark.parametrize("width", [80, 132])
def test_every_source_has_a_row_that_fits(document: dict[str, Any], width: int) -> None:
    lines = summary(document, width=width).splitlines()
    table = lines[1 : 2 + len(document["sources"]) + 1]
    assert max(len(line) for line in table) <= width
    assert table[0].split()[:3] == ["source", "samples", "images"]
    assert table[-1].startswith("all ")
    assert [line[:6] for line in table[1:-1]] == [visible(name)[:6] for name in document["sources"]]
    assert not any("…" in line[-60:] for line in table), "only names are cut"


def test_totals_over_long_and_failures_stand_below(document: dict[str, Any]) -> None:
    text = summary(document, width=200, profile="internvl3-8b")
    everything = document["profiles"]["internvl3-8b"]["all"]
    assert text.startswith("harbour-v3, profile internvl3-8b\n")
    assert f"{everything['num_samples']:,} samples, {everything['num_images']:,} images, " in text
    assert f"{everything['num_tokens']:,} tokens, " in text
    assert f"longer than 8,192: {everything['over_long'][0]['num_samples']:,} samples" in text
    assert "FAILED " in text
    assert "note: 2 input files are empty" in text


def test_it_is_plain_text_unless_colour_is_asked_for(document: dict[str, Any]) -> None:
    assert "\x1b" not in summary(document)
    assert "\x1b[" in summary(document, color=True)
    assert not {"\x00", "\u202e"} & set(summary(document))


def test_without_a_profile_it_says_so(document: dict[str, Any]) -> None:
    assert summary({**document, "profiles": {}}) == "harbour-v3\nno profile is indexed yet\n"
