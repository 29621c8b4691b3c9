"""Images a second on one core: bytes to uint8 patches, and on to float32, against the processor and against Pillow alone.

The limit is Pillow opening, decoding, making RGB and resizing, nothing else. The processor is transformers' Pillow class, given
the picture upright; its result is compared with ours once, bit for bit. Contestants take turns on the same images in memory,
each on one thread; CPU time is measured.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import processors

from packer.format.errors import RowError
from plugin.tensors import decode, image_tensors

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
KINDS = {"stamps": "stamps", "clip art": "clipart", "manual figures": "gimp-help", "photos": "photos", "wallpapers": "wallpapers"}
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
MOST_IMAGES = 40
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def upright(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def decodes(path: Path) -> bool:
    """Some images of the corpus are broken on purpose."""
    try:
        decode(path.read_bytes())
    except RowError:
        return False
    return True


def contestants(preset: str) -> dict[str, Callable[[bytes], Any]]:
    ours = image_tensors(preset)
    is_tiled = preset.startswith("internvl")
    processor = processors.internvl_images() if is_tiled else processors.qwen2_vl_images(max_pixels=1003520)
    values = IMAGENET if is_tiled else {}
    sizes: dict[tuple[int, int], Any] = {}

    def limit(data: bytes) -> None:
        image = upright(data).convert("RGB")
        target = sizes.setdefault(image.size, ours.target(*image.size))
        image.resize((target.width, target.height), Image.Resampling.BICUBIC)
        if is_tiled and target.shape[0] > 1:
            image.resize(target.shape[2:], Image.Resampling.BICUBIC)

    return {
        "Pillow alone": limit,
        "ours, uint8": lambda data: ours.patches(data).pixels,
        "ours, float32": lambda data: ours.normalise(ours.patches(data).pixels),
        "processor": lambda data: processor(images=upright(data), return_tensors="np", **values)["pixel_values"],
    }


def report(runs: int) -> None:
    table = Table(title=f"images/s on one core, median of {runs}; in brackets: times the processor")
    columns = (
        "preset",
        "images",
        "mean size",
        "Pillow alone",
        "ours, uint8",
        "ours, float32",
        "processor",
        "uint8 of Pillow alone",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("preset", "images") else "right")
    for preset in ("qwen2_5_vl_max1280", "internvl3"):
        for kind, folder in KINDS.items():
            files = sorted(path for path in (CORPUS / folder).rglob("*") if path.suffix in SUFFIXES)
            all_data = [path.read_bytes() for path in files[:: max(1, len(files) // MOST_IMAGES)] if decodes(path)]
            sides = np.mean([upright(data).size for data in all_data], axis=0)
            rivals = contestants(preset)
            for data in all_data:
                assert np.array_equal(rivals["ours, float32"](data), rivals["processor"](data)), "pixels differ"
            turns = [{name: seconds(rival, all_data) for name, rival in rivals.items()} for _ in range(runs)]
            rate = {name: len(all_data) / statistics.median(turn[name] for turn in turns) for name in rivals}
            shown = [f"{rate[name]:,.0f} ({rate[name] / rate['processor']:.1f}x)" for name in list(rivals)[:3]]
            ratio = statistics.median(turn["Pillow alone"] / turn["ours, uint8"] for turn in turns)
            size = f"{sides[0]:.0f} x {sides[1]:.0f}"
            table.add_row(preset, f"{len(all_data)} {kind}", size, *shown, f"{rate['processor']:,.0f}", f"{ratio:.0%}")
    Console(width=150).print(table)


def seconds(rival: Callable[[bytes], Any], all_data: list[bytes]) -> float:
    started = time.process_time()
    for data in all_data:
        rival(data)
    return time.process_time() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Pillow on palettes
    report(parser.parse_args().runs)
