"""One part in the making: records, offsets, bundle and quarantine grow in staged files and appear together or not at all."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import IO

from packer.format import layout
from packer.format.bundle import MAX_IMAGES, BundleWriter, StoredImage
from packer.format.digest import bytes_digest
from packer.format.errors import FormatError
from packer.format.manifest import FileEntry, InputSpan, PartManifest, Supersedes, encode_manifest
from packer.format.offsets import encode_offsets
from packer.format.quarantine import QuarantineLine
from packer.images import EXTENSIONS
from packer.loading import LoadedImage
from packer.samples import Sample, Spool
from packer.sources import InputRange, RawLine, SpanDigest
from packer.storage import Staged, Storage, publish_file, writes_to

MAX_RECORD_BYTES = 1 << 30
_BUFFER_BYTES = 1 << 20
_ENTRY_BYTES = 512
"""Room an image takes in a record line, for the decision to roll."""


@dataclass(slots=True)
class _Growing:
    """A staged file with its open handle."""

    staged: Staged
    file: IO[bytes]


class PartWriter:
    """Collects the rows of one part; `commit` publishes them, `abandon` leaves no trace."""

    def __init__(self, storage: Storage, source: str, part_id: layout.PartId, byte_start: int) -> None:
        self.part_id = part_id
        self._storage = storage
        self._source = source
        self._growing: dict[str, _Growing] = {}
        self._bundle: BundleWriter | None = None
        self._offsets = array("Q", [0])
        self._span = SpanDigest()
        self._byte_start = self._byte_end = byte_start
        self._reasons: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._num_read = self._num_blank = self._num_non_finite = self._num_images = 0

    @property
    def bundle_name(self) -> str:
        """File name of this part's bundle, as its records give it."""
        return f"{self.part_id}{layout.BUNDLE_SUFFIX}"

    @property
    def byte_end(self) -> int:
        """One past the last line counted."""
        return self._byte_end

    @property
    def num_written(self) -> int:
        """Records so far."""
        return len(self._offsets) - 1

    @property
    def num_quarantined(self) -> int:
        """Quarantined rows so far."""
        return self._reasons.total()

    def is_full_for(self, sample: Sample, target_bundle_bytes: int) -> bool:
        """Whether `sample` should open the next part; never for a part without records."""
        if not self.num_written:
            return False
        if self._offsets[-1] + len(sample.line.raw) + _ENTRY_BYTES * len(sample.images) > MAX_RECORD_BYTES:
            return True
        bundle = self._bundle
        new = [image for image in sample.distinct_images() if bundle is None or not bundle.holds(image.digest, _extension(image))]
        if not new or bundle is None:
            return False
        new_bytes = sum(image.size for image in new)
        return bundle.num_bytes + new_bytes > target_bundle_bytes or bundle.num_images + len(new) > MAX_IMAGES

    def count_line(self, line: RawLine) -> None:
        """Account for a line of the input, blank or not, before it is written or quarantined."""
        self._span.update(line)
        self._byte_end = line.byte_end
        if line.is_blank:
            self._num_blank += 1
        else:
            self._num_read += 1

    def add(self, sample: Sample) -> None:
        """Store a sample's images and write its record."""
        with writes_to(self._storage.url):
            stored = [self._store(image, sample.spool) for image in sample.images]
            line = sample.encode(self.bundle_name, stored)
            self._file(layout.RECORDS_SUFFIX).write(line)
        self._offsets.append(self._offsets[-1] + len(line))
        self._num_images += len(stored)
        self._num_non_finite += sample.num_non_finite
        self._dropped.update(sample.dropped)

    def _store(self, image: LoadedImage, spool: Spool) -> StoredImage:
        if self._bundle is None:
            self._bundle = BundleWriter(self._file(layout.BUNDLE_SUFFIX))
        extension = _extension(image)
        data = b"" if self._bundle.holds(image.digest, extension) else spool.get(image.digest)
        return self._bundle.add(data, digest=image.digest, extension=extension, crc=image.crc32)

    def quarantine(self, line: QuarantineLine) -> None:
        """Write a quarantine line."""
        with writes_to(self._storage.url):
            self._file(layout.QUARANTINE_SUFFIX).write(line.encode())
        self._reasons[line.reason.value] += 1

    def _file(self, suffix: str) -> IO[bytes]:
        growing = self._growing.get(suffix)
        if growing is None:
            staged = self._storage.stage(layout.part_file(self._source, str(self.part_id), suffix))
            growing = self._growing[suffix] = _Growing(staged, open(staged.path, "wb", buffering=_BUFFER_BYTES))
        return growing.file

    def commit(
        self,
        work: InputRange,
        *,
        recipe_fingerprint: str,
        check: str,
        is_last_of_range: bool,
        fault: str | None = None,
        supersedes: Supersedes | None = None,
    ) -> PartManifest:
        """Publish bundle, records, offsets and quarantine, see that they are there, then publish the manifest."""
        with writes_to(self._storage.url):
            files = self._publish_files()
        manifest = PartManifest(
            part_id=str(self.part_id),
            source=self._source,
            input=InputSpan(
                file=work.file,
                byte_start=self._byte_start,
                byte_end=self._byte_end,
                file_size=work.file_size,
                digest=self._span.hexdigest(),
                input_complete=fault is None,
            ),
            recipe_fingerprint=recipe_fingerprint,
            num_read=self._num_read,
            num_written=self.num_written,
            num_quarantined=self.num_quarantined,
            quarantined_by_reason=dict(sorted(self._reasons.items())),
            num_images=self._num_images,
            num_images_stored=self._bundle.num_images if self._bundle else 0,
            images_dropped_by_reason=dict(sorted(self._dropped.items())),
            num_blank_lines=self._num_blank,
            num_non_finite=self._num_non_finite,
            check=check,
            files=files,
            is_last_of_range=is_last_of_range,
            supersedes=supersedes,
        )
        check_files(self._storage, manifest)
        name = layout.part_file(self._source, str(self.part_id), layout.MANIFEST_SUFFIX)
        self._storage.publish_bytes(name, encode_manifest(manifest))
        return manifest

    def _publish_files(self) -> dict[str, FileEntry]:
        """Publish in the order a reader would miss them least: bundle, records, offsets, quarantine."""
        files = {}
        self._file(layout.RECORDS_SUFFIX)
        if self._bundle is not None:
            files[self.bundle_name] = self._publish_bundle(self._bundle)
        for suffix in (layout.RECORDS_SUFFIX, layout.QUARANTINE_SUFFIX):
            if suffix in self._growing:
                growing = self._growing[suffix]
                growing.file.close()
                size, digest = publish_file(self._storage, growing.staged)
                files[f"{self.part_id}{suffix}"] = FileEntry(size=size, digest=digest)
                del self._growing[suffix]
        offsets = encode_offsets(self._offsets)
        name = layout.part_file(self._source, str(self.part_id), layout.OFFSETS_SUFFIX)
        self._storage.publish_bytes(name, offsets)
        files[f"{self.part_id}{layout.OFFSETS_SUFFIX}"] = FileEntry(size=len(offsets), digest=bytes_digest(offsets))
        return dict(sorted(files.items()))

    def _publish_bundle(self, bundle: BundleWriter) -> FileEntry:
        growing = self._growing[layout.BUNDLE_SUFFIX]
        bundle.close()
        growing.file.close()
        proven = bundle.prove(growing.staged.path)
        self._storage.publish(growing.staged, size=proven.size, digest=proven.hexdigest())
        del self._growing[layout.BUNDLE_SUFFIX]
        return FileEntry(size=proven.size, digest=proven.hexdigest())

    def abandon(self) -> None:
        """Close and remove what was staged."""
        if self._bundle is not None:
            self._bundle.abandon()
        for growing in self._growing.values():
            with contextlib.suppress(OSError):  # a full disk refuses the last bytes once more
                growing.file.close()
        for growing in self._growing.values():
            self._storage.discard(growing.staged)
        self._growing.clear()


def check_files(storage: Storage, manifest: PartManifest) -> None:
    """See that every file a manifest names is there in its size, before the manifest makes it count.

    Raises:
        FormatError: naming the file.
    """
    for file_name, entry in manifest.files.items():
        name = f"{layout.source_dir(manifest.source)}/{file_name}"
        found = storage.stat(name)
        if found is None or found.size != entry.size:
            raise FormatError(
                f"{name}: found {'nothing' if found is None else f'{found.size} bytes'} after publishing, expected {entry.size} "
                "bytes: another program writes into this dataset, or the store lost the file"
            )


def _extension(image: LoadedImage) -> str:
    return EXTENSIONS[image.facts.format]
