"""The planner that `plugin.balance` is: its plans, under a name that ranks compare."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from plugin.balance import Mode, Plan, Topology, assign

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """`assign` with its settings."""

    topology: Topology
    mode: Mode | str = Mode.AUTO
    pipeline: bool = False

    @property
    def name(self) -> str:
        groups = self.topology.expert_group
        digest = "none" if groups is None else blake3(np.ascontiguousarray(groups, "<i8").tobytes()).hexdigest(8)
        return f"{self.topology.resolve(self.mode)}, pipeline {self.pipeline}, expert groups {digest}"

    def __call__(self, encoder: Ints, llm: Ints, num_bytes: Ints) -> Plan:
        return assign(encoder, llm, self.topology, self.mode, pipeline=self.pipeline, num_bytes=num_bytes)
