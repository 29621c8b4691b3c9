"""Bytes of an image -> the pixels a model's processor would give: decoded, resized to the grid the index promised, uint8.

A patch of 14 x 14 stays 588 bytes here, an eighth of the processor's 4,704 (float32, every frame twice); normalising comes
last, on the training device. Pixels equal those of the `...Pil` processors of transformers bit for bit. Sizes come from
`indexer.image_rules` alone. No reading, no batches; torch is imported only where a tensor is handed in.
"""

from __future__ import annotations

from plugin.tensors.decode import Alpha, decode
from plugin.tensors.families import GREY, ImagePatches, ImageTensors, Promise, Target
from plugin.tensors.normalise import Normalisation
from plugin.tensors.registry import PUBLISHED, image_tensors

__all__ = [
    "GREY",
    "PUBLISHED",
    "Alpha",
    "ImagePatches",
    "ImageTensors",
    "Normalisation",
    "Promise",
    "Target",
    "decode",
    "image_tensors",
]
