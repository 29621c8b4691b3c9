"""`PackLoader`: the stream a trainer iterates. One pack a step, counters, and a state that is refused wherever it does not fit.

Energon's savable loader does the work; this opens it from a dataset's folder or URL, and stands between it and the trainer, so
that a resumed run sees the same packs or says why it cannot.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from blake3 import blake3
from megatron.energon import ConcatDataset, WorkerConfig, get_savable_loader
from torch.utils.data import get_worker_info

from packer.format import layout
from packer.format.errors import BayplanError, UsageError
from packer.storage import join_url
from plugin.batch.checks import texts
from plugin.batch.torch_batch import TorchBatch
from plugin.carry_over import CarryOverPackingDataset
from plugin.counters import StreamCounters, difference, line
from plugin.host_memory import HostMemory
from plugin.loader_position import Position
from plugin.loader_state import VERSION, LoaderState, profiles_of, read_state, sources_of
from plugin.loader_workers import let_go, refuse_dead, restore_workers, shut_down
from plugin.opening import energon_path, open_dataset, refuse_unfit, worker_config_of
from plugin.settings import PackSettings, Peers
from plugin.task_encoder import Pack, PackingTaskEncoder
from plugin.tensors import ImageTensors

logger = logging.getLogger(__name__)

REMEMBERED_PACKS = 4096
"""Packs whose sample ids can still be asked for."""
CHECKPOINT_SECONDS = 5.0
"""Workers note where they are so often; a restore builds the packs since then once more. Energon's 60 would cost that many."""
WATCHDOG_SECONDS = 60.0
"""A worker whose next pack takes longer warns of it."""
PACKS_BETWEEN_COLLECTIONS = 100
"""Of garbage: each looks at every index row in the buffers, 4 ms with the default sizes. Energon's 10 is for large tensors in
cycles, and no pack is in one.
"""


class PackLoader:
    """Iterate it: each item is one pack in host memory, as one tensor. Not for several threads at once.

    `num_workers` tells whoever wraps it whether packs are built in this process.
    """

    def __init__(self, loader: Any, encoder: PackingTaskEncoder) -> None:
        """Over a loader of Energon's `get_savable_loader`, whose dataset was made with the encoder.

        `open` makes both; this is for blends, epochs and splits of your own.
        """
        self._packing = _wrapped(loader.dataset, CarryOverPackingDataset)
        if self._packing is None:
            raise UsageError(f"found a loader over {loader.dataset}, expected one whose dataset a `PackingTaskEncoder` made")
        _refuse_other(self._packing, encoder)
        _admit(loader, encoder, rows_waiting=self._packing.rows_waiting)
        if loader.generator is None:
            # The trainer's own generator would move with the first pack, and with it the dropout of a resumed run.
            loader.generator = torch.Generator()
        self._loader = loader
        self.encoder = encoder
        self.num_workers: int = loader.worker_config.num_workers
        self.rank: int = loader.worker_config.rank
        self.world_size: int = loader.worker_config.world_size
        self._iterator: Iterator[Pack] | None = None
        self._is_between_epochs = False
        self._has_begun = False
        self._over: tuple[str, BaseException | None] | None = None
        """Why no pack comes any more, and the error that it came from."""
        self._is_closed = False
        self._process = os.getpid()
        self._asking = threading.Lock()
        self._position = Position(loader)
        self._unsaved: BaseException | None = None
        """What ended a call of `save_state` while workers were asked: what they answered since is not told from new answers."""
        self._counters = StreamCounters()
        self._reported = self._counters.totals()
        self._ids: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        """As they stand in the packs: strings would take several times as much."""
        self.num_packs = 0
        """Handed out, counting on over a resume."""
        self.restore_key: tuple[Any, ...] | None = None
        """Of the latest pack, for Energon's `restore_sample`."""

    @classmethod
    def open(
        cls,
        dataset_url: str | os.PathLike[str],
        profile: str,
        settings: PackSettings,
        *,
        peers: Peers | None = None,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 2,
        split: Literal["train", "val"] = "train",
        seed: int = 0,
        shuffle_buffer_size: int | None = 2000,
        prefetch_factor: int = 2,
        blend: str | None = None,
        worker_config: WorkerConfig | None = None,
        tensors: ImageTensors | None = None,
    ) -> PackLoader:
        """The packs of a dataset's blend under a profile. `train` never ends, `val` is one pass.

        Args:
            dataset_url: a folder, or the URL of one in a store that Energon's storage client knows (s3, gs, msc).
            rank, world_size: of the pure data-parallel group: ranks of one replica give the same rank and get the same packs.
            num_workers: processes that build packs; 0: this process does, when it asks.
            seed: another seed, another order.
            shuffle_buffer_size: index rows that are drawn from, in `train`.
            prefetch_factor: packs a worker builds ahead.
            blend: another Energon `dataset.yaml` than the profile's own.
            worker_config: instead of rank, world_size, num_workers and seed.
            tensors: pixels of your own for the profile's image rule.

        Raises:
            UsageError: what cannot work, by name. FormatError: a damaged index.
        """
        refuse_unfit(split=split, shuffle_buffer_size=shuffle_buffer_size, prefetch_factor=prefetch_factor)
        config = worker_config or worker_config_of(rank=rank, world_size=world_size, num_workers=num_workers, seed=seed)
        dataset_url = os.fspath(dataset_url)
        encoder = PackingTaskEncoder(dataset_url, profile, settings, peers=peers, tensors=tensors)
        path = blend or join_url(dataset_url, f"{layout.index_dir(profile)}/{layout.PROFILE_DATASET_FILE}")
        dataset = open_dataset(energon_path(path), split, config, encoder, shuffle_buffer_size=shuffle_buffer_size)
        loader = get_savable_loader(
            dataset,
            checkpoint_every_sec=CHECKPOINT_SECONDS,
            prefetch_factor=prefetch_factor,
            gc_collect_every_n_steps=PACKS_BETWEEN_COLLECTIONS,
            # A thread for each pass; without workers none of them would ever end.
            watchdog_timeout_seconds=WATCHDOG_SECONDS if config.num_workers else None,
        )
        return cls(loader, encoder)

    @property
    def fingerprint(self) -> str:
        """Of the profile."""
        return self.encoder.builder.fingerprint

    @property
    def normalise(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """uint8 pixels of a pack -> what the vision encoder takes, on their device; None for a profile without images."""
        tensors = self.encoder.builder.tensors
        return None if tensors is None else tensors.normalise_torch

    def __iter__(self) -> PackLoader:
        return self

    def __next__(self) -> TorchBatch:
        started = time.perf_counter()
        packed: TorchBatch | None = None
        while packed is None:
            pack = self._next_pack()
            packed = pack.packed
            self._counters.fail(len(pack.failures))
            for failure in pack.failures:
                logger.warning("on_failure %r: %s", self.encoder.settings.on_failure, failure)
            if packed is None:
                self._position.give()
        batch = packed.batch
        self._counters.add(batch, wait_seconds=time.perf_counter() - started)
        self._counters.hear(pack.worker, pack.refused, pack.reading)
        self._ids[self.num_packs] = batch.sample_id_bytes.tobytes(), batch.sample_id_offsets.tobytes()
        if len(self._ids) > REMEMBERED_PACKS:
            self._ids.popitem(last=False)
        self.num_packs += 1
        self.restore_key = pack.__restore_key__
        self._position.give()
        return packed

    def _next_pack(self) -> Pack:
        self._refuse_over()
        outside = sys.exception()
        if not self._asking.acquire(blocking=False):
            raise UsageError("found two threads that ask one stream for packs at once, expected one; put a lock around it")
        try:
            if self._iterator is None:
                if self.num_workers:
                    # A forked worker collects what is garbage here, and what has threads (gloo) ends it by a crash, or never.
                    gc.collect()
                    self._packing.trainer = os.getpid()
                self._iterator = iter(self._loader)
                self._has_begun = True
            pack = next(self._iterator)
        except StopIteration:
            self._iterator = None
            self._is_between_epochs = True
            self._position.end_epoch()
            raise
        except BaseException as error:
            # The generators under it are at their end now, which must not look like that of the data.
            self._over = f"it ended with {type(error).__name__}: {error}", error
            if self.num_workers:
                let_go(error, outside)
            if isinstance(error, OSError | RuntimeError):
                refuse_dead(self._loader, "no pack", error)
            raise
        finally:
            self._asking.release()
        self._is_between_epochs = False
        return pack

    def _refuse_over(self) -> None:
        if self._over is not None:
            why, error = self._over
            raise UsageError(f"no pack comes of this stream any more: {why}. Open it again and restore its state") from error
        self._refuse_fork()

    def __reduce__(self) -> NoReturn:
        """A copy would be another stream of the same packs."""
        raise UsageError(
            "found a `PackLoader` that is to be pickled or copied, expected one that stays where it was opened: open it in the "
            "process that iterates it, and hand on `save_state()`"
        )

    def _refuse_fork(self) -> None:
        """A child that took packs from its parent's workers would leave the parent waiting for them; each of torch's workers
        would give the same packs once more.
        """
        if get_worker_info() is not None:
            raise UsageError(
                "found a `PackLoader` in a worker of torch's DataLoader, expected one that is iterated itself: it has workers of "
                "its own, `PackLoader.open(..., num_workers=)`"
            )
        if self.num_workers and os.getpid() != self._process:
            raise UsageError(
                f"found a stream with loader workers of process {self._process} in process {os.getpid()}, forked from it; "
                "open one in each process, with its own rank"
            )

    def restore_sample(self, restore_key: tuple[Any, ...]) -> TorchBatch:
        """A pack again, by the `restore_key` it had."""
        pack: Pack = self._loader.restore_sample(restore_key)
        assert pack.packed is not None
        return pack.packed

    def sample_ids(self, pack_index: int) -> tuple[str, ...]:
        """Ids of the samples of the n-th pack, counted from 0 as `num_packs` counts.

        Raises:
            UsageError: it is not out yet, or too long ago.
        """
        try:
            blob, offsets = self._ids[pack_index]
        except KeyError:
            known = f"{next(iter(self._ids))} to {self.num_packs - 1}" if self._ids else "none"
            raise UsageError(f"found pack {pack_index}, expected one of those whose ids are kept: {known}") from None
        return texts(np.frombuffer(blob, np.uint8), np.frombuffer(offsets, np.int64))

    def counters(self) -> dict[str, Any]:
        """Since this process began to iterate: see `StreamCounters.totals`."""
        return self._counters.totals()

    def step_counters(self) -> dict[str, Any]:
        """Since the last call of this or of `log_line`: call it once a step."""
        before, self._reported = self._reported, self._counters.totals()
        return difference(self._reported, before)

    def log_line(self) -> str:
        """`step_counters` as one line."""
        return line(self.step_counters())

    def save_state(self) -> dict[str, Any]:
        """Where the stream stands after the pack that came last: plain values around Energon's own state.

        Raises:
            WorkerDied: and its place in the stream with it. UsageError: it was closed, or is not between two packs.
        """
        self._refuse_fork()
        if self._is_closed and self.num_workers:
            raise UsageError("save_state: found a stream that was closed, whose workers are gone; save its state before")
        if not self._asking.acquire(blocking=False):
            raise UsageError(
                "save_state: found a stream that is being asked for a pack or a state, expected one between packs; in the "
                "handler of a signal raise an error or set a flag, and save outside"
            )
        try:
            self._refuse_not_whole()
            state: LoaderState = {
                "version": VERSION,
                **self._identity(),
                "num_packs": self.num_packs,
                "is_between_epochs": self._is_between_epochs,
                "packs_of_epoch": self._position.packs_of_epoch,
                "energon": self._position.state(),
            }
        except BayplanError:
            raise
        except BaseException as error:
            self._unsaved = error
            raise
        finally:
            self._asking.release()
        return dict(state)

    def _refuse_not_whole(self) -> None:
        why = self._over[0] if self._over is not None else "an error struck there"
        if self._packing.is_changing:
            what = f"found a stream that stopped in the midst of choosing samples, expected one between packs: {why}"
        elif not self._position.is_whole:
            what = f"found a pack that was taken from the stream and not handed out: {why}"
        elif self._unsaved is not None and self.num_workers:
            what = f"found an earlier call that was interrupted ({type(self._unsaved).__name__}), whose answers are yet to come"
        else:
            return
        raise UsageError(f"save_state: {what}; resume from the latest state before")

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go on where a state was saved. Before the first pack is asked for.

        Raises:
            UsageError: it does not fit this stream, with every value that differs.
        """
        if self._has_begun:
            raise UsageError("restore_state: found a stream that has begun, expected a fresh one; restore before the first pack")
        known = read_state(state, self._identity())
        if known["num_packs"] and _wrapped(self._loader.dataset, ConcatDataset) is not None:
            raise UsageError(
                "restore_state: found a pass over several sources, one after another, which Energon would "
                "begin again; begin it anew"
            )
        replayed = restore_workers(self._loader, known["energon"])
        self._packing.num_replayed = dict(enumerate(replayed))
        of_epoch, is_between = known["packs_of_epoch"], known["is_between_epochs"]
        self._packing.in_next_epoch = frozenset(
            worker for worker, number in enumerate(replayed) if not is_between and (number or not of_epoch[worker])
        )
        self._position.begin(deepcopy(known["energon"]), of_epoch)
        self.num_packs = known["num_packs"]
        if is_between:
            self._skip_ended_epoch()

    def state_dict(self) -> dict[str, Any]:
        """`save_state`, as torchdata and accelerate call it."""
        return self.save_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """`restore_state`, as torchdata and accelerate call it."""
        self.restore_state(state_dict)

    def _skip_ended_epoch(self) -> None:
        """The workers still stand at the end of the epoch that the trainer has seen."""
        self._has_begun = True
        if next(iter(self._loader), None) is not None:
            raise UsageError("restore_state: found packs behind the end of an epoch; save this state again with this release")
        self._position.begin_at_first_worker()
        self._is_between_epochs = True

    def _identity(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "num_workers": self.num_workers,
            "seed": self._loader.worker_config.seed_offset,
            "profile": self.encoder.builder.profile,
            "profile_fingerprint": self.fingerprint,
            "limits": self.encoder.limits.state(),
            "choice": self._packing.identity(),
            "sources": sources_of(self._loader.dataset.config()),
        }

    def shared_identity(self) -> str:
        """What ranks of one run must have alike, or some samples come twice and others never; as a text to compare."""
        known = self._identity()
        sources = blake3(repr(sorted(known["sources"].items())).encode()).hexdigest(8)
        choice = ", ".join(f"{name} {value}" for name, value in {**known["limits"], **known["choice"]}.items())
        return f"seed {known['seed']}, {known['num_workers']} workers, {choice}, sources {sources}"

    def close(self) -> None:
        """End the workers; no pack comes after it."""
        self._iterator = None
        self._is_closed = True
        self._over = self._over or ("it was closed", None)
        if os.getpid() == self._process:
            shut_down(self._loader)
        self.encoder.builder.close()

    def __enter__(self) -> PackLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_other(packing: CarryOverPackingDataset, encoder: PackingTaskEncoder) -> None:
    """A stream of another encoder or profile, whose lengths and states would be others'."""
    if packing.packer is not encoder:
        raise UsageError("found a loader whose dataset another `PackingTaskEncoder` made, expected the one that is given with it")
    profile = encoder.builder.profile
    if others := profiles_of(packing.config()) - {profile}:
        raise UsageError(
            f"found a blend of the profile {' and '.join(map(repr, sorted(others)))}, expected one of {profile!r}, as the stream "
            f"is opened with; give the `dataset.yaml` of that profile's folder, or name its `profile-{profile}.yaml` in the blend"
        )


def _admit(loader: Any, encoder: PackingTaskEncoder, *, rows_waiting: int) -> None:
    builder, settings = encoder.builder, encoder.settings
    HostMemory.of(
        settings,
        builder.limits,
        builder.tensors.form if builder.tensors is not None and builder.peers.pipeline_stage == 0 else None,
        num_workers=loader.num_workers,
        packs_queued=loader.prefetch_factor or 0,
        rows_waiting=rows_waiting,
    ).admit(settings.max_host_bytes)


def _wrapped(dataset: Any, kind: type) -> Any:
    """The dataset of a kind under Energon's wrappers, if it is there."""
    while dataset is not None and not isinstance(dataset, kind):
        inner = getattr(dataset, "datasets", None) or (getattr(dataset, "dataset", None),)
        dataset = inner[0] if len(inner) == 1 else None
    return dataset
