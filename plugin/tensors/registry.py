"""From a preset's name to its pixels, with the mean and deviation that models publish: class defaults differ from those too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from indexer.image_rules import PRESETS, ImageRule, image_rule
from indexer.image_rules.internvl import InternVL
from indexer.image_rules.smart_resize import SmartResize
from packer.format.errors import UsageError
from packer.images import ImageLimits
from plugin.tensors.decode import Alpha
from plugin.tensors.families import ImageTensors, Layout, MergedPatches, RuleTensors, Tiles
from plugin.tensors.normalise import Normalisation

_CLIP = Normalisation(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
_HALF = Normalisation(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
_IMAGENET = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
_TEMPORAL_PATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a preset needs beyond its rule."""

    normalisation: Normalisation
    source: str
    """Where the values are from."""


_QWEN2 = Published(
    normalisation=replace(_CLIP, frames=_TEMPORAL_PATCH), source="published preprocessor_config.json; the class default too"
)
_QWEN3 = Published(
    normalisation=replace(_HALF, frames=_TEMPORAL_PATCH), source="published preprocessor_config.json; the class default is CLIP's"
)
_INTERNVL = Published(
    normalisation=_IMAGENET, source="published processor_config.json of InternVL3.5; the class default is CLIP's"
)

PUBLISHED: dict[str, Published] = {
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_max1280": _QWEN2,
    "qwen3_vl": _QWEN3,
    "glm4_1v": Published(normalisation=replace(_CLIP, frames=_TEMPORAL_PATCH), source="transformers 5.24 class default"),
    "internvl3": _INTERNVL,
    "internvl3_max6": _INTERNVL,
}
"""Presets that have pixels, not counts alone."""


def image_tensors(
    preset_name: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    alpha: Alpha = "white",
    limits: ImageLimits | None = None,
    draft: bool = False,
) -> ImageTensors:
    """The pixels of a profile's image rule.

    Args:
        preset_name: as in a profile's `images.rule`.
        parameters: as in its `images.parameters`.
        mean: per channel, for models that publish another than the preset's.
        std: likewise.
        alpha: what becomes of transparency.
        limits: what is refused before it is decoded; by default more than 2^28 pixels.
        draft: let JPEGs be decoded at a fraction of their size: faster, and no longer the processor's pixels.

    Raises:
        UsageError: unknown preset or parameter, or one with counts but without pixels.
    """
    if preset_name not in PUBLISHED:
        _refuse(preset_name)
    layout = _layout(preset_name, image_rule(preset_name, parameters))
    published = PUBLISHED[preset_name].normalisation
    normalisation = replace(
        published,
        mean=published.mean if mean is None else tuple(mean),
        std=published.std if std is None else tuple(std),
    )
    return RuleTensors(layout=layout, normalisation=normalisation, alpha=alpha, limits=limits or ImageLimits(), draft=draft)


def _layout(name: str, rule: ImageRule) -> Layout:
    if isinstance(rule, SmartResize):
        if rule.fetch_image:
            raise UsageError(
                f"image rule {name!r} with fetch_image: pixels resized twice are not made; leave it out and re-index"
            )
        return MergedPatches(rule=rule)
    assert isinstance(rule, InternVL), f"{name} is listed with pixels, but none are made for {type(rule).__name__}"
    if rule.fill_area:
        raise UsageError(f"image rule {name!r} with fill_area: pixels of that model are not made; leave it out and re-index")
    return Tiles(rule=rule)


def _refuse(name: str) -> None:
    rule = image_rule(name)  # an unknown name fails here, with the nearest known one
    kind = type(rule)
    near = [known for known in PUBLISHED if isinstance(PRESETS[known].rule, kind)] or list(PUBLISHED)
    raise UsageError(
        f"image rule {name!r} counts tokens but has no pixels yet; nearest with pixels: {', '.join(near)}. "
        "For others hand in tensors of your own: any object with the methods of plugin.tensors.ImageTensors"
    )
