"""Stock Energon with our encoding, pixels, packing plan and batch: what differs from ours is where samples come from and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from loader_data import PROFILE, SOURCE, image_name
from megatron.energon import (
    Cooker,
    CrudeSample,
    FileStore,
    Sample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_loader,
    get_train_dataset,
    stateless,
)

from indexer.encode import EncodedSample
from indexer.profile import open_stored
from indexer.tokenizers import bound_threads
from plugin.batch import PackSample, PatchImage, build
from plugin.batch.torch_batch import TorchBatch
from plugin.packing import Samples, pack, shuffled
from plugin.settings import PackSettings, Peers
from plugin.tensors import image_tensors


@edataclass
class Read(Sample):  # type: ignore[misc]
    """A cooked sample."""

    number: int
    record: dict[str, Any]
    files: list[bytes]
    encoded: EncodedSample | None = None
    num_patches: int = 0


@edataclass
class Packed(Sample):  # type: ignore[misc]
    """What leaves the loader."""

    packed: TorchBatch


@stateless  # type: ignore[untyped-decorator]
def cook_loose(sample: CrudeSample, images: FileStore) -> Read:
    """Its images are files of their own."""
    document = sample["json"]
    places = range(len(document["record"]["images"]))
    files = [images.get(image_name(document["number"], place), sample) for place in places]
    return Read(**basic_sample_keys(sample), **document, files=files)


@stateless  # type: ignore[untyped-decorator]
def cook_shard(sample: CrudeSample) -> Read:
    """Its images stand beside it in the tar."""
    document = orjson.loads(sample["json"])
    files = [sample[f"{place}.png"] for place in range(len(document["record"]["images"]))]
    return Read(**basic_sample_keys(sample), **document, files=files)


class PeerTaskEncoder(TaskEncoder[Read, Read, Packed, Packed]):  # type: ignore[misc]
    """Encodes before packing, since a plan needs lengths; decodes only what was packed."""

    decoder = None

    def __init__(self, dataset: str, settings: PackSettings, cook: Any, *, decodes: bool) -> None:
        bound_threads(1)
        opened = open_stored(dataset, PROFILE)
        assert opened.profile.images.rule is not None, "the profile has images"
        self._encoder = opened.encoder
        self._tensors = image_tensors(opened.profile.images.rule, opened.profile.images.parameters)
        self._settings = settings
        self._limits = settings.limits(Peers())
        self._decodes = decodes
        self.cookers = (Cooker(cook),)

    @stateless  # type: ignore[untyped-decorator]
    def preencode_sample(self, sample: Read) -> Read:
        """Its ids and what a plan must know."""
        sample.encoded = self._encoder.encode(sample.record)
        sizes = [(entry["width"], entry["height"]) for entry in sample.record["images"]]
        sample.num_patches = sum(self._tensors.target(*size).num_patches for size in sizes)
        return sample

    def select_samples_to_pack(self, samples: list[Read]) -> list[list[Read]]:
        """Nothing can be handed back here."""
        columns = Samples.of(
            [len(sample.encoded.ids) for sample in samples if sample.encoded is not None],
            num_images=[len(sample.files) for sample in samples],
            num_patches=[sample.num_patches for sample in samples],
            age=[0] * len(samples),
        )
        packing = pack(columns, self._limits, flush=True, max_age=self._settings.max_age)
        packs = shuffled(packing.packs, worker_seed=0, sample_index=self.current_sample_index)
        return [[samples[place] for place in one.tolist()] for one in packs]

    @stateless  # type: ignore[untyped-decorator]
    def pack_selected_samples(self, samples: list[Read]) -> Packed:
        """Decode and lay into one buffer."""
        batch = build(
            [self._packed(sample) for sample in samples],
            form=self._tensors.form,
            sequence_length=self._limits.sequence_length,
            alignment=self._limits.alignment,
            pad_id=self._settings.pad_id,
        )
        key = ",".join(sample.__key__ for sample in samples)
        return Packed(__key__=key, __restore_key__=(), packed=batch.to_torch())

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: list[Packed]) -> Packed:
        (one,) = samples
        return one

    def _packed(self, sample: Read) -> PackSample:
        assert sample.encoded is not None, "samples are encoded before they are packed"
        images = tuple(self._image(sample, span.index) for span in sample.encoded.image_spans)
        return PackSample(
            sample_id=sample.record["id"],
            source=SOURCE,
            row=sample.number,
            encoded=sample.encoded,
            images=images,
            num_text_tokens=0,
            num_patches=sample.num_patches,
        )

    def _image(self, sample: Read, index: int) -> PatchImage:
        if self._decodes:
            made = self._tensors.patches(sample.files[index])
            return PatchImage(grid_thw=made.grid, pixels=made.pixels)
        entry = sample.record["images"][index]
        return PatchImage(grid_thw=self._tensors.target(entry["width"], entry["height"]).grid, pixels=None)


def open_peer(
    metadataset: Path, dataset: str, settings: PackSettings, cook: Any, *, num_workers: int, decodes: bool
) -> tuple[Any, Any]:
    """The loader, and its iterator over packs as ours hands them out."""
    packs = get_train_dataset(
        metadataset,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=num_workers),
        batch_size=1,
        packing_buffer_size=settings.buffer_size,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=PeerTaskEncoder(dataset, settings, cook, decodes=decodes),
    )
    loader = get_loader(packs)
    return loader, (one.packed for one in loader)
