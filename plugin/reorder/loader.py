"""`BalancedLoader`: the iterator between a trainer's loader and its forward step. This is the trainer's half."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from packer.format.errors import UsageError
from plugin.batch.torch_batch import TorchBatch
from plugin.exchange.errors import ExchangeError
from plugin.exchange.group import GlooGroup
from plugin.exchange.settings import Settings
from plugin.exchange.transport import Transport
from plugin.forks import begins_anew_after_fork
from plugin.reorder import state as loader_state
from plugin.reorder.counters import Counters
from plugin.reorder.options import microbatches_at, refuse_wrong, refuse_wrong_seconds, transport_of
from plugin.reorder.parallel import Parallel
from plugin.reorder.planner import Planner
from plugin.reorder.pool import Pool
from plugin.reorder.pulling import Expected, Pulled, pull
from plugin.reorder.replicas import Replicas
from plugin.reorder.state import Identity, Position
from plugin.reorder.worker import EXIT_SECONDS, Setup, Worker
from plugin.stream import PackSource, num_workers

Readers = Literal["all", "replica"]
_log = logging.getLogger(__name__)


class BalancedLoader:
    """Packs of one rank, dealt anew among the ranks of its data-parallel group within each global batch.

    While a global batch is trained on, the next one is read, planned and exchanged in a thread. Nothing is read before the first
    `__next__`. A pack that was handed out belongs to the caller. At the end of any rank's stream all ranks stop.
    """

    def __init__(
        self,
        source: PackSource | None,
        *,
        parallel: Parallel,
        planner: Planner,
        num_microbatches: int | Callable[[int], int],
        profile: str,
        cost: str,
        sequence_length: int,
        micro_batch_size: int = 1,
        loss_per_token: bool = False,
        readers: Readers = "all",
        transport: str | Transport = "gloo",
        slice_bytes: int = 256 << 20,
        timeout_seconds: float = 1800.0,
        slow_seconds: float = 30.0,
        stream: str = "",
        on_batch: Callable[[Counters], None] | None = None,
    ) -> None:
        """Connects the ranks: all of the data-parallel group and of the replica must make their loaders.

        Args:
            source: of this rank's packs; None where the rank does not read (`Parallel.reads`).
            num_microbatches: of a step, or a function of the step, asked for the step after the last too: it is read ahead.
            profile: fingerprint of the profile, as packs carry it.
            cost: fingerprint of the cost model that packs' costs come from.
            micro_batch_size: packs that the trainer joins to one microbatch; each is handed out by its own `__next__`.
            loss_per_token: the trainer weighs the loss by tokens over the global batch, not by microbatches.
            readers: "replica": the first rank of each replica reads and feeds its peers.
            transport: "gloo", in the thread; "nccl", on the device, launched by the trainer's thread.
            slice_bytes: what a rank holds to send, and to receive, at once.
            timeout_seconds: a rank that is later than this is lost.
            slow_seconds: waits longer than this are warned of.
            stream: settings of the source that must be alike on all ranks, as a text.
            on_batch: called with the counters of each global batch, at the `__next__` or `close` behind its last pack.
        """
        refuse_wrong(source, parallel, micro_batch_size, loss_per_token, readers, slice_bytes)
        refuse_wrong_seconds(timeout_seconds=timeout_seconds, slow_seconds=slow_seconds)
        self._num_microbatches = num_microbatches
        self._micro_batch_size = micro_batch_size
        self._parallel, self._planner, self._readers = parallel, planner, readers
        self._expected = Expected(profile=profile, sequence_length=sequence_length)
        self._slow_seconds, self._slice_bytes = slow_seconds, slice_bytes
        self._on_batch = on_batch
        self._stream = stream
        self._source = source if parallel.reads(readers) else None
        self._pulls_itself = num_workers(self._source) == 0
        self._identity = Identity(
            dp_size=parallel.dp_size, profile=profile, cost=cost, planner=planner.name, reads=self._source is not None
        )
        self._group = GlooGroup(parallel.data_ranks, purpose="data", timeout_seconds=timeout_seconds)
        self._peers = GlooGroup(parallel.peers, purpose="replica", timeout_seconds=timeout_seconds)
        self._transport = transport_of(transport, self._group)
        self._log_level = logging.INFO if parallel.dp_rank == 0 else logging.DEBUG
        self._start = Position(step=0, yielded=0, snapshot=None)
        self._is_start_known = False
        self._worker: Worker | None = None
        self._pool: Pool | None = None
        self._next: Pool | None = None
        self._yielded = 0
        self._is_counted = False
        self._is_ended = False
        self._asking = threading.Lock()
        self._refusal = ""
        """Why no pack can come any more."""
        begins_anew_after_fork(self)

    def __iter__(self) -> Iterator[TorchBatch]:
        return self

    def __next__(self) -> TorchBatch:
        if self._is_ended:
            raise StopIteration
        if self._refusal:
            raise UsageError(f"balanced loader: {self._refusal}")
        if not self._asking.acquire(blocking=False):
            raise UsageError("balanced loader: found a second thread that asks for packs, expected one at a time")
        try:
            return self._take()
        finally:
            self._asking.release()

    def _take(self) -> TorchBatch:
        started = time.monotonic()
        pool = self._pool_to_take_from()
        self._prepare_next(pool)
        if not pool.has(self._yielded):
            self._transport.settle()
        pack = pool.take(self._yielded)
        self._yielded += 1
        pool.counters.exposed_seconds += time.monotonic() - started
        return pack

    def after_fork(self) -> None:
        """A child has neither the thread nor the connections."""
        self._refusal = "found a process forked from the one that made it, expected that one; make a loader in each process"

    def save_state(self) -> dict[str, Any]:
        """Local and cheap: the source's state before the global batch, and how many of its packs were handed out."""
        position = self._position()
        return loader_state.encode(position, self._identity, self._num_slots(position.step))

    def restore_state(self, state: Any) -> None:
        """Go on where `save_state` was called; before the first `__next__`.

        Raises:
            UsageError: the state of another run, or too late.
        """
        if self._worker is not None:
            raise UsageError("balanced loader: found a state to restore after the first pack, expected it before")
        if self._is_ended:
            raise UsageError("balanced loader: found a state to restore after close(), expected a new loader: no pack would come")
        position = loader_state.decode(state, self._identity, None)
        loader_state.decode(state, self._identity, self._num_slots(position.step))
        if self._source is not None:
            self._source.restore_state(position.snapshot)
        self._start, self._yielded, self._is_start_known = position, position.yielded, True

    def close(self) -> None:
        """End the thread and the connections; before the source is closed. No pack comes after it."""
        if self._pool is not None:
            self._count(self._pool)
        self._is_ended = True
        if self._worker is not None:
            self._worker.stop_at_exit()
            return
        # The others may have begun, and wait for this rank.
        self._peers.close()
        self._group.close()

    @property
    def counters(self) -> Counters:
        """Of the global batch that the last pack belongs to."""
        return self._current().counters

    @property
    def num_loss_tokens(self) -> int:
        """Of the global batch that the last pack belongs to, over all ranks and microbatches."""
        return self._current().counters.num_loss_tokens

    @property
    def step(self) -> int:
        """The global batch that the last pack belongs to, counted from the beginning of training."""
        return self._current().step

    @property
    def dropped(self) -> tuple[tuple[str, ...], ...]:
        """At the end: sample ids of the packs this rank had read for a global batch that did not fill up."""
        return self._next.dropped if self._is_ended and self._next else ()

    def _current(self) -> Pool:
        if self._pool is None:
            raise UsageError("balanced loader: found no global batch, expected this to be asked after the first pack")
        return self._pool

    def _position(self) -> Position:
        if self._pool is None:
            if self._source is None or self._is_start_known:
                return self._start
            return Position(step=0, yielded=0, snapshot=self._source.save_state())
        if self._yielded == self._pool.num_microbatches:
            return Position(step=self._pool.step + 1, yielded=0, snapshot=self._pool.after)
        return Position(step=self._pool.step, yielded=self._yielded, snapshot=self._pool.before)

    def _pool_to_take_from(self) -> Pool:
        """Raises:
        StopIteration: the streams have ended.
        """
        if self._pool is None:
            self._begin()
        elif self._yielded < self._pool.num_microbatches:
            self._pool.refuse_lost()
            if self._next is not None:
                self._next.refuse_lost()
            return self._pool
        else:
            self._count(self._pool)
        assert self._next is not None, "the next one is always on its way"
        self._next.wait_known()
        if self._next.is_ended:
            self._is_ended = True
            raise StopIteration
        pool, is_first = self._next, self._pool is None
        self._pool, self._next, self._is_counted = pool, None, False
        if is_first:
            self._log_memory(pool)
        else:
            self._yielded = 0
        # What there was no microbatch for: all of the first batch, and of those whose batch before had too few.
        self._launch(pool, pool.num_microbatches, pool.num_microbatches)
        return pool

    def _count(self, pool: Pool) -> None:
        """Once for each global batch that was trained on whole."""
        if self._is_counted or self._yielded < pool.num_microbatches:
            return
        self._is_counted = True
        _log.log(self._log_level, "%s", pool.counters)
        if self._on_batch is not None:
            self._on_batch(pool.counters)

    def _begin(self) -> None:
        """The first `__next__`, or one after that failed."""
        if self._worker is None:
            self._worker = self._started()
        if self._next is None:
            if self._source is not None and not self._is_start_known:
                # What a state says until there is a first pack: from here on the source is ahead of it, and may be the thread's.
                self._start, self._is_start_known = replace(self._start, snapshot=self._source.save_state()), True
            self._submit(self._start.step, self._start.snapshot)

    def _prepare_next(self, pool: Pool) -> None:
        """Begin with the next global batch, and launch what of it is due at this microbatch."""
        number = pool.num_microbatches
        if self._next is None and (not self._pulls_itself or self._yielded >= min(1, number - 1)):
            self._submit(pool.step + 1, pool.after)
        # A later stage asks for its first pack when this one has computed with its own, and none plans without the others.
        earliest = max(number // 2, min(1, self._parallel.num_stages - 1))
        if self._next is None or not self._transport.is_launched or self._yielded < earliest:
            return
        if not self._next.is_known:
            self._transport.settle()  # The thread may still wait for this batch's packs to arrive.
        with suppress(Exception):  # It comes up where that batch begins, as on all other ranks.
            self._next.wait_known()
        self._next.refuse_lost()
        self._launch(self._next, self._yielded, number)

    def _launch(self, pool: Pool, microbatch: int, num_microbatches: int) -> None:
        try:
            self._transport.launch(microbatch, num_microbatches)
        except ExchangeError:
            pool.refuse_lost()  # It failed in the other thread, and that says why.
            raise

    def _submit(self, step: int, before: Any) -> None:
        assert self._worker is not None, "begun"
        number = self._num_slots(step)
        worker = self._worker
        pool = Pool(step, number, stage=lambda: worker.stage, slow_seconds=self._slow_seconds)
        pulled: Pulled | None = None
        if self._pulls_itself and self._source is not None:
            # Another thread that makes packs would draw from the trainer's random state, at times of its own.
            try:
                pulled = pull(self._source, number, before, self._expected)
            except BaseException as error:
                # Nobody knows which packs the source gave by then: whoever goes on after an interrupt would train without them.
                why = ExchangeError(f"step {step}: reading was interrupted ({type(error).__name__}); go on from the last state")
                self._hand_over(pool, before, Pulled(packs=[], before=before, after=before, error=why))
                raise
        self._hand_over(pool, before, pulled)

    def _hand_over(self, pool: Pool, before: Any, pulled: Pulled | None) -> None:
        assert self._worker is not None, "begun"
        self._worker.submit(pool, before, pulled)
        self._next = pool

    def _started(self) -> Worker:
        settings = Settings(
            profile=self._expected.profile,
            cost=self._identity.cost,
            planner=self._identity.planner,
            sequence_length=self._expected.sequence_length,
            dp_size=self._parallel.dp_size,
            num_microbatches=self._num_slots(self._start.step) // self._micro_batch_size,
            micro_batch_size=self._micro_batch_size,
            first_step=self._start.step,
            first_yielded=self._start.yielded,
            transport=self._transport.name,
            slice_bytes=self._slice_bytes,
            readers=self._readers,
            stream=self._stream,
        )
        replicas = Replicas(self._peers, self._parallel, feeds=self._readers == "replica", settings_digest=settings.digest())
        worker = Worker(
            Setup(
                source=self._source,
                parallel=self._parallel,
                settings=settings,
                expected=self._expected,
                planner=self._planner,
                group=self._group,
                replicas=replicas,
                transport=self._transport,
                slice_bytes=self._slice_bytes,
                slow_seconds=self._slow_seconds,
            )
        )
        weakref.finalize(self, worker.stop).atexit = False
        atexit.register(_stop_at_exit, weakref.ref(worker), worker.thread)
        return worker

    def _num_slots(self, step: int) -> int:
        """Packs of this rank in a global batch."""
        return microbatches_at(step, self._num_microbatches) * self._micro_batch_size

    def _log_memory(self, pool: Pool) -> None:
        pack, slice_ = pool.max_pack_bytes / 2**20, max(self._slice_bytes, pool.max_pack_bytes) / 2**20
        packs = 2 * pool.num_microbatches
        _log.log(
            self._log_level,
            "host memory: up to %.0f MiB for packs: %d (2 global batches of %d) of up to %.1f MiB, and 2 slices of %.0f MiB",
            packs * pack + 2 * slice_,
            packs,
            pool.num_microbatches,
            pack,
            slice_,
        )


def _stop_at_exit(worker: weakref.ref[Worker], thread: threading.Thread) -> None:
    """A thread that comes back from C++ while the interpreter is taken down aborts the process."""
    if not thread.is_alive():
        return
    if (found := worker()) is not None:
        found.stop_at_exit()
    else:
        thread.join(EXIT_SECONDS)  # It gives back its connections.
