"""Forecast: what packing and balancing will give on a dataset, from its index alone. Pure numpy; no record is read.

1. `read_rows` takes random slices of each source's rows, as columns with their costs; a small source whole (`rows`).
2. A `RowOrder` draws them as a blend does, and `packs_of_stream` makes of them the packs that a loader would make (`streams`).
3. `pack_pool` packs some streams for real, for several independent replicates, and says how full packs are (`pool`).
4. `balance` draws global batches from the pool, one from each replicate, and has `plugin.balance.assign` deal them (`batches`).
   Replicates share neither packs nor draws, so that their spread is the sampling error.
"""

from plugin.forecast.batches import BalanceForecast, Cluster, ModeForecast, balance
from plugin.forecast.estimates import Estimate
from plugin.forecast.pool import PackPool, pack_pool
from plugin.forecast.rows import RowColumns, SourceRows, SourceWeight, read_rows
from plugin.forecast.sizes import PackSize, pack_size
from plugin.forecast.streams import RowOrder, packs_of_stream

__all__ = [
    "BalanceForecast",
    "Cluster",
    "Estimate",
    "ModeForecast",
    "PackPool",
    "PackSize",
    "RowColumns",
    "RowOrder",
    "SourceRows",
    "SourceWeight",
    "balance",
    "pack_pool",
    "pack_size",
    "packs_of_stream",
    "read_rows",
]
