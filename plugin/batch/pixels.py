"""The images of a pack as arguments of a model's forward; the same for every trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from packer.format.errors import UsageError
from plugin.batch.facts import Form

if TYPE_CHECKING:
    import torch

    from plugin.batch.torch_batch import TorchBatch


def pixel_tensors(pack: TorchBatch, normalise: Callable[[torch.Tensor], torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """`pixel_values`, `image_grid_thw` and `image_sizes`: those that the pack has.

    Raises:
        UsageError: pixels, but no `normalise`.
    """
    host, views = pack.batch, pack.views
    made = {}
    if host.has_pixels:
        if normalise is None:
            raise UsageError("found pixels as uint8 and no `normalise`, expected one: the vision encoder takes normalised pixels")
        made["pixel_values"] = normalise(views["pixels" if host.form == Form.PATCHES else "tiles"])
    if host.form == Form.PATCHES and len(host.image_sample):
        made["image_grid_thw"] = views["image_grid_thw"]
    if len(host.image_sample) and host.image_size.all():
        made["image_sizes"] = views["image_size"]
    return made
