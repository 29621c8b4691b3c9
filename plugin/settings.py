"""What a stream of packs is to be, and where this process stands among its peers. Values alone: nothing is opened here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from packer.format.errors import UsageError
from plugin.packing import PackLimits

OnFailure = Literal["stop", "blank", "skip"]

_INT32 = (1 << 31) - 1
_WHOLE = {
    "buffer_size": 1,
    "max_age": 0,
    "packs_ahead": 1,
    "prefetch_bytes": 1,
    "num_threads": 1,
    "num_decode_threads": 1,
    "pad_id": 0,
}
"""The least of each."""
_WHOLE_OR_NONE = {"max_failures": 0, "max_host_bytes": 1}
_NONE_SAYS = {
    "max_failures": " (0: stop at the first), or None (unlimited)",
    "max_host_bytes": ", or None (only logged)",
}


def refuse_not_whole(name: str, value: object, least: int, *, most: int | None = None, way_out: str = "") -> None:
    """Raises:
    UsageError: no whole number, or one out of bounds: settings come from files and command lines, where 2 is easily "2" or 2.0.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"found {name} {value!r}, expected a whole number {bounds}{way_out}")


def is_running_low(num_planned: int, buffer_size: int) -> bool:
    """Whether it is time for the next plan: so few samples are left of the last one. Decides which samples share a pack."""
    return num_planned <= buffer_size // 8


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
        for name in ("tensor", "context", "pipeline"):
            refuse_not_whole(name, getattr(self, name), 1)
        refuse_not_whole("pipeline_stage", self.pipeline_stage, 0)
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
    num_decode_threads: int = 1
    """Images of a pack decoded at once in each loader worker; 1: one after the other. Where a node has more cores than loader
    workers, 4 threads take less memory than 4 workers do."""
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
        for name, least in _WHOLE.items():
            refuse_not_whole(name, getattr(self, name), least, most=_INT32 if name == "pad_id" else None)
        for name, least in _WHOLE_OR_NONE.items():
            if getattr(self, name) is not None:
                refuse_not_whole(name, getattr(self, name), least, way_out=_NONE_SAYS[name])
        for name in ("ensure_image", "draft", "check_crc"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"found {name} {getattr(self, name)!r}, expected True or False")
        if not (_is_number(self.read_deadline_seconds) and 0 < self.read_deadline_seconds < math.inf):
            raise UsageError(f"found read_deadline_seconds {self.read_deadline_seconds!r}, expected a number of seconds above 0")
        if self.cost is not None and not isinstance(self.cost, str):
            raise UsageError(f"found cost {self.cost!r}, expected the name or the file of a cost model, or None")
        if self.on_failure not in get_args(OnFailure):
            raise UsageError(f"found on_failure {self.on_failure!r}, expected one of {', '.join(get_args(OnFailure))}")
        share = self.max_failure_share
        if share is not None and not (_is_number(share) and 0 <= share <= 1):
            raise UsageError(f"found max_failure_share {share!r}, expected 0 to 1, or None (unlimited)")
        self.limits(Peers())  # refuses what no pack could be
        refuse_not_whole("sequence_length", self.sequence_length, 1, most=_INT32)  # cu_seqlens are int32

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
