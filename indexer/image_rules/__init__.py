"""Upright image sizes -> image tokens, encoder patches and attention lengths, as the models' own processors count them.

Pure arithmetic on numpy arrays: no files, no torch. Each rule is a dataclass of explicit parameters that is called with
`ImageSizes`; `presets.py` holds published values. What a processor refuses is a reason, never an exception.
"""

from __future__ import annotations

from indexer.image_rules.core import (
    MAX_SIDE,
    ImageCount,
    ImageCounts,
    ImageRule,
    ImageSizes,
    count_one,
    count_sample,
    image_counts,
)
from indexer.image_rules.lookup import image_rule
from indexer.image_rules.presets import PRESETS, Preset

__all__ = [
    "MAX_SIDE",
    "PRESETS",
    "ImageCount",
    "ImageCounts",
    "ImageRule",
    "ImageSizes",
    "Preset",
    "count_one",
    "count_sample",
    "image_counts",
    "image_rule",
]
