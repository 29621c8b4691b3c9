"""Where which number of a pack stands: `facts` of the pack as a whole, columns of `sample_counts`."""

from __future__ import annotations

from enum import IntEnum

IGNORED = -100
"""The label of what is not predicted: padding, a sample's first token, and what its loss mask leaves out."""


class Fact(IntEnum):
    """Places in `facts`."""

    SEQUENCE_LENGTH = 0
    ALIGNMENT = 1
    PAD_ID = 2
    MAX_SEQLEN = 3
    FORM = 4
    """A `Form`."""
    MERGE_SIZE = 5
    """0 where there is none."""
    HAS_PIXELS = 6


class Form(IntEnum):
    NONE = 0
    PATCHES = 1
    TILES = 2


class Count(IntEnum):
    """Columns of `sample_counts`."""

    TEXT = 0
    IMAGE = 1
    OTHER = 2
    """Special and wrapper tokens."""
    LOSS = 3
    PATCHES = 4


class Cost(IntEnum):
    """Columns of `sample_costs`."""

    ENCODER = 0
    LLM = 1
