"""Totals and distributions of index rows under one profile, as counts that add up.

Built once per part, kept per part, merged for a source. Only usable rows enter token figures; the others are counted by
status. About 9 million rows (of 1.5 images) a second on one core; no row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from indexer.facts import NO_IMAGES, ImageFacts
from indexer.mergeable import Ints, Mergeable, counted, exact_sum
from indexer.sketch import Distribution, SizeGrid
from indexer.status import Status
from packer.format.errors import FormatError, UsageError

Column = npt.NDArray[np.integer[Any]]

STATUS_NAMES = tuple(status.name.lower() for status in Status)
"""Names of the index's status numbers, in order."""
USABLE = Status.USABLE
ASPECT_SCALE = 1000
"""Longer side / shorter side is counted in thousandths, rounded down: 1920 x 1080 is 1777."""


class StatsColumns(Protocol):
    """The index columns that are counted: one value per row, and for images one per image, row after row.

    Rows that are not usable hold zeros and no images.
    """

    @property
    def num_text_tokens(self) -> Column: ...
    @property
    def num_image_tokens(self) -> Column: ...
    @property
    def num_tokens(self) -> Column: ...
    @property
    def num_loss_tokens(self) -> Column: ...
    @property
    def num_images(self) -> Column: ...
    @property
    def status(self) -> Column: ...
    @property
    def image_width(self) -> Column: ...
    @property
    def image_height(self) -> Column: ...
    @property
    def image_num_tokens(self) -> Column: ...
    @property
    def image_num_patches(self) -> Column: ...
    @property
    def image_sum_squared_attention(self) -> Column: ...


STATS_VERSION = 1
"""Rises when the fields of `Stats`, or what they mean, change: index files that hold another version are stale."""


class Stats(Mergeable, frozen=True, kw_only=True):
    """The statistics of one part, or of many merged, under one profile."""

    status: dict[str, int] = msgspec.field(default_factory=dict)
    """Rows by the name of their status; those without rows are absent."""
    num_loss_tokens: int = 0
    sum_squared_attention: int = 0
    num_text_only: int = 0
    """Usable rows without an image."""
    num_image_only: int = 0
    """Usable rows with images and no text token."""
    num_mixed: int = 0
    tokens_per_sample: Distribution = Distribution()
    text_tokens_per_sample: Distribution = Distribution()
    image_tokens_per_image: Distribution = Distribution()
    patches_per_image: Distribution = Distribution()
    images_per_sample: Distribution = Distribution()
    image_width: Distribution = Distribution()
    """Upright, in pixels."""
    image_height: Distribution = Distribution()
    """Upright, in pixels."""
    aspect_ratio: Distribution = Distribution()
    """Longer / shorter side x 1000, rounded down."""
    width_height: SizeGrid = SizeGrid()
    images: ImageFacts = NO_IMAGES

    def __post_init__(self) -> None:
        counts = {
            "status": self.status.get(STATUS_NAMES[USABLE], 0),
            "tokens_per_sample": self.tokens_per_sample.count,
            "text_tokens_per_sample": self.text_tokens_per_sample.count,
            "images_per_sample": self.images_per_sample.count,
            "the three kinds of samples": self.num_text_only + self.num_image_only + self.num_mixed,
        }
        if len(set(counts.values())) > 1:
            raise ValueError(f"these should all be the number of usable rows: {counts}")

    @property
    def num_samples(self) -> int:
        """Rows, usable or not."""
        return sum(self.status.values())

    @property
    def num_usable(self) -> int:
        return self.tokens_per_sample.count

    @property
    def num_tokens(self) -> int:
        return self.tokens_per_sample.sum

    @property
    def num_text_tokens(self) -> int:
        return self.text_tokens_per_sample.sum

    @property
    def num_image_tokens(self) -> int:
        return self.image_tokens_per_image.sum

    @property
    def num_other_tokens(self) -> int:
        """Wrapper tokens around images and special tokens."""
        return self.num_tokens - self.num_text_tokens - self.num_image_tokens

    @property
    def num_images(self) -> int:
        """Of usable rows; `images.num_images` counts those of every record."""
        return self.images_per_sample.sum

    @property
    def num_patches(self) -> int:
        return self.patches_per_image.sum


def encode_stats(stats: Stats) -> bytes:
    """Statistics as index files hold them; the file says their `STATS_VERSION`."""
    return orjson.dumps(stats.to_json())


def decode_stats(blob: bytes, where: str) -> Stats:
    """What `encode_stats` wrote. A field that is missing is damage: its default would count as zero.

    Raises:
        FormatError: naming `where`, when the blob is empty, cut or does not add up.
    """
    try:
        document = orjson.loads(blob)
    except orjson.JSONDecodeError as error:
        raise FormatError(
            f"{where}: found {len(blob):,} bytes of statistics that are not JSON ({error}): remove it and index again"
        ) from error
    missing = [name for name in Stats.__struct_fields__ if not isinstance(document, dict) or name not in document]
    if missing:
        raise FormatError(f"{where}: found statistics without {', '.join(missing)}: remove it and index again")
    return Stats.from_json(document, where)


def stats_of(columns: StatsColumns, images: ImageFacts = NO_IMAGES) -> Stats:
    """The statistics of some index rows, a million at a time for speed; `images` are the facts of the same records.

    Raises:
        FormatError: when the columns contradict each other.
    """
    status = _status_counts(columns.status)
    usable = _usable(columns.status)
    text, num_images = columns.num_text_tokens[usable], columns.num_images[usable]
    image_tokens = Distribution.of(columns.image_num_tokens)
    _check_sums("images", exact_sum(num_images), len(columns.image_num_tokens))
    _check_sums("image tokens", exact_sum(columns.num_image_tokens[usable]), image_tokens.sum)
    num_text_only = int(np.count_nonzero(num_images == 0))
    num_image_only = int(np.count_nonzero((num_images > 0) & (text == 0)))
    return Stats(
        status=status,
        num_loss_tokens=exact_sum(columns.num_loss_tokens[usable]),
        sum_squared_attention=exact_sum(columns.image_sum_squared_attention),
        num_text_only=num_text_only,
        num_image_only=num_image_only,
        num_mixed=len(num_images) - num_text_only - num_image_only,
        tokens_per_sample=Distribution.of(columns.num_tokens[usable]),
        text_tokens_per_sample=Distribution.of(text),
        image_tokens_per_image=image_tokens,
        patches_per_image=Distribution.of(columns.image_num_patches),
        images_per_sample=Distribution.of(num_images),
        image_width=Distribution.of(columns.image_width),
        image_height=Distribution.of(columns.image_height),
        aspect_ratio=Distribution.of(aspect_thousandths(columns.image_width, columns.image_height)),
        width_height=SizeGrid.of(columns.image_width, columns.image_height),
        images=images,
    )


def aspect_thousandths(widths: Column, heights: Column) -> Ints:
    """Longer side / shorter side x 1000, rounded down.

    Raises:
        FormatError: when an image has no pixels.
    """
    shorter = np.minimum(widths, heights)
    if shorter.size and shorter.min() < 1:
        raise FormatError(f"an image has a side of {shorter.min()} pixels, expected 1 or more: build the index again")
    return np.maximum(widths, heights).astype(np.int64) * ASPECT_SCALE // shorter


def _status_counts(status: Column) -> dict[str, int]:
    counts = np.bincount(status, minlength=len(STATUS_NAMES)).tolist()
    if len(counts) > len(STATUS_NAMES):
        raise FormatError(
            f"found the row status {len(counts) - 1}, expected 0 to {len(STATUS_NAMES) - 1}: written by a newer release"
        )
    return counted(dict(zip(STATUS_NAMES, counts, strict=True)))


def _usable(status: Column) -> npt.NDArray[np.bool_] | slice:
    """What picks the usable rows out of a column; without a copy where that is all of them."""
    mask = status == USABLE
    return slice(None) if mask.all() else mask


def _check_sums(what: str, in_rows: int, in_images: int) -> None:
    if in_rows != in_images:
        raise FormatError(f"the usable rows hold {in_rows} {what}, but the listed images make {in_images}: build the index again")


class OverLong(Mergeable, frozen=True, kw_only=True):
    """Samples that do not fit into sequences of some lengths. They stay whole, so all their tokens are counted."""

    num_samples: dict[int, int] = msgspec.field(default_factory=dict)
    """Sequence length -> usable samples with more tokens, exactly."""
    num_tokens: dict[int, int] = msgspec.field(default_factory=dict)
    """Sequence length -> all tokens of those samples."""

    @classmethod
    def _total(cls, items: list[Self]) -> Self:
        lengths = list(items[0].num_samples)
        for item in items:
            if list(item.num_samples) != lengths:
                found = f"found counts above {list(item.num_samples)} and above {lengths}"
                raise UsageError(f"{found}, which cannot be added: count both above the same lengths")
        return cls(
            num_samples={length: sum(item.num_samples[length] for item in items) for length in lengths},
            num_tokens={length: sum(item.num_tokens[length] for item in items) for length in lengths},
        )


def over_long(num_tokens: Column, status: Column, lengths: Sequence[int]) -> OverLong:
    """Counts the usable rows that have more tokens than each of the sequence lengths."""
    if wrong := [length for length in lengths if length < 1]:
        raise UsageError(f"found the sequence length {wrong[0]}, expected 1 or more")
    tokens = num_tokens[_usable(status)]
    above = {length: tokens[tokens > length] for length in sorted(set(lengths))}
    return OverLong(
        num_samples={length: len(column) for length, column in above.items()},
        num_tokens={length: exact_sum(column) for length, column in above.items()},
    )
