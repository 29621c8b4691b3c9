"""The samples of `expert_step.py`, few with many images, many with none; and a cost model by which short packs cost as long ones.

Packs of `SEQUENCE_LENGTH` tokens are read and trained on quickly, and cost what packs `STANDS_FOR` times as long would: each
token and patch stands for so many. Attention windows keep their size, and there are so many more of them.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from counting import CORPUS
from loader_corpus import run_here
from PIL import Image

PROFILE = "bench"
SEQUENCE_LENGTH = 512
STANDS_FOR = 16
MODEL = "qwen2_5_vl_vit+qwen3_30b_a3b"
"""A published vision encoder before a published language model with experts."""
NUM_IMAGES = 200
WORDS = "a ship sails by the bay with crates of tea and salt while rain falls on the old stone pier at night".split()
Row = dict[str, Any]


def write_skewed(root: Path) -> str:
    """Packed and indexed; the dataset's folder."""
    from pipelines.index import IndexJob
    from pipelines.pack import PackJob
    from pipelines.recipe import load_recipe

    chance = random.Random(5)
    (root / "images").mkdir(parents=True)
    for number in range(NUM_IMAGES):
        size = chance.randrange(112, 253), chance.randrange(112, 253)
        Image.linear_gradient("L").resize(size).convert("RGB").save(root / "images" / f"{number}.jpg")
    sources = [_written(root, name, share, rows(chance)) for name, (share, rows) in SOURCES.items()]
    tokenizer = {"tokenizer": str(CORPUS / "tokenizer.json"), "template": "document", "eos": "<|endoftext|>"}
    profiles = {PROFILE: {**tokenizer, "image_rule": "qwen2_5_vl"}}
    recipe = {"version": 1, "name": "skewed", "output": "out", "sources": sources, "profiles": profiles}
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    logging.disable(logging.INFO)
    loaded = load_recipe(root / "recipe.yaml")
    run_tasks = run_here(loaded.output)
    packed = PackJob(loaded, run_tasks=run_tasks).run()
    counted = IndexJob(loaded.output, run_tasks=run_tasks).run()
    if packed.exit_code or counted.exit_code:
        raise RuntimeError(f"the samples of the benchmark were not packed: {packed}, {counted}")
    logging.disable(logging.NOTSET)
    return str(loaded.output)


def write_cost_model(path: Path) -> str:
    """`MODEL`, each token and patch standing for `STANDS_FOR`."""
    from plugin.cost import cost_file, cost_model

    model = cost_model(MODEL)
    # Pairs grow with the square; those within windows of a fixed size only with the number of windows.
    encoder = replace(
        model.encoder,
        linear=model.encoder.linear * STANDS_FOR,
        quadratic=model.encoder.quadratic * STANDS_FOR,
        full_quadratic=model.encoder.full_quadratic * STANDS_FOR**2,
    )
    llm = replace(model.llm, linear=model.llm.linear * STANDS_FOR, quadratic=model.llm.quadratic * STANDS_FOR**2)
    path.write_bytes(cost_file(replace(model, encoder=encoder, llm=llm)))
    return str(path)


def _written(root: Path, name: str, weight: float, rows: Iterator[Row]) -> Mapping[str, Any]:
    (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": name, "schema": "interleaved", "files": f"{name}.jsonl", "image_root": "images", "weight": weight}


def _rows(name: str, number: int, words: tuple[int, int], images: tuple[int, int]) -> Callable[[random.Random], Iterator[Row]]:
    """Samples of so many words and images, both at random."""

    def made(chance: random.Random) -> Iterator[Row]:
        for row in range(number):
            text = " ".join(chance.choices(WORDS, k=chance.randint(*words)))
            shown = [{"type": "image", "image": f"{chance.randrange(NUM_IMAGES)}.jpg"} for _ in range(chance.randint(*images))]
            yield {"id": f"{name} {row}", "content": [*shown, {"type": "text", "text": text}]}

    return made


SOURCES = {
    "texts": (5.0, _rows("texts", 1200, (20, 320), (0, 0))),
    "captions": (3.0, _rows("captions", 600, (5, 40), (1, 1))),
    "galleries": (3.0, _rows("galleries", 400, (10, 60), (3, 9))),
}
"""Name -> its share of the samples, and its rows."""
