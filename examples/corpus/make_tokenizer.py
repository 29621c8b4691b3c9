"""Trains `tokenizer.json` on the text of this corpus: a byte-level BPE with the special tokens of a Qwen2.5-VL style model.

It stands for a real model's tokenizer, which is larger and not ours to ship. Run: python make_tokenizer.py DATASET, where
DATASET is this corpus as `bayplan pack` made it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VOCABULARY = 8192


def texts(dataset: Path) -> Iterator[str]:
    for file in sorted(dataset.glob("sources/*/*.jsonl")):
        if file.name.endswith(".quarantine.jsonl"):
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            contents = [record["content"]] if "content" in record else [turn["content"] for turn in record["messages"]]
            yield from (part["text"] for content in contents for part in content if part["type"] == "text")


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(Path(sys.argv[1])), trainer)
    tokenizer.save(str(Path(__file__).with_name("tokenizer.json")), pretty=False)


if __name__ == "__main__":
    main()
