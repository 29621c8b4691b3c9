"""One rank of a Trainer over gloo: what it trained on, as one line of JSON. Started by `torchrun` with dataset and output, and
`balance` where packs are dealt.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from typing import Any

from loading import SETTINGS, opened
from tiny_qwen import tiny_qwen25
from transformers import Trainer, TrainingArguments

from plugin.adapters.huggingface import BayplanTrainerMixin
from plugin.reorder import BalancedPackLoader

warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")


class RankTrainer(BayplanTrainerMixin, Trainer):
    """Keeps what it was given, and how many tokens each step counted."""

    counted: list[int]
    given: list[list[str]]

    def arguments_of(self, pack: Any) -> dict[str, Any]:
        self.given.append(list(pack.batch.sample_ids))
        return super().arguments_of(pack)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.counted.append(int(num_items_in_batch))
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def main(url: str, output: str, balance: str = "") -> None:
    args = TrainingArguments(
        output_dir=output,
        max_steps=3,
        save_steps=3,
        logging_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2 if balance else 1,
        remove_unused_columns=False,
        ignore_data_skip=True,
        ddp_backend="gloo",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
    settings = replace(SETTINGS, cost="qwen2_5_vl_vit+qwen3_8b", ensure_image=True) if balance else SETTINGS
    loader: Any = opened(url, settings, rank=args.process_index, world_size=args.world_size)
    if balance:
        loader = BalancedPackLoader(loader, num_microbatches=args.gradient_accumulation_steps)
    trainer = RankTrainer(model=tiny_qwen25(), args=args, train_dataset=loader)
    trainer.counted, trainer.given = [], []
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with open(f"{output}/rank{args.process_index}.json", "w") as file:
        json.dump({"ids": trainer.given, "counted": trainer.counted, "losses": losses}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
