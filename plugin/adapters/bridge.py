"""Megatron Bridge (0.6, Python 3.12): `cfg.dataset = BayplanDatasetProvider(...)`, and a callback that watches over resuming.

The only module that imports Megatron Bridge. What the loop is given is in `megatron_stream`, where states lie in `data_state`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from packer.format.errors import UsageError
from plugin.adapters.data_state import require_state
from plugin.adapters.megatron_balance import Microbatches, RunFacts, balance_settings, surroundings
from plugin.adapters.megatron_stream import MegatronStream, Place
from plugin.settings import PackSettings, Peers

try:
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
    from megatron.bridge.training.callbacks import Callback, CallbackContext
    from megatron.core import num_microbatches_calculator, parallel_state
except ImportError as error:
    if not (error.name or "").startswith(("megatron.bridge", "megatron.core")):
        raise
    raise ImportError(
        f"found no {error.name}, expected Megatron Bridge 0.6 or newer: `pip install 'megatron-bridge>=0.6.2'` (Python 3.12)",
        name=error.name,
        path=error.path,
    ) from error

if TYPE_CHECKING:
    import torch

    from plugin.loader import PackLoader
    from plugin.reorder import BalancedPackLoader

log = logging.getLogger(__name__)

_STATE_FOLDER = "energon"
"""Below a checkpoint's folder, unless `dataloader_save` and `dataloader_load` say otherwise."""


@dataclass(kw_only=True)
class BayplanDatasetProvider(DatasetProvider):  # type: ignore[misc]
    """One profile of a dataset as microbatches for `vlm_step`, one pack each: `train.micro_batch_size` is 1.

    Of the inherited options `num_workers`, `dataloader_save` and `dataloader_load` are used. Give `BayplanCallback` too.
    """

    dataset_url: str
    profile: str
    sequence_length: int
    """The model's `seq_length`."""
    sequence_parallel: bool = False
    """As the model's: it decides what samples are padded to."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Other fields of `PackSettings`; a dict, since Bridge's overrides cannot set those of a frozen class."""
    seed: int = 0
    mrope: bool = False
    """Positions of three rows; Bridge's own Qwen models compute them."""
    balance: dict[str, Any] | None = None
    """Deal packs among ranks by cost, in training: fields of `BalanceSettings`, {} for all as they are; None: packs stay where
    they are read. Needs `settings={"cost": ...}` and `BayplanCallback`."""
    dataloader_type: str | None = "external"

    @property
    def seq_length(self) -> int:
        """What Bridge's throughput report asks a dataset for."""
        return self.sequence_length

    @property
    def train_stream(self) -> MegatronStream | None:
        """Of this process, once the datasets are built."""
        # No field, since Bridge writes those into a checkpoint's YAML.
        return getattr(self, "_train_stream", None)

    def finalize(self) -> None:
        """Raises:
        UsageError: settings that cannot work; nothing is opened.
        """
        super().finalize()
        if self.dataloader_type != "external":
            raise UsageError(f"found dataloader_type {self.dataloader_type!r}, expected 'external': another loses the data state")
        settings = self.pack_settings()
        if self.balance is None:
            return
        balance_settings(self.balance)
        if settings.cost is None:
            raise UsageError(
                "found balance and settings without cost, expected settings={'cost': ...}: two presets as in "
                "'qwen2_5_vl_vit+qwen3_8b', or a file"
            )

    def adopt(self, cfg: Any) -> None:
        """Take over what balancing needs of the whole run's configuration; the callback does it, before the data is built."""
        # No field, as above.
        self._facts = RunFacts.of(cfg)

    def pack_settings(self) -> PackSettings:
        """Raises:
        UsageError: a setting that is unknown or means nothing.
        """
        known = {each.name for each in fields(PackSettings)} - {"sequence_length"}
        if unknown := sorted(set(self.settings) - known):
            raise UsageError(f"found settings {', '.join(unknown)}, expected of {', '.join(sorted(known))}")
        return PackSettings(sequence_length=self.sequence_length, **self.settings)

    def build_datasets(self, context: DatasetBuildContext) -> tuple[MegatronStream | None, MegatronStream | None, None]:
        """Streams of `train` and `val` for this rank; no `test`: a dataset has those two splits."""
        self.finalize()
        place = place_of(context.pg_collection, sequence_parallel=self.sequence_parallel)
        train = None
        if context.train_samples and self.balance is None:
            train = self._stream(place, "train")
        elif context.train_samples:
            train = self._balanced_stream(place, _groups(context.pg_collection))
        val = self._stream(place, "val") if context.valid_samples else None
        self._train_stream = train
        return train, val, None

    def _balanced_stream(self, place: Place, groups: Any) -> MegatronStream:
        """Every rank of the world makes its own, those that do not read too."""
        from plugin.reorder import BalancedPackLoader

        assert self.balance is not None
        if (facts := getattr(self, "_facts", None)) is None:
            raise UsageError(
                "found balance and no BayplanCallback, expected pretrain(..., callbacks=[BayplanCallback(provider)]): it brings "
                "the model's settings, by which ranks wait for each other"
            )
        if (before := self.train_stream) is not None and not before.is_closed:
            raise UsageError(
                "found a second training stream with balance, expected one for all model chunks of a rank: states of several are "
                "saved by no trainer; take Megatron Bridge 0.6.2 or newer, or `chunk_iterators` in a loop of your own"
            )
        schedule = Microbatches(_calculator(), dp_size=place.size)
        parallel, topology = surroundings(groups, facts.synchronises)
        loader = BalancedPackLoader(
            self.open_loader(place, "train"),
            num_microbatches=schedule,
            settings=balance_settings(self.balance, loss_per_token=facts.loss_per_token),
            parallel=parallel,
            topology=topology,
        )
        log.info("train of %s: balanced by mode %s over %d ranks", self.dataset_url, loader.mode, place.size)
        return self._stream_over(loader, place, schedule)

    def _stream_over(
        self, loader: PackLoader | BalancedPackLoader, place: Place, schedule: Microbatches | None = None
    ) -> MegatronStream:
        return MegatronStream(
            loader,
            size=place.size,
            normalise=loader.normalise,
            device=_device(),
            mrope=self.mrope,
            schedule=schedule,
            takes_pixels=place.peers.pipeline_stage == 0,
        )

    def _stream(self, place: Place, split: Literal["train", "val"]) -> MegatronStream:
        loader = self.open_loader(place, split)
        log.info("%s of %s, profile %s: opened for %s", split, self.dataset_url, self.profile, place)
        return self._stream_over(loader, place)

    def open_loader(self, place: Place, split: Literal["train", "val"]) -> PackLoader:
        """The loader of one split."""
        from plugin.loader import PackLoader

        return PackLoader.open(
            self.dataset_url,
            self.profile,
            self.pack_settings(),
            peers=place.peers,
            rank=place.rank,
            world_size=place.size,
            num_workers=self.num_workers,
            split=split,
            seed=self.seed,
        )


def place_of(groups: Any, *, sequence_parallel: bool) -> Place:
    """This process among its peers, from a `ProcessGroupCollection`; None: from Megatron's own state, or alone.

    Raises:
        UsageError: several processes, and nothing says how they are grouped.
    """
    import torch.distributed

    groups = _groups(groups)
    if groups is not None:
        peers = Peers(
            tensor=groups.tp.size(),
            context=groups.cp.size(),
            pipeline=groups.pp.size(),
            pipeline_stage=groups.pp.rank(),
            sequence_parallel=sequence_parallel,
        )
        return Place(rank=groups.dp.rank(), size=groups.dp.size(), peers=peers)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise UsageError(
            f"found {torch.distributed.get_world_size()} processes and no process groups, expected Megatron's; call "
            "`initialize_model_parallel` first, or give the context a `pg_collection`"
        )
    return Place()


def _groups(groups: Any) -> Any:
    """Those given, or Megatron's own, or None without any."""
    if groups is not None or not parallel_state.model_parallel_is_initialized():
        return groups
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["dp", "tp", "cp", "pp", "ep", "expt_tp"])


def _calculator() -> Any:
    """Megatron's own, of the whole process; it has no public name."""
    return getattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None)


def _device() -> torch.device:
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class BayplanCallback(Callback):  # type: ignore[misc]
    """Refuses a run whose settings or data state do not fit the model's, before its first step; logs the loader's counters."""

    def __init__(self, provider: BayplanDatasetProvider, *, starts_over: bool = False, log_every_steps: int = 0) -> None:
        """Args:
        starts_over: resume the model and take the data from its start; needs `dataloader_load=""` of the provider.
        log_every_steps: a line of counters on each data-parallel rank's own log; 0: none.
        """
        if starts_over and provider.dataloader_load != "":
            raise UsageError(
                f"found starts_over with dataloader_load {provider.dataloader_load!r}, expected '' (no folder): with any other "
                "Bridge restores the data state all the same"
            )
        self._provider, self._starts_over, self._log_every_steps = provider, starts_over, log_every_steps

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Before Bridge looks for data states: it starts the data over in silence where a checkpoint has no folder of them."""
        from megatron.bridge.training.utils.pg_utils import get_pg_collection

        state = context.state
        _refuse_unfit(state.cfg, self._provider)
        if self._provider.balance is not None:
            self._provider.adopt(state.cfg)
        if state.train_state.step and not self._starts_over:
            place = place_of(get_pg_collection(context.model), sequence_parallel=self._provider.sequence_parallel)
            folders = _state_folders(state.cfg.checkpoint, self._provider.dataloader_load)
            require_state(folders, state.train_state.step, rank=place.rank, size=place.size)

    def on_train_start(self, context: CallbackContext) -> None:
        train = context.state.train_state
        if (stream := self._provider.train_stream) is None or not train.step:
            return
        if self._starts_over:
            stream.start_over(train.consumed_train_samples)
        stream.refuse_other_position(train.consumed_train_samples)

    def on_train_step_end(self, context: CallbackContext) -> None:
        step, stream = context.state.train_state.step, self._provider.train_stream
        if self._log_every_steps and step % self._log_every_steps == 0 and stream is not None:
            log.info("step %d: %s", step, stream.log_line())

    def on_train_end(self, context: CallbackContext) -> None:
        """Ends what a balanced stream has running; Bridge may save a checkpoint afterwards all the same."""
        if (stream := self._provider.train_stream) is not None and self._provider.balance is not None:
            stream.close()


def _refuse_unfit(cfg: Any, provider: BayplanDatasetProvider) -> None:
    """What Bridge checks of its own datasets only."""
    evaluation = cfg.dist.eval_context_parallel_size
    expected = {
        "train.micro_batch_size": (cfg.train.micro_batch_size, 1),
        "model.seq_length": (cfg.model.seq_length, provider.sequence_length),
        "model.sequence_parallel": (bool(cfg.model.sequence_parallel), provider.sequence_parallel),
        "dist.eval_context_parallel_size": (evaluation, None if evaluation is None else cfg.model.context_parallel_size),
    }
    wrong = [f"{name} {found!r}, expected {value!r}" for name, (found, value) in expected.items() if found != value]
    if wrong:
        raise UsageError(f"the run's settings do not fit the dataset's: found {'; '.join(wrong)}; make them equal")
    skipped, num_stages = cfg.train.iterations_to_skip, cfg.model.pipeline_model_parallel_size
    if skipped and num_stages > 2:
        raise UsageError(
            f"found train.iterations_to_skip {skipped} and {num_stages} pipeline stages, expected at most 2 stages to skip on: "
            "Bridge takes the packs of a skipped step on the first and last stage only, and those between would train on others"
        )


def _state_folders(checkpoint: Any, given: str | None) -> list[str]:
    """Where Bridge may take states from: which of them it knows only once it has loaded the model."""
    if given is not None:
        return [given] if given else []
    roots = [root for root in (checkpoint.load, checkpoint.save) if root]
    roots += [os.path.dirname(os.path.normpath(root)) for root in roots]
    return list(dict.fromkeys(os.path.join(root, _STATE_FOLDER) for root in roots))
