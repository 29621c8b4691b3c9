"""One part in the making: records, offsets, bundle and quarantine grow in staged files and appear together or not at all."""

from __future__ import annotations

import contextlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import IO

from packer.format import layout
from packer.format.bundle import MAX_IMAGES, BundleWriter, StoredImage
from packer.format.digest import FileDigest, bytes_digest
from packer.format.errors import FormatError
from packer.format.manifest import FileEntry, InputSpan, PartManifest, Supersedes, encode_manifest
from packer.format.offsets import encode_offsets
from packer.format.quarantine import QuarantineLine
from packer.images import EXTENSIONS
from packer.loading import LoadedImage
from packer.samples import Sample, Spool
from packer.sources import InputRange, RawLine, SpanDigest
from packer.storage import Proof, Staged, Storage, same_as, writes_to

MAX_RECORD_BYTES = 1 << 30
_ENTRY_BYTES = 512
"""Room an image takes in a record line, for the decision to roll."""


@dataclass(slots=True)
class _Growing:
    """A staged file with its open handle, and the digest of what was written to it."""

    staged: Staged
    file: IO[bytes]
    written: FileDigest = field(default_factory=FileDigest)

    def append(self, line: bytes) -> None:
        self.file.write(line)
        self.written.update(line)


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
        self._num_read = self._num_blank = self._num_marks = self._num_non_finite = self._num_images = 0

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
        self._num_marks += line.has_byte_order_mark
        if line.is_blank:
            self._num_blank += 1
        else:
            self._num_read += 1

    def add(self, sample: Sample) -> None:
        """Store a sample's images and write its record."""
        with writes_to(self._storage.url):
            stored = [self._store(image, sample.spool) for image in sample.images]
            line = sample.encode(self.bundle_name, stored)
            self._grow(layout.RECORDS_SUFFIX).append(line)
        self._offsets.append(self._offsets[-1] + len(line))
        self._num_images += len(stored)
        self._num_non_finite += sample.num_non_finite
        self._dropped.update(sample.dropped)

    def _store(self, image: LoadedImage, spool: Spool) -> StoredImage:
        if self._bundle is None:
            self._bundle = BundleWriter(self._grow(layout.BUNDLE_SUFFIX).file)
        extension = _extension(image)
        data = b"" if self._bundle.holds(image.digest, extension) else spool.get(image.digest)
        return self._bundle.add(data, digest=image.digest, extension=extension, crc=image.crc32)

    def quarantine(self, line: QuarantineLine) -> None:
        """Write a quarantine line."""
        with writes_to(self._storage.url):
            self._grow(layout.QUARANTINE_SUFFIX).append(line.encode())
        self._reasons[line.reason.value] += 1

    def _grow(self, suffix: str) -> _Growing:
        growing = self._growing.get(suffix)
        if growing is None:
            staged = self._storage.stage(layout.part_file(self._source, str(self.part_id), suffix))
            growing = self._growing[suffix] = _Growing(staged, staged.open())
        return growing

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
            num_byte_order_marks=self._num_marks,
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
        if self._bundle is not None:
            self._bundle.close()
            files[self.bundle_name] = self._publish(layout.BUNDLE_SUFFIX, self._bundle.prove)
        records = self._grow(layout.RECORDS_SUFFIX)  # there even when it is empty
        files[f"{self.part_id}{layout.RECORDS_SUFFIX}"] = self._publish(layout.RECORDS_SUFFIX, same_as(records.written))
        if (quarantined := self._growing.get(layout.QUARANTINE_SUFFIX)) is not None:
            name = f"{self.part_id}{layout.QUARANTINE_SUFFIX}"
            files[name] = self._publish(layout.QUARANTINE_SUFFIX, same_as(quarantined.written))
        offsets = encode_offsets(self._offsets)
        name = layout.part_file(self._source, str(self.part_id), layout.OFFSETS_SUFFIX)
        self._storage.publish_bytes(name, offsets)
        files[f"{self.part_id}{layout.OFFSETS_SUFFIX}"] = FileEntry(size=len(offsets), digest=bytes_digest(offsets))
        return dict(sorted(files.items()))

    def _publish(self, suffix: str, prove: Proof) -> FileEntry:
        growing = self._growing[suffix]
        growing.file.close()
        proven = self._storage.publish(growing.staged, prove)
        del self._growing[suffix]
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
