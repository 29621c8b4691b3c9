"""What a trainer imports: reading, packing and balancing. Never loads Ray or `pipelines`.

Names are loaded when they are first used, so `from plugin import BundleReader` brings neither torch nor Energon nor pyarrow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from plugin.requests import ImageRead, Sample, SampleRead

_MODULES = {
    "BundleReader": "plugin.reader",
    "FileChanged": "plugin.read_errors",
    "FileCut": "plugin.read_errors",
    "FileMissing": "plugin.read_errors",
    "ImageRead": "plugin.requests",
    "PrefetchPool": "plugin.prefetch",
    "Prefetched": "plugin.prefetch",
    "ReadCancelled": "plugin.read_errors",
    "ReadError": "plugin.read_errors",
    "ReadPlace": "plugin.read_errors",
    "ReadStalled": "plugin.read_errors",
    "Sample": "plugin.requests",
    "SampleRead": "plugin.requests",
    "StoreFailed": "plugin.read_errors",
}

__all__ = [
    "BundleReader",
    "FileChanged",
    "FileCut",
    "FileMissing",
    "ImageRead",
    "PrefetchPool",
    "Prefetched",
    "ReadCancelled",
    "ReadError",
    "ReadPlace",
    "ReadStalled",
    "Sample",
    "SampleRead",
    "StoreFailed",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
