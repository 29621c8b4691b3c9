"""What parts hold besides counts of tokens: figures of their records' images, and of their manifests. Both add up.

Figures of images cover every record, usable under some profile or not, since they describe what is stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec

from indexer.mergeable import Mergeable, counted
from packer.format.manifest import PartManifest, total


class ImageFacts(Mergeable, frozen=True, kw_only=True):
    """What the records say of their images, repeats included; where converted, of what is stored."""

    num_images: int = 0
    num_dropped: int = 0
    """Images the recipe's policy left out of records that were kept."""
    num_converted: int = 0
    num_animated: int = 0
    """Of more than one frame or page."""
    num_upright: int = 0
    """Stored as they are shown: orientation 1."""
    image_bytes: int = 0
    """If every reference had its own copy."""
    image_bytes_stored: int = 0
    """Equal images of a part once."""
    formats: dict[str, int] = msgspec.field(default_factory=dict)
    modes: dict[str, int] = msgspec.field(default_factory=dict)
    orientations: dict[str, int] = msgspec.field(default_factory=dict)
    """EXIF orientation, "1" to "8"."""


NO_IMAGES = ImageFacts()


class RecordFacts:
    """Gathers the `ImageFacts` of one part, record by record; it remembers the place of every stored image meanwhile."""

    def __init__(self) -> None:
        self._kinds: Counter[tuple[str, str, int, bool, bool]] = Counter()
        self._stored: dict[tuple[str, int], int] = {}
        self._num_dropped = 0
        self._image_bytes = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Takes in a record of `packer.format.record`."""
        self._num_dropped += record.get("num_images_dropped", 0)
        for entry in record["images"]:
            kind = (entry["format"], entry["mode"], entry["orientation"], entry["frames"] > 1, "converted_from" in entry)
            self._kinds[kind] += 1
            self._image_bytes += entry["size"]
            self._stored[entry["bundle"], entry["offset"]] = entry["size"]

    def facts(self) -> ImageFacts:
        """What was taken in so far."""
        formats, modes, orientations = Counter[str](), Counter[str](), Counter[str]()
        for (image_format, mode, orientation, _, _), count in self._kinds.items():
            formats[image_format] += count
            modes[mode] += count
            orientations[str(orientation)] += count
        return ImageFacts(
            num_images=self._kinds.total(),
            num_dropped=self._num_dropped,
            num_converted=sum(count for (*_, converted), count in self._kinds.items() if converted),
            num_animated=sum(count for (*_, animated, _), count in self._kinds.items() if animated),
            num_upright=orientations["1"],
            image_bytes=self._image_bytes,
            image_bytes_stored=sum(self._stored.values()),
            formats=counted(formats),
            modes=counted(modes),
            orientations=counted(orientations),
        )


class PackFacts(Mergeable, frozen=True, kw_only=True):
    """What the manifests of some parts say. Rows that a retry superseded count once, as written."""

    num_parts: int = 0
    num_read: int = 0
    num_written: int = 0
    num_quarantined: int = 0
    quarantined_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    num_images: int = 0
    """References, repeats included."""
    num_images_stored: int = 0
    images_dropped_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    num_bytes: int = 0
    """Of all published files."""
    check: dict[str, int] = msgspec.field(default_factory=dict)
    """Check level -> parts whose images were held to it."""

    @classmethod
    def of(cls, manifests: Iterable[PartManifest]) -> Self:
        """From the manifests of a source, or of any of its parts."""
        parts = list(manifests)
        totals = total(parts)
        shared = {name: getattr(totals, name) for name in cls.__struct_fields__ if name != "check"}
        return cls(**shared, check=counted(Counter(part.check for part in parts)))

    @property
    def num_duplicates_saved(self) -> int:
        """References that found their image already stored in the part."""
        return self.num_images - self.num_images_stored
