"""A pack as packed models of transformers take it: `DataCollatorWithFlattening`'s convention, and images.

Those models tell samples apart by positions that restart, and only if there is neither an attention mask nor a cache. Of Qwen's
kind they look at a fourth row of positions for it; with three, or with [1, T], samples see each other and nothing says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plugin.batch.core import PackedBatch
from plugin.batch.mrope import mrope_positions
from plugin.batch.pixels import pixel_tensors

if TYPE_CHECKING:
    import torch

    from plugin.batch.torch_batch import TorchBatch


def to_hf(
    batch: PackedBatch | TorchBatch,
    *,
    normalise: Callable[[torch.Tensor], torch.Tensor] | None,
    mrope: bool,
    flash_attention: bool = False,
) -> dict[str, Any]:
    """Arguments of `model(...)`, on the device of `batch`; labels are not shifted, as transformers expects.

    Args:
        normalise: uint8 patches or tiles, as the pack holds them -> `pixel_values` of the model's processor.
        mrope: whether the model takes positions of Qwen2-VL's kind: [4, 1, T] instead of [1, T].
        flash_attention: add `cu_seq_lens_*` (padding as part of the sample before it) and `max_length_*`.

    Raises:
        UsageError: pixels, but no `normalise`; `mrope`, but images that have none.
    """
    import torch

    pack = batch.to_torch() if isinstance(batch, PackedBatch) else batch
    views, host = pack.views, pack.batch
    positions = views["position_ids"][None]
    if mrope:
        rows = torch.from_numpy(mrope_positions(host)).to(pack.tensor.device)
        positions = torch.cat([positions, rows])[:, None]
    made: dict[str, Any] = {
        "input_ids": views["tokens"][None],
        "labels": views["labels"][None],
        "position_ids": positions,
        "use_cache": False,
        **pixel_tensors(pack, normalise),
    }
    if flash_attention:
        made |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), views["cu_seqlens_padded"])
        made |= dict.fromkeys(("max_length_q", "max_length_k"), host.max_seqlen)
    return made
