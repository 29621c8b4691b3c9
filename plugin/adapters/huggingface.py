"""Hugging Face: `class PackTrainer(BayplanTrainerMixin, Trainer)` over a `PackLoader`, a callback that saves and restores it with
Trainer's checkpoints, and the same for accelerate.

Nothing here is prepared by accelerate: a stream that is cut by rank already would be cut again, or read by rank 0 alone. Pixels
travel as bytes, an eighth of what they are once normalised, which comes last and on the device.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from packer.format.errors import UsageError
from plugin.adapters.rank_states import HasState, restore_rank, save_rank
from plugin.balance import Mode
from plugin.batch import to_hf
from plugin.batch.facts import IGNORED
from plugin.batch.torch_batch import TorchBatch
from plugin.reorder import BalancedPackLoader

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

log = logging.getLogger(__name__)

_PACK = "pack"


class TrainerPacks:
    """The packs of a loader as Trainer's loop takes them: dicts in host memory, without an end and without a length."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> TrainerPacks:
        return self

    def __next__(self) -> dict[str, Any]:
        """`pack`, and what Trainer counts before it: `input_ids` and `labels` [1, T], views of the pack."""
        pack = self._next_pack()
        # Trainer would take an end for that of an epoch, and ranks come to it at different steps.
        return {_PACK: pack, "input_ids": pack.views["tokens"][None], "labels": pack.views["labels"][None]}

    def _next_pack(self) -> TorchBatch:
        for _ in range(2):
            try:
                return next(self._loader)  # type: ignore[no-any-return]
            except StopIteration:
                log.info("the data of this rank begins anew")
        raise UsageError(
            "found no pack for this rank in a whole pass over the data, expected one; train on fewer ranks, or add data (a "
            "balanced loader ends for good: balance a stream that never ends)"
        )


class BayplanTrainerMixin(_Trainer):
    """Before `Trainer` among the bases; `train_dataset` is a `PackLoader` of this process's rank, or a `BalancedPackLoader`. Adds
    `BayplanCallback`.

    One pack is one batch: `per_device_train_batch_size` 1, and `gradient_accumulation_steps` for more.
    """

    takes_mrope: bool | None = None
    """Whether the model takes positions of Qwen2-VL's kind; None: as its configuration says."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As `Trainer`.

        Raises:
            UsageError: arguments under which Trainer would skip, cut or repeat data, all at once.
        """
        super().__init__(*arguments, **named)
        loader: Any = self.train_dataset
        if not hasattr(loader, "save_state"):
            raise UsageError(f"found a train_dataset of {type(loader).__name__}, expected a `PackLoader`")
        if hasattr(self.eval_dataset, "save_state"):
            raise UsageError(
                "found a stream of packs as eval_dataset, where ranks have different numbers of packs and Trainer would wait for "
                "ever; evaluate in a loop of your own over `PackLoader.open(..., split='val')`"
            )
        refuse_unfit(self.args)
        self._refuse_other_place(loader)
        if isinstance(loader, BalancedPackLoader):
            sharded = self.is_fsdp_enabled or is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
            refuse_unfit_balance(loader, self.args.gradient_accumulation_steps, self.args.max_steps, shards_parameters=sharded)
        self._data_callback = next((each for each in self.callback_handler.callbacks if isinstance(each, BayplanCallback)), None)
        if self._data_callback is None:
            self._data_callback = BayplanCallback(loader)
            self.add_callback(self._data_callback)
        # Such models average each pack alone, and Trainer the packs: tokens of short answers would weigh more than others.
        if not self.model_accepts_loss_kwargs and self.compute_loss_func is None:
            self.compute_loss_func = loss_per_token

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """As `Trainer`'s; the data goes on where that checkpoint has it."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        assert self._data_callback is not None
        self._data_callback.resume_folder = folder or None
        if folder and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            refuse_unread_weights(self.model, folder)
        return super().train(resume_from_checkpoint, *arguments, **named)

    def get_train_dataloader(self) -> Any:
        """The loader's packs, unprepared."""
        return TrainerPacks(self.train_dataset)

    def arguments_of(self, pack: TorchBatch) -> dict[str, Any]:
        """What the model is called with, on the device. Override it for a model that takes its images otherwise."""
        loader: Any = self.train_dataset
        refuse_other_image_token(pack, self.model.config)  # type: ignore[union-attr]
        mrope = takes_mrope(self.model.config) if self.takes_mrope is None else self.takes_mrope  # type: ignore[union-attr]
        return to_hf(pack.to(self.args.device), normalise=loader.normalise, mrope=mrope)

    def _prepare_inputs(self, inputs: Any) -> Any:
        if _PACK in inputs:
            inputs = self.arguments_of(inputs[_PACK])
        return super()._prepare_inputs(inputs)

    def _refuse_other_place(self, loader: Any) -> None:
        """A rank of data is what shares one pack: tensor-parallel ranks do."""
        if (parts := self.get_cp_size() * self.get_sp_size()) > 1:
            raise UsageError(
                f"found {parts} ranks to a sequence (context or sequence parallel), expected 1: cut by Trainer, samples of a "
                "pack see each other; take Megatron Bridge for it"
            )
        tensor = self.get_tp_size()
        here = (self.args.process_index // tensor, self.args.world_size // tensor)
        if (loader.rank, loader.world_size) != here:
            raise UsageError(
                f"found a loader of rank {loader.rank} of {loader.world_size}, expected rank {here[0]} of {here[1]}, where this "
                f"process is; open it with rank={'args.process_index' if tensor == 1 else here[0]} and "
                f"world_size={'args.world_size' if tensor == 1 else here[1]}"
            )


class BayplanCallback(TrainerCallback):
    """Writes the data state of each rank into every checkpoint, and restores it before the first step of a resumed run."""

    def __init__(self, loader: Any, *, starts_over: bool = False, log_every_steps: int = 0) -> None:
        """Args:
        starts_over: resume the model and take the data from its start.
        log_every_steps: a line of counters on each rank's own log; 0: none.
        """
        self._loader, self._starts_over, self._log_every_steps = loader, starts_over, log_every_steps
        self.resume_folder: str | None = None
        """The checkpoint that is resumed from; None: that of the step in `output_dir`. Set by the mixin."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Raises:
        UsageError: the checkpoint has no data state, or one that does not fit.
        """
        refuse_unfit(args)
        if not state.global_step:
            return
        if self._starts_over:
            log.warning("the data starts over; the model has trained for %d steps", state.global_step)
            return
        folder = self.resume_folder or _checkpoint(args, state)
        restore_rank(self._loader, folder, step=state.global_step)
        log.info("the data goes on after pack %d, from %s", self._loader.num_packs, folder)

    def on_save(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        save_rank(self._loader, _checkpoint(args, state), step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        if self._log_every_steps and state.global_step % self._log_every_steps == 0:
            log.info("step %d: %s", state.global_step, self._loader.log_line())

    def on_train_end(self, args: Any, state: Any, control: Any, **context: Any) -> None:
        """Ends what a balanced loader has running: other ranks would wait for its part in the batch after the last."""
        if isinstance(self._loader, BalancedPackLoader):
            self._loader.close()


def _checkpoint(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def refuse_unfit(args: Any) -> None:
    """Raises:
    UsageError: each of `TrainingArguments` that does not go with a stream of packs, and why.
    """
    needs = {
        "max_steps": (args.max_steps > 0, "a number of steps: the stream has no end"),
        "per_device_train_batch_size": (args.per_device_train_batch_size == 1, "1: a pack is a batch"),
        "ignore_data_skip": (args.ignore_data_skip, "True: the stream resumes by its state, and skipping would lose packs"),
        "remove_unused_columns": (not args.remove_unused_columns, "False: a pack's keys are not the model's"),
        "dataloader_num_workers": (args.dataloader_num_workers == 0, "0: the loader has its own `num_workers`"),
        "auto_find_batch_size": (not args.auto_find_batch_size, "False: beginning again would lose packs"),
        "n_gpu": (args.n_gpu <= 1, "1: start a process for each GPU, with `torchrun` or `accelerate launch`"),
    }
    wrong = [f"{name} {getattr(args, name)!r}, expected {why}" for name, (fits, why) in needs.items() if not fits]
    if wrong:
        raise UsageError(f"these TrainingArguments do not go with a stream of packs: found {'; '.join(wrong)}")


def refuse_unfit_balance(loader: BalancedPackLoader, accumulated: int, num_steps: int, *, shards_parameters: bool) -> None:
    """Args:
        accumulated: packs of a rank to an optimizer step.
        shards_parameters: as ZeRO-3 and FSDP do.

    Raises:
        UsageError: steps would take others than the packs that were dealt for them.
    """
    wrong = {loader.num_microbatches(step) for step in (0, max(0, num_steps - 1))} - {accumulated}
    if wrong:
        raise UsageError(
            f"found a balanced loader with num_microbatches {min(wrong)} and gradient_accumulation_steps {accumulated}, expected "
            "the same: packs are dealt within an optimizer step; make it with num_microbatches=args.gradient_accumulation_steps"
        )
    if shards_parameters and accumulated > 1 and loader.mode is Mode.DP:
        log.warning(
            "packs are balanced for ranks that meet once a step, and under ZeRO-3 or FSDP they meet at each microbatch: give the "
            "balanced loader topology=Topology(num_ranks=%d, synchronises='microbatch')",
            loader.world_size,
        )


def refuse_other_image_token(pack: TorchBatch, config: Any) -> None:
    """Raises:
    UsageError: the profile's tokenizer has another id for what stands for an image than the model's configuration.
    """
    expected = getattr(config, "image_token_id", None)
    found = pack.views["tokens"][pack.views["feature_mask"].bool()]
    if expected is not None and len(found) and not bool((found == expected).all()):
        raise UsageError(
            f"found image tokens of id {int(found[found != expected][0])} in a pack, expected {expected} as in the model's "
            "configuration (image_token_id): train with the model whose tokenizer the profile counted with, or make a profile "
            "with the model's"
        )


def refuse_unread_weights(model: Any, folder: str) -> None:
    """Trainer takes weights by their names in the checkpoint, which for Qwen2.5-VL and others are not those in the model; it then
    goes on with the weights that it had, and says so in a warning only (transformers issue 43701).

    Raises:
        UsageError: the checkpoint has such names, and the model was not made from it.
    """
    foreign = _weight_names(folder) - set(model.state_dict())
    if foreign and os.path.realpath(model.name_or_path or "") != os.path.realpath(folder):
        raise UsageError(
            f"found {len(foreign)} weights in {folder} by other names than the model's, the first {min(foreign)}: Trainer would "
            f"resume without them; make the model with `{type(model).__name__}.from_pretrained({folder!r})`, and resume then"
        )


def _weight_names(folder: str) -> set[str]:
    """In a checkpoint of whole weights; none where there are only those of an adapter."""
    index = os.path.join(folder, SAFE_WEIGHTS_INDEX_NAME)
    if os.path.exists(index):
        with open(index) as file:
            return set(json.load(file)["weight_map"])
    weights = os.path.join(folder, SAFE_WEIGHTS_NAME)
    if not os.path.exists(weights):
        return set()
    with safe_open(weights, framework="pt") as stored:
        return set(stored.keys())


def takes_mrope(config: Any) -> bool:
    """Whether a model's configuration is of Qwen2-VL's kind, with positions of three dimensions."""
    text = config.get_text_config()
    # Named so before and since transformers 5.
    return any(_has_sections(getattr(text, name, None)) for name in ("rope_parameters", "rope_scaling"))


def _has_sections(rope: Any) -> bool:
    if not isinstance(rope, Mapping):
        return False
    return "mrope_section" in rope or any(map(_has_sections, rope.values()))


def loss_per_token(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Mean cross entropy over all tokens in the loss of a step: of all packs it accumulates, on all ranks."""
    logits = outputs["logits"][:, :-1].float()
    shifted = labels[:, 1:].to(logits.device)
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="sum")
    number = (shifted != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / number


def keep_data_state(accelerator: Any, loader: HasState) -> tuple[Callable[[], None], Callable[[], None]]:
    """Let `accelerator.save_state` and `load_state` take the loader along, each rank its own state.

    Not `register_for_checkpointing`, which writes what rank 0 has and gives it to every rank.

    Returns:
        What undoes it: of saving, of loading.

    Raises:
        UsageError: a balanced loader, and an accelerator that accumulates another number of packs.
    """
    if isinstance(loader, BalancedPackLoader) and accelerator.gradient_accumulation_steps > 1:
        refuse_unfit_balance(loader, accelerator.gradient_accumulation_steps, 1, shards_parameters=False)
    saving = accelerator.register_save_state_pre_hook(lambda models, weights, folder: save_rank(loader, folder))
    loading = accelerator.register_load_state_pre_hook(lambda models, folder: restore_rank(loader, folder))
    return saving.remove, loading.remove
