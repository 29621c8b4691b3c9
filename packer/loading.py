"""Reference -> checked image, ready to be stored: bytes, facts, digest and checksum, or the reason there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer.format.bundle import crc32
from packer.format.digest import image_digest
from packer.format.errors import BayplanError, RowError, StorageFault
from packer.format.reasons import Reason
from packer.images import CheckLevel, Conversion, ImageFacts, ImageLimits, convert, inspect
from packer.references import ReferenceReader, stored_ref
from packer.storage import may_pass


@dataclass(slots=True, kw_only=True)
class LoadedImage:
    """An image that passed its checks. `data` is empty while its bytes are spooled or stand elsewhere in the sample."""

    data: bytes
    size: int
    digest: str
    crc32: int
    facts: ImageFacts
    ref: str
    converted_from: Mapping[str, Any] | None = None


Outcome = LoadedImage | RowError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePolicy:
    """What a source's images are held to, and what happens to a sample whose image fails."""

    limits: ImageLimits
    check: CheckLevel
    conversion: Conversion | None
    drops_image: bool
    """Leave a bad image out instead of quarantining its sample."""
    max_per_sample: int | None
    keeps_first: bool
    """Keep the first `max_per_sample` images instead of quarantining the sample."""


class ImageLoader:
    """Reference -> checked image. Called from several threads."""

    def __init__(self, reader: ReferenceReader, policy: ImagePolicy, *, max_faults: int = 0) -> None:
        """`max_faults`: images in a row whose store may keep failing before that is taken for an outage."""
        self._reader = reader
        self._policy = policy
        self._max_faults = max_faults
        self._num_faults = 0

    @property
    def concurrency(self) -> int:
        """Reads at once: 4 on a local file system, 32 on a remote one."""
        return 32 if self._reader.is_remote else 4

    def load(self, ref: str) -> Outcome:
        """The image, or why there is none.

        Raises:
            StorageFault: when the store kept failing; says nothing about the image.
        """
        try:
            data = self._reader.read(ref)
            self._num_faults = 0
            facts = inspect(data, self._policy.limits, self._policy.check)
            origin = None
            digest = image_digest(data)
            kept_ref = stored_ref(ref, digest)
            if self._policy.conversion is not None and (converted := convert(data, facts, self._policy.conversion)) is not None:
                origin = _facts_json(facts, digest, len(data))
                data = converted
                facts, digest = inspect(data, ImageLimits(), CheckLevel.HEADER), image_digest(data)
        except RowError as error:
            return error
        except StorageFault as fault:
            self._num_faults += 1
            if self._num_faults > self._max_faults:
                raise
            return RowError(Reason.UNREADABLE_IMAGE, f"its store kept failing for this image: {fault}")
        except Exception as error:
            if isinstance(error, BayplanError | OSError) or may_pass(error):
                raise
            return internal_error(error)
        return LoadedImage(
            data=data, size=len(data), digest=digest, crc32=crc32(data), facts=facts, ref=kept_ref, converted_from=origin
        )


def internal_error(error: Exception) -> RowError:
    """An error of our own on one row or image, as the reason it is quarantined for."""
    return RowError(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {str(error)[:200]}")


def _facts_json(facts: ImageFacts, digest: str, size: int) -> dict[str, Any]:
    return {
        "digest": digest,
        "size": size,
        "width": facts.width,
        "height": facts.height,
        "format": facts.format,
        "mode": facts.mode,
        "orientation": facts.orientation,
        "frames": facts.frames,
    }
