"""Those that compete: ours, and stock Energon over JSONL with loose images and over tars. Each gives packs of the same form.

All encode with one `SampleEncoder`, decode with `plugin.tensors`, plan with `plugin.packing`, build with `plugin.batch` and
collect garbage as seldom. Stock Energon packs through its own hooks: it encodes a sample and reads its images before it is in
the packing buffer, one by one, and hands nothing back. Without decoding, files are read and nothing is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from loader_corpus import PROFILE, SOURCE, Layouts
from megatron.energon import (
    Cooker,
    CrudeSample,
    FileStore,
    Sample,
    TaskEncoder,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
    stateless,
)
from megatron.energon.cache import CachePool, FileStoreCachePool
from megatron.energon.task_encoder import cooker

from indexer.encode import EncodedSample
from indexer.profile import open_stored
from indexer.tokenizers import bound_threads
from plugin.batch import build
from plugin.batch.torch_batch import TorchBatch
from plugin.loader import CHECKPOINT_SECONDS, PACKS_BETWEEN_COLLECTIONS, PackLoader
from plugin.packing import Samples, pack, shuffled
from plugin.sample_builder import SampleBuilder
from plugin.settings import PackSettings, Peers
from plugin.task_encoder import Pack, PackingTaskEncoder
from plugin.tensors import image_tensors


@edataclass
class FullSample(Sample):  # type: ignore[misc]
    """What stock Energon holds in its packing buffer: the record and the bytes of its images, or their places in a cache."""

    record: dict[str, Any]
    files: list[Any]
    encoded: EncodedSample | None = None
    patches: tuple[int, ...] = ()
    """Of each image."""


@stateless  # type: ignore[untyped-decorator]
def cook_jsonl(sample: CrudeSample, images: FileStore[bytes]) -> FullSample:
    record = sample["json"]
    return FullSample(**basic_sample_keys(sample), record=record, files=[images.get(one["ref"]) for one in record["images"]])


@stateless  # type: ignore[untyped-decorator]
@cooker(need_cache=True)  # type: ignore[untyped-decorator]
def cook_jsonl_cached(sample: CrudeSample, images: FileStore[bytes], cache: CachePool) -> FullSample:
    """Images are fetched by the threads of Energon's cache while the sample waits in the buffer."""
    record = sample["json"]
    files = [cache.get_lazy(images, one["ref"]) for one in record["images"]]
    return FullSample(**basic_sample_keys(sample), record=record, files=files)


@stateless  # type: ignore[untyped-decorator]
def cook_tar(sample: CrudeSample) -> FullSample:
    record = orjson.loads(sample["json"])
    return FullSample(
        **basic_sample_keys(sample), record=record, files=[sample[f"{place}.jpg"] for place in range(len(record["images"]))]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImageRow:
    width: int
    height: int
    num_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What `SampleBuilder` asks of an index row, from a record: stock Energon has no index."""

    source: str
    num_tokens: int
    num_text_tokens: int
    num_patches: int
    images: Sequence[_ImageRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    row: Any
    number: int = 0


class StockEncoder(TaskEncoder[FullSample, FullSample, Pack, Pack]):  # type: ignore[misc]
    """Stock Energon with its own packing."""

    __default_failure_tolerance__ = 1
    decoder = None

    def __init__(self, dataset_url: str, cook: Any, settings: PackSettings, *, decodes: bool) -> None:
        bound_threads(1)
        opened = open_stored(dataset_url, PROFILE)
        rule = opened.profile.images.rule
        assert rule is not None
        self.cookers = (Cooker(cook),)
        self.limits = settings.limits(Peers())
        self.fingerprint = opened.fingerprint
        self.samples = SampleBuilder(
            encoder=opened.encoder,
            tensors=image_tensors(rule, opened.profile.images.parameters),
            pad_id=settings.pad_id,
            with_pixels=decodes,
        )

    @stateless  # type: ignore[untyped-decorator]
    def preencode_sample(self, sample: FullSample) -> FullSample:
        """Lengths must be known before the packing."""
        sample.encoded = self.samples.encoder.encode(sample.record)
        sample.patches = tuple(self._num_patches(image) for image in sample.record["images"])
        return sample

    def _num_patches(self, image: dict[str, Any]) -> int:
        assert self.samples.tensors is not None
        time, height, width = self.samples.tensors.target(image["width"], image["height"]).grid
        return time * height * width

    def select_samples_to_pack(self, samples: list[FullSample]) -> list[list[FullSample]]:
        columns = Samples.of(
            [len(sample.encoded.ids) for sample in samples],
            num_images=[len(sample.files) for sample in samples],
            num_patches=[sum(sample.patches) for sample in samples],
        )
        packing = pack(columns, self.limits, flush=True)
        active = WorkerConfig.active_worker_config
        packs = shuffled(packing.packs, worker_seed=active.worker_seed(), sample_index=self.current_sample_index)
        return [[samples[place] for place in one.tolist()] for one in packs]

    @stateless  # type: ignore[untyped-decorator]
    def pack_selected_samples(self, samples: list[FullSample]) -> Pack:
        batch = build(
            [self._placed(sample) for sample in samples],
            form=self.samples.form,
            sequence_length=self.limits.sequence_length,
            alignment=self.limits.alignment,
            pad_id=self.samples.pad_id,
            fingerprint=self.fingerprint,
        )
        return Pack(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            __sources__=tuple(source for sample in samples for source in sample.__sources__ or ()),
            packed=batch.to_torch(),
        )

    def _placed(self, sample: FullSample) -> Any:
        encoded, record = sample.encoded, sample.record
        assert encoded is not None
        images = [
            _ImageRow(width=one["width"], height=one["height"], num_patches=number)
            for one, number in zip(record["images"], sample.patches, strict=True)
        ]
        num_text = len(encoded.ids) - int(encoded.feature_mask.sum()) - 2 * len(images)
        row: Any = _Row(
            source=SOURCE,
            num_tokens=len(encoded.ids),
            num_text_tokens=max(0, num_text),
            num_patches=sum(sample.patches),
            images=images,
        )
        files = [file if isinstance(file, bytes) else file.get(sample) for file in sample.files]
        made = [self.samples.image(row, span.index, files[span.index]) for span in encoded.image_spans]
        return self.samples.sample(_Chosen(row=row), record["id"], encoded, made)

    @stateless  # type: ignore[untyped-decorator]
    def batch(self, samples: list[Pack]) -> Pack:
        (one,) = samples
        return one


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One stream to be measured."""

    contestant: str
    layouts: Layouts
    profile_url: str
    """Our dataset on the local disk: stock Energon takes the encoder from there."""
    settings: PackSettings
    decodes: bool
    num_workers: int
    shuffle_size: int
    repeat: bool = True


def packs_of(run: Run) -> Iterator[TorchBatch]:
    """The packs of a contestant, training order."""
    return _ours(run) if run.contestant in (OURS, OURS_THREADS) else _stock(run)


OURS = "ours"
OURS_THREADS = "ours, 2 threads decode"
_STOCK = {
    "energon jsonl": (cook_jsonl, "jsonl"),
    "energon jsonl, cached": (cook_jsonl_cached, "jsonl"),
    "energon tars": (cook_tar, "tars"),
    "energon tars, large": (cook_tar, "large_tars"),
}
CONTESTANTS = (OURS, OURS_THREADS, *_STOCK)


def _ours(run: Run) -> Iterator[TorchBatch]:
    settings = replace(run.settings, num_decode_threads=2 if run.contestant == OURS_THREADS else 1)
    encoder = PackingTaskEncoder(run.layouts.ours, PROFILE, settings)
    if not run.decodes:  # images are still read: no setting does that, since nobody would want it
        encoder.builder._samples = replace(encoder.builder._samples, with_pixels=False)
    path = f"{run.layouts.ours}/index/{PROFILE}/dataset.yaml" if run.repeat else run.layouts.ours_once
    return PackLoader(_loader(run, path, encoder), encoder)


def _stock(run: Run) -> Iterator[TorchBatch]:
    cook, layout = _STOCK[run.contestant]
    path = getattr(run.layouts, layout)
    encoder = StockEncoder(run.profile_url, cook, run.settings, decodes=run.decodes)
    pool: dict[str, Any] = {}
    if cook is cook_jsonl_cached:
        folder = Path(run.profile_url).parent / "cache"
        folder.mkdir(exist_ok=True)
        pool["cache_pool"] = FileStoreCachePool(parent_cache_dir=folder, num_workers=run.settings.num_threads)
    for one in _loader(run, path, encoder, **pool):
        yield one.packed


def _loader(run: Run, path: str, encoder: Any, **options: Any) -> Any:
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=run.num_workers),
        batch_size=None,
        packing_buffer_size=run.settings.buffer_size,
        shuffle_buffer_size=run.shuffle_size,
        max_samples_per_sequence=None,
        task_encoder=encoder,
        repeat=run.repeat,
    )
    return get_savable_loader(
        dataset,
        checkpoint_every_sec=CHECKPOINT_SECONDS,
        prefetch_factor=2,
        gc_collect_every_n_steps=PACKS_BETWEEN_COLLECTIONS,
        **options,
    )
