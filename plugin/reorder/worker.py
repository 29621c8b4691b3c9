"""The background thread: reads a global batch, tells the others, plans, exchanges. It touches gloo and NumPy, never a device."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from packer.format.errors import BayplanError, UsageError
from plugin.exchange import metadata
from plugin.exchange import settings as agreement
from plugin.exchange.errors import ExchangeError, RankLeft, RankLost
from plugin.exchange.group import GlooGroup
from plugin.exchange.metadata import PackTable
from plugin.exchange.moves import moves_of, routes_of
from plugin.exchange.settings import Settings, differing, named
from plugin.exchange.transport import Job, Transport
from plugin.reorder.parallel import Parallel
from plugin.reorder.planner import Plan, Planner, imbalance, refuse_broken
from plugin.reorder.pool import Pool
from plugin.reorder.pulling import Expected, Pulled, pull
from plugin.reorder.replicas import Replicas
from plugin.stream import PackSource

_MESSAGE_BYTES = 2048
_HEAD = np.dtype([("step", "<i8"), ("num_slots", "<i8"), ("num_packs", "<i8"), ("failed", "<i8"), ("read_milliseconds", "<i8")])
EXIT_SECONDS = 5.0
"""A thread that is in the middle of reading is left behind after this."""
IDLE, BEGINNING, LINGERING = "idle", "beginning", "letting its peers get the last of it"
SETTLING = "waiting for its peers to have the batch before"
_ENDS_BY_ITSELF = frozenset({IDLE, BEGINNING, SETTLING, LINGERING})
"""Stages in which a closed loader leaves its connections to peers, who may not have the last batch yet."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the thread works with."""

    source: PackSource | None
    parallel: Parallel
    settings: Settings
    expected: Expected
    planner: Planner
    group: GlooGroup
    replicas: Replicas
    transport: Transport
    slice_bytes: int
    slow_seconds: float


class Worker:
    """One daemon thread, started with the first global batch. A pool of threads would wait for it at the interpreter's exit."""

    def __init__(self, setup: Setup) -> None:
        self.stage = IDLE
        self.jobs: queue.SimpleQueue[tuple[Pool, object, Pulled | None] | None] = queue.SimpleQueue()
        self._setup = setup
        self._node: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
        self._failure: BaseException | None = None
        self._is_shared = False
        """All ranks of the group have come to the same failure by themselves."""
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="bayplan-reorder", daemon=True)

    def submit(self, pool: Pool, before: object, pulled: Pulled | None = None) -> None:
        """Prepare a global batch, read from where the source stands (`before`), or already read."""
        if self.thread.ident is None:
            self.thread.start()
        self.jobs.put((pool, before, pulled))

    def stop(self) -> None:
        """The loader is gone: end the thread, out of a collective too. Does not wait."""
        self._is_closed = True
        self.jobs.put(None)
        self._setup.transport.fail()
        if self.thread.is_alive() and self.stage not in _ENDS_BY_ITSELF:
            self._hang_up()

    def _hang_up(self) -> None:
        self._setup.replicas.group.close()
        self._setup.group.close()

    def stop_at_exit(self) -> None:
        """Wait for the thread, but not for ever."""
        self.stop()
        self.thread.join(EXIT_SECONDS)
        if self.thread.is_alive():
            self._hang_up()
            self.thread.join(EXIT_SECONDS)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None and not self._is_closed:
            self.stage = BEGINNING
            pool, before, pulled = job
            try:
                if self._failure is not None:
                    raise self._failure
                self._prepare(pool, before, pulled)
                if pool.is_ended:
                    self._setup.replicas.settle()
            except BaseException as error:
                self._fail(pool, error)
            # What is idle holds nothing.
            job = pool = before = pulled = None  # type: ignore[assignment]
            self.stage = IDLE
        if self._failure is None:
            self.stage = SETTLING
            with suppress(BayplanError):
                self._setup.replicas.settle()

    def _fail(self, pool: Pool, error: BaseException) -> None:
        if self._is_closed:
            pool.fail(error, is_shared=False)
            return
        if self._failure is None:
            self._failure = error
            level = logging.INFO if isinstance(error, RankLeft) else logging.ERROR
            _log.log(level, "step %d: stopped while %s: %s: %s", pool.step, self.stage, type(error).__name__, error)
            self._tell(error)
        # Who has left has all it wanted: the others may train to the end of the batch before.
        pool.fail(error, is_shared=self._is_shared or isinstance(error, RankLeft))
        self._setup.transport.fail()

    def _tell(self, error: BaseException) -> None:
        """Those that are in one group with this rank, and wait for it now."""
        if isinstance(error, RankLeft):  # So has this rank: it is no fault for those either who were in no group with the first.
            self._hang_up()
            return
        text = f"{type(error).__name__}: {error}"
        self._setup.replicas.group.leave_note(text, is_cause=True)
        if not self._is_shared:
            self._setup.group.leave_note(text, is_cause=not isinstance(error, RankLost))

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """What is raised here is raised on all ranks of the group, so nobody need be told."""
        try:
            yield
        except RankLost:
            raise
        except Exception:
            self._is_shared = True
            raise

    def _prepare(self, pool: Pool, before: object, pulled: Pulled | None) -> None:
        if self._node is None:
            self._agree()
        pulled = self._read(pool, before, pulled)
        pool.before, pool.after = pulled.before, pulled.after
        pool.counters.read_seconds = pulled.seconds
        started = time.monotonic()
        if not self._announce(pool, pulled):
            return
        table = self._gather(pool, pulled)
        pool.counters.gathered_seconds = time.monotonic() - started
        started = time.monotonic()
        plan = self._solve(pool, table)
        pool.counters.solved_seconds = time.monotonic() - started
        started = time.monotonic()
        self._exchange(pool, plan, table, pulled)
        pool.counters.exchanged_seconds = time.monotonic() - started

    def _agree(self) -> None:
        self.stage = "comparing settings"
        group = self._setup.group
        with group.doing("comparing settings before the first step"):
            rows = group.gather(agreement.encode(self._setup.settings, socket.gethostname()))
        with self._shared():
            hosts = agreement.agree(rows, group.ranks)
        self._node = np.unique(np.array(hosts), return_inverse=True)[1].astype(np.int64)

    def _read(self, pool: Pool, before: object, pulled: Pulled | None) -> Pulled:
        setup, replicas = self._setup, self._setup.replicas
        self.stage = SETTLING
        replicas.settle()
        if self._is_closed:
            raise UsageError("balanced loader: it was closed")
        self.stage = "reading packs"
        if not replicas.reads:
            return replicas.receive(pool.step, pool.num_microbatches)
        if pulled is None:
            assert setup.source is not None, "who reads has a source"
            pulled = pull(setup.source, pool.num_microbatches, before, setup.expected)
        self.stage = "waiting for its peers"
        replicas.feed(pool.step, pulled)
        if pulled.error is None:
            replicas.compare(pool.step, pulled)
        return pulled

    def _announce(self, pool: Pool, pulled: Pulled) -> bool:
        """Whether every rank has a full share; False at the end of the streams.

        Raises:
            ExchangeError: another rank failed. The rank that did raises its own error.
            UsageError: ranks are not at the same step, or count microbatches differently.
        """
        self.stage = "waiting for other ranks to have read"
        group = self._setup.group
        head = np.zeros(1, _HEAD)
        head[0] = (pool.step, pool.num_microbatches, len(pulled.packs), pulled.error is not None, int(pulled.seconds * 1000))
        started = time.monotonic()
        with group.doing(f"waiting for other ranks to have read step {pool.step}"):
            heads = np.ascontiguousarray(group.gather(head.view(np.uint8))).view(_HEAD)[:, 0]
        self._warn_slow(pool, heads, time.monotonic() - started)
        with self._shared():
            if heads["failed"].any():
                self._raise_failure(pool, pulled, heads)
            for field, what in (("step", "step"), ("num_slots", "number of microbatches")):
                if found := differing(heads[field].tolist(), group.ranks):
                    raise UsageError(f"step {pool.step}: found {what} {found}, expected the same on all ranks")
        if (heads["num_packs"] == pool.num_microbatches).all():
            return True
        self._end(pool, pulled, heads["num_packs"].tolist())
        return False

    def _warn_slow(self, pool: Pool, heads: np.ndarray[tuple[int], np.dtype[np.void]], seconds: float) -> None:
        slowest = int(np.argmax(heads["read_milliseconds"]))
        if seconds > self._setup.slow_seconds:
            _log.warning(
                "step %d: waited %.1f s for other ranks; rank %d read for %.1f s, the longest",
                pool.step,
                seconds,
                self._setup.group.ranks[slowest],
                heads["read_milliseconds"][slowest] / 1000,
            )

    def _raise_failure(self, pool: Pool, pulled: Pulled, heads: np.ndarray[tuple[int], np.dtype[np.void]]) -> None:
        group = self._setup.group
        text = "" if pulled.error is None else f"{type(pulled.error).__name__}: {pulled.error}"
        row = np.frombuffer(text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0"), np.uint8)
        with group.doing(f"hearing which rank failed at step {pool.step}"):
            texts = [said.tobytes().rstrip(b"\0").decode(errors="replace") for said in group.gather(row)]
        if pulled.error is not None:
            raise pulled.error
        failed = [f"rank {rank}: {said}" for rank, said, bad in zip(group.ranks, texts, heads["failed"], strict=True) if bad]
        raise ExchangeError(f"step {pool.step}: reading packs failed on another rank, so all stop; {'; '.join(failed)}")

    def _end(self, pool: Pool, pulled: Pulled, num_packs: list[int]) -> None:
        pool.dropped = tuple(pack.batch.sample_ids for pack in pulled.packs if pack is not None)
        pool.num_dropped = sum(num_packs)
        pool.is_ended = True
        if pool.num_dropped:
            short = [rank for rank, had in zip(self._setup.group.ranks, num_packs, strict=True) if had < pool.num_microbatches]
            _log.warning(
                "step %d: the streams end; %s had fewer than %d packs. All ranks stop: %d packs are not trained on, %d of them "
                "read here, with the samples %s",
                pool.step,
                named(short),
                pool.num_microbatches,
                pool.num_dropped,
                len(pool.dropped),
                ", ".join(sample for pack in pool.dropped for sample in pack) or "(none)",
            )
        self.stage = LINGERING
        pool.know()

    def _gather(self, pool: Pool, pulled: Pulled) -> PackTable:
        self.stage = "gathering costs"
        group = self._setup.group
        rows = metadata.encode([pack.batch for pack in pulled.packs if pack is not None])
        with group.doing(f"gathering the costs of step {pool.step}"):
            gathered = group.gather(rows.reshape(-1))
        table = metadata.decode(gathered.reshape(group.size, pool.num_microbatches, metadata.NUM_BYTES))
        pool.max_pack_bytes = int(table.num_bytes.max())
        pool.counters.num_packs = table.digest.size
        pool.counters.num_loss_tokens = int(table.num_loss_tokens.sum())
        return table

    def _solve(self, pool: Pool, table: PackTable) -> Plan:
        self.stage = "planning"
        setup = self._setup
        plan = setup.planner(table.encoder, table.llm, table.num_bytes)
        refuse_broken(plan, table.encoder.shape, setup.planner.name)
        digest = np.frombuffer(blake3(np.ascontiguousarray(plan.taken, "<i8").tobytes()).digest(16), np.uint8)
        with setup.group.doing(f"comparing the plans of step {pool.step}"):
            digests = setup.group.gather(digest)
        others = [rank for rank, row in zip(setup.group.ranks, digests, strict=True) if (row != digests[0]).any()]
        with self._shared():
            if others:
                raise UsageError(
                    f"step {pool.step}: planner {setup.planner.name!r} made another plan on {named(others)} than on rank "
                    f"{setup.group.ranks[0]}, expected the same for the same costs; use the same bayplan and NumPy on all ranks"
                )
        counters = pool.counters
        counters.before, counters.after, counters.bound = (imbalance(plan, name) for name in ("before", "after", "bound"))
        return plan

    def _exchange(self, pool: Pool, plan: Plan, table: PackTable, pulled: Pulled) -> None:
        self.stage = "exchanging packs"
        setup, rank, number = self._setup, self._setup.parallel.dp_rank, pool.num_microbatches
        taken = np.asarray(plan.taken)
        moves = moves_of(taken, table.num_bytes, slice_bytes=setup.slice_bytes)
        assert self._node is not None, "settings were agreed on"
        pool.counters.count_moves(moves, self._node)
        for microbatch in np.flatnonzero(taken[rank] // number == rank):
            position = int(taken[rank, microbatch]) - rank * number
            pack, pulled.packs[position] = pulled.packs[position], None
            assert pack is not None, "a plan takes each pack once"
            pool.deliver(int(microbatch), pack)
        if not moves.num_slices:
            pool.know()
            return
        job = Job(
            step=pool.step,
            routes=routes_of(moves, rank, num_ranks=setup.group.size, num_microbatches=number),
            packs=pulled.packs,
            digests=table.digest.reshape(-1),
            deliver=pool.deliver,
        )
        setup.transport.begin(job)
        pool.know()
        with setup.group.doing(f"exchanging the packs of step {pool.step}"):
            setup.transport.exchange(job)
