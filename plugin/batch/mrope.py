"""Three-dimensional positions (MRoPE) of a pack, each sample's computed alone. Pure numpy.

Rule: Qwen2-VL, arXiv 2409.12191 section 2.1, and `get_rope_index` in transformers `models/qwen2_vl/modeling_qwen2_vl.py`, which
Qwen2.5-VL and Qwen3-VL follow for images: text counts in all three rows; an image's features keep the position before it in time
and add their row and column; what follows goes on after the larger side of the image.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.batch.core import PackedBatch
from plugin.batch.facts import Form


def mrope_positions(batch: PackedBatch) -> npt.NDArray[np.int64]:
    """[3, T]: time, height, width; padding counts on.

    Raises:
        UsageError: the pack's images are not patches with a merge size, or not still images whose features stand together.
    """
    if len(batch.image_sample) and (batch.form != Form.PATCHES or batch.merge_size is None):
        raise UsageError(f"found images as {batch.form.name}, expected patches with a merge size: the model family has no MRoPE")
    positions = np.tile(batch.position_ids, (3, 1))
    for place, segment in enumerate(np.where(batch.image_sample >= 0, batch.image_sample, batch.num_samples).tolist()):
        start, end = batch.image_span[place].tolist()
        features = np.flatnonzero(batch.feature_mask[start:end]) + start
        assert batch.merge_size is not None
        time, height, width = batch.image_grid_thw[place].tolist()
        rows, columns = height // batch.merge_size, width // batch.merge_size
        number = rows * columns
        if time != 1 or len(features) != number or features[-1] - features[0] != number - 1:
            raise UsageError(
                f"image {place} of the pack: found {len(features)} features for the grid {(time, height, width)}, expected one "
                f"point in time and {number} features beside each other"
            )
        first, behind = int(features[0]), int(features[-1]) + 1
        before = positions[0, first]
        positions[0, first:behind] = before
        positions[1, first:behind] = before + np.repeat(np.arange(rows), columns)
        positions[2, first:behind] = before + np.tile(np.arange(columns), rows)
        positions[:, behind : batch.cu_seqlens_padded[segment + 1]] += max(rows, columns) - number
    return positions
