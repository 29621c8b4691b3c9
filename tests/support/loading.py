"""Streams of packs to test with: a counted dataset of a few hundred small samples, and what there is to compare of a pack."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import megatron.energon as energon
import torch
from byte_tokenizer import write_byte_tokenizer
from in_process import index_in_process, pack_in_process
from PIL import Image
from small_job import PROFILES, write_recipe, write_rows

from plugin.loader import PackLoader
from plugin.settings import PackSettings, Peers
from plugin.task_encoder import PackingTaskEncoder

SOURCES = """\
  - {name: docs, schema: interleaved, files: docs.jsonl, image_root: images, range_bytes: 8192}
  - {name: pics, schema: caption, files: pics.jsonl, image_root: images}
  - {name: text, schema: text, files: text.jsonl}
"""
NUM_SAMPLES = {"docs": 160, "pics": 80, "text": 120}
PROFILE = "qwen"
SETTINGS = PackSettings(sequence_length=256, max_patches_per_pack=512, buffer_size=40, num_threads=2)
EVERY_SAMPLE_ONCE = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend_epochized:
"""


def write_stream(folder: Path, *profiles: str) -> str:
    """The dataset's folder."""
    random.seed(7)
    (folder / "images").mkdir(parents=True)
    for number in range(40):
        size = (random.randrange(20, 120), random.randrange(20, 120))
        Image.effect_noise(size, 50).convert("RGB").save(folder / "images" / f"{number}.png")
    write_byte_tokenizer(folder / "tokenizer.json")
    write_rows(folder / "docs.jsonl", map(_document, range(NUM_SAMPLES["docs"])))
    captions = ({"id": f"pic {n}", "image_path": f"{n % 40}.png", "caption": f"그림 {n}"} for n in range(NUM_SAMPLES["pics"]))
    write_rows(folder / "pics.jsonl", captions)
    text = ({"id": f"text {n}", "text": "w" * random.randrange(5, 150)} for n in range(NUM_SAMPLES["text"]))
    write_rows(folder / "text.jsonl", text)
    pack_in_process(write_recipe(folder, sources=SOURCES, profiles=dict.fromkeys(profiles or [PROFILE], PROFILES[PROFILE])))
    assert index_in_process(folder / "out").exit_code == 0
    return str(folder / "out")


def _document(number: int) -> dict[str, Any]:
    images = [{"type": "image", "image": f"{random.randrange(40)}.png"} for _ in range(number % 4)]
    text = {"type": "text", "text": f"document {number} " + "x" * random.randrange(60)}
    return {"id": f"doc {number}", "content": [text, *images]}


def opened(url: str, settings: PackSettings = SETTINGS, *, profile: str = PROFILE, **arguments: Any) -> PackLoader:
    return PackLoader.open(url, profile, settings, **{"num_workers": 0, "shuffle_buffer_size": 20} | arguments)


def digest(pack: Any) -> str:
    """Of all of a pack: ids, tokens, pixels."""
    return str(blake3.blake3(pack.tensor.numpy().tobytes()).hexdigest())


def digests(stream: PackLoader, number: int) -> list[str]:
    return [digest(pack) for _, pack in zip(range(number), stream, strict=False)]


class QuickLoader(PackLoader):
    """Kills its workers, where Energon's own way out takes a second for each."""

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
            for worker in iterator._workers:
                worker.kill()
            for worker in iterator._workers:
                worker.join()
        super().close()


class Epochs:
    """Passes over every source once, ended; on one rank. Opens quickly again: encoder and index are opened once."""

    def __init__(self, url: str, settings: PackSettings = SETTINGS, peers: Peers | None = None, *, sources: str = "") -> None:
        self.url = url
        self.encoder = PackingTaskEncoder(url, PROFILE, settings, peers=peers)
        self.path = Path(url) / "index" / PROFILE / "every-sample-once.yaml"
        names = sources.split() or list(NUM_SAMPLES)
        listed = "".join(f"      - {{repetitions: 1, path: ../../sources/{n}, dataset_config: {PROFILE_FILE}}}\n" for n in names)
        self.path.write_text(EVERY_SAMPLE_ONCE + listed)

    def open(
        self,
        *,
        repeat: bool = False,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        checkpoint_seconds: float = 0,
    ) -> PackLoader:
        """Args:
        checkpoint_seconds: 0: workers note where they are before each pack, so that none is built again.
        """
        dataset = energon.get_train_dataset(
            self.path,
            worker_config=energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers),
            batch_size=None,
            shuffle_buffer_size=20,
            max_samples_per_sequence=None,
            task_encoder=self.encoder,
            repeat=repeat,
        )
        return QuickLoader(energon.get_savable_loader(dataset, checkpoint_every_sec=checkpoint_seconds), self.encoder)


PROFILE_FILE = f"profile-{PROFILE}.yaml"


def ids(packs: Iterator[Any]) -> list[str]:
    return [sample for pack in packs for sample in pack.batch.sample_ids]
