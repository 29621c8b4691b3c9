"""What a stream of packs is to be, and where this process stands among its peers. Values alone: nothing is opened here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from packer.format.errors import UsageError
from plugin.packing import PackLimits

OnFailure = Literal["stop", "blank", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that compute one replica of the model together: they must see the same packs."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    pipeline_stage: int = 0
    """0 is the first, the one with the vision encoder."""
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if min(self.tensor, self.context, self.pipeline) < 1 or not 0 <= self.pipeline_stage < self.pipeline:
            raise UsageError(f"found {self}, expected sizes of at least 1 and a stage within [0, {self.pipeline})")

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.context * self.pipeline

    @property
    def alignment(self) -> int:
        """What each sample must be padded to a multiple of: Megatron Bridge's rule (its `training/config.py`)."""
        context = 2 * self.context if self.context > 1 else 1
        return math.lcm(context, self.context * self.tensor if self.sequence_parallel else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSettings:
    """One stream of packs: what a pack may hold, how samples are chosen and read, and what happens when one cannot be."""

    sequence_length: int
    """LLM tokens of a pack."""
    alignment: int | None = None
    """Each sample is padded to a multiple of it; None: what the peers ask for."""
    max_images_per_pack: int | None = None
    max_patches_per_pack: int | None = None
    """The memory of the vision encoder: without it one pack may hold as many patches as its tokens stand for."""
    pad_id: int = 0
    cost: str | None = None
    """A cost model, as `plugin.cost.cost_model` takes it: each sample carries its costs, which balancing deals packs by."""
    ensure_image: bool = False
    """Give packs without an image a grey one without loss: ZeRO-3 and FSDP need every rank in the vision encoder."""
    draft: bool = False
    """Let JPEGs be decoded at a fraction of their size: faster, and no longer the processor's pixels."""

    buffer_size: int = 2000
    """Index rows to choose from, in each loader worker."""
    max_age: int = 5
    """A sample that was handed back to the buffer so often leaves with the next packs."""

    packs_ahead: int = 4
    """So many packs are being read in each loader worker, the one that is built next among them."""
    prefetch_bytes: int = 256 << 20
    """What each loader worker may hold of files read ahead."""
    num_threads: int = 16
    """Reads at once in each loader worker."""
    read_deadline_seconds: float = 60.0
    check_crc: bool = True

    on_failure: OnFailure = "stop"
    """For a sample that cannot be read or decoded. `blank`: grey pixels of the promised grid, and the sample out of the loss.
    `skip`: it is left out of its pack."""
    max_failures: int | None = 100
    """Of one loader worker, with `blank` and `skip`; 0: the first one stops. None: unlimited."""
    max_failure_share: float | None = 0.01
    """Of the samples of one loader worker, looked at after the first 1,000; None: unlimited."""

    max_host_bytes: int | None = None
    """What the loader of one rank may take; more is refused before anything is read. None: only logged."""

    def __post_init__(self) -> None:
        for name in ("buffer_size", "packs_ahead", "prefetch_bytes", "num_threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"found {name} {getattr(self, name)}, expected at least 1")
        if self.on_failure not in get_args(OnFailure):
            raise UsageError(f"found on_failure {self.on_failure!r}, expected one of {', '.join(get_args(OnFailure))}")
        if self.max_failures is not None and self.max_failures < 0:
            raise UsageError(f"found max_failures {self.max_failures}, expected 0 (stop at the first), more, or None (unlimited)")
        if self.max_failure_share is not None and not 0 <= self.max_failure_share <= 1:
            raise UsageError(f"found max_failure_share {self.max_failure_share}, expected 0 to 1, or None (unlimited)")
        self.limits(Peers())  # refuses what no pack could be

    def limits(self, peers: Peers) -> PackLimits:
        """What a pack may hold."""
        alignment = peers.alignment if self.alignment is None else self.alignment
        return PackLimits(
            sequence_length=self.sequence_length,
            alignment=alignment,
            max_images=self.max_images_per_pack,
            max_patches=self.max_patches_per_pack,
        )

    def refuse_unfit(self, peers: Peers) -> None:
        """Raises:
        UsageError: when peers could come to see other packs, or could not use these.
        """
        if self.on_failure == "skip" and peers.num_ranks > 1:
            raise UsageError(
                f"found on_failure 'skip' with {peers.num_ranks} ranks a replica: one that could not read a sample would train "
                "on another pack than its peers; take 'blank' or 'stop'"
            )
        if self.alignment is not None and self.alignment % peers.alignment:
            raise UsageError(
                f"found alignment {self.alignment}, expected a multiple of {peers.alignment} for tensor parallel {peers.tensor} "
                f"and context parallel {peers.context}; leave it out to get that"
            )
