"""How large a pack's flat buffer is, from counts: the layout's own formula, over columns of packs at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indexer.image_rules import image_rule
from plugin.batch import ImageForm, Patches, Tiles
from plugin.batch import format as buffer_format
from plugin.batch.building import shapes
from plugin.packing.limits import IntArray
from plugin.tensors import image_tensors
from plugin.tensors.families import Target
from plugin.tensors.registry import PUBLISHED

ID_BYTES = 32
"""Of a sample: ids are not in the index. Some bytes in a pack of megabytes."""
SOURCE_BYTES = 16
FINGERPRINT_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSize:
    """What a pack is made of, its counts apart."""

    form: ImageForm | None
    """None: the profile takes no images."""
    patches_per_unit: int = 1
    """Patches of a tile, where images come as tiles."""
    is_assumed: bool = False
    """No pixels are made for the image rule; the form is what models of its kind take."""

    def num_bytes(self, sequence_length: int, num_samples: IntArray, num_images: IntArray, num_patches: IntArray) -> IntArray:
        """Of packs that are filled up to the sequence length."""
        counts = shapes(
            self.form,
            num_tokens=sequence_length,
            num_segments=num_samples,
            num_samples=num_samples,
            num_images=num_images if self.form is not None else num_images * 0,
            num_units=num_patches // self.patches_per_unit,
            num_sources=num_samples * 0 + 1,
            text_bytes=(num_samples * ID_BYTES, num_samples * 0 + SOURCE_BYTES, num_samples * 0 + FINGERPRINT_BYTES),
        )
        _, total = buffer_format.planned(counts)
        return total + num_samples * 0


_PROBE_SIDE = 448


def pack_size(rule: str | None, parameters: Mapping[str, Any]) -> PackSize | None:
    """Of the packs of a profile with an image rule; None where it is not known how large the rule's pixels are.

    A rule that only counts is taken to give flattened patches, as every known model with a patch size and no tiles does.
    """
    if rule is None:
        return PackSize(form=None)
    if rule in PUBLISHED:
        tensors = image_tensors(rule, parameters)
        target = tensors.target(_PROBE_SIDE, _PROBE_SIDE)
        return PackSize(form=tensors.form, patches_per_unit=_patches_per_unit(tensors.form, target))
    patch_side = getattr(image_rule(rule, parameters), "patch_size", None)
    if not isinstance(patch_side, int):
        return None
    return PackSize(form=Patches(patch_bytes=3 * patch_side**2, merge_size=None), is_assumed=True)


def _patches_per_unit(form: ImageForm, target: Target) -> int:
    return target.num_patches // target.shape[0] if isinstance(form, Tiles) else 1
