"""How one picture becomes the rows of an encoder's input: Qwen's patches in merge order, InternVL's tiles with a thumbnail.

What size a picture is resized to is the image rule's word, taken from its counts; here it is only followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from indexer.image_rules import MAX_SIDE, ImageCount, count_one
from indexer.image_rules.internvl import InternVL
from indexer.image_rules.smart_resize import SmartResize
from packer.format.errors import FormatError, RowError
from packer.format.reasons import Reason
from packer.images import CheckLevel, ImageFacts, ImageLimits, inspect
from plugin.tensors.decode import Alpha, check_alpha, decode
from plugin.tensors.normalise import Normalisation

if TYPE_CHECKING:
    import torch

    from plugin.batch.images import ImageForm, Patches
    from plugin.batch.images import Tiles as TileForm

Pixels = npt.NDArray[np.uint8]

GREY = 128
"""Every byte of a blank image: close to zero once normalised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One image as the index holds it."""

    width: int
    """Upright, as is `height`."""
    height: int
    num_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What an image of some size becomes."""

    width: int
    """Pixels it is resized to; of all tiles side by side, a thumbnail apart. So is `height`."""
    height: int
    grid: tuple[int, int, int]
    """(1, rows, columns) of patches, or of tiles without the thumbnail."""
    num_patches: int
    """As the index counts them: inputs of the encoder, thumbnail included."""
    shape: tuple[int, ...]
    """Of the pixels: [num_patches, 3 * patch * patch] or [num_tiles, 3, tile, tile]."""

    @property
    def num_bytes(self) -> int:
        """Memory its pixels take as uint8."""
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePatches:
    """The pixels of one image, not normalised yet."""

    pixels: Pixels
    """`Target.shape`; a patch is one channel after the other, once for all frames."""
    grid: tuple[int, int, int]


class ImageTensors(Protocol):
    """One model's processor. Picklable, without state: any number of threads may share it."""

    @property
    def normalisation(self) -> Normalisation: ...

    @property
    def form(self) -> ImageForm:
        """How a pack holds these pixels."""
        ...

    def target(self, width: int, height: int) -> Target:
        """What an image of this upright size becomes; RowError where the processor refuses it."""
        ...

    def num_bytes(self, width: int, height: int) -> int:
        """Memory of its pixels, known before anything is read."""
        ...

    def patches(self, data: bytes, promise: Promise | None = None) -> ImagePatches:
        """The pixels of an image file.

        Raises:
            RowError: it does not decode, or the processor refuses its size.
            FormatError: it is not what the index promised.
        """
        ...

    def blank(self, width: int, height: int) -> ImagePatches:
        """Grey pixels of the grid that an image of this size has."""
        ...

    def normalise(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """`pixel_values` of the pixels of any number of images, one after another."""
        ...

    def normalise_torch(self, pixels: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The same, on the device the tensor is on."""
        ...


class Layout(Protocol):
    """What differs between families."""

    def __hash__(self) -> int: ...

    @property
    def rule(self) -> SmartResize | InternVL: ...

    @property
    def form(self) -> ImageForm: ...

    def target(self, count: ImageCount) -> Target: ...

    def arrange(self, image: Image.Image, target: Target) -> Pixels: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedPatches:
    """Qwen and GLM: patches of one merged token follow one another, tokens run row by row."""

    rule: SmartResize

    @property
    def form(self) -> Patches:
        from plugin.batch.images import Patches  # packs come with the index's Arrow, which pixels alone do without

        return Patches(patch_bytes=3 * self.rule.patch_size**2, merge_size=self.rule.merge_size)

    def target(self, count: ImageCount) -> Target:
        side = self.rule.patch_size
        return Target(
            width=count.grid_columns * side,
            height=count.grid_rows * side,
            grid=(1, count.grid_rows, count.grid_columns),
            num_patches=count.num_patches,
            shape=(count.num_patches, 3 * side * side),
        )

    def arrange(self, image: Image.Image, target: Target) -> Pixels:
        side, merge = self.rule.patch_size, self.rule.merge_size
        _, rows, columns = target.grid
        run = np.dtype((np.void, side))  # one row of a patch moves as one element: twice as fast as byte by byte
        out = np.empty((rows // merge, columns // merge, merge, merge, 3, side), run)
        for channel, band in enumerate(_bands(_resized(image, target.width, target.height))):
            cells = band.view(run).reshape(rows // merge, merge, side, columns // merge, merge)
            out[:, :, :, :, channel] = cells.transpose(0, 3, 1, 4, 2)
        return out.view(np.uint8).reshape(target.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """InternVL: tiles row by row, then the whole image as one more tile if there are several."""

    rule: InternVL

    @property
    def form(self) -> TileForm:
        from plugin.batch.images import Tiles as TileForm  # as above

        return TileForm(side=self.rule.tile, features_per_tile=self.rule.tokens_per_tile)

    def target(self, count: ImageCount) -> Target:
        side = self.rule.tile
        rows, columns = count.grid_rows, count.grid_columns
        return Target(
            width=columns * side,
            height=rows * side,
            grid=(1, rows, columns),
            num_patches=count.num_patches,
            shape=(count.num_segments, 3, side, side),
        )

    def arrange(self, image: Image.Image, target: Target) -> Pixels:
        side = self.rule.tile
        _, rows, columns = target.grid
        out = np.empty(target.shape, np.uint8)
        tiles = out[: rows * columns].reshape(rows, columns, 3, side, side)
        for channel, band in enumerate(_bands(_resized(image, target.width, target.height))):
            tiles[:, :, channel] = band.reshape(rows, side, columns, side).transpose(0, 2, 1, 3)
        if len(out) > rows * columns:
            for channel, band in enumerate(_bands(_resized(image, side, side))):
                out[-1, channel] = band
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTensors:
    """`ImageTensors` of a family's layout, an image rule's parameters and a published normalisation."""

    layout: Layout
    normalisation: Normalisation
    alpha: Alpha = "white"
    limits: ImageLimits = field(default_factory=ImageLimits)
    draft: bool = False
    """Let JPEGs be decoded at a fraction of their size where that still covers the target: other pixels."""

    def __post_init__(self) -> None:
        check_alpha(self.alpha)

    @property
    def form(self) -> ImageForm:
        return self.layout.form

    def target(self, width: int, height: int) -> Target:
        return _target(self.layout, width, height)

    def num_bytes(self, width: int, height: int) -> int:
        return self.target(width, height).num_bytes

    def patches(self, data: bytes, promise: Promise | None = None) -> ImagePatches:
        limits = self.limits if promise is None else _with_room_for(promise, self.limits)
        facts = inspect(data, limits, CheckLevel.HEADER)
        if promise is not None:
            _check_size(facts, promise)
        target = self.target(facts.width, facts.height)
        if promise is not None:
            _check_patches(target, promise)
        draft_size = (target.width, target.height) if self.draft else None
        image = decode(data, facts=facts, limits=limits, alpha=self.alpha, draft_size=draft_size)
        return _checked(self.layout.arrange(image, target), target)

    def blank(self, width: int, height: int) -> ImagePatches:
        target = self.target(width, height)
        return _checked(np.full(target.shape, GREY, np.uint8), target)

    def normalise(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        return self.normalisation.apply(pixels)

    def normalise_torch(self, pixels: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.normalisation.apply_torch(pixels, dtype)


@lru_cache(maxsize=1 << 16)
def _target(layout: Layout, width: int, height: int) -> Target:
    """Kept, since a rule takes a tenth of a millisecond for one image, and corpora have few sizes."""
    if max(width, height) > MAX_SIDE:
        raise RowError(Reason.TOO_MANY_PIXELS, f"size is {width} x {height}, expected sides of at most {MAX_SIDE:,}")
    count = count_one(layout.rule, width, height)
    if count.refusal is not None:
        raise RowError(Reason.ASPECT_RATIO, f"the model's processor refuses {width} x {height}: {count.refusal}")
    return layout.target(count)


def _with_room_for(promise: Promise, limits: ImageLimits) -> ImageLimits:
    """What a recipe let into the dataset may be trained on, and nothing larger."""
    num_pixels = promise.width * promise.height
    return limits if num_pixels <= limits.max_pixels else replace(limits, max_pixels=num_pixels)


def _check_size(facts: ImageFacts, promise: Promise) -> None:
    if (facts.width, facts.height) != (promise.width, promise.height):
        raise FormatError(
            f"found a {facts.format} of {facts.width} x {facts.height} (upright, orientation {facts.orientation}), the index "
            f"promised {promise.width} x {promise.height}: bundle and index are not of one dataset; verify it, then index again"
        )


def _check_patches(target: Target, promise: Promise) -> None:
    if target.num_patches != promise.num_patches:
        raise FormatError(
            f"an image of {promise.width} x {promise.height}: the index promised {promise.num_patches:,} patches, this rule "
            f"makes {target.num_patches:,} (grid {target.grid}); train with the profile it was indexed with, or index again"
        )


def _checked(pixels: Pixels, target: Target) -> ImagePatches:
    assert pixels.shape == target.shape, f"made pixels {pixels.shape}, expected {target.shape}"
    return ImagePatches(pixels=pixels, grid=target.grid)


def _resized(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.BICUBIC)


def _bands(image: Image.Image) -> list[Pixels]:
    """[height, width] of red, green and blue; grey is all three."""
    bands = [np.asarray(band) for band in image.split()]
    return bands * 3 if len(bands) == 1 else bands
