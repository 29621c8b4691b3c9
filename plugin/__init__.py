"""What a trainer imports: reading, packing and balancing. Never loads Ray or `pipelines`.

Names are loaded when they are first used, so `from plugin import BundleReader` brings neither torch nor Energon nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plugin.adapters.map_style import RawSamples
    from plugin.balance import Topology
    from plugin.cost import CostModel, EncoderCost, LlmCost, StepTimer, cost_model
    from plugin.failures import SampleFailed, TooManyFailures
    from plugin.loader import PackLoader
    from plugin.loader_workers import WorkerDied
    from plugin.prefetch import Prefetched, PrefetchPool
    from plugin.read_errors import (
        FileChanged,
        FileCut,
        FileMissing,
        ReadCancelled,
        ReadError,
        ReadPlace,
        ReadStalled,
        StoreFailed,
    )
    from plugin.reader import BundleReader
    from plugin.reorder import Assigned, BalancedLoader, BalancedPackLoader, BalanceSettings, Parallel
    from plugin.requests import ImageRead, Sample, SampleRead
    from plugin.settings import PackSettings, Peers
    from plugin.task_encoder import PackingTaskEncoder

_MODULES = {
    "Assigned": "plugin.reorder",
    "BalanceSettings": "plugin.reorder",
    "BalancedLoader": "plugin.reorder",
    "BalancedPackLoader": "plugin.reorder",
    "BundleReader": "plugin.reader",
    "CostModel": "plugin.cost",
    "EncoderCost": "plugin.cost",
    "FileChanged": "plugin.read_errors",
    "FileCut": "plugin.read_errors",
    "FileMissing": "plugin.read_errors",
    "ImageRead": "plugin.requests",
    "LlmCost": "plugin.cost",
    "PackLoader": "plugin.loader",
    "PackSettings": "plugin.settings",
    "PackingTaskEncoder": "plugin.task_encoder",
    "Parallel": "plugin.reorder",
    "Peers": "plugin.settings",
    "PrefetchPool": "plugin.prefetch",
    "Prefetched": "plugin.prefetch",
    "RawSamples": "plugin.adapters.map_style",
    "ReadCancelled": "plugin.read_errors",
    "ReadError": "plugin.read_errors",
    "ReadPlace": "plugin.read_errors",
    "ReadStalled": "plugin.read_errors",
    "Sample": "plugin.requests",
    "SampleFailed": "plugin.failures",
    "SampleRead": "plugin.requests",
    "StepTimer": "plugin.cost",
    "StoreFailed": "plugin.read_errors",
    "TooManyFailures": "plugin.failures",
    "Topology": "plugin.balance",
    "WorkerDied": "plugin.loader_workers",
    "cost_model": "plugin.cost",
}

__all__ = [
    "Assigned",
    "BalanceSettings",
    "BalancedLoader",
    "BalancedPackLoader",
    "BundleReader",
    "CostModel",
    "EncoderCost",
    "FileChanged",
    "FileCut",
    "FileMissing",
    "ImageRead",
    "LlmCost",
    "PackLoader",
    "PackSettings",
    "PackingTaskEncoder",
    "Parallel",
    "Peers",
    "PrefetchPool",
    "Prefetched",
    "RawSamples",
    "ReadCancelled",
    "ReadError",
    "ReadPlace",
    "ReadStalled",
    "Sample",
    "SampleFailed",
    "SampleRead",
    "StepTimer",
    "StoreFailed",
    "TooManyFailures",
    "Topology",
    "WorkerDied",
    "cost_model",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
