"""A small recipe of five sources with everything an index job meets: documents, conversations, captions, text, and nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from byte_tokenizer import write_byte_tokenizer
from PIL import Image

from packer.format import layout

QWEN = "tokenizer: tokenizer.json, template: chatml, eos: <|endoftext|>, image_rule: qwen2_5_vl"
PROFILES = {"qwen": f"{{{QWEN}, sequence_lengths: [20, 60]}}"}
SOURCES = """\
  - {name: docs, schema: interleaved, files: 'docs*.jsonl', image_root: images, range_bytes: 512}
  - {name: talk, schema: chat, files: talk.jsonl, image_root: images}
  - {name: pics, schema: caption, files: pics.jsonl, image_root: images, range_bytes: 256, target_bundle_bytes: 4000}
  - {name: text, schema: text, files: text.jsonl.gz}
  - {name: none, schema: text, files: none.jsonl}
"""
TOO_LONG = (500, 2)
"""The rule refuses an image 250 times as wide as it is high."""


def write_job(folder: Path) -> Path:
    """The inputs and the recipe; its output is `out` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    _images(folder / "images")
    write_byte_tokenizer(folder / "tokenizer.json")
    write_rows(folder / "docs.jsonl", (_document(number) for number in range(12)))
    write_rows(folder / "talk.jsonl", map(_conversation, range(5)))
    captions = ["0.png", "1.png", "upright.jpg", "missing.png", "grey.png", "long.png", "0.png", "pages.gif", "clear.png"]
    write_rows(
        folder / "pics.jsonl", ({"id": f"pic {n}", "image_path": i, "caption": f"그림 {n}"} for n, i in enumerate(captions))
    )
    with gzip.open(folder / "text.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"{'word ' * number}end"}) + "\n" for number in range(30))
    (folder / "none.jsonl").touch()
    return write_recipe(folder)


def write_recipe(folder: Path, *, sources: str = SOURCES, profiles: Mapping[str, str] = PROFILES, output: str = "out") -> Path:
    """Another recipe over the same inputs."""
    listed = "".join(f"  {name}: {settings}\n" for name, settings in profiles.items())
    recipe = folder / "recipe.yaml"
    text = f"version: 1\nname: small\noutput: {output}\nsources:\n{sources}"
    recipe.write_text(text + (f"profiles:\n{listed}" if listed else ""))
    return recipe


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def records(dataset: Path, source: str) -> list[dict[str, Any]]:
    """The record lines of a source in part order: part ids are padded, and a retry stands behind its part."""
    document = json.loads((dataset / layout.source_file(source)).read_text())
    files = [dataset / layout.part_file(source, part["part_id"], layout.RECORDS_SUFFIX) for part in document["parts"]]
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def _document(number: int) -> dict[str, Any]:
    images = [{"type": "image", "image": f"{k}.png"} for k in range(number % 4)]
    return {
        "id": f"doc {number}",
        "content": [{"type": "text", "text": f"before {number}"}, *images, {"type": "text", "text": "end"}],
    }


def _conversation(number: int) -> dict[str, Any]:
    asked = [{"type": "text", "text": f"what is {number}?"}]
    if number % 2:
        asked.append({"type": "image_url", "image_url": {"url": f"{number}.png"}})
    role = "critic" if number == 4 else "user"
    messages = [{"role": role, "content": asked}, {"role": "assistant", "content": f"it is {number}"}]
    return {"id": f"talk {number}", "messages": messages}


def _images(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number in range(4):
        Image.effect_noise((30 + 40 * number, 60), 40).convert("RGB").save(folder / f"{number}.png")
    Image.effect_noise((64, 48), 30).save(folder / "grey.png")
    Image.new("RGB", TOO_LONG, "red").save(folder / "long.png")
    Image.new("RGBA", (40, 40)).save(folder / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.effect_noise((80, 40), 30).convert("RGB").save(folder / "upright.jpg", exif=exif)
    pages = [Image.new("RGB", (33, 22), color) for color in ("red", "green", "blue")]
    pages[0].save(folder / "pages.gif", save_all=True, append_images=pages[1:])
