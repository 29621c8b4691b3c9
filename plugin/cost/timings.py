"""Measured microbatches as JSON lines: what a line holds, how it is made of a pack, and how files of them are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from packer.format.errors import FormatError, UsageError

if TYPE_CHECKING:
    from plugin.batch.core import PackedBatch

VERSION = 1
SECONDS = ("encoder_seconds", "llm_seconds", "seconds")

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a microbatch holds: padding of the sequence and images that only keep ranks in step are computed, so they count."""

    num_patches: int
    sum_squared_attention: int
    """As in the index: squared patches of each window or tile set."""
    sum_squared_patches: int | None
    """Squared patches of each image, for encoders with windows; None where there are none."""
    num_images: int
    num_tokens: int
    sum_squared_tokens: int


class Timing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One microbatch on one rank; one line of a file."""

    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    num_patches: _Count
    sum_squared_attention: _Count
    sum_squared_patches: _Count | None = None
    num_images: _Count
    num_tokens: _Count
    sum_squared_tokens: _Count
    encoder_seconds: _Seconds | None = None
    llm_seconds: _Seconds | None = None
    seconds: _Seconds | None = None
    """All of the microbatch."""
    rank: int | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    place: str
    """File and line, from 1."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The good lines of some files, and the others."""

    rows: tuple[Timing, ...]
    places: tuple[str, ...]
    """File and line of each row, from 1."""
    bad: tuple[BadLine, ...]

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """NaN where a line does not say it."""
        values = (getattr(row, name) for row in self.rows)
        return np.array([np.nan if value is None else value for value in values], np.float64)


def read_timings(paths: Iterable[str | os.PathLike[str]]) -> Timings:
    """Local files of JSON lines. A bad line costs itself only; empty lines are none.

    Raises:
        FormatError: no good line in any of them.
        OSError: a file that cannot be read.
    """
    rows, places, bad = list[Timing](), list[str](), list[BadLine]()
    decoder = msgspec.json.Decoder(Timing)
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                place = f"{os.fspath(path)} line {number}"
                try:
                    row = decoder.decode(line)
                    if not any(getattr(row, name) for name in SECONDS):
                        raise ValueError(f"found none of {', '.join(SECONDS)}, expected at least one")
                except ValueError as error:  # msgspec's are, and so are bytes that are no text
                    cut = "" if line.endswith(b"\n") else "; the line has no end: it was cut"
                    bad.append(BadLine(place=place, reason=f"{str(error).replace('`', '')}{cut}"))
                    continue
                rows.append(row)
                places.append(place)
    if not rows:
        first = f"; the first, {bad[0].place}: {bad[0].reason}" if bad else ""
        raise FormatError(f"found no good line of timings and {len(bad)} bad ones{first}")
    return Timings(rows=tuple(rows), places=tuple(places), bad=tuple(bad))


def features_of(
    batches: Sequence[PackedBatch], *, window_patches: int | None = None, patches_per_tile: int | None = None
) -> Features:
    """What the packs of one microbatch hold together.

    Args:
        window_patches: side of an attention window, as the image rule has it.
        patches_per_tile: for images as tiles.

    Raises:
        UsageError: images as tiles without `patches_per_tile`.
    """
    found = [_of_pack(batch, window_patches, patches_per_tile) for batch in batches]
    sums = {name: sum(getattr(features, name) for features in found) for name in _SUMMED}
    squares = None if window_patches is None else sum(features.sum_squared_patches or 0 for features in found)
    return Features(**sums, sum_squared_patches=squares)


_SUMMED = ("num_patches", "sum_squared_attention", "num_images", "num_tokens", "sum_squared_tokens")


def _of_pack(batch: PackedBatch, window: int | None, patches_per_tile: int | None) -> Features:
    from plugin.batch.facts import Form  # a cost alone loads neither Arrow nor tokenizers

    if not batch.has_pixels:  # the encoder does not run
        patches, attention, squares = 0, 0, 0
    elif batch.form == Form.TILES:
        if patches_per_tile is None:
            raise UsageError("found a pack of tiles, expected patches_per_tile: a pack does not say it")
        patches = int(batch.num_tiles.sum()) * patches_per_tile
        attention = patches * patches_per_tile
        squares = int(np.square(batch.num_tiles).sum()) * patches_per_tile**2
    else:
        grid = batch.image_grid_thw
        frames, rows, columns = grid[:, 0], grid[:, 1], grid[:, 2]
        patches = int((frames * rows * columns).sum())
        squares = int((frames * np.square(rows * columns)).sum())
        attention = squares
        if window is not None:
            attention = int((frames * _squared_windows(rows, window) * _squared_windows(columns, window)).sum())
    ends = batch.cu_seqlens.astype(np.int64)
    return Features(
        num_patches=patches,
        sum_squared_attention=attention,
        sum_squared_patches=squares,
        num_images=len(batch.image_state) if batch.has_pixels else 0,
        num_tokens=len(batch.tokens),
        sum_squared_tokens=int(np.square(ends[1:] - ends[:-1]).sum()),
    )


def _squared_windows(sides: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """Squares of the pieces that windows cut a side into; the last one may be shorter."""
    return sides // window * window**2 + (sides % window) ** 2


def timing_line(features: Features, seconds: dict[str, float], *, rank: int, step: int) -> bytes:
    """A line of a file, its end included."""
    row = {"version": VERSION, "rank": rank, "step": step, **asdict(features), **seconds}
    return msgspec.json.encode({name: value for name, value in row.items() if value is not None}) + b"\n"
