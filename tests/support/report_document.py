"""Builds report documents that look like real ones: 3 to 130 sources, long and hostile names, empty sources, 2T tokens."""

from __future__ import annotations

import base64
import io
import math
import random
from itertools import pairwise
from typing import Any

from PIL import Image, ImageDraw

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
RTL = "invoice\u202egnp.exe"
_QUANTILES = ("0.01", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99")
_ERROR = 0.01
_KINDS = ("interleaved", "chat", "caption", "text", "documents", "charts", "ocr", "photos")
_TOPICS = (
    "news-en",
    "web-ko",
    "textbooks",
    "arxiv-figures",
    "receipts",
    "maps",
    "product-pages",
    "wiki-ko",
    "forum-threads",
    "patents",
    "slides",
    "screenshots-mobile",
    "handwriting",
    "comics",
    "medical-leaflets",
    "recipes",
    "street-signs",
    "satellite-tiles",
)
_TEXTS = (
    "The lock gates open at a quarter past six, and the pilot boards an hour before. [image] What you see here is the old signal "
    "station; its mast was taken down in 1931 and stands in the museum now.",
    "다음 그림은 항만의 컨테이너 배치도를 보여 줍니다. [image] 선미 쪽 세 번째 베이에 냉동 컨테이너가 실려 있으며, 무게 중심은 "
    "배의 중앙보다 조금 앞에 있습니다. 배치도를 보고 다음 질문에 답하세요.",
    "user: How many people are wearing a helmet in this picture? [image] assistant: Four. Two of them stand on the scaffold, one "
    "is at the gate, and one sits in the crane's cabin.",
    "user: 이 영수증의 합계 금액은 얼마인가요? [image] assistant: 합계는 48,500원이며, 부가가치세 4,409원이 포함되어 있습니다.",
    "Figure 3: Loss against compute for four model sizes. [image] The dashed line is the power-law fit of equation (2); the "
    "shaded band is the spread over three seeds.",
)


def distribution(
    draw: random.Random, count: int, median: float, spread: float, *, low: int = 1, steps: int = 60
) -> dict[str, Any]:
    """Buckets of a log-normal, as a sketch of 1 % would hold them."""
    if not count:
        nothing = dict.fromkeys(("sum", "min", "max", "mean"))
        return {"count": 0, **nothing, "quantiles": None, "histogram": [], "relative_error": _ERROR}
    edges = sorted({max(low, round(math.exp(math.log(median) + spread * (6 * i / steps - 3)))) for i in range(steps + 1)})
    if len(edges) < 2:
        edges = [edges[0], edges[0] + 1]
    shape = [
        math.exp(-0.5 * ((math.log((a + b) / 2) - math.log(median)) / spread) ** 2) * draw.uniform(0.8, 1.2) * math.log(b / a)
        for a, b in pairwise(edges)
    ]
    counts = [int(count * value / sum(shape)) for value in shape]
    counts[counts.index(max(counts))] += count - sum(counts)
    histogram = [[a, b, n] for (a, b), n in zip(pairwise(edges), counts, strict=True) if n]
    return summary_of(histogram)


def summary_of(histogram: list[list[int]]) -> dict[str, Any]:
    if not histogram:
        nothing = dict.fromkeys(("sum", "min", "max", "mean"))
        return {"count": 0, **nothing, "quantiles": None, "histogram": [], "relative_error": _ERROR}
    count = sum(n for _, _, n in histogram)
    total = sum((a + b - 1) * n // 2 for a, b, n in histogram)
    quantiles = {}
    for name in _QUANTILES:
        left = float(name) * (count - 1)
        for a, b, n in histogram:
            left -= n
            if left < 0:
                quantiles[name] = (a + b - 1) // 2
                break
    return {
        "count": count,
        "sum": total,
        "min": histogram[0][0],
        "max": histogram[-1][1] - 1,
        "mean": total / count,
        "quantiles": quantiles,
        "histogram": histogram,
        "relative_error": _ERROR,
    }


def merged(many: list[dict[str, Any]]) -> dict[str, Any]:
    """Several distributions as one over a common grid of buckets."""
    counts: dict[int, int] = {}
    for one in many:
        for low, _, n in one["histogram"]:
            cell = low if low < 16 else 16 + math.floor(math.log(low / 16) / 0.08)
            counts[cell] = counts.get(cell, 0) + n

    def edge(cell: int) -> int:
        return cell if cell < 16 else math.ceil(16 * math.exp(0.08 * (cell - 16)))

    rows = [[edge(cell), max(edge(cell + 1), edge(cell) + 1), n] for cell, n in sorted(counts.items())]
    return summary_of(rows)


def source_numbers(
    draw: random.Random, images: random.Random, kind: str, num_samples: int, *, scale: float = 1.0
) -> dict[str, Any]:
    has_images, has_text = kind != "text", kind != "photos"
    per_sample = {"caption": 1.0, "photos": 1.0, "interleaved": 6.0, "documents": 3.0}.get(kind, 1.4) if has_images else 0
    num_images = round(num_samples * per_sample)
    text_median = {"caption": 42, "text": 1100, "interleaved": 900, "ocr": 380}.get(kind, 240) * draw.uniform(0.6, 1.7) * scale
    image_median = draw.choice((256, 400, 640, 1024)) * draw.uniform(0.8, 1.3)
    text = distribution(draw, num_samples if has_text else 0, text_median, 0.9)
    tokens = distribution(draw, num_samples, text_median * has_text + image_median * per_sample + 12, 0.8 if has_text else 0.4)
    image_tokens = distribution(draw, num_images, image_median, 0.7)
    num_text, num_image = text["sum"] or 0, image_tokens["sum"] or 0
    num_other = num_samples * 14 + num_images * 2
    width = distribution(images, num_images, 900 * images.uniform(0.4, 1.8), 0.6, low=8)
    height = distribution(images, num_images, 700 * images.uniform(0.4, 1.8), 0.6, low=8)
    quarantined = round(num_samples * images.choice((0, 0, 0.0004, 0.003, 0.012, 0.05)))
    reasons = _split(
        images,
        quarantined,
        ("missing_image", "truncated_image", "not_an_image", "too_many_pixels", "invalid_json", "aspect_ratio"),
    )
    jpeg = round(num_images * images.uniform(0.5, 0.95))
    return {
        "num_samples": num_samples,
        "num_usable": num_samples - num_samples // 5000,
        "status": {"usable": num_samples - num_samples // 5000, "image_too_small_for_rule": num_samples // 5000},
        "num_images": num_images,
        "num_tokens": num_text + num_image + num_other,
        "num_text_tokens": num_text,
        "num_image_tokens": num_image,
        "num_loss_tokens": round(num_text * draw.uniform(0.35, 1.0)),
        "num_other_tokens": num_other,
        "num_patches": 4 * num_image,
        "num_text_only": num_samples // 9 if has_images and has_text else (0 if has_images else num_samples),
        "num_image_only": 0 if has_text else num_samples,
        "num_mixed": num_samples - num_samples // 9 if has_images and has_text else 0,
        "distributions": {
            "tokens_per_sample": tokens,
            "text_tokens_per_sample": text,
            "image_tokens_per_image": image_tokens,
            "patches_per_image": distribution(draw, num_images, 4 * image_median, 0.7),
            "images_per_sample": _images_per_sample(num_samples, per_sample, has_text),
            "image_width": width,
            "image_height": height,
            "aspect_ratio": distribution(images, num_images, 1290, 0.4),
        },
        "width_height": _sizes(images, num_images),
        "formats": {"jpeg": jpeg, "png": num_images - jpeg} if num_images else {},
        "modes": {"RGB": num_images - num_images // 20, "RGBA": num_images // 20} if num_images else {},
        "orientations": {"1": num_images - num_images // 50, "6": num_images // 50} if num_images else {},
        "num_animated": num_images // 4000,
        "num_upright": num_images - num_images // 50,
        "num_images_stored": round(num_images * 0.93),
        "image_bytes": num_images * 92_000,
        "image_bytes_stored": num_images * 81_000,
        "images_dropped_by_reason": {},
        "num_duplicates_saved": num_images - round(num_images * 0.93),
        "num_read": num_samples + quarantined,
        "num_written": num_samples,
        "num_quarantined": quarantined,
        "quarantined_by_reason": reasons,
        "check": {"structure": num_images},
        "over_long": [over_long(tokens, length) for length in (8192, 32768)],
        "mixture": {"weight": None, "token_share": None, "share_of_tokens": None, "expected_token_share": None},
    }


def over_long(tokens: dict[str, Any], length: int) -> dict[str, int]:
    beyond = [(low, n) for low, _, n in tokens["histogram"] if low > length]
    return {"sequence_length": length, "num_samples": sum(n for _, n in beyond), "num_tokens": sum(low * n for low, n in beyond)}


def _images_per_sample(num_samples: int, mean: float, has_text: bool) -> dict[str, Any]:
    if not mean:
        return summary_of([[0, 1, num_samples]] if num_samples else [])
    alone = num_samples // 9 if has_text else 0
    rest = num_samples - alone
    shares = [(mean / (1 + mean)) ** k / mean for k in range(1, 60)] if mean > 1 else [1.0]
    rows = [[k, k + 1, int(rest * share / sum(shares))] for k, share in enumerate(shares, 1)]
    rows[0][2] += rest - sum(n for _, _, n in rows)
    return summary_of([row for row in [[0, 1, alone], *rows] if row[2]])


def _sizes(draw: random.Random, num_images: int) -> list[list[int]]:
    edges = [round(16 * 2 ** (i / 2)) for i in range(21)]
    centre = draw.uniform(9, 13)
    weights = {
        (x, y): math.exp(-0.5 * (((x + y) / 2 - centre) / 2.2) ** 2 - 0.5 * ((x - y - 0.7) / 1.1) ** 2)
        for x in range(20)
        for y in range(20)
    }
    whole = sum(weights.values())
    rows = [[edges[x], edges[x + 1], edges[y], edges[y + 1], int(num_images * w / whole)] for (x, y), w in weights.items()]
    return [row for row in rows if row[4]]


def _split(draw: random.Random, total: int, names: tuple[str, ...]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for name in names[:-1]:
        take = draw.randint(0, total)
        if take:
            parts[name] = take
        total -= take
    return {**parts, names[-1]: total} if total else parts


def added(many: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of all sources, as the real report makes them."""
    result: dict[str, Any] = {}
    for key, value in many[0].items():
        values = [one[key] for one in many]
        if isinstance(value, int):
            result[key] = sum(values)
        elif key == "distributions":
            result[key] = {name: merged([one[name] for one in values]) for name in value}
        elif key == "width_height":
            sizes: dict[tuple[int, ...], int] = {}
            for row in (row for rows in values for row in rows):
                sizes[tuple(row[:4])] = sizes.get(tuple(row[:4]), 0) + row[4]
            result[key] = [[*place, n] for place, n in sorted(sizes.items())]
        elif key == "over_long":
            result[key] = [
                {k: (rows[0][k] if k == "sequence_length" else sum(row[k] for row in rows)) for k in rows[0]}
                for rows in zip(*values, strict=True)
            ]
        elif key == "mixture":
            result[key] = {"weight": None, "token_share": None, "share_of_tokens": 1.0, "expected_token_share": 1.0}
        else:
            result[key] = {}
            for name, n in (pair for one in values for pair in one.items()):
                result[key][name] = result[key].get(name, 0) + n
    return result


def picture(draw: random.Random, width: int, height: int) -> str:
    """A small picture of sea, sky and a ship, as a data: URL."""
    size = (max(8, round(160 * min(1, width / height))), max(8, round(160 * min(1, height / width))))
    sky, sea = [(draw.randint(120, 230), draw.randint(150, 225), draw.randint(180, 240)) for _ in range(2)]
    image = Image.new("RGB", size, sky)
    pen = ImageDraw.Draw(image)
    horizon = size[1] * draw.uniform(0.45, 0.7)
    pen.rectangle((0, horizon, *size), fill=tuple(v * 2 // 3 for v in sea))
    x = size[0] * draw.uniform(0.1, 0.4)
    pen.polygon(
        [(x, horizon), (x + size[0] / 2, horizon), (x + size[0] / 2.4, horizon + size[1] / 8), (x + 8, horizon + size[1] / 8)],
        fill=(60, 52, 60),
    )
    for i in range(5):
        pen.rectangle(
            (x + i * size[0] / 11, horizon - size[1] / 10, x + (i + 0.8) * size[0] / 11, horizon),
            fill=(draw.randint(90, 200), 90, 70),
        )
    out = io.BytesIO()
    image.save(out, "WEBP", quality=70)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def card(draw: random.Random, number: int, kind: str, *, text: str | None = None, sample_id: str | None = None) -> dict[str, Any]:
    num_images = {"text": 0, "interleaved": draw.randint(2, 9)}.get(kind, 1)
    thumbnails = []
    for _ in range(min(num_images, 3)):
        width, height = draw.choice(((1920, 1080), (640, 480), (768, 1024), (512, 512), (2480, 3508)))
        thumbnails.append(
            {
                "data": picture(draw, width, height),
                "width": width,
                "height": height,
                "num_image_tokens": width * height // 784,
                "title": "jpeg RGB",
            }
        )
    image_tokens = sum(one["num_image_tokens"] for one in thumbnails)
    text_tokens = draw.randint(40, 900)
    return {
        "id": sample_id if sample_id is not None else f"{kind}-{draw.getrandbits(40):010x}",
        "line": number,
        "part": "aa7c7fcb9fa4-r00000-p00000",
        "num_tokens": text_tokens + image_tokens + 16,
        "num_text_tokens": text_tokens,
        "num_image_tokens": image_tokens,
        "num_images": num_images,
        "text": draw.choice(_TEXTS) if text is None else text,
        "thumbnails": thumbnails,
        "more_images": num_images - len(thumbnails),
    }


def _names(num_sources: int) -> list[tuple[str, str]]:
    names = [(f"{_TOPICS[i % len(_TOPICS)]}-{_KINDS[i % len(_KINDS)]}", _KINDS[i % len(_KINDS)]) for i in range(num_sources)]
    unique: dict[str, str] = {}
    for name, kind in names:
        long = "-deduplicated-and-filtered-2026-08" if len(unique) % 11 == 7 else ""
        unique[name + long if name + long not in unique else f"{name}{long}-{len(unique):03d}"] = kind
    return list(unique.items())


def build_document(num_sources: int, *, seed: int = 7, is_hostile: bool = False, scale: float = 1.0) -> dict[str, Any]:
    """A document of two profiles; of five sources or more the last two are empty and the very last has failed."""
    draw = random.Random(seed)
    kinds = dict(_names(num_sources))
    if is_hostile:
        kinds = {
            HOSTILE: "chat",
            RTL: "text",
            "nul\x00in\x1bname": "caption",
            "x" * 400: "interleaved",
            "__proto__": "photos",
            **kinds,
        }
    sizes = {name: round(math.exp(draw.gauss(13.2, 1.5)) * scale) for name in kinds}
    names = list(kinds)
    if num_sources >= 5:
        sizes[names[-2]] = sizes[names[-1]] = 0
    profiles = {}
    for profile, factor in (("qwen3-vl-8b", 1.0), ("internvl3-8b", 1.3)):
        own = random.Random(f"{seed}{profile}")
        sources = {
            name: source_numbers(own, random.Random(f"{seed}{name!r}"), kind, sizes[name], scale=factor)
            for name, kind in kinds.items()
        }
        everything = added(list(sources.values()))
        _mix(own, sources, everything["num_tokens"])
        profiles[profile] = {
            "fingerprint": f"{own.getrandbits(128):032x}",
            "tokenizer": f"{profile}/tokenizer.json",
            "template": "chatml",
            "image_rule": "qwen3_vl" if factor == 1 else "internvl3",
            "sequence_lengths": [8192, 32768],
            "all": everything,
            "sources": sources,
        }
    failure = "found 0 files for data/receipts/*.jsonl.zst, expected at least 1; mend `files`"
    facts = {
        name: {
            "schema": kind if kind in ("interleaved", "chat", "caption", "text") else "llava",
            "weight": 1.0,
            "token_share": None,
            "check": "structure",
            "failure": failure if num_sources >= 5 and name == names[-1] else None,
        }
        for name, kind in kinds.items()
    }
    cards = {name: [card(draw, i, kind) for i in range(3)] if sizes[name] else [] for name, kind in kinds.items()}
    if is_hostile:
        cards[HOSTILE][0] = card(
            draw, 0, "chat", text=f"{HOSTILE} <b>bold</b> & \x00 \ud800 \u202e 한국어 'quotes' \"double\"", sample_id=RTL * 30
        )
    return {
        "dataset": {
            "name": "harbour-v3",
            "url_shown": "s3://training-data/harbour-v3",
            "tool_version": "0.2.0",
            "format_version": 1,
            "num_sources": len(kinds),
        },
        "profiles": profiles,
        "sources": facts,
        "excluded": {},
        "cards": cards,
        "forecast": {"packing": None, "balance": None},
        "notes": ["2 input files are empty: data/maps/part-017.jsonl, data/maps/part-031.jsonl"],
    }


def build_forecast(profile: str, fingerprint: str) -> dict[str, Any]:
    """A forecast of one setting under expert groups, as `bayplan forecast` writes it."""

    def about(value: float, error: float | None = 0.001) -> dict[str, Any]:
        return {"value": value, "error": error}

    def mode(name: str, imbalance: float, gain: float, moved: float, *, is_auto: bool = False) -> dict[str, Any]:
        numbers = {
            "imbalance": about(imbalance),
            "gain": about(gain),
            "moved_share": about(moved),
            "off_node_share": about(moved / 9),
        }
        sizes = {"moved_bytes": about(5e9 * moved), "off_node_bytes": about(5e8 * moved)}
        return {"mode": name, "is_auto": is_auto, **numbers, **sizes, "solver_seconds": 0.0213}

    packing = {
        "sequence_length": 8192, "num_packs": 43_621, "num_replicates": 5, "num_streams": 20, "num_drawn_samples": 554_348,
        "efficiency": about(0.99963, 0.00002), "bound": about(0.99993), "alignment_loss": about(0.0),
        "samples_per_pack": about(7.3), "images_per_pack": about(14.8), "most_images": 211, "patches_per_pack": about(19_769.0),
        "most_patches": 32_700, "without_image": about(0.0047), "pack_bytes": about(11.8e6), "most_pack_bytes": 20_000_000,
        "encoder_share": about(0.195), "num_looked_at": 2836, "refused": {"over_long": 28},
        "refused_by_source": {HOSTILE: {"over_long": 28}},
        "in_vain": [],
    }  # fmt: skip
    balance = {
        "sequence_length": 8192, "num_ranks": 64, "num_microbatches": 128, "num_packs": 8192, "num_samples": 59_962.0,
        "is_sampled": False, "epochs_per_batch": {"maps": 3.5}, "arrival": about(1.185), "encoder_arrival": about(1.9),
        "bound": about(1.0004, None),
        "modes": [
            mode("local", 1.032, 0.148, 0.0), mode("ep", 1.006, 0.178, 0.32, is_auto=True), mode("fsdp", 1.005, 0.179, 0.34),
        ],
    }  # fmt: skip
    return {
        "bayplan_forecast": 1,
        "dataset": "s3://training-data/harbour-v3",
        "profile": profile,
        "profile_fingerprint": fingerprint,
        "cost": {"name": "qwen3_vl_vit+qwen3_8b", "fingerprint": "c" * 32, "unit": "MFLOP", "source": "", "is_default": True},
        "settings": {
            "expert_parallel": 8, "synchronises": "batch", "ranks_per_node": 8, "alignment": 1, "max_images_per_pack": None,
            "max_patches_per_pack": None, "buffer_size": 2000, "num_batches": 5, "seed": 0, "max_age": 5,
        },
        "sources": [{"name": HOSTILE, "weight": 1.0, "num_rows": 9, "num_read": 9, "num_train": 2836, "is_whole": True}],
        "packing": [packing],
        "balance": [balance],
        "notes": [],
    }  # fmt: skip


def _mix(draw: random.Random, sources: dict[str, dict[str, Any]], num_tokens: int) -> None:
    drawn = {name: numbers["num_tokens"] ** 0.7 * draw.uniform(0.6, 1.8) for name, numbers in sources.items()}
    for name, numbers in sources.items():
        numbers["mixture"] = {
            "weight": 1.0,
            "token_share": None,
            "share_of_tokens": numbers["num_tokens"] / num_tokens,
            "expected_token_share": drawn[name] / sum(drawn.values()),
        }
