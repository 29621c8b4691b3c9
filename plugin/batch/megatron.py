"""A pack as Megatron Bridge's `training/vlm_step.py` takes it (0.6.2, and main of August 2026). Imports no Bridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from plugin.batch.core import PackedBatch
from plugin.batch.facts import IGNORED
from plugin.batch.mrope import mrope_positions
from plugin.batch.pixels import pixel_tensors

if TYPE_CHECKING:
    import torch

    from plugin.batch.torch_batch import TorchBatch


@dataclass(kw_only=True)
class VisualInputs:
    """What `vlm_step` asks of visual inputs: attributes that are tensors or None, and `normalized_for_model`."""

    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    image_sizes: torch.Tensor | None = None

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Arguments of the model's forward."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


def to_megatron(
    batch: PackedBatch | TorchBatch, *, normalise: Callable[[torch.Tensor], torch.Tensor] | None, mrope: bool = False
) -> dict[str, Any]:
    """One microbatch of one row, on the device of `batch`; labels and loss mask are shifted by one.

    Args:
        normalise: uint8 patches or tiles, as the pack holds them -> what the vision encoder takes.
        mrope: positions [3, 1, T] of Qwen's kind; Bridge's own Qwen models compute them from [1, T].

    Raises:
        UsageError: pixels, but no `normalise`.
    """
    import torch

    pack = batch.to_torch() if isinstance(batch, PackedBatch) else batch
    views, host = pack.views, pack.batch
    labels = torch.full_like(views["labels"], IGNORED)
    # A sample's first token has no label, so none is predicted from the sample before it.
    labels[:-1] = views["labels"][1:]
    positions = views["position_ids"][None]
    if mrope:
        positions = torch.from_numpy(mrope_positions(host)).to(pack.tensor.device)[:, None]
    longest = torch.tensor(host.max_seqlen, dtype=torch.int32)
    made: dict[str, Any] = {
        "tokens": views["tokens"][None],
        "labels": labels[None],
        "loss_mask": (labels != IGNORED).float()[None],
        "position_ids": positions,
        "attention_mask": None,
        "cu_seqlens_q": views["cu_seqlens"],
        "cu_seqlens_kv": views["cu_seqlens"],
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "total_tokens": len(host.tokens),
        "visual_inputs": None,
    }
    # Given only where they differ: without them attention takes its faster kernel.
    if (host.cu_seqlens != host.cu_seqlens_padded).any():
        made |= dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), views["cu_seqlens_padded"])
    if len(host.image_sample):
        made["visual_inputs"] = VisualInputs(**pixel_tensors(pack, normalise))
    return made
