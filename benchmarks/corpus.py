"""Image corpora for the benchmarks: real encodings of noise, each file's bytes unique, with the JSONL that names them."""

from __future__ import annotations

import json
import random
import struct
import zlib
from io import BytesIO
from pathlib import Path

from PIL import Image

KINDS = {"icons": (6000, 0), "photos": (0, 400), "mixed": (3000, 200)}
"""Kind -> number of icons (PNG of about 25 KB) and photos (JPEG of about 1 MB)."""


def make_corpus(folder: Path, kind: str) -> Path:
    """Write a corpus unless it is there; the path of its JSONL file."""
    lines = folder / f"{kind}.jsonl"
    if lines.exists():
        return lines
    images = folder / kind
    images.mkdir(parents=True, exist_ok=True)
    num_icons, num_photos = KINDS[kind]
    icons = [_encoded(92, 92, "PNG", seed) for seed in range(8)]
    photos = [_encoded(1500, 1050, "JPEG", seed) for seed in range(8)]
    names = []
    for number in range(num_icons):
        names.append(f"{kind}/i{number:05d}.png")
        (folder / names[-1]).write_bytes(unique_png(icons[number % 8], number))
    for number in range(num_photos):
        names.append(f"{kind}/p{number:05d}.jpg")
        (folder / names[-1]).write_bytes(unique_jpeg(photos[number % 8], number))
    random.Random(1).shuffle(names)
    rows = (json.dumps({"image_path": name, "caption": f"a picture called {name}"}) for name in names)
    lines.write_text("\n".join(rows) + "\n")
    return lines


def _encoded(width: int, height: int, kind: str, seed: int) -> bytes:
    image = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(width * height * 3))
    buffer = BytesIO()
    image.save(buffer, kind, **({"quality": 77} if kind == "JPEG" else {}))
    return buffer.getvalue()


def unique_png(data: bytes, number: int) -> bytes:
    body = b"tEXt" + b"Comment\0" + str(number).encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk + data[33:]


def unique_jpeg(data: bytes, number: int) -> bytes:
    comment = str(number).encode()
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]
