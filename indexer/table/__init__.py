"""The index on disk: one Arrow file a part, consolidated into one a source, opened as one table over all sources."""

from __future__ import annotations

from indexer.table.consolidating import Consolidated, consolidate, is_consolidated, read_stats
from indexer.table.index import IndexImage, IndexRow, IndexTable
from indexer.table.opening import open_index
from indexer.table.parts import PartCheck, PartState, part_state, part_states, read_part, write_part

__all__ = [
    "Consolidated",
    "IndexImage",
    "IndexRow",
    "IndexTable",
    "PartCheck",
    "PartState",
    "consolidate",
    "is_consolidated",
    "open_index",
    "part_state",
    "part_states",
    "read_part",
    "read_stats",
    "write_part",
]
