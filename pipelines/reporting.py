"""`bayplan report`: the statistics of a dataset, written as `report.json` and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packer.format import layout
from packer.storage import join_url, open_storage
from pipelines.forecast_text import closing_lines, read_forecast, refuse_foreign
from pipelines.report_document import report_document
from pipelines.report_page import render_page


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """The statistics, and where they were written."""

    document: Mapping[str, Any]
    """As `report.json` holds it: the cards without pictures."""
    place: str
    """Of the HTML page."""


def write_report(
    url: str,
    profiles: Sequence[str] = (),
    *,
    num_cards: int = 4,
    seed: int = 0,
    folder: str | None = None,
    forecast_file: str | None = None,
) -> WrittenReport:
    """Write the report of a dataset that has been indexed, into `folder` or into the dataset.

    That of some profiles has their names in its own, so it never takes the place of the whole one.

    Args:
        forecast_file: the JSON that `bayplan forecast` wrote, to be shown.

    Raises:
        UsageError: no dataset, no such profile, nothing counted yet. FormatError: an index that does not fit the dataset, or a
            file that is no forecast of it.
    """
    storage = open_storage(url)
    forecast = None if forecast_file is None else read_forecast(forecast_file)
    document = report_document(storage, profiles, num_cards=num_cards, seed=seed)
    if forecast is not None:
        refuse_foreign(forecast, str(forecast_file), document)
        document["forecast"] = {**forecast, "lines": list(closing_lines(forecast))}
    target, prefix = (open_storage(folder), "") if folder is not None else (storage, f"{layout.REPORT_DIR}/")
    stem = "-".join([f"{prefix}report", *document["profiles"]]) if profiles else f"{prefix}report"
    page = f"{stem}.html"
    plain = _without_pictures(document)
    target.publish_bytes(f"{stem}.json", json.dumps(plain, indent=1, ensure_ascii=False).encode())
    target.publish_bytes(page, render_page(document).encode())
    return WrittenReport(document=plain, place=join_url(target.url, page))


def _without_pictures(document: Mapping[str, Any]) -> dict[str, Any]:
    cards = {
        source: [card | {"thumbnails": [{**shown, "data": None} for shown in card["thumbnails"]]} for card in cards]
        for source, cards in document["cards"].items()
    }
    return {**document, "cards": cards}
