"""`index/<profile>/dataset.yaml`: the Energon blend of a recipe's sources under one profile, `train` and `val`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from indexer.exclusion import SourceEffect
from indexer.mixture import Mixture, SourceTokens, mixture_of
from indexer.stats import Stats
from indexer.table import open_index
from packer.format import layout
from packer.format.errors import UsageError
from packer.storage import Storage
from pipelines.recipe import Recipe

_HEAD = "# The blend of this profile: weights are probabilities that the next sample is from a source.\n"


Excluded = Mapping[str, SourceEffect]
"""What lists of excluded ids take from each source."""
NOTHING = SourceEffect(num_rows=0, num_usable=0, num_tokens=0)


def excluded_of(storage: Storage, profile: str, sources: Sequence[str]) -> Excluded:
    """What the dataset's lists of excluded ids take from counted sources.

    Raises:
        UsageError, FormatError: a list that cannot be read.
    """
    if not sources or not storage.list_dir(layout.EXCLUDE_DIR):
        return {}
    report = open_index(storage.url, profile, sources=sources, check=False).exclusion
    return {} if report is None else report.sources


def mixture(recipe: Recipe, stats: Mapping[str, Stats], excluded: Excluded) -> Mixture:
    """Weights and shares of the recipe's sources that are counted, without their excluded samples.

    Raises:
        UsageError: when none of them has a sample to draw.
    """
    return mixture_of(
        [
            SourceTokens(
                name=source.name,
                num_samples=stats[source.name].num_usable - excluded.get(source.name, NOTHING).num_usable,
                num_tokens=stats[source.name].num_tokens - excluded.get(source.name, NOTHING).num_tokens,
                weight=source.weight,
                token_share=source.token_share,
                val=source.val,
            )
            for source in recipe.sources
            if source.name in stats
        ]
    )


def dataset_yaml(recipe: Recipe, profile: str, stats: Mapping[str, Stats], excluded: Excluded) -> tuple[bytes, list[str]]:
    """The file, and what a person has to be told of it.

    Sources that are not counted yet and those with nothing to draw are left out.
    """
    notes: list[str] = []
    weights: dict[str, float] = {}
    if missing := [source.name for source in recipe.sources if source.name not in stats]:
        notes.append(f"{layout.profile_dataset_file(profile)} leaves out what is not counted: {', '.join(missing)}")
    try:
        mixed = mixture(recipe, stats, excluded)
    except UsageError as error:
        notes.append(f"{layout.profile_dataset_file(profile)} is empty: {error}")
    else:
        notes += mixed.notes
        weights = {row.name: row.weight for row in mixed.rows if row.weight}
    held_out = {source.name for source in recipe.sources if source.val and source.name in weights}
    if weights and not held_out:
        notes.append("no source holds samples out (`val`), so the `val` split reads the training samples")
    splits = {
        "train": {"blend": [_entry(name, profile, weight) for name, weight in weights.items()]},
        "val": {"blend": [_entry(name, profile, weight) for name, weight in weights.items() if name in (held_out or weights)]},
    }
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}
    return (_HEAD + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).encode(), notes


def _entry(source: str, profile: str, weight: float) -> dict[str, Any]:
    return {
        "path": f"../../{layout.source_dir(source)}",
        "dataset_config": layout.nv_meta_profile(profile),
        "weight": weight,
        "subflavors": {"source": source},
    }
