"""What the loader of one rank takes of the host's memory at most, worked out before it starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from packer.format.errors import UsageError
from plugin.batch import ImageForm, Patches
from plugin.packing import PackLimits
from plugin.settings import PackSettings

logger = logging.getLogger(__name__)

_BYTES_A_TOKEN = 3 * 8 + 2
"""Tokens, labels and positions; two masks."""
_HEADER_BYTES = 64 << 10
"""Header, ids of samples, places of images: more than any pack of this project's corpora needs."""
_ROW_BYTES = 2 << 10
"""An index row in the buffer with its key for restoring, and their copies in saved states."""
_BUILDING = 3
"""A worker holds the pixels of the pack it builds, that pack, and the one that is on its way."""
_IN_TRAINER = 2
"""The trainer holds the pack it computes with, and the next one, pinned."""


def largest_pack_bytes(limits: PackLimits, form: ImageForm | None) -> int:
    """Of any pack within the limits: its pixels as the limits or, without one, as its tokens allow."""
    return limits.sequence_length * _BYTES_A_TOKEN + _HEADER_BYTES + _pixel_bytes(limits, form)


def _pixel_bytes(limits: PackLimits, form: ImageForm | None) -> int:
    if form is None:
        return 0
    if isinstance(form, Patches):
        by_tokens = limits.sequence_length * (form.merge_size or 1) ** 2
        return min(by_tokens, limits.max_patches or by_tokens) * form.patch_bytes
    # How many of the limit's patches a tile takes is not known here.
    num_tiles = limits.sequence_length // (form.features_per_tile or 1)
    return num_tiles * form.channels * form.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Of one rank, apart from decoded pictures: one for each decoding thread, as large as the dataset's largest. Where the files
    of one pack are more than `prefetch_bytes`, they count instead.
    """

    pack_bytes: int
    num_workers: int
    packs_queued: int
    """By each worker, built and not yet taken."""
    prefetch_bytes: int
    buffer_bytes: int

    @classmethod
    def of(
        cls,
        settings: PackSettings,
        limits: PackLimits,
        form: ImageForm | None,
        *,
        num_workers: int,
        packs_queued: int,
        rows_waiting: int,
    ) -> HostMemory:
        """Args:
        num_workers: 0 builds packs in the trainer's own process. packs_queued: torch's `prefetch_factor`.
        rows_waiting: of a worker, to be mixed and to be packed.
        """
        return cls(
            pack_bytes=largest_pack_bytes(limits, form),
            num_workers=num_workers,
            packs_queued=packs_queued if num_workers else 0,
            prefetch_bytes=settings.prefetch_bytes,
            buffer_bytes=rows_waiting * _ROW_BYTES,
        )

    @property
    def worker_bytes(self) -> int:
        return (self.packs_queued + _BUILDING) * self.pack_bytes + self.prefetch_bytes + self.buffer_bytes

    @property
    def total_bytes(self) -> int:
        return max(1, self.num_workers) * self.worker_bytes + _IN_TRAINER * self.pack_bytes

    def __str__(self) -> str:
        return (
            f"{_mebibytes(self.total_bytes)} = {max(1, self.num_workers)} workers x [({self.packs_queued} + {_BUILDING}) packs "
            f"of {_mebibytes(self.pack_bytes)} + {_mebibytes(self.prefetch_bytes)} read ahead + {_mebibytes(self.buffer_bytes)} "
            f"of index rows] + {_IN_TRAINER} packs in the trainer"
        )

    def admit(self, max_host_bytes: int | None) -> None:
        """Log it.

        Raises:
            UsageError: it is above the limit.
        """
        if max_host_bytes is not None and self.total_bytes > max_host_bytes:
            raise UsageError(
                f"host memory of this rank's loader: found up to {self}, expected at most max_host_bytes {max_host_bytes:,}; "
                "lower num_workers, max_patches_per_pack, prefetch_bytes or prefetch_factor, or raise the limit"
            )
        logger.info("host memory of this rank's loader: up to %s", self)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
