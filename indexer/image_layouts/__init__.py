"""The counts of one image -> what stands for it in the sample, in order: special tokens, positions of features, filler text.

A layout is strings alone. How many features there are is the image rule's, what ids they get the tokenizer's.
"""

from __future__ import annotations

from indexer.image_layouts.core import ImageLayout, StringLayout
from indexer.image_layouts.defaults import DEFAULTS, LayoutDefault, default_layout
from indexer.image_layouts.kinds import KINDS, Gemma3, Idefics3, Llama4, MiniCPM, Rows, Wrapped
from indexer.image_layouts.lookup import image_layout

__all__ = [
    "DEFAULTS",
    "KINDS",
    "Gemma3",
    "Idefics3",
    "ImageLayout",
    "LayoutDefault",
    "Llama4",
    "MiniCPM",
    "Rows",
    "StringLayout",
    "Wrapped",
    "default_layout",
    "image_layout",
]
