"""Peers of a replica: tensor, context and pipeline ranks that must train on the same packs. In the background thread, over gloo.

Each reads the stream, and digests are compared; or one reads, and feeds the others. Where peers are stages of a pipeline, a later
stage asks for its first pack only when an earlier one has computed with it: so nobody waits there before the batch after.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError
from plugin.batch.torch_batch import TorchBatch
from plugin.exchange.errors import ExchangeError
from plugin.exchange.group import GlooGroup
from plugin.exchange.metadata import pool_digest
from plugin.exchange.settings import named
from plugin.exchange.transport import buffer
from plugin.reorder.parallel import Parallel
from plugin.reorder.pulling import Pulled

_HEADER = np.dtype([("step", "<i8"), ("num_packs", "<i8"), ("settings", "V16"), ("failed", "<i8"), ("message", "S2048")])
_ROW = np.dtype([("step", "<i8"), ("settings", "V16"), ("packs", "V16")])

Bytes = npt.NDArray[np.uint8]


class Replicas:
    """One rank's side; without peers nothing happens."""

    def __init__(self, group: GlooGroup, parallel: Parallel, *, feeds: bool, settings_digest: bytes) -> None:
        """Args:
        group: of the peers.
        feeds: the first rank reads for all, instead of each for itself.
        """
        self.feeds = feeds and len(parallel.peers) > 1
        self.reads = not self.feeds or parallel.rank == parallel.peers[0]
        self.group = group
        self._waits = parallel.num_stages == 1
        self._settings = settings_digest
        self._pending: list[Callable[[], None]] = []

    def settle(self) -> None:
        """Finish with the batch before.

        Raises:
            UsageError: its streams differed.
            RankLost: a peer is gone.
        """
        with self.group.doing("waiting for the peers of the replica"):
            pending, self._pending = self._pending, []
            for wait in pending:
                wait()

    def compare(self, step: int, pulled: Pulled) -> None:
        """All peers have read the same packs, or one of them, and then all, stop."""
        if self.group.size == 1 or self.feeds:
            return
        row = np.zeros(1, _ROW)
        packs = [pack.batch for pack in pulled.packs if pack is not None]
        row[0] = (step, self._settings, pool_digest(packs))
        with self.group.doing(f"comparing the packs of step {step} with the peers of the replica"):
            gathered = self.group.gather_later(row.view(np.uint8))
        self._pending.append(lambda: self._refuse_different(gathered()))
        if self._waits:
            self.settle()

    def feed(self, step: int, pulled: Pulled) -> None:
        """The reader's side: begins to send."""
        if not self.feeds:
            return
        header = np.zeros(1, _HEADER)
        text = "" if pulled.error is None else f"{type(pulled.error).__name__}: {pulled.error}"
        header[0] = (step, len(pulled.packs), self._settings, pulled.error is not None, text.encode()[:2048])
        packs = [pack.tensor for pack in pulled.packs if pack is not None]
        sizes = np.array([len(pack) for pack in packs], np.int64)
        with self.group.doing(f"feeding the packs of step {step} to the peers of the replica"):
            self._send(header)
            if len(sizes) and pulled.error is None:
                self._send(sizes)
                self._pending += [self.group.broadcast_later(pack) for pack in packs]

    def receive(self, step: int, number: int) -> Pulled:
        """A peer's side: what the reader has read."""
        with self.group.doing(f"getting the packs of step {step} from the reader of the replica"):
            header = self._receive(_HEADER, 1)[0]
            if header["settings"].tobytes() != self._settings or header["step"] != step or header["num_packs"] > number:
                raise UsageError(
                    f"replica of {named(self.group.ranks)}: found step {header['step']} with {header['num_packs']} packs "
                    f"and settings {header['settings'].tobytes().hex()} at its reader, expected step {step}, at most {number} "
                    f"packs and settings {self._settings.hex()}; start all ranks with the same settings, from the same checkpoint"
                )
            pulled = Pulled(packs=[], before=None, after=None)
            if header["failed"]:
                message = header["message"].decode(errors="replace")
                pulled.error = ExchangeError(f"rank {self.group.ranks[0]}, which reads for this one, failed: {message}")
            elif header["num_packs"]:
                for size in self._receive(np.dtype("<i8"), int(header["num_packs"])):
                    arrived = buffer(int(size))
                    self.group.broadcast_later(arrived)()
                    pulled.packs.append(TorchBatch.from_tensor(arrived))
        return pulled

    def _send(self, values: npt.NDArray[np.generic]) -> None:
        row = buffer(values.nbytes)
        row.numpy()[:] = values.view(np.uint8)
        self._pending.append(self.group.broadcast_later(row))

    def _receive(self, dtype: np.dtype[np.generic], number: int) -> npt.NDArray[np.generic]:
        row = buffer(dtype.itemsize * number)
        self.group.broadcast_later(row)()
        values: npt.NDArray[np.generic] = row.numpy().view(dtype)
        return values

    def _refuse_different(self, rows: Bytes) -> None:
        found = np.ascontiguousarray(rows).view(_ROW)[:, 0]
        for name, what in (("settings", "settings"), ("step", "step"), ("packs", "packs")):
            others = [rank for rank, row in zip(self.group.ranks, found, strict=True) if row[name] != found[0][name]]
            if others:
                raise UsageError(
                    f"replica of {named(self.group.ranks)}: found other {what} on {named(others)} than on rank "
                    f"{self.group.ranks[0]} at step {int(found[0]['step'])}, expected the same on all tensor, context and "
                    "pipeline peers; give them the same data-parallel rank, seed and settings"
                )
