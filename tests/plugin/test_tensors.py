"""Pixels, grids and refusals against transformers' own Pillow processors, bit for bit; broken promises and hostile files.

The processors are built from values written out here, not from the package's.
"""

from __future__ import annotations

import base64
import io
import pickle
import random
import re
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import processors
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import normalize, rescale
from transformers.image_utils import load_image

from indexer.image_rules import PRESETS, count_one
from packer.format.errors import BayplanError, FormatError, RowError, UsageError
from packer.format.reasons import Reason
from packer.images import ImageLimits
from plugin.tensors import GREY, PUBLISHED, ImagePatches, ImageTensors, Normalisation, Promise, decode, image_tensors

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
NOISE = random.Random(4).randbytes(1 << 21)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Ours, and the processor it must equal."""

    preset: str
    processor: Any
    values: dict[str, Any]
    parameters: dict[str, Any]

    @property
    def ours(self) -> ImageTensors:
        return image_tensors(self.preset, self.parameters)

    def theirs(self, *images: Image.Image | str) -> tuple[np.ndarray, list[tuple[int, ...]] | None]:
        """(pixel_values, grids); a tile processor tells no grid."""
        out = self.processor(images=list(images), return_tensors="np", **self.values)
        grids = [tuple(map(int, grid)) for grid in out["image_grid_thw"]] if "image_grid_thw" in out else None
        return out["pixel_values"], grids

    def compare(self, data: bytes) -> None:
        """The same pixels, normalised either way, and the same grid."""
        found = self.ours.patches(data)
        pixel_values, grids = self.theirs(as_handed_over(data))
        assert bits(self.ours.normalise(found.pixels)) == bits(pixel_values)
        assert bits(self.ours.normalise_torch(torch.from_numpy(found.pixels)).numpy()) == bits(pixel_values)
        if grids is not None:
            assert [found.grid] == grids


def model(preset: str, processor: Any, values: dict[str, Any], **parameters: Any) -> Model:
    return Model(preset=preset, processor=processor, values=values, parameters=parameters)


def internvl(max_patches: int, min_patches: int = 1, crop: bool = True) -> Any:
    images = processors.internvl_images()
    images.max_patches, images.min_patches, images.crop_to_patches = max_patches, min_patches, crop
    return images


MODELS = {
    "qwen2_5_vl": model("qwen2_5_vl", processors.qwen2_vl_images(), CLIP),
    "qwen2_5_vl_max1280": model("qwen2_5_vl_max1280", processors.qwen2_vl_images(max_pixels=1003520), CLIP),
    "qwen2_5_vl, few pixels": model(
        "qwen2_5_vl", processors.qwen2_vl_images(50_000, 60_000), CLIP, min_pixels=50_000, max_pixels=60_000
    ),
    "qwen3_vl": model("qwen3_vl", processors.qwen2_vl_images(65536, 16777216, 16), HALF),
    "glm4_1v": model("glm4_1v", processors.glm4v_images(), CLIP),
    "internvl3": model("internvl3", internvl(12), IMAGENET),
    "internvl3_max6": model("internvl3_max6", internvl(6), IMAGENET),
    "internvl3, 4 to 9": model("internvl3", internvl(9, 4), IMAGENET, min_tiles=4, max_tiles=9),
    "internvl3, one tile": model("internvl3", internvl(12, crop=False), IMAGENET, crop_to_patches=False),
}
QWEN, INTERNVL = MODELS["qwen2_5_vl"], MODELS["internvl3"]
every_model = pytest.mark.parametrize("name", MODELS)


def bits(values: np.ndarray) -> tuple[tuple[int, ...], bytes]:
    assert values.dtype == np.float32
    return values.shape, values.tobytes()


def as_handed_over(data: bytes) -> Image.Image:
    """What a training script gives a processor: the picture, upright."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def noise(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    """A picture of random bytes in any mode."""
    if mode in ("1", "P"):
        return noise("RGB", size, seed).convert(mode)
    if mode == "F":
        return noise("L", size, seed).convert("F").point(lambda value: value * 1.5 - 30.25)
    bytes_of_pixel = {"I;16": 2, "I": 4}.get(mode, len(Image.getmodebands(mode) * "x") if mode != "I" else 4)
    needed = size[0] * size[1] * bytes_of_pixel
    source = NOISE[seed % 997 :] * (needed // (len(NOISE) - 997) + 1)
    if mode == "I":
        return noise("L", size, seed).convert("I").point(lambda value: value * 2 - 100)
    return Image.frombytes(mode, size, source[:needed])


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def animated(mode: str, kind: str) -> Callable[..., bytes]:
    def build(size: tuple[int, int], seed: int, **options: Any) -> bytes:
        more = [noise(mode, size, seed + number) for number in (1, 2)]
        return encoded(noise(mode, size, seed), kind, save_all=True, append_images=more, **options)

    return build


def still(mode: str, kind: str, **fixed: Any) -> Callable[..., bytes]:
    def build(size: tuple[int, int], seed: int, **options: Any) -> bytes:
        return encoded(noise(mode, size, seed), kind, **fixed, **options)

    return build


TURNED: dict[str, Callable[..., bytes]] = {
    "jpeg RGB": still("RGB", "JPEG"),
    "jpeg RGB, progressive": still("RGB", "JPEG", quality=30, progressive=True, subsampling=0),
    "jpeg L": still("L", "JPEG"),
    "jpeg CMYK": still("CMYK", "JPEG"),
    "png 1": still("1", "PNG"),
    "png L": still("L", "PNG"),
    "png L, transparent colour": still("L", "PNG", transparency=7),
    "png LA": still("LA", "PNG"),
    "png P": still("P", "PNG"),
    "png P, one transparent": still("P", "PNG", transparency=3),
    "png P, translucent": still("P", "PNG", transparency=bytes(range(256))),
    "png RGB": still("RGB", "PNG"),
    "png RGB, transparent colour": still("RGB", "PNG", transparency=(1, 2, 3)),
    "png RGBA": still("RGBA", "PNG"),
    "png I;16": still("I;16", "PNG"),
    "png I;16, transparent colour": still("I;16", "PNG", transparency=1000),
    "apng": animated("RGBA", "PNG"),
    "webp RGB": still("RGB", "WEBP", quality=60),
    "webp RGBA": still("RGBA", "WEBP", lossless=True),
    "webp animated": animated("RGBA", "WEBP"),
    "tiff RGB": still("RGB", "TIFF"),
    "tiff RGBA": still("RGBA", "TIFF", compression="tiff_lzw"),
    "tiff CMYK": still("CMYK", "TIFF"),
    "tiff I;16": still("I;16", "TIFF"),
    "tiff I": still("I", "TIFF"),
    "tiff F": still("F", "TIFF"),
    "avif RGB": still("RGB", "AVIF", speed=10),
    "avif RGBA": still("RGBA", "AVIF", speed=10),
}
UNTURNED: dict[str, Callable[..., bytes]] = {
    "gif": still("P", "GIF"),
    "gif, transparent": still("P", "GIF", transparency=3),
    "gif animated": animated("P", "GIF"),
    "bmp RGB": still("RGB", "BMP"),
    "bmp 1": still("1", "BMP"),
    "bmp L": still("L", "BMP"),
    "jp2": still("RGBA", "JPEG2000"),
    "ppm": still("RGB", "PPM"),
    "ico": lambda size, seed: still("RGBA", "ICO")((min(size[0], 256), min(size[1], 256)), seed),
}
every_kind = pytest.mark.parametrize("kind", [*TURNED, *UNTURNED])


def a_file(kind: str, size: tuple[int, int], seed: int = 0, orientation: int | None = None) -> bytes:
    if kind in UNTURNED:
        return UNTURNED[kind](size, seed)
    return TURNED[kind](size, seed, **({} if orientation is None else {"exif": exif(orientation)}))


sides = st.floats(0, 9).map(lambda power: round(2**power))
files = st.builds(
    a_file,
    st.sampled_from([*TURNED, *UNTURNED]),
    st.tuples(sides, sides).filter(lambda size: 1 <= max(size) / min(size) <= 200),
    st.integers(0, 900),
    st.none() | st.integers(1, 8),
)


# --- pixels


@every_model
@settings(max_examples=20)
@given(data=files)
def test_pixels_are_the_processors_own_bit_for_bit(name: str, data: bytes) -> None:
    MODELS[name].compare(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", TURNED)
def test_every_mode_in_every_orientation(kind: str, orientation: int) -> None:
    for model in (QWEN, INTERNVL) if orientation in (1, 6) else (QWEN,):
        model.compare(a_file(kind, (90, 50), orientation, orientation))


@pytest.mark.parametrize("kind", UNTURNED)
def test_formats_without_orientation(kind: str) -> None:
    for model in (QWEN, INTERNVL):
        model.compare(a_file(kind, (50, 40)))


@every_model
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (2, 2), (1, 200), (200, 1), (10, 1400), (13, 27), (28, 28), (448, 448)])
def test_icons_and_ribbons(name: str, size: tuple[int, int]) -> None:
    MODELS[name].compare(a_file("png RGB", size))


@every_model
def test_a_photo(name: str) -> None:
    MODELS[name].compare(a_file("jpeg RGB", (1200, 801), 3, 6))


@pytest.mark.parametrize("model", [QWEN, INTERNVL], ids=["qwen", "internvl"])
def test_images_of_a_pack_are_normalised_together(model: Model) -> None:
    all_data = [a_file(kind, size) for kind, size in [("png L", (90, 40)), ("jpeg RGB", (300, 500)), ("webp RGBA", (30, 30))]]
    found = [model.ours.patches(data) for data in all_data]
    pixel_values, grids = model.theirs(*map(as_handed_over, all_data))
    assert bits(model.ours.normalise(np.concatenate([image.pixels for image in found]))) == bits(pixel_values)
    assert grids in (None, [image.grid for image in found])


def test_alpha_may_be_dropped_as_loading_from_a_url_does() -> None:
    ours = image_tensors("qwen2_5_vl", alpha="drop")
    for number, kind in enumerate([*TURNED, *UNTURNED]):
        data = a_file(kind, (60, 40), number, 5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Palette images with Transparency")
            loaded = load_image(f"data:image/any;base64,{base64.b64encode(data).decode()}")
        assert bits(ours.normalise(ours.patches(data).pixels)) == bits(QWEN.theirs(loaded)[0]), kind


def test_what_becomes_of_modes() -> None:
    grey16 = Image.fromarray(np.array([[0, 255, 1000, 60000]], np.uint16))
    assert np.asarray(decode(encoded(grey16, "PNG")).convert("L")).tolist() == [[0, 255, 255, 255]]
    clear = encoded(Image.new("RGBA", (1, 1), (10, 20, 30, 0)), "PNG")
    assert decode(clear).getpixel((0, 0)) == (255, 255, 255)
    assert decode(clear, alpha="drop").getpixel((0, 0)) == (10, 20, 30)
    assert decode(encoded(Image.new("1", (2, 1), 1), "PNG")).mode == "L"
    assert decode(encoded(Image.new("LA", (1, 1), (10, 100)), "PNG")).getpixel((0, 0)) == (159, 159, 159)


def test_orientation_that_only_xmp_names_is_not_applied() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF><rdf:Description tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    data = encoded(noise("RGB", (90, 40)), "JPEG", xmp=xmp)
    assert decode(data).size == (90, 40)


def test_draft_is_off_unless_asked_for() -> None:
    page = Image.effect_mandelbrot((2000, 1400), (-2, -1, 1, 1), 60).convert("RGB")
    data = encoded(page, "JPEG", exif=exif(6))
    small, drafted = (image_tensors("internvl3", {"max_tiles": 1}, draft=draft) for draft in (False, True))
    exact, quick = small.patches(data), drafted.patches(data)
    assert quick.grid == exact.grid
    assert quick.pixels.shape == exact.pixels.shape
    distance = np.abs(quick.pixels.astype(int) - exact.pixels).mean()
    assert 0 < distance < 3
    assert decode(data, draft_size=(448, 448)).size == (700, 1000)
    assert decode(data, draft_size=(350, 900)).size == (700, 1000)  # upright: 900 of the 2000 stored side by side
    assert np.array_equal(*(ours.patches(a_file("png RGB", (900, 700))).pixels for ours in (small, drafted)))


# --- normalising


@pytest.mark.parametrize("values", [CLIP, HALF, IMAGENET])
@pytest.mark.parametrize("frames", [None, 2])
def test_every_byte_in_every_channel(values: dict[str, list[float]], frames: int | None) -> None:
    normalisation = Normalisation(mean=tuple(values["image_mean"]), std=tuple(values["image_std"]), frames=frames)
    image = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16)).copy()
    expected = normalize(rescale(image, 1 / 255), values["image_mean"], values["image_std"], input_data_format="channels_first")
    pixels = image[None] if frames is None else image.reshape(1, -1)
    wanted = expected[None] if frames is None else np.repeat(expected.reshape(3, 1, -1), frames, axis=1).reshape(1, -1)
    assert bits(normalisation.apply(pixels)) == bits(np.ascontiguousarray(wanted))
    tensor = torch.from_numpy(pixels)
    for found in (normalisation.apply_torch(tensor), normalisation._looked_up(tensor, torch.float32)):
        assert bits(found.numpy()) == bits(np.ascontiguousarray(wanted))
    for found in (normalisation.apply_torch(tensor, torch.bfloat16), normalisation._looked_up(tensor, torch.bfloat16)):
        assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(wanted)).bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_same_bits_on_a_gpu() -> None:
    found = QWEN.ours.patches(a_file("png RGB", (300, 200))).pixels
    there = QWEN.ours.normalise_torch(torch.from_numpy(found).cuda())
    assert there.is_cuda
    assert bits(there.cpu().numpy()) == bits(QWEN.ours.normalise(found))


@pytest.mark.parametrize("rows", [0, 1, 6000])
def test_any_number_of_rows(rows: int) -> None:
    pixels = np.resize(np.frombuffer(NOISE, np.uint8), (rows, 588))
    found = QWEN.ours.normalise(pixels)
    assert found.shape == (rows, 1176)
    for row in range(0, rows, 997):
        assert bits(found[row : row + 1]) == bits(QWEN.ours.normalise(pixels[row : row + 1]))
    assert bits(QWEN.ours.normalise_torch(torch.from_numpy(pixels)).numpy()) == bits(found)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5,) * 3), ((0.5,) * 3, (0.5, 0, 0.5)), ((0.5,) * 3, ())])
def test_impossible_values_are_refused(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="expected three numbers each"):
        image_tensors("qwen3_vl", mean=mean, std=std)


def test_another_mean_may_be_given() -> None:
    pixel_values, _ = model("qwen3_vl", MODELS["qwen3_vl"].processor, CLIP).theirs(noise("RGB", (90, 70)))
    ours = image_tensors("qwen3_vl", mean=CLIP["image_mean"], std=CLIP["image_std"])
    assert bits(ours.normalise(ours.patches(a_file("png RGB", (90, 70))).pixels)) == bits(pixel_values)


# --- sizes, promises and memory


@every_model
@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
@example(width=20000, height=100)
def test_targets_are_what_the_index_counts(name: str, width: int, height: int) -> None:
    ours = MODELS[name].ours
    count = count_one(ours.layout.rule, width, height)  # type: ignore[attr-defined]
    if count.refusal is not None:
        with pytest.raises(RowError, match=re.escape(count.refusal)):
            ours.target(width, height)
        return
    target = ours.target(width, height)
    assert (target.grid, target.num_patches) == ((1, count.grid_rows, count.grid_columns), count.num_patches)
    assert ours.num_bytes(width, height) == target.num_bytes == count.num_patches * 3 * ours.layout.rule.patch_size**2  # type: ignore[attr-defined]


def test_a_patch_is_588_bytes() -> None:
    found = QWEN.ours.patches(a_file("jpeg RGB", (640, 480)))
    assert found.pixels.dtype == np.uint8
    assert found.pixels.shape == (34 * 46, 588)
    assert found.pixels.nbytes == QWEN.ours.num_bytes(640, 480) == 34 * 46 * 588
    assert QWEN.ours.normalise(found.pixels).nbytes == 8 * found.pixels.nbytes


@every_model
def test_blank_images_have_the_promised_grid(name: str) -> None:
    ours = MODELS[name].ours
    blank, real = ours.blank(300, 500), ours.patches(a_file("jpeg L", (300, 500)))
    assert blank.grid == real.grid
    assert blank.pixels.shape == real.pixels.shape
    assert np.unique(blank.pixels).tolist() == [GREY]
    assert np.abs(ours.normalise(blank.pixels)).max() < 0.5


@every_model
def test_processors_refuse_what_we_refuse(name: str) -> None:
    for size in [(1, 201), (201, 1), (1401, 7), (1400, 7)]:
        data = a_file("png L", size)
        try:
            MODELS[name].theirs(as_handed_over(data))
        except ValueError as error:
            with pytest.raises(RowError, match=re.escape(str(error))) as caught:
                MODELS[name].ours.patches(data)
            assert caught.value.reason is Reason.ASPECT_RATIO
            with pytest.raises(RowError, match=re.escape(str(error))):
                MODELS[name].ours.blank(*size)
        else:
            MODELS[name].compare(data)


def test_a_side_beyond_the_rules_arithmetic() -> None:
    with pytest.raises(RowError, match="sides of at most"):
        INTERNVL.ours.target(1, 2**24 + 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_promise_is_of_the_upright_image(orientation: int) -> None:
    data = a_file("jpeg RGB", (640, 480), 0, orientation)
    size = (640, 480) if orientation < 5 else (480, 640)
    promise = Promise(width=size[0], height=size[1], num_patches=QWEN.ours.target(*size).num_patches)
    columns, rows = (46, 34) if orientation < 5 else (34, 46)
    assert QWEN.ours.patches(data, promise).grid == (1, rows, columns)
    swapped = Promise(width=size[1], height=size[0], num_patches=promise.num_patches)
    with pytest.raises(FormatError, match=f"found a jpeg of {size[0]} x {size[1]} .*promised {size[1]} x {size[0]}"):
        QWEN.ours.patches(data, swapped)


def test_a_promise_of_another_rule_names_both_counts() -> None:
    promise = Promise(width=640, height=480, num_patches=1564)
    data = a_file("jpeg RGB", (640, 480))
    assert len(QWEN.ours.patches(data, promise).pixels) == 1564
    with pytest.raises(FormatError, match=r"promised 1,564 patches, this rule makes 1,200 \(grid \(1, 30, 40\)\)"):
        MODELS["qwen3_vl"].ours.patches(data, promise)
    with pytest.raises(FormatError, match=r"promised 1,564 patches, this rule makes 13,312"):
        INTERNVL.ours.patches(data, promise)


# --- hostile files


def refused(data: bytes, **options: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        image_tensors("qwen2_5_vl", **options).patches(data)
    assert "\n" not in str(caught.value)
    return caught.value


def pixels_or_refusal(data: bytes) -> ImagePatches | Reason:
    try:
        return QWEN.ours.patches(data)
    except RowError as error:
        return error.reason


@every_kind
def test_cut_files_give_a_reason(kind: str) -> None:
    data = a_file(kind, (60, 50))
    if kind not in ("gif animated", "webp animated", "apng"):  # their first frame may be whole
        refused(data[: len(data) // 2])
    for end in [*range(0, len(data) - 1, max(1, len(data) // 40)), len(data) - 2]:
        pixels_or_refusal(data[:end])


@every_kind
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_changed_bytes_give_pixels_or_a_reason(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(a_file(kind, (60, 50)))
    for _ in range(chance.randint(1, 8)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    pixels_or_refusal(bytes(data))


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I4s", len(payload), kind) + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png_of(width: int, height: int, *extra: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(bytes((width + 1) * min(height, 100)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_bombs_are_refused_by_their_header() -> None:
    assert refused(png_of(50000, 50000)).reason is Reason.TOO_MANY_PIXELS
    assert refused(a_file("png L", (500, 400)), limits=ImageLimits(max_pixels=199_999)).reason is Reason.TOO_MANY_PIXELS
    wide = encoded(Image.new("L", (10000, 10000)), "PNG")  # Pillow itself would warn here
    assert refused(wide, limits=ImageLimits(max_pixels=10**7)).reason is Reason.TOO_MANY_PIXELS
    assert image_tensors("internvl3", {"max_tiles": 1}).patches(wide).grid == (1, 1, 1)


def test_what_was_let_into_a_dataset_may_be_trained_on() -> None:
    """A recipe's `max_pixels` may be above ours; the index promises what came of it."""
    tensors = image_tensors("internvl3", {"max_tiles": 1}, limits=ImageLimits(max_pixels=199_999))
    data = a_file("png L", (500, 400))
    promise = Promise(width=500, height=400, num_patches=tensors.target(500, 400).num_patches)
    assert tensors.patches(data, promise).grid == (1, 1, 1)
    with pytest.raises(RowError, match="limit is 200,000") as caught:
        tensors.patches(a_file("png L", (501, 400)), promise)
    assert caught.value.reason is Reason.TOO_MANY_PIXELS


def test_chunks_that_swell_are_never_opened() -> None:
    text = b"note\0\0" + zlib.compress(bytes(1 << 24))
    assert QWEN.ours.patches(png_of(60, 60, chunk(b"zTXt", text))).grid == (1, 4, 4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.EMPTY_IMAGE),
        (b"<html><body>404</body></html>", Reason.NOT_AN_IMAGE),
        (b"\xff\xd8\xff\xe0", Reason.TRUNCATED_IMAGE),
        (NOISE[:1000], Reason.NOT_AN_IMAGE),
    ],
)
def test_what_is_no_image(data: bytes, reason: Reason) -> None:
    assert refused(data).reason is reason


def test_a_refused_size_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plugin.tensors.families.decode", lambda *_, **__: pytest.fail("decoded"))
    refused(a_file("png L", (1, 201)))


# --- the registry


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - PUBLISHED.keys()))
def test_presets_without_pixels_name_those_with(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*has no pixels yet; nearest with pixels: (qwen2_5_vl|internvl3)"):
        image_tensors(name)


def test_every_preset_with_pixels_is_tested() -> None:
    assert {model.preset for model in MODELS.values()} == PUBLISHED.keys()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen2_5", {}, "did you mean 'qwen2_5_vl'"),
        ("qwen2_5_vl", {"parameters": {"max_pixel": 9}}, "did you mean 'max_pixels'"),
        ("qwen2_5_vl", {"parameters": {"fetch_image": True}}, "resized twice"),
        ("internvl3", {"parameters": {"fill_area": True}}, "fill_area"),
        ("internvl3", {"alpha": "black"}, "alpha is 'black', expected one of white, drop"),
    ],
)
def test_wrong_use(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        image_tensors(name, **options)


def test_decode_takes_the_same_words() -> None:
    with pytest.raises(BayplanError, match="alpha is 'black'"):
        decode(a_file("png L", (2, 2)), alpha="black")  # type: ignore[arg-type]


@every_model
def test_travels_to_workers_and_serves_threads(name: str) -> None:
    ours = MODELS[name].ours
    again = pickle.loads(pickle.dumps(ours))
    assert again == ours
    all_data = [a_file(kind, (70, 50), number) for number, kind in enumerate([*TURNED, *UNTURNED])]
    expected = [ours.patches(data).pixels.tobytes() for data in all_data]
    with ThreadPoolExecutor(8) as pool:
        assert [found.pixels.tobytes() for found in pool.map(again.patches, all_data * 2)] == expected * 2


def test_numpy_and_pillow_are_all_it_loads() -> None:
    code = """
import sys
from plugin.tensors import image_tensors
ours = image_tensors("qwen2_5_vl")
ours.normalise(ours.blank(50, 60).pixels)
print(sorted({"torch", "ray", "megatron", "transformers", "pipelines", "pyarrow"} & sys.modules.keys()))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
