"""A report's document as its page carries it: fewer and shorter histograms, nothing twice, safe inside HTML.

A sketch of 1 % holds some 300 buckets; 130 sources, two profiles and eight distributions of them would be 12 MB. The page draws
60 cells at most, so neighbours are merged (counts stay exact) to 40 buckets a source, 160 for all sources: about 1.5 MB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

_SOURCE_BUCKETS = 40
_ALL_BUCKETS = 160


def page_data(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with short histograms; later profiles leave out what is as in the first (sizes of images, formats, ...)."""
    profiles = {
        name: {
            **profile,
            "all": _short(profile["all"], _ALL_BUCKETS),
            "sources": {source: _short(numbers, _SOURCE_BUCKETS) for source, numbers in profile["sources"].items()},
        }
        for name, profile in document["profiles"].items()
    }
    first = next(iter(profiles.values()), None)
    for profile in profiles.values():
        if profile is not first and first is not None:
            profile["all"] = _without_same(profile["all"], first["all"])
            known = first["sources"]
            profile["sources"] = {
                source: _without_same(numbers, known[source]) if source in known else numbers
                for source, numbers in profile["sources"].items()
            }
    return {**document, "profiles": profiles}


def _short(numbers: Mapping[str, Any], max_buckets: int) -> dict[str, Any]:
    shortened = {
        name: {**found, "histogram": flat_histogram(merge_buckets(found["histogram"], max_buckets))}
        for name, found in numbers["distributions"].items()
    }
    return {**numbers, "distributions": shortened}


def merge_buckets(histogram: Sequence[Sequence[int]], max_buckets: int) -> list[list[int]]:
    """At most `max_buckets` buckets (and one for zeros) made of whole neighbours, about equally wide on a logarithmic axis."""
    if len(histogram) <= max_buckets:
        return [list(bucket) for bucket in histogram]
    lows = [low for low, _, _ in histogram if low > 0]
    start, width = math.log(lows[0]), math.log(lows[-1] / lows[0]) / max_buckets
    merged: list[list[int]] = []
    last = None
    for low, high, count in histogram:
        cell = min(math.floor((math.log(low) - start) / width), max_buckets - 1) if low > 0 else -1
        if cell == last:
            merged[-1][1:] = [high, merged[-1][2] + count]
        else:
            merged.append([low, high, count])
        last = cell
    return merged


def flat_histogram(histogram: Sequence[Sequence[int]]) -> list[int]:
    """[[low, high, count], ...] as low, count, low, count, ..., high: half as long. Gaps become buckets of count 0."""
    flat: list[int] = []
    end = None
    for low, high, count in histogram:
        if end is not None and low > end:
            flat += [end, 0]
        flat += [low, count]
        end = high
    return flat if end is None else [*flat, end]


def _without_same(numbers: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in numbers.items() if value != first[key]}
    own["distributions"] = {
        name: found for name, found in numbers["distributions"].items() if found != first["distributions"].get(name)
    }
    return own


def embedded_json(value: object) -> str:
    """ASCII JSON that no HTML parser can read as anything but text."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
