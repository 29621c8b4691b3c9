"""Trains a tiny vision-language model from a packed dataset on CPUs: one process, or several with torchrun over gloo.

    python examples/train_tiny_vlm.py --dataset demo-dataset --profile qwen25vl --save checkpoints --losses losses.jsonl
    torchrun --standalone --nproc-per-node 2 examples/train_tiny_vlm.py --dataset demo-dataset --profile qwen25vl

What a trainer of one's own needs: `accumulate` (losses of packs are summed, and divided once by the loss tokens of the whole
global batch), `reduce_gradients` (a rank whose packs hold no image still takes part), and a checkpoint with the loader's state.
With `--balance` the packs of a global batch are dealt anew among the ranks: each step sees the same packs, and has the same loss.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tiny_vlm import TinyVlm, VlmSizes
from torch import Tensor, nn

from indexer.image_rules import image_rule
from indexer.profile import open_stored
from packer.format.errors import BayplanError, UsageError

if TYPE_CHECKING:
    from plugin import BalancedPackLoader, PackLoader
    from plugin.batch.torch_batch import TorchBatch

log = logging.getLogger("train_tiny_vlm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train, whatever the data and the model."""

    steps: int
    """The last step; one that resumes counts from the beginning of the run it goes on with."""
    accumulation: int = 1
    """Packs of a rank in a step."""
    learning_rate: float = 1e-3
    save: Path | None = None
    """A folder all ranks see."""
    save_every: int = 100
    """Steps; the last one is saved too."""
    resume: bool = False
    """Go on from the newest complete checkpoint in `save`."""
    losses: Path | None = None
    """One JSON line a step, written by rank 0."""


def train(loader: PackLoader | BalancedPackLoader, model: TinyVlm, settings: Settings) -> list[float]:
    """Loss per token of each step taken, of the whole global batch: the same on every rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    checkpoints = Checkpoints(settings.save, model, optimizer, loader)
    done = checkpoints.restore() if settings.resume else 0
    losses = LossFile(settings.losses if rank() == 0 else None, done)
    packs, found = iter(loader), []
    for step in range(done + 1, settings.steps + 1):
        loss, num_loss_tokens = accumulate(model, packs, settings.accumulation)
        reduce_gradients(model, num_loss_tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss)
        losses.add(step=step, loss=loss, num_loss_tokens=num_loss_tokens)
        log.info("step %d: loss %.4f of %d tokens; %s", step, loss, num_loss_tokens, loader.log_line())
        if step == settings.steps or step % settings.save_every == 0:
            checkpoints.save(step)
    return found


def accumulate(model: TinyVlm, packs: Iterator[TorchBatch], number: int) -> tuple[float, int]:
    """Adds up the gradients of this rank's packs of a step; loss per token and loss tokens of all ranks' packs."""
    total = torch.zeros(2, dtype=torch.float64)
    for _ in range(number):
        loss, num_loss_tokens = model.loss(next(packs))
        loss.backward()
        total += torch.tensor([loss.item(), num_loss_tokens], dtype=torch.float64)
    loss_sum, num_loss_tokens = sum_over_ranks(total).tolist()
    return loss_sum / max(num_loss_tokens, 1), int(num_loss_tokens)


def reduce_gradients(model: nn.Module, num_loss_tokens: int) -> None:
    """Sums over ranks, per loss token of the global batch: packs differ in those, so a mean of the ranks' means is wrong."""
    parameters = list(model.parameters())
    # Ranks without an image have no gradients for the vision encoder: they take part with zeros, or the others would wait.
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    flat = sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients])) / max(num_loss_tokens, 1)
    for parameter, gradient in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def sum_over_ranks(tensor: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Checkpoints:
    """`step-000100/rank-0-of-2.pt`: each rank writes its own file, since each reads its own part of the data."""

    def __init__(
        self, folder: Path | None, model: TinyVlm, optimizer: torch.optim.Optimizer, loader: PackLoader | BalancedPackLoader
    ) -> None:
        self.folder, self.model, self.optimizer, self.loader = folder, model, optimizer, loader

    def save(self, step: int) -> None:
        if self.folder is None:
            return
        file = self._file(self.folder / f"step-{step:06}", rank())
        file.parent.mkdir(parents=True, exist_ok=True)
        parts = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        temporary = file.with_suffix(".tmp")
        torch.save(parts | {"loader": self.loader.save_state()}, temporary)
        temporary.replace(file)

    def restore(self) -> int:
        """The step of the newest checkpoint that all ranks have written."""
        folders = sorted(self.folder.glob("step-*"), reverse=True) if self.folder else []
        ranks = range(world_size())
        complete = [folder for folder in folders if all(self._file(folder, one).exists() for one in ranks)]
        if not complete:
            raise UsageError(
                f"found no checkpoint of {world_size()} ranks in {self.folder}, expected one; resume with --save and as many "
                "ranks as before"
            )
        # Not weights alone: the loader's state holds objects. Load only checkpoints of your own.
        saved = torch.load(self._file(complete[0], rank()), weights_only=False)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        from plugin import BalancedPackLoader
        from plugin.adapters.data_state import of_unbalanced

        # With --balance the loader knows both kinds of state; without, the one inside is wanted.
        state = saved["loader"] if isinstance(self.loader, BalancedPackLoader) else of_unbalanced(saved["loader"])
        self.loader.restore_state(state)
        return int(saved["step"])

    @staticmethod
    def _file(folder: Path, rank: int) -> Path:
        return folder / f"rank-{rank}-of-{world_size()}.pt"


class LossFile:
    """JSON lines. Those of steps after a restored one are dropped: they are taken again."""

    def __init__(self, path: Path | None, done: int) -> None:
        self.path = path
        if path is not None:
            lines = path.read_text().splitlines() if done and path.exists() else []
            path.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= done))

    def add(self, **values: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")


def open_loader(arguments: argparse.Namespace) -> PackLoader | BalancedPackLoader:
    """The packs of this rank: as they come, or dealt among the ranks of each global batch."""
    from plugin import BalancedPackLoader, BalanceSettings, PackLoader, PackSettings  # after --help

    pack_settings = PackSettings(
        sequence_length=arguments.sequence_length,
        max_patches_per_pack=arguments.max_patches_per_pack,
        buffer_size=arguments.buffer_size,
        cost=arguments.cost if arguments.balance else None,
    )
    loader = PackLoader.open(
        arguments.dataset,
        arguments.profile,
        pack_settings,
        rank=rank(),
        world_size=world_size(),
        num_workers=arguments.num_workers,
        seed=arguments.seed,
    )
    if not arguments.balance:
        return loader
    # Losses are summed over all packs and divided once (`accumulate`), so it does not matter which rank trains which.
    balance = BalanceSettings(mode=arguments.balance, loss_per_token=True)
    return BalancedPackLoader(loader, num_microbatches=arguments.accumulation, settings=balance)


def build_model(arguments: argparse.Namespace, loader: PackLoader | BalancedPackLoader) -> TinyVlm:
    """Of the profile's vocabulary and patches. The seed gives every rank the same weights, so none are sent."""
    opened = open_stored(arguments.dataset, arguments.profile)
    images = opened.profile.images
    patch_size = {"patch_size": image_rule(images.rule, images.parameters).patch_size} if images.rule else {}
    torch.manual_seed(arguments.seed)
    sizes = VlmSizes(
        vocab_size=opened.encoder.tokenizer.vocab_size,
        hidden=arguments.hidden,
        layers=arguments.layers,
        vision_layers=arguments.layers,
        **patch_size,
    )
    return TinyVlm(sizes, loader.normalise)


def parsed(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tiny vision-language model from a packed dataset.")
    parser.add_argument("--dataset", required=True, help="path or URL, packed and indexed")
    parser.add_argument("--profile", required=True, help="one of its profiles")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulation", type=int, default=1, help="packs of a rank in a step")
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens of a pack")
    parser.add_argument("--max-patches-per-pack", type=int, default=8192, help="bounds the memory of the vision encoder")
    parser.add_argument("--buffer-size", type=int, default=1000, help="samples to choose from when packing")
    parser.add_argument("--num-workers", type=int, default=2, help="of the loader; 0: in this process")
    parser.add_argument(
        "--balance",
        nargs="?",
        const="auto",
        choices=["auto", "dp", "fsdp", "local"],
        help="deal the packs of a step among the ranks by cost; auto: dp, as ranks of this script meet once a step",
    )
    parser.add_argument(
        "--cost",
        metavar="NAME|FILE",
        default="qwen2_5_vl_vit+qwen2_5_7b",
        help="with --balance, what packs cost: ENCODER+LLM of plugin.cost, or a file as `bayplan calibrate` writes it",
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2, help="of the decoder, and of the vision encoder")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--save", type=Path, help="folder of checkpoints, which all ranks see")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --save")
    parser.add_argument("--losses", type=Path, help="write one JSON line a step")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    arguments = parsed(words)
    torch.use_deterministic_algorithms(True)
    starts_world = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if starts_world:
        dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING, format="%(message)s")
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in fields(Settings)})
    with open_loader(arguments) as loader:
        train(loader, build_model(arguments, loader), settings)
    if starts_world:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BayplanError as error:
        raise SystemExit(str(error)) from error
