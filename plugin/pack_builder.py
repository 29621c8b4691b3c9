"""Chosen rows -> one packed batch: records and images fetched ahead, encoded, decoded and laid into one buffer. No Energon here.

Nothing is kept between packs but what is being fetched, so the same rows give the same pack in any process and after any restore.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from indexer.encode import EncodedSample
from indexer.profile import open_stored
from indexer.table import IndexRow
from indexer.tokenizers import bound_threads
from packer.format.errors import BayplanError, UsageError
from plugin.batch import EnsuredImage, ImageState, PackedBatch, PackImage, PackSample, PatchImage, build
from plugin.cost import cost_model
from plugin.decode_threads import DecodeThreads
from plugin.failures import Failure, SampleFailed
from plugin.packing import PackLimits
from plugin.prefetch import Prefetched, PrefetchPool
from plugin.read_errors import ReadCancelled, without_frames
from plugin.reader import BundleReader
from plugin.requests import ImageRead, Sample, SampleRead
from plugin.sample_builder import Chosen, SampleBuilder
from plugin.settings import PackSettings, Peers
from plugin.tensors import ImageTensors, image_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPack:
    """What became of the samples of one pack."""

    batch: PackedBatch | None
    """None: every sample was skipped."""
    failures: tuple[Failure, ...]


_Encoded = tuple[Sample, EncodedSample]
_Images = dict[int, PackImage | BayplanError]
"""By their index in the record."""


class _Asked(NamedTuple):
    """An image to decode."""

    sample: int
    """Its place in the pack."""
    row: IndexRow
    image: int
    """Its index in the record."""
    files: list[bytes]
    """Of the record's images; emptied as they are decoded. None of them: no pixels are asked for."""


class PackBuilder:
    """Builds the packs of a dataset under a profile. Made in the trainer's process; workers forked from it read by themselves."""

    def __init__(
        self,
        dataset_url: str | os.PathLike[str],
        profile: str,
        settings: PackSettings,
        peers: Peers | None = None,
        *,
        tensors: ImageTensors | None = None,
    ) -> None:
        """Open the profile's encoder; no record is read yet.

        Args:
            tensors: pixels of your own for the profile's image rule; None takes those of `plugin.tensors`.

        Raises:
            UsageError: no such profile, one whose images have no pixels yet, or settings that the peers could not share.
        """
        dataset_url = os.fspath(dataset_url)
        if not isinstance(settings, PackSettings):
            raise UsageError(f"found settings of type {type(settings).__name__}, expected PackSettings(...)")
        if not isinstance(peers, Peers | None):
            raise UsageError(f"found peers of type {type(peers).__name__}, expected Peers(...)")
        self.peers = peers or Peers()
        settings.refuse_unfit(self.peers)
        self.settings = settings
        self.limits = settings.limits(self.peers)
        bound_threads(1)  # the workers are the parallel part, and threads of a tokenizer do not survive a fork
        opened = open_stored(dataset_url, profile)
        self.profile = profile
        self.fingerprint = opened.fingerprint
        is_first = self.peers.pipeline_stage == 0
        # Who computes the loss must know which samples are blank, so then all stages look at the images.
        self._decodes = is_first or settings.on_failure == "blank"
        self._drops_pixels = self._decodes and not is_first
        rule = opened.profile.images.rule
        self.tensors = tensors
        if rule is not None and tensors is None:
            self.tensors = image_tensors(rule, opened.profile.images.parameters, draft=settings.draft)
        self.cost = None if settings.cost is None else cost_model(settings.cost)
        self._samples = SampleBuilder(
            encoder=opened.encoder,
            tensors=self.tensors,
            pad_id=settings.pad_id,
            with_pixels=self._decodes,
            cost=self.cost,
        )
        ensured = self._samples.ensured_image() if settings.ensure_image else None
        self.ensured = replace(ensured, image=self._kept(ensured.image)) if ensured else None
        self.planning_limits = _without_ensured(self.limits, self.ensured)
        """Of the samples of a pack: what an ensured image takes is kept free."""
        self.reader = BundleReader(dataset_url, check_crc=settings.check_crc)
        self._pool = self._new_pool()
        self._threads = DecodeThreads(settings.num_decode_threads)

    def _new_pool(self) -> PrefetchPool:
        return PrefetchPool(
            self.reader,
            num_threads=self.settings.num_threads,
            max_bytes=self.settings.prefetch_bytes,
            read_deadline_seconds=self.settings.read_deadline_seconds,
        )

    def fetch_ahead(self, chosen: Iterable[Chosen]) -> None:
        """Begin to read these, in their order; waits for nothing."""
        for one in chosen:
            self._submitted(one)

    def build(self, chosen: Sequence[Chosen]) -> BuiltPack:
        """One pack of these samples, in their order.

        Raises:
            UsageError: no sample. SampleFailed: one could not be used, and the settings say to stop.
        """
        with self._pool.keeping():
            found = self._encoded(chosen)
            images = self._decoded(chosen, found)
        made = [self._sample(one, of_it, own) for one, of_it, own in zip(chosen, found, images, strict=True)]
        samples = [sample for sample, _ in made if sample is not None]
        failures = tuple(failure for _, failure in made if failure is not None)
        if made and not samples:
            return BuiltPack(batch=None, failures=failures)
        batch = build(
            samples,
            form=self._samples.form,
            sequence_length=self.limits.sequence_length,
            alignment=self.limits.alignment,
            pad_id=self.settings.pad_id,
            fingerprint=self.fingerprint,
            ensure_image=self.ensured,
        )
        return BuiltPack(batch=batch, failures=failures)

    def counters(self) -> dict[str, float]:
        """Of this process's prefetch pool: see `PrefetchPool.counters`."""
        return self._pool.counters()

    def close(self) -> None:
        """End the threads and give the descriptors back; what is asked for later begins anew."""
        self._threads.close()
        self._pool.close()
        self._pool = self._new_pool()
        self.reader.close()

    def _submitted(self, one: Chosen) -> Prefetched:
        return self._pool.submit(_key(one), [SampleRead(row=one.row, with_images=self._decodes)])

    def _encoded(self, chosen: Sequence[Chosen]) -> list[_Encoded | BayplanError]:
        """The records and files of the samples, as they were counted, and their ids; an error where one is not to be had."""
        reads = [self._read(self._submitted(one), one) for one in chosen]
        rows = [one.row for one, read in zip(chosen, reads, strict=True) if isinstance(read, Sample)]
        encoded = iter(self._samples.encode(rows, [read.record for read in reads if isinstance(read, Sample)]))
        return [read if isinstance(read, BayplanError) else _with(read, next(encoded)) for read in reads]

    def _read(self, asked: Prefetched, one: Chosen) -> Sample | BayplanError:
        try:
            (read,) = asked.get()
        except BayplanError as error:
            if self.settings.on_failure == "stop" or isinstance(error, ReadCancelled):
                _stop(one, error)  # before the others are waited for
            return without_frames(error)
        assert isinstance(read, Sample)
        return read

    def _decoded(self, chosen: Sequence[Chosen], found: Sequence[_Encoded | BayplanError]) -> list[_Images]:
        """Of each sample, its images by their index."""
        asked = [
            _Asked(place, one.row, index, of_it[0].images)
            for place, (one, of_it) in enumerate(zip(chosen, found, strict=True))
            if not isinstance(of_it, BayplanError)
            for index in _indices(of_it[1])
        ]
        images: list[_Images] = [{} for _ in chosen]
        for of_it, image in zip(asked, self._threads.map(self._image, asked), strict=True):
            images[of_it.sample][of_it.image] = image
        return images

    def _image(self, asked: _Asked) -> PackImage | BayplanError:
        data = None
        if asked.files:
            data, asked.files[asked.image] = asked.files[asked.image], b""  # files may be larger than pixels: gone first
        try:
            return self._kept(self._samples.image(asked.row, asked.image, data))
        except BayplanError as error:
            return without_frames(error)

    def _sample(self, one: Chosen, found: _Encoded | BayplanError, images: _Images) -> tuple[PackSample | None, Failure | None]:
        """The sample and what failed of it; no sample where it is skipped."""
        whole = _whole(found, images)
        if not isinstance(whole, BayplanError):
            read, encoded, made = whole
            return self._placed(one, read.record["id"], encoded, made), None
        # Not raised to be caught here: its traceback would lead to the pixels of this pack, in a cycle.
        if self.settings.on_failure == "stop":
            _stop(one, whole)
        failure = Failure(sample=one.row.name, error=str(whole))
        if self.settings.on_failure == "skip":
            return None, failure
        sample, is_whole = self._rescued(one)
        return sample, None if is_whole else failure

    def _rescued(self, one: Chosen) -> tuple[PackSample, bool]:
        """The sample with every image grey that cannot be had; where its record cannot be had, what keeps its place. And whether
        all of it could be had this time.
        """
        read = self._read(self._pool.submit((_key(one), "record"), [SampleRead(row=one.row, with_images=False)]), one)
        found = read if isinstance(read, BayplanError) else _with(read, *self._samples.encode([one.row], [read.record]))
        if isinstance(found, BayplanError):
            lost = self._samples.lost(one)
            return replace(lost, images=tuple(map(self._kept, lost.images))), False
        read, encoded = found
        made = {index: self._image_or_blank(one, read.record, index) for index in _indices(encoded)}
        is_whole = all(image.state == ImageState.REAL for image in made.values())
        return self._placed(one, read.record["id"], encoded, made), is_whole

    def _image_or_blank(self, one: Chosen, record: Mapping[str, Any], index: int) -> PackImage:
        asked = ImageRead(source=one.row.source, entry=record["images"][index], sample_id=record["id"])
        try:
            (data,) = self._pool.submit((_key(one), index), [asked]).get()
            assert isinstance(data, bytes)
            return self._samples.image(one.row, index, data)
        except ReadCancelled as error:
            _stop(one, error)
        except BayplanError as error:
            without_frames(error)
            return self._samples.blank(one.row, index)

    def _placed(self, one: Chosen, sample_id: str, encoded: EncodedSample, made: Mapping[int, PackImage]) -> PackSample:
        return self._samples.sample(one, sample_id, encoded, [self._kept(made[span.index]) for span in encoded.image_spans])

    def _kept(self, image: PackImage) -> PackImage:
        if not self._drops_pixels:
            return image
        return replace(image, pixels=None) if isinstance(image, PatchImage) else replace(image, tiles=None)


def _without_ensured(limits: PackLimits, ensured: EnsuredImage | None) -> PackLimits:
    if ensured is None:
        return limits
    taken = -(-ensured.num_tokens // limits.alignment) * limits.alignment
    if taken >= limits.sequence_length:
        raise UsageError(
            f"found sequence_length {limits.sequence_length}, expected more than {taken}, which an ensured image takes; raise it "
            "or leave out ensure_image"
        )
    return replace(limits, sequence_length=limits.sequence_length - taken)


def _whole(found: _Encoded | BayplanError, images: _Images) -> tuple[Sample, EncodedSample, dict[int, PackImage]] | BayplanError:
    """All of a sample, or the first thing that is wrong with it."""
    if isinstance(found, BayplanError):
        return found
    made: dict[int, PackImage] = {}
    for index, image in images.items():
        if isinstance(image, BayplanError):
            return image
        made[index] = image
    return *found, made


def _with(read: Sample, encoded: EncodedSample | BayplanError) -> _Encoded | BayplanError:
    return encoded if isinstance(encoded, BayplanError) else (read, encoded)


def _key(one: Chosen) -> Hashable:
    return one.row.record_file, one.row.record_offset


def _indices(encoded: EncodedSample) -> list[int]:
    """Of the images that stand in a sample, each once."""
    return list(dict.fromkeys(span.index for span in encoded.image_spans))


def _stop(one: Chosen, error: BayplanError) -> NoReturn:
    raise SampleFailed(
        f"sample {one.row.name}: {error}. Training stops here, as on_failure 'stop' says; resumed with 'blank' it goes on "
        "without this sample in the loss, and a list in `exclude/` leaves it out of a run that starts its data over"
    ) from error
