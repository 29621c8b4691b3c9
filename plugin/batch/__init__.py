"""The packed batch: what a loader worker hands to a trainer, and ranks hand to each other. No Energon; torch only where used.

1. `build` takes whole samples with their images (`PackSample`) and writes them into one flat uint8 buffer (`format`).
2. `PackedBatch` is a read-only view over such a buffer: nothing is copied, and it crosses processes as one array. Its fields,
   their shapes and dtypes are the table in `core`. `unpack` gives the samples back, exactly.
3. `batch.to_torch()` is the same memory as one tensor, to be pinned, sent or copied to a device as one.
4. `to_megatron` and `to_hf` make the arguments a trainer expects: labels shifted or not, segments told apart its way.

Padding belongs to the segment before it, and positions count on: each sample is padded to the alignment, the last one to the end.
Nothing that is not a sample's counts: padding and an ensured image are in no count, cost or label.
"""

from plugin.batch.building import build
from plugin.batch.core import PackedBatch
from plugin.batch.facts import IGNORED, Cost, Count, Form
from plugin.batch.huggingface import to_hf
from plugin.batch.images import EnsuredImage, ImageForm, ImageState, PackImage, Patches, PatchImage, TileImage, Tiles
from plugin.batch.megatron import VisualInputs, to_megatron
from plugin.batch.mrope import mrope_positions
from plugin.batch.samples import PackSample

__all__ = [
    "IGNORED",
    "Cost",
    "Count",
    "EnsuredImage",
    "Form",
    "ImageForm",
    "ImageState",
    "PackImage",
    "PackSample",
    "PackedBatch",
    "PatchImage",
    "Patches",
    "TileImage",
    "Tiles",
    "VisualInputs",
    "build",
    "mrope_positions",
    "to_hf",
    "to_megatron",
]
