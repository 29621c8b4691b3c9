"""Images as a pack holds them: uint8 until the device, in one of two forms. How they are decoded and normalised is not here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from packer.format.errors import UsageError

Bytes = npt.NDArray[np.uint8]

DEFAULT_GREY = 128
MOST_PATCHES_A_SIDE, MOST_TILES = (1 << 20) - 1, (1 << 40) - 1
"""Beyond any image; products of three such sides still fit 64 bits."""


class ImageState(IntEnum):
    REAL = 0
    BLANK = 1
    """Stands for an image that could not be read: its grid is the promised one, its pixels are nobody's."""
    ENSURED = 2
    """Belongs to no sample: only there so that every rank runs its vision encoder. Counts nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchImage:
    """An image as flattened patches, as Qwen-VL and its kind take it."""

    grid_thw: tuple[int, int, int]
    """Patches in time, height and width."""
    pixels: Bytes | None
    """[t * h * w, patch_bytes]; None in packs for pipeline stages that read no image."""
    size: tuple[int, int] | None = None
    """Height and width in pixels, where a model asks for them."""
    state: ImageState = ImageState.REAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileImage:
    """An image as square tiles of one side, a thumbnail among them where the model takes one."""

    num_tiles: int
    tiles: Bytes | None
    """[num_tiles, channels, side, side]; None in packs for pipeline stages that read no image."""
    size: tuple[int, int] | None = None
    """Height and width in pixels, where a model asks for them."""
    state: ImageState = ImageState.REAL


PackImage = PatchImage | TileImage


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """The form of a model family that takes flattened patches."""

    patch_bytes: int
    """Channels x patch height x patch width, time not repeated: 588 for Qwen2.5-VL, 768 for Qwen3-VL."""
    merge_size: int | None
    """So many patches a side become one feature; None: features are not counted from the grid."""

    def __post_init__(self) -> None:
        if self.patch_bytes < 1 or (self.merge_size is not None and self.merge_size < 1):
            raise UsageError(f"found patch_bytes {self.patch_bytes} and merge_size {self.merge_size}, expected 1 or more")

    def smallest(self) -> PatchImage:
        """A grey image of one feature."""
        side = self.merge_size or 1
        return PatchImage(grid_thw=(1, side, side), pixels=np.full((side * side, self.patch_bytes), DEFAULT_GREY, np.uint8))

    def num_features(self, image: PackImage) -> int | None:
        """Raises:
        UsageError: an image that is not of this form.
        """
        if not isinstance(image, PatchImage):
            raise UsageError(f"found a {type(image).__name__}, expected a PatchImage as the form {self} says")
        if len(image.grid_thw) != 3 or min(image.grid_thw) < 1 or max(image.grid_thw) > MOST_PATCHES_A_SIDE:
            raise UsageError(f"found the grid {image.grid_thw}, expected three numbers of 1 to {MOST_PATCHES_A_SIDE:,}")
        time, height, width = image.grid_thw
        _refuse_other_pixels(image.pixels, (time * height * width, self.patch_bytes))
        if self.merge_size is None:
            return None
        if height % self.merge_size or width % self.merge_size:
            raise UsageError(f"found the grid {image.grid_thw}, expected multiples of the merge size {self.merge_size}")
        return time * (height // self.merge_size) * (width // self.merge_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The form of a model family that takes tiles."""

    side: int
    """Pixels."""
    features_per_tile: int | None
    """None: features are not counted from the tiles."""
    channels: int = 3

    def __post_init__(self) -> None:
        if min(self.side, self.channels) < 1 or (self.features_per_tile is not None and self.features_per_tile < 1):
            raise UsageError(f"found {self}, expected numbers of at least 1")

    def smallest(self) -> TileImage:
        """One grey tile."""
        return TileImage(num_tiles=1, tiles=np.full((1, self.channels, self.side, self.side), DEFAULT_GREY, np.uint8))

    def num_features(self, image: PackImage) -> int | None:
        """Raises:
        UsageError: an image that is not of this form.
        """
        if not isinstance(image, TileImage):
            raise UsageError(f"found a {type(image).__name__}, expected a TileImage as the form {self} says")
        if not 1 <= image.num_tiles <= MOST_TILES:
            raise UsageError(f"found an image of {image.num_tiles} tiles, expected 1 to {MOST_TILES:,}")
        _refuse_other_pixels(image.tiles, (image.num_tiles, self.channels, self.side, self.side))
        return None if self.features_per_tile is None else image.num_tiles * self.features_per_tile


ImageForm = Patches | Tiles


def pixels_of(image: PackImage) -> Bytes | None:
    return image.pixels if isinstance(image, PatchImage) else image.tiles


def _refuse_other_pixels(pixels: Bytes | None, shape: tuple[int, ...]) -> None:
    if pixels is not None and (pixels.dtype != np.uint8 or pixels.shape != shape):
        raise UsageError(f"found pixels as {pixels.dtype} of shape {pixels.shape}, expected uint8 of shape {shape}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsuredImage:
    """What a pack without an image gets, so that its rank runs the vision encoder as the others do (ZeRO-3 and FSDP hang else).

    It is a segment of its own after the samples, without loss: no sample's token sees it, and its gradient is zero.
    """

    ids: tuple[int, ...]
    """The placeholders, with the wrapper tokens if the model wants them."""
    feature_mask: tuple[bool, ...]
    """Which of them hold a feature."""
    image: PackImage
    """`form.smallest()`; without pixels where the others have none, with a `size` where the model asks for one."""

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.feature_mask) or not any(self.feature_mask):
            raise UsageError(
                f"ensured image: found {len(self.ids)} ids and a mask of {len(self.feature_mask)} with {sum(self.feature_mask)} "
                "features, expected as many of both and a feature"
            )

    @property
    def num_tokens(self) -> int:
        """What to keep free in packs, before alignment: pack into `sequence_length` less this."""
        return len(self.ids)
