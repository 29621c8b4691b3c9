"""The figures of a report equal recounts that share no code with it: DuckDB over the Arrow files, plain Python over the lines."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.ipc
import pytest
from in_process import index_in_process, pack_in_process, retry_in_process, run_here
from PIL import Image
from small_job import PROFILES, QWEN, records, write_job, write_recipe, write_rows

from packer.format import layout
from packer.storage import open_storage
from pipelines.index import IndexJob
from pipelines.pack import PackJob
from pipelines.ray_executor import Interrupted, Listener, Outcome
from pipelines.recipe import load_recipe
from pipelines.report_document import report_document
from pipelines.tasks import Task

SOURCES = ("docs", "talk", "pics", "text", "none")
BOTH = {**PROFILES, "bare": "{tokenizer: tokenizer.json, template: document, image_rule: null}"}
LENGTHS = (20, 60)


def write_inputs(folder: Path) -> Path:
    """The small job with bad rows in two sources and a second file in one; two profiles."""
    write_job(folder)
    with open(folder / "docs.jsonl", "a") as file:
        file.write('{broken\n{"content": 5}\n')
    write_rows(folder / "docs-2.jsonl", [{"id": "k", "content": [{"type": "image", "image": "2.png"}]}])
    with open(folder / "talk.jsonl", "a") as file:
        file.write('{"messages": "none"}\n')
    return write_recipe(folder, profiles=BOTH)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed, one of two missing images put in place and retried, indexed."""
    folder = tmp_path_factory.mktemp("figures") / "job"
    recipe = write_inputs(folder)
    with open(folder / "pics.jsonl", "a") as file:
        file.write('{"id": "never", "image_path": "never.png", "caption": "never there"}\n')
    pack_in_process(recipe)
    Image.new("RGB", (50, 70), "blue").save(folder / "images/missing.png")
    retry_in_process(folder / "out")
    index_in_process(folder / "out")
    return folder / "out"


def document_of(dataset: Path) -> dict[str, Any]:
    return report_document(open_storage(str(dataset)), (), num_cards=3, seed=0)


@pytest.fixture(scope="module")
def document(dataset: Path) -> dict[str, Any]:
    return document_of(dataset)


def figures(document: dict[str, Any], profile: str, source: str | None) -> dict[str, Any]:
    """Of a source, or of all."""
    found = document["profiles"][profile]
    numbers: dict[str, Any] = found["all"] if source is None else found["sources"][source]
    return numbers


def smart_resize(width: int, height: int) -> tuple[int, int] | None:
    """Patches of 14 in both directions, as the Qwen2.5-VL processor gives them; None for what it refuses."""
    if max(width, height) / min(width, height) > 200:
        return None
    across, down = max(28, round(width / 28) * 28), max(28, round(height / 28) * 28)
    if across * down < 3136:
        scale = math.sqrt(3136 / (width * height))
        across, down = math.ceil(width * scale / 28) * 28, math.ceil(height * scale / 28) * 28
    assert across * down <= 12845056
    return across // 14, down // 14


def counted(record: dict[str, Any]) -> dict[str, int] | None:
    """A record under the profile `qwen`: every byte is a token, two wrappers an image, `<|endoftext|>` behind a document."""
    sizes = [smart_resize(entry["width"], entry["height"]) for entry in record["images"]]
    if None in sizes:
        return None
    if "messages" in record:
        texts = [[part["text"] for part in message["content"] if part["type"] == "text"] for message in record["messages"]]
        roles = [message["role"] for message in record["messages"]]
        text = sum(len(f"{role}\n{''.join(said)}\n".encode()) for role, said in zip(roles, texts, strict=True))
        special = 2 * len(roles)
        loss = sum(len("".join(said).encode()) + 1 for role, said in zip(roles, texts, strict=True) if role == "assistant")
    else:
        text = sum(len(part["text"].encode()) for part in record["content"] if part["type"] == "text")
        special, loss = 1, text + 1
    patches = [size[0] * size[1] for size in sizes if size]
    image = sum(count // 4 for count in patches)
    other = special + 2 * len(patches)
    return {
        "text": text, "image": image, "other": other, "tokens": text + image + other, "loss": loss,
        "patches": sum(patches), "images": len(patches),
    }  # fmt: skip


@pytest.mark.parametrize("source", [*SOURCES, None])
def test_tokens_against_the_record_lines(dataset: Path, document: dict[str, Any], source: str | None) -> None:
    rows = [counted(record) for name in ([source] if source else SOURCES) for record in records(dataset, name)]
    usable = [row for row in rows if row is not None]
    found = figures(document, "qwen", source)
    assert (found["num_samples"], found["num_usable"]) == (len(rows), len(usable))
    assert found["status"] == {"usable": len(usable), **({"image_refused": 1} if len(usable) < len(rows) else {})}
    for key, name in (
        ("num_tokens", "tokens"),
        ("num_text_tokens", "text"),
        ("num_image_tokens", "image"),
        ("num_other_tokens", "other"),
        ("num_loss_tokens", "loss"),
        ("num_patches", "patches"),
        ("num_images", "images"),
    ):
        assert found[key] == sum(row[name] for row in usable), key
    assert found["num_text_only"] == sum(not row["images"] for row in usable)
    assert found["num_image_only"] == sum(row["images"] > 0 and not row["text"] for row in usable)
    assert found["num_text_only"] + found["num_image_only"] + found["num_mixed"] == len(usable)
    for length, entry in zip(LENGTHS, found["over_long"], strict=True):
        longer = [row["tokens"] for row in usable if row["tokens"] > length]
        assert entry == {"sequence_length": length, "num_samples": len(longer), "num_tokens": sum(longer)}
    tokens = [row["tokens"] for row in usable]
    spread = found["distributions"]["tokens_per_sample"]
    assert (spread["count"], spread["sum"]) == (len(tokens), sum(tokens))
    assert (spread["min"], spread["max"]) == ((min(tokens), max(tokens)) if tokens else (None, None))


@pytest.mark.parametrize("source", [*SOURCES, None])
def test_images_against_the_record_lines(dataset: Path, document: dict[str, Any], source: str | None) -> None:
    entries = [
        (name, entry)
        for name in ([source] if source else SOURCES)
        for record in records(dataset, name)
        for entry in record["images"]
    ]
    found = figures(document, "qwen", source)
    for key in ("format", "mode", "orientation"):
        assert found[f"{key}s"] == Counter(str(entry[key]) for _, entry in entries)
    assert found["image_bytes"] == sum(entry["size"] for _, entry in entries)
    assert found["num_animated"] == sum(entry["frames"] > 1 for _, entry in entries)
    assert found["num_upright"] == sum(entry["orientation"] == 1 for _, entry in entries)
    assert found["num_images_stored"] == len({(name, entry["bundle"], entry["offset"]) for name, entry in entries})
    assert found["num_images_stored"] + found["num_duplicates_saved"] == len(entries)


def test_the_test_data_has_what_it_takes(document: dict[str, Any]) -> None:
    found = figures(document, "qwen", None)
    assert len(found["formats"]) >= 3
    assert len(found["modes"]) >= 3
    assert found["orientations"].keys() == {"1", "6"}
    assert found["num_animated"] == 1
    assert found["num_duplicates_saved"] > 0
    assert found["num_image_only"] == 1
    assert all(0 < entry["num_samples"] < found["num_usable"] for entry in found["over_long"])


def rows_of_inputs(folder: Path, source: str) -> int:
    files = sorted(folder.glob(f"{source}*.jsonl*"))
    read = [gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes() for file in files]
    return sum(data.count(b"\n") for data in read)


@pytest.mark.parametrize("source", [*SOURCES, None])
def test_rows_and_quarantine_against_inputs_and_lines(dataset: Path, document: dict[str, Any], source: str | None) -> None:
    names = [source] if source else SOURCES
    num_read = sum(rows_of_inputs(dataset.parent, name) for name in names)
    reasons: Counter[str] = Counter()
    num_written = 0
    for name in names:
        origins = [(record["origin"]["file"], record["origin"]["byte_offset"]) for record in records(dataset, name)]
        num_written += len(origins)
        for path in (dataset / layout.source_dir(name)).glob(f"*{layout.QUARANTINE_SUFFIX}"):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            reasons.update(line["reason"] for line in lines if (line["file"], line["byte_offset"]) not in origins)
    found = figures(document, "qwen", source)
    assert (found["num_read"], found["num_written"]) == (num_read, num_written)
    assert found["num_quarantined"] == num_read - num_written == reasons.total()
    assert found["quarantined_by_reason"] == reasons
    if source is None:
        assert reasons == {"invalid_json": 1, "schema_mismatch": 2, "missing_image": 1}


@pytest.mark.parametrize("source", [*SOURCES, None])
@pytest.mark.parametrize("profile", BOTH)
def test_totals_against_duckdb(dataset: Path, document: dict[str, Any], profile: str, source: str | None) -> None:
    files = sorted((dataset / f"index/{profile}/parts").glob(f"{source or '*'}/*.arrow"))
    tables = [pa.ipc.open_file(pa.memory_map(str(path))).read_all().replace_schema_metadata() for path in files]
    found = figures(document, profile, source)
    if not tables:
        assert (source, found["num_samples"], found["num_tokens"]) == ("none", 0, 0)
        return
    with duckdb.connect() as database:
        database.register("counts", pa.concat_tables(tables))
        (totals,) = database.execute(
            "select count(*), count(*) filter (status = 0), sum(num_tokens), sum(num_text_tokens), sum(num_image_tokens),"
            " sum(num_loss_tokens), sum(num_images), sum(num_patches), sum(num_tokens - num_text_tokens - num_image_tokens),"
            " count(*) filter (status = 0 and num_images = 0), min(num_tokens) filter (status = 0),"
            " max(num_tokens) filter (status = 0) from counts"
        ).fetchall()
        images = database.execute(
            "select count(*), min(i.width), max(i.width), min(i.height), max(i.height), sum(i.num_image_tokens),"
            " sum(i.num_patches), max(i.num_image_tokens) from (select unnest(images) as i from counts)"
        ).fetchall()[0]
        longer = [
            database.execute(
                "select count(*), coalesce(sum(num_tokens), 0) from counts where num_tokens > ?", [length]
            ).fetchall()[0]
            for length in document["profiles"][profile]["sequence_lengths"]
        ]
    spread = found["distributions"]
    assert totals == (
        found["num_samples"], found["num_usable"], found["num_tokens"], found["num_text_tokens"], found["num_image_tokens"],
        found["num_loss_tokens"], found["num_images"], found["num_patches"], found["num_other_tokens"], found["num_text_only"],
        spread["tokens_per_sample"]["min"], spread["tokens_per_sample"]["max"],
    )  # fmt: skip
    assert images == (
        found["num_images"], spread["image_width"]["min"], spread["image_width"]["max"], spread["image_height"]["min"],
        spread["image_height"]["max"], found["num_image_tokens"] or None, found["num_patches"] or None,
        spread["image_tokens_per_image"]["max"],
    )  # fmt: skip
    assert longer == [(entry["num_samples"], entry["num_tokens"]) for entry in found["over_long"]]


def test_sources_add_up_to_all(document: dict[str, Any]) -> None:
    for profile in BOTH:
        whole, parts = document["profiles"][profile]["all"], document["profiles"][profile]["sources"].values()
        for key, value in whole.items():
            if isinstance(value, int):
                assert value == sum(part[key] for part in parts), key
            elif isinstance(value, dict) and key != "distributions":
                assert value == sum((Counter(part[key]) for part in parts), Counter(value.fromkeys(value, 0))), key


@pytest.mark.parametrize("num_tasks", [1, 2, 4, 9])
def test_totals_after_a_stop_and_a_rerun_are_those_of_one_run(tmp_path: Path, num_tasks: int) -> None:
    folder = tmp_path / "job"
    recipe, output = write_inputs(folder), folder / "out"
    pack_in_process(recipe)
    index_in_process(output)
    expected = document_of(output)
    shutil.rmtree(output)

    def stopped_after(count: int) -> Callable[[Sequence[tuple[str, Task]], Listener], Outcome]:
        def run_tasks(tasks: Sequence[tuple[str, Task]], listener: Listener) -> Outcome:
            done = run_here(str(output))(tasks[:count], listener)
            if len(tasks) > count:
                raise Interrupted("stopped")
            return done

        return run_tasks

    loaded = load_recipe(recipe)
    with pytest.raises(Interrupted):
        PackJob(loaded, run_tasks=stopped_after(num_tasks)).run()
    pack_in_process(recipe)
    for count in (num_tasks, 1):
        try:
            IndexJob(str(output), run_tasks=stopped_after(count)).run()
        except Interrupted:
            continue
    index_in_process(output)
    assert document_of(output) == expected
    write_rows(folder / "docs-3.jsonl", [{"id": "late", "content": [{"type": "text", "text": "late"}]}])
    pack_in_process(recipe)
    index_in_process(output)
    again = document_of(output)
    for profile in BOTH:
        assert again["profiles"][profile]["all"]["num_samples"] == expected["profiles"][profile]["all"]["num_samples"] + 1
        assert again["profiles"][profile]["sources"]["talk"] == expected["profiles"][profile]["sources"]["talk"] | {
            "mixture": again["profiles"][profile]["sources"]["talk"]["mixture"]
        }


def test_a_profile_without_eos_differs_by_one_token_a_document(dataset: Path, document: dict[str, Any]) -> None:
    """A second opinion on `other`: the same dataset under a profile that lacks only the end token."""
    recipe = write_recipe(
        dataset.parent, profiles={"bare": BOTH["bare"], "no-eos": f"{{{QWEN.replace(' eos: <|endoftext|>,', '')}}}"}
    )
    index_in_process(dataset, recipe=recipe, profiles=["no-eos"])
    one, other = (figures(document_of(dataset), profile, "text") for profile in ("qwen", "no-eos"))
    assert one["num_tokens"] - other["num_tokens"] == one["num_usable"] == 30
