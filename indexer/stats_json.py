"""The statistics of a source as one JSON object: the contract between counting and the report."""

from __future__ import annotations

from typing import Any

from indexer.facts import PackFacts
from indexer.mixture import MixtureRow
from indexer.sketch import Distribution
from indexer.stats import OverLong, Stats

QUANTILES = ("0.01", "0.05", "0.25", "0.5", "0.75", "0.95", "0.99")
DISTRIBUTIONS = (
    "tokens_per_sample",
    "text_tokens_per_sample",
    "image_tokens_per_image",
    "patches_per_image",
    "images_per_sample",
    "image_width",
    "image_height",
    "aspect_ratio",
)
_OF_STATS = (
    "num_samples",
    "num_usable",
    "num_images",
    "num_tokens",
    "num_text_tokens",
    "num_image_tokens",
    "num_loss_tokens",
    "num_other_tokens",
    "num_patches",
    "num_text_only",
    "num_image_only",
    "num_mixed",
)
_OF_IMAGES = ("formats", "modes", "orientations", "num_animated", "num_upright", "image_bytes", "image_bytes_stored")
_OF_PACK = (
    "num_images_stored",
    "num_duplicates_saved",
    "num_read",
    "num_written",
    "num_quarantined",
    "quarantined_by_reason",
    "images_dropped_by_reason",
    "check",
)


def stats_dict(stats: Stats, pack_facts: PackFacts, over_long: OverLong, mixture_row: MixtureRow | None) -> dict[str, Any]:
    """All figures of a source (or of all, without a `mixture_row`: then `mixture` is null).

    `aspect_ratio` is in thousandths (longer / shorter side); `num_images` is of usable samples, while `formats`, `modes`,
    `orientations`, `num_animated`, `num_upright` and `image_bytes` are of every record.
    """
    return {
        **{name: getattr(stats, name) for name in _OF_STATS},
        "status": {"usable": 0} | stats.status,
        "distributions": {name: distribution_dict(getattr(stats, name)) for name in DISTRIBUTIONS},
        "width_height": [list(row) for row in stats.width_height.rows()],
        **{name: getattr(stats.images, name) for name in _OF_IMAGES},
        **{name: getattr(pack_facts, name) for name in _OF_PACK},
        "over_long": [
            {"sequence_length": length, "num_samples": count, "num_tokens": over_long.num_tokens[length]}
            for length, count in over_long.num_samples.items()
        ],
        "mixture": None if mixture_row is None else _mixture_dict(mixture_row),
    }


def distribution_dict(distribution: Distribution) -> dict[str, Any]:
    """A distribution for plots and tables; min, max, mean and quantiles are null when it is empty."""
    quantiles = {share: distribution.quantile(float(share)) for share in QUANTILES}
    return {
        "count": distribution.count,
        "sum": distribution.sum,
        "min": distribution.min,
        "max": distribution.max,
        "mean": distribution.mean,
        "quantiles": quantiles if distribution.count else None,
        "histogram": [list(row) for row in distribution.histogram()],
        "relative_error": distribution.relative_error,
    }


def _mixture_dict(row: MixtureRow) -> dict[str, float | None]:
    return {
        "weight": row.weight,
        "token_share": row.token_share,
        "share_of_tokens": row.share_of_tokens,
        "expected_token_share": row.expected_token_share,
    }
