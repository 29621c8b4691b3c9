"""What reordering asks of a loader: an iterator of packs whose state can be saved and restored."""

from __future__ import annotations

from typing import Any, Protocol

from plugin.batch.torch_batch import TorchBatch


class PackSource(Protocol):
    """Packs of one data-parallel rank, in order.

    A source may have an attribute `num_workers`: 0 says that packs are made by the thread that asks, so that only the trainer's
    own thread may ask (`num_workers`).
    """

    def __next__(self) -> TorchBatch:
        """The next pack, in the host's memory; StopIteration at the end."""
        ...

    def save_state(self) -> Any:
        """Cheap and local: where the stream stands after the last pack handed out."""
        ...

    def restore_state(self, state: Any) -> None:
        """Go on after that pack; before the first `__next__`."""
        ...


def num_workers(source: PackSource | None) -> int | None:
    """Processes that make the packs; None where the source does not say."""
    found = getattr(source, "num_workers", None)
    return found if found is None else int(found)
