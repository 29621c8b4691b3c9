"""The statistics report as one HTML page that opens without a network; `report/` beside this file holds its pieces.

The page carries the report's document as JSON, its own script, and plotly.js (4.8 MB) as text that is run when the first plot
comes into view, so that numbers and tables stand there at once. Nothing of the data becomes markup: the script only sets text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from packer.format.reasons import EXPLANATIONS
from pipelines.report_cards import within_budget
from pipelines.report_data import embedded_json, page_data

# Concatenated in this order into one function scope.
_SCRIPTS = (
    "format.js",
    "charts.js",
    "plots.js",
    "overview.js",
    "table.js",
    "sections.js",
    "forecast.js",
    "details.js",
    "main.js",
)
_THUMBNAIL_BYTES = 1_200_000
# Control characters, and characters that turn the direction of what follows them.
_VISIBLE = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)]} | {
    code: f"<U+{code:04X}>" for code in [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
}


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a report's document, which is also what `report.json` holds; UTF-8 is written in its head."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    cards = within_budget(document["cards"], _THUMBNAIL_BYTES)
    reasons = {reason.value: text for reason, text in EXPLANATIONS.items()}
    script = '"use strict";\n(() => {\n' + "\n".join(_piece(name) for name in _SCRIPTS) + "\n})();\n"
    plotly = str(get_plotlyjs())
    for name, text in (("the page's script", script), ("plotly.js", plotly)):
        assert not any(mark in text.lower() for mark in ("</script", "<script", "<!--", "\r")), f"{name} cannot stand in HTML"
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    return environment.from_string(_piece("page.html.jinja")).render(
        document=document,
        first_profile=next(iter(document["profiles"].values()), None),
        policy=_policy(script, plotly),
        style=_piece("page.css"),
        data=embedded_json({**page_data(document), "cards": cards, "reasons": reasons}),
        script=script,
        plotly=plotly,
    )


def visible(value: object) -> str:
    """Text with control characters and changes of direction spelt out, so that no name can disguise itself."""
    return str(value).encode("utf-8", "backslashreplace").decode().translate(_VISIBLE)


def _piece(name: str) -> str:
    return (resources.files("pipelines") / "report" / name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    """Only these scripts run and nothing can be fetched; plotly sets styles of its own and draws its PNG export from a blob."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
