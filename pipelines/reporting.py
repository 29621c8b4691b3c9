"""`bayplan report`: the statistics of a dataset, written as `report.json` and as one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packer.format import layout
from packer.storage import join_url, open_storage
from pipelines.report_document import report_document
from pipelines.report_page import render_page


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenReport:
    """The statistics, and where they were written."""

    document: Mapping[str, Any]
    place: str
    """Of the HTML page."""


def write_report(
    url: str, profiles: Sequence[str] = (), *, num_cards: int = 4, seed: int = 0, folder: str | None = None
) -> WrittenReport:
    """Write the report of a dataset that has been indexed, into `folder` or into the dataset.

    Raises:
        UsageError: no dataset, no such profile, nothing counted yet. FormatError: an index that does not fit the dataset.
    """
    storage = open_storage(url)
    document = report_document(storage, profiles, num_cards=num_cards, seed=seed)
    target, prefix = (open_storage(folder), "") if folder is not None else (storage, f"{layout.REPORT_DIR}/")
    page = f"{prefix}report.html"
    target.publish_bytes(f"{prefix}report.json", _report_json(document))
    target.publish_bytes(page, render_page(document).encode())
    return WrittenReport(document=document, place=join_url(target.url, page))


def _report_json(document: Mapping[str, Any]) -> bytes:
    """The document without its pictures."""
    cards = {
        source: [card | {"thumbnails": [{**shown, "data": None} for shown in card["thumbnails"]]} for card in cards]
        for source, cards in document["cards"].items()
    }
    return json.dumps({**document, "cards": cards}, indent=1, ensure_ascii=False).encode()
