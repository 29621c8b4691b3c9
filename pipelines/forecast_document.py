"""A forecast as one plain JSON document. What it is made of is worked out elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from indexer.profile import StoredProfile
from plugin.cost import CostModel
from plugin.forecast import BalanceForecast, PackPool, PackSize, SourceRows
from plugin.packing import PackLimits, Refusal

Document = dict[str, Any]

VERSION = 1
"""`bayplan_forecast` of the document."""


def refused(sources: Sequence[SourceRows], limits: PackLimits) -> dict[str, int]:
    """Samples that fit no pack, by reason."""
    counts: dict[str, int] = {}
    for source in sources:
        for name, count in _named(source.refused(limits)).items():
            counts[name] = counts.get(name, 0) + count
    return counts


def cost_dict(model: CostModel, is_default: bool) -> Document:
    return {
        "name": model.name,
        "fingerprint": model.fingerprint,
        "unit": model.unit.of_costs,
        "source": model.source,
        "is_default": is_default,
    }


def source_dict(source: SourceRows) -> Document:
    return {
        "name": source.name,
        "weight": source.weight,
        "num_rows": source.num_rows,
        "num_read": source.num_read,
        "num_train": source.num_train,
        "is_whole": source.is_whole,
    }


def packing_dict(pool: PackPool, sources: Sequence[SourceRows]) -> Document:
    limits = pool.limits
    by_source = {source.name: source.refused(limits) for source in sources}
    return {
        "sequence_length": limits.sequence_length,
        "num_packs": len(pool),
        "num_replicates": len(pool.replicates),
        "num_streams": pool.num_streams * len(pool.replicates),
        "num_drawn_samples": pool.num_drawn_rows,
        "efficiency": asdict(pool.efficiency),
        "bound": asdict(pool.bound),
        "alignment_loss": asdict(pool.alignment_loss),
        "samples_per_pack": asdict(pool.mean("num_samples")),
        "images_per_pack": asdict(pool.mean("num_images")),
        "most_images": pool.most("num_images"),
        "patches_per_pack": asdict(pool.mean("num_patches")),
        "most_patches": pool.most("num_patches"),
        "without_image": asdict(pool.without_image),
        "pack_bytes": None if pool.replicates[0].num_bytes is None else asdict(pool.mean("num_bytes")),
        "most_pack_bytes": None if pool.replicates[0].num_bytes is None else pool.most("num_bytes"),
        "encoder_share": asdict(pool.encoder_share),
        "num_looked_at": sum(len(piece) for source in sources for piece in source.slices),
        "refused": refused(sources, limits),
        "refused_by_source": {name: _named(counts) for name, counts in by_source.items() if counts},
        "in_vain": [source.name for source in sources if source.is_in_vain(limits)],
    }


def _named(counts: Mapping[Refusal, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}


def balance_dict(pool: PackPool, found: BalanceForecast, sources: Sequence[SourceRows]) -> Document:
    cluster = found.cluster
    num_packs = cluster.num_ranks * found.num_microbatches
    num_samples = num_packs * pool.mean("num_samples").value
    trained = [source for source in sources if source.slices and not source.is_in_vain(pool.limits)]
    whole = sum(source.weight for source in trained)
    takes = {source.name: num_samples * source.weight / whole / source.num_train for source in trained}
    repeats = {name: times for name, times in takes.items() if times > 1}
    return {
        "sequence_length": pool.limits.sequence_length,
        "num_ranks": cluster.num_ranks,
        "num_microbatches": found.num_microbatches,
        "num_packs": num_packs,
        "num_samples": num_samples,
        "is_sampled": found.is_sampled,
        "epochs_per_batch": repeats,
        "arrival": asdict(found.arrival),
        "encoder_arrival": asdict(found.encoder_arrival),
        "bound": asdict(found.bound),
        "modes": [asdict(mode) | {"mode": str(mode.mode)} for mode in found.modes],
    }


def notes(
    stored: StoredProfile, model: CostModel, is_default: bool, size: PackSize | None, sources: Sequence[SourceRows]
) -> list[str]:
    """What a reader has to know beside the numbers."""
    found = []
    if is_default:
        found.append(f"costs are those of {model.name}, the default for this profile; name your model's by --cost")
    if empty := [source.name for source in sources if not source.slices]:
        found.append(f"nothing to draw from {', '.join(empty)}: no usable training sample in what was read")
    if not any((piece.num_images > 0).any() for source in sources for piece in source.slices):
        found.append("no sample has an image: the encoder does nothing, and packs differ by the attention of their samples alone")
    elif size is None:
        found.append(f"bytes are not known: image rule {stored.profile.images.rule!r} has no pixels of a known size")
    elif size.is_assumed:
        found.append(
            f"bytes: this release makes no pixels for image rule {stored.profile.images.rule!r}; flattened patches assumed"
        )
    if any(not source.is_whole for source in sources):
        found.append("of large sources random slices of 256 rows were read; figures of samples that fit no pack are of these")
    return found
