"""Statistics against independent recounts of random tables, real records and manifests; merging, JSON, the report's dict."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.facts import ImageFacts, PackFacts, RecordFacts
from indexer.mixture import SourceTokens, mixture_of
from indexer.stats import STATUS_NAMES, OverLong, Stats, decode_stats, encode_stats, over_long, stats_of
from indexer.stats_json import DISTRIBUTIONS, QUANTILES, stats_dict
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import FileEntry, InputSpan, PartManifest, Supersedes, decode_source
from packer.format.record import decode_record

GOLDEN = Path(__file__).parents[1] / "golden" / "v1" / "dataset" / "sources"


@dataclass(frozen=True)
class Columns:
    num_text_tokens: np.ndarray
    num_image_tokens: np.ndarray
    num_tokens: np.ndarray
    num_loss_tokens: np.ndarray
    num_images: np.ndarray
    status: np.ndarray
    image_width: np.ndarray
    image_height: np.ndarray
    image_num_tokens: np.ndarray
    image_num_patches: np.ndarray
    image_sum_squared_attention: np.ndarray


def row(text=0, other=0, images=(), status=0):
    """One row; an image is (width, height, tokens, patches)."""
    return {"text": text, "other": other, "images": list(images), "status": status}


def columns(rows):
    """The index columns of some rows, as the index writes them: unusable rows are zero and without images."""
    usable = [r if r["status"] == 0 else row(status=r["status"]) for r in rows]
    images = np.array([image for r in usable for image in r["images"]], np.int32).reshape(-1, 4)
    text = np.array([r["text"] for r in usable], np.int32)
    of_images = np.array([sum(image[2] for image in r["images"]) for r in usable], np.int32)
    return Columns(
        num_text_tokens=text,
        num_image_tokens=of_images,
        num_tokens=text + of_images + np.array([r["other"] for r in usable], np.int32),
        num_loss_tokens=text // 2,
        num_images=np.array([len(r["images"]) for r in usable], np.int32),
        status=np.array([r["status"] for r in usable], np.uint8),
        image_width=images[:, 0],
        image_height=images[:, 1],
        image_num_tokens=images[:, 2],
        image_num_patches=images[:, 3],
        image_sum_squared_attention=images[:, 3].astype(np.int64) ** 2,
    )


IMAGES = st.tuples(st.integers(1, 9000), st.integers(1, 9000), st.integers(0, 20_000), st.integers(0, 80_000))
ROWS = st.builds(
    row,
    text=st.one_of(st.just(0), st.integers(0, 100_000)),
    other=st.integers(0, 5),
    images=st.lists(IMAGES, max_size=3),
    status=st.one_of(st.just(0), st.integers(0, len(STATUS_NAMES) - 1)),
)
PARTS = st.lists(st.lists(ROWS, max_size=6), min_size=1, max_size=6)


@given(st.lists(ROWS, max_size=20))
def test_totals_against_a_recount_in_plain_python(rows):
    stats = stats_of(columns(rows))
    usable = [r for r in rows if r["status"] == 0]
    images = [image for r in usable for image in r["images"]]
    assert stats.status == {name: n for k, name in enumerate(STATUS_NAMES) if (n := sum(r["status"] == k for r in rows))}
    assert (stats.num_samples, stats.num_usable, stats.num_images) == (len(rows), len(usable), len(images))
    assert stats.num_text_tokens == sum(r["text"] for r in usable)
    assert stats.num_loss_tokens == sum(r["text"] // 2 for r in usable)
    assert stats.num_other_tokens == sum(r["other"] for r in usable)
    assert stats.num_image_tokens == sum(tokens for *_, tokens, _ in images)
    assert stats.num_tokens == stats.num_text_tokens + stats.num_image_tokens + stats.num_other_tokens
    assert stats.num_patches == sum(patches for *_, patches in images)
    assert stats.sum_squared_attention == sum(patches**2 for *_, patches in images)
    assert stats.num_text_only == sum(not r["images"] for r in usable)
    assert stats.num_image_only == sum(bool(r["images"]) and not r["text"] for r in usable)
    assert stats.num_mixed == sum(bool(r["images"]) and bool(r["text"]) for r in usable)
    ratios = [max(w, h) * 1000 // min(w, h) for w, h, *_ in images]
    assert (stats.aspect_ratio.sum, stats.aspect_ratio.max) == (sum(ratios), max(ratios, default=None))
    assert sum(count for *_, count in stats.width_height.rows()) == len(images)


def test_distributions_against_a_recount_in_sql():
    duckdb = pytest.importorskip("duckdb")
    chance = random.Random(5)
    rows = [
        row(
            chance.randrange(5000), 3, [tuple(chance.randrange(1, 6000) for _ in range(4)) for _ in range(chance.randrange(4))], 0
        )
        if chance.random() < 0.9
        else row(status=chance.randrange(1, 6))
        for _ in range(5000)
    ]
    table = columns(rows)
    stats = stats_of(table)
    samples = {name: getattr(table, name) for name in ("num_tokens", "num_text_tokens", "num_images", "status")}
    images = {name: getattr(table, f"image_{name}") for name in ("width", "height", "num_tokens", "num_patches")}
    expected = {
        "tokens_per_sample": ("samples where status = 0", "num_tokens"),
        "text_tokens_per_sample": ("samples where status = 0", "num_text_tokens"),
        "images_per_sample": ("samples where status = 0", "num_images"),
        "image_tokens_per_image": ("images", "num_tokens"),
        "patches_per_image": ("images", "num_patches"),
        "image_width": ("images", "width"),
        "image_height": ("images", "height"),
        "aspect_ratio": ("images", "greatest(width, height)::bigint * 1000 // least(width, height)"),
    }
    with duckdb.connect() as connection:
        connection.register("samples", samples)
        connection.register("images", images)
        for name, (table_name, value) in expected.items():
            select = f"count(*), sum({value})::bigint, min({value}), max({value}), quantile_disc({value}, [0.05, 0.5, 0.95])"
            count, total, least, most, quantiles = connection.execute(f"select {select} from {table_name}").fetchone()
            found = getattr(stats, name)
            assert (found.count, found.sum, found.min, found.max) == (count, total, least, most), name
            for share, exact in zip((0.05, 0.5, 0.95), quantiles, strict=True):
                assert abs(found.quantile(share) - exact) <= found.relative_error * exact, name


@given(PARTS, st.randoms())
def test_parts_merged_in_any_order_and_grouping_equal_the_whole(parts, chance):
    whole = stats_of(columns([r for part in parts for r in part]))
    items = [stats_of(columns(part)) for part in parts]
    assert Stats.merged(iter(items)) == whole
    while len(items) > 1:
        chance.shuffle(items)
        items.append(items.pop().merge(items.pop()))
    assert orjson.dumps(items[0].to_json()) == orjson.dumps(whole.to_json())
    assert Stats.from_json(orjson.loads(orjson.dumps(whole.to_json())), "here") == whole


def test_totals_after_a_stop_and_a_rerun_equal_those_of_one_run():
    """Case 28: what is kept is one value per part, so a part that is done twice replaces itself."""
    parts = {f"part{k}": columns([row(text=10 * k, images=[(k + 1, 5, k, k)])]) for k in range(4)}
    one_run = Stats.merged(stats_of(part) for part in parts.values())
    kept: dict[str, Stats] = {}
    for done_in_this_run in (["part0", "part1"], ["part1", "part3", "part2"]):  # stopped after two; part1 is done again
        kept |= {name: stats_of(parts[name]) for name in done_in_this_run}
    assert Stats.merged(kept.values()) == one_run
    assert one_run.num_samples == 4


def test_a_tall_image_keeps_its_shape():
    """Case 21: the grid and the sides tell an upright 480 x 640 from 640 x 480, where the tokens do not."""
    upright, lying = (stats_of(columns([row(images=[(*size, 391, 1564)])])) for size in ((480, 640), (640, 480)))
    assert upright.num_image_tokens == lying.num_image_tokens
    assert upright.width_height.rows() == [(448, 512, 640, 768, 1)]
    assert lying.width_height.rows() == [(640, 768, 448, 512, 1)]
    assert upright.aspect_ratio.max == lying.aspect_ratio.max == 1333


def test_too_long_counts_image_tokens_too():
    """Case 27: ten words and one image of 15,000 tokens do not fit into 4,096."""
    table = columns([row(text=10, images=[(4000, 3000, 15_000, 60_000)]), row(text=4096), row(status=1)])
    assert over_long(table.num_tokens, table.status, [4096]) == OverLong(num_samples={4096: 1}, num_tokens={4096: 15_010})


@given(PARTS, st.sets(st.integers(1, 200_000), max_size=4))
def test_over_long_is_exact_and_merges(parts, lengths):
    items = []
    for part in parts:
        table = columns(part)
        items.append(over_long(table.num_tokens, table.status, list(lengths)))
    sums = [r["text"] + r["other"] + sum(image[2] for image in r["images"]) for part in parts for r in part if r["status"] == 0]
    found = OverLong.merged(items)
    assert found.num_samples == {length: sum(n > length for n in sums) for length in lengths}
    assert found.num_tokens == {length: sum(n for n in sums if n > length) for length in lengths}
    assert OverLong.from_json(orjson.loads(orjson.dumps(found.to_json())), "here") == found


def test_over_long_of_other_lengths_is_refused():
    counts = [over_long(np.array([5]), np.array([0]), [length]) for length in (1, 2)]
    with pytest.raises(UsageError, match=r"above \[2\] and above \[1\]"):
        OverLong.merged(counts)
    with pytest.raises(UsageError, match="sequence length 0"):
        over_long(np.array([5]), np.array([0]), [0])


@pytest.mark.parametrize("rows", [[], [row(status=5)] * 3], ids=["no rows", "none usable"])
def test_nothing_usable(rows):
    stats = stats_of(columns(rows))
    assert (stats.num_samples, stats.num_usable, stats.num_tokens, stats.num_other_tokens) == (len(rows), 0, 0, 0)
    found = stats_dict(stats, PackFacts(), OverLong(), None)
    assert found["status"]["usable"] == 0
    assert (found["over_long"], found["mixture"]) == ([], None)
    assert found["distributions"]["tokens_per_sample"] == {
        "count": 0,
        "sum": 0,
        "min": None,
        "max": None,
        "mean": None,
        "quantiles": None,
        "histogram": [],
        "relative_error": 0.0,
    }


def test_columns_that_contradict_each_other_are_refused():
    good = columns([row(text=1, images=[(2, 2, 4, 4)])])
    for wrong, says in (
        ({"num_images": np.array([2])}, "hold 2 images, but the listed images make 1"),
        ({"num_image_tokens": np.array([5])}, "hold 5 image tokens, but the listed images make 4"),
        ({"status": np.array([1], np.uint8)}, "hold 0 images"),
        ({"status": np.array([9], np.uint8)}, "row status 9, expected 0 to 5"),
        ({"image_width": np.array([0])}, "side of 0 pixels"),
    ):
        with pytest.raises(FormatError, match=says):
            stats_of(Columns(**vars(good) | wrong))


def test_damaged_json_is_refused_by_name():
    document = stats_of(columns([row(text=1)])).to_json()
    for change in ({"status": {"usable": 2}}, {"num_mixed": 1}, {"num_rows": 1}, {"images": {"formats": []}}):
        with pytest.raises(FormatError, match="part a: not the JSON of Stats"):
            Stats.from_json(document | change, "part a")


def test_blobs_read_back_and_damage_is_refused_by_name():
    stats = stats_of(columns([row(text=1)]))
    assert decode_stats(encode_stats(stats), "part a") == stats
    with pytest.raises(FormatError, match="part a: found 0 bytes of statistics that are not JSON"):
        decode_stats(b"", "part a")
    with pytest.raises(FormatError, match=r"part a: found .* bytes of statistics that are not JSON"):
        decode_stats(encode_stats(stats)[:-1], "part a")
    for blob in (b"{}", b"[]", b"0"):
        with pytest.raises(FormatError, match="part a: found statistics without status, num_loss_tokens"):
            decode_stats(blob, "part a")


def entry(offset, **facts):
    standard = {"bundle": "p.zip", "offset": offset, "size": 100, "format": "jpeg", "mode": "RGB", "orientation": 1, "frames": 1}
    return standard | facts


def test_facts_of_records():
    """Case 22: the stats show how many images of each kind there are."""
    collector = RecordFacts()
    collector.add({"images": [entry(10), entry(10), entry(500, orientation=6)]})
    collector.add({"images": [], "num_images_dropped": 2})
    collector.add({"images": [entry(900, format="png", mode="I;16", size=7), entry(950, format="gif", mode="P", frames=12)]})
    collector.add({"images": [entry(990, converted_from={"format": "tiff"})]})
    facts = ImageFacts(
        num_images=6,
        num_dropped=2,
        num_converted=1,
        num_animated=1,
        num_upright=5,
        image_bytes=507,
        image_bytes_stored=407,
        formats={"gif": 1, "jpeg": 4, "png": 1},
        modes={"I;16": 1, "P": 1, "RGB": 4},
        orientations={"1": 5, "6": 1},
    )
    assert collector.facts() == facts
    assert facts.merge(RecordFacts().facts()) == facts
    assert facts.merge(facts).formats == {"gif": 2, "jpeg": 8, "png": 2}


def golden_facts(folder):
    manifests = decode_source((folder / "source.json").read_bytes(), "golden")
    parts = []
    for manifest in manifests:
        collector = RecordFacts()
        for line in (folder / f"{manifest.part_id}.jsonl").read_bytes().splitlines():
            collector.add(decode_record(line, "golden"))
        parts.append(collector.facts())
    return manifests, parts


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
def test_records_and_manifests_of_a_real_dataset_agree(folder):
    manifests, parts = golden_facts(folder)
    facts, pack = ImageFacts.merged(parts), PackFacts.of(manifests)
    assert facts.num_images == pack.num_images == sum(facts.formats.values()) == sum(facts.orientations.values())
    assert facts.num_dropped == sum(pack.images_dropped_by_reason.values())
    bundles = sum(entry.size for manifest in manifests for name, entry in manifest.files.items() if name.endswith(".zip"))
    assert facts.image_bytes_stored <= min(facts.image_bytes, bundles)
    assert (facts.image_bytes_stored == facts.image_bytes) == (pack.num_duplicates_saved == 0)
    assert PackFacts.merged(PackFacts.of([manifest]) for manifest in manifests) == pack
    assert pack.num_read == pack.num_written + pack.num_quarantined


def manifest(part_id, written, quarantined, **more):
    return PartManifest(
        part_id=part_id,
        source="web",
        input=InputSpan(file="a.jsonl", byte_start=0, byte_end=9, file_size=9, digest="0" * 64),
        recipe_fingerprint="0" * 32,
        num_read=written + sum(quarantined.values()),
        num_written=written,
        num_quarantined=sum(quarantined.values()),
        quarantined_by_reason=quarantined,
        files={"x.jsonl": FileEntry(size=50, digest="0" * 64)},
        is_last_of_range=True,
        **{"num_images": 5, "num_images_stored": 3, "check": "structure"} | more,
    )


def test_facts_of_manifests_count_a_retried_row_once():
    name = "0123456789ab-r00000-p00000"
    retry = Supersedes(part_id=name, byte_offsets=(7,), by_reason={"missing_image": 1})
    parts = [
        manifest(name, 8, {"missing_image": 1, "invalid_json": 1}),
        manifest(f"{name}-retry1", 1, {}, num_images=1, num_images_stored=1, check="decode", supersedes=retry),
    ]
    expected = PackFacts(
        num_parts=2,
        num_read=10,
        num_written=9,
        num_quarantined=1,
        quarantined_by_reason={"invalid_json": 1},
        num_images=6,
        num_images_stored=4,
        num_bytes=100,
        check={"decode": 1, "structure": 1},
    )
    assert PackFacts.of(parts) == PackFacts.of(parts[:1]).merge(PackFacts.of(parts[1:])) == expected
    assert expected.num_duplicates_saved == 2


def test_the_reports_dict_is_complete_and_plain_json():
    facts = RecordFacts()
    facts.add({"images": [entry(10), entry(10)]})
    table = columns([row(text=10, other=2, images=[(640, 480, 391, 1564)] * 2), row(text=600), row(status=2)])
    stats = stats_of(table, facts.facts())
    pack = PackFacts.of([manifest("0123456789ab-r00000-p00000", 3, {"invalid_json": 1}, num_images=2, num_images_stored=1)])
    mixture = mixture_of([SourceTokens(name="web", num_samples=2, num_tokens=stats.num_tokens, weight=3)])
    found = stats_dict(stats, pack, over_long(table.num_tokens, table.status, [512, 700]), mixture.rows[0])
    distributions = found.pop("distributions")
    assert found == {
        "num_samples": 3,
        "num_usable": 2,
        "status": {"usable": 2, "template_failed": 1},
        "num_images": 2,
        "num_tokens": 1394,
        "num_text_tokens": 610,
        "num_image_tokens": 782,
        "num_loss_tokens": 305,
        "num_other_tokens": 2,
        "num_patches": 3128,
        "num_text_only": 1,
        "num_image_only": 0,
        "num_mixed": 1,
        "width_height": [[640, 768, 448, 512, 2]],
        "formats": {"jpeg": 2},
        "modes": {"RGB": 2},
        "orientations": {"1": 2},
        "num_animated": 0,
        "num_upright": 2,
        "num_images_stored": 1,
        "image_bytes": 200,
        "image_bytes_stored": 100,
        "images_dropped_by_reason": {},
        "num_duplicates_saved": 1,
        "num_read": 4,
        "num_written": 3,
        "num_quarantined": 1,
        "quarantined_by_reason": {"invalid_json": 1},
        "check": {"structure": 1},
        "over_long": [
            {"sequence_length": 512, "num_samples": 2, "num_tokens": 1394},
            {"sequence_length": 700, "num_samples": 1, "num_tokens": 794},
        ],
        "mixture": {"weight": 1.0, "token_share": None, "share_of_tokens": 1.0, "expected_token_share": 1.0},
    }
    assert tuple(distributions) == DISTRIBUTIONS
    assert distributions["images_per_sample"] == {
        "count": 2,
        "sum": 2,
        "min": 0,
        "max": 2,
        "mean": 1.0,
        "quantiles": dict.fromkeys(QUANTILES[:4], 0) | dict.fromkeys(QUANTILES[4:], 2),
        "histogram": [[0, 1, 1], [1, 2, 0], [2, 3, 1]],
        "relative_error": 0.0,
    }
    whole = found | {"distributions": distributions}
    assert orjson.loads(orjson.dumps(whole)) == whole
