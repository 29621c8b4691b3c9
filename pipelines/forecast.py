"""`bayplan forecast`: what packing and balancing will give on a dataset, for one or many settings. Reads the index only.

The figures are `plugin.forecast`'s; here a dataset, a profile, its blend and a cost model are found, and one plain JSON document
is made of what comes out. `forecast_text` prints it, the report shows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from indexer.image_rules.lookup import nearest
from indexer.profile import StoredProfile, profile_names, read_profile
from indexer.table import open_index
from packer.format.errors import UsageError
from packer.storage import Storage, open_storage
from pipelines.blend_reading import read_blend
from pipelines.dataset import require_identity
from pipelines.forecast_text import VERSION
from plugin.cost import CostModel, cost_model
from plugin.forecast import BalanceForecast, Cluster, PackPool, SourceRows, balance, pack_pool, pack_size, read_rows
from plugin.packing import Refusal
from plugin.settings import PackSettings, Peers

Document = dict[str, Any]

_ENCODERS = {
    "qwen2_5_vl": "qwen2_5_vl_vit",
    "qwen3_vl": "qwen3_vl_vit",
    "internvl3": "internvit_300m",
}
"""Beginning of an image rule's name -> the encoder its costs are taken from unless one is named."""
_OTHER_ENCODER = "siglip_so400m_patch14"
_LLM = "qwen3_8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to forecast: the product of ranks, microbatches and sequence lengths."""

    num_ranks: Sequence[int]
    num_microbatches: Sequence[int]
    sequence_lengths: Sequence[int] = ()
    """Empty: those that the profile names."""
    expert_parallel: int | None = None
    synchronises: Literal["microbatch", "batch"] = "batch"
    ranks_per_node: int = 8
    cost: str | None = None
    alignment: int = 1
    max_images_per_pack: int | None = None
    max_patches_per_pack: int | None = None
    buffer_size: int = 2000
    num_batches: int = 5
    """Independent replicates; their spread is the sampling error."""
    seed: int = 0

    def settings(self, sequence_length: int) -> PackSettings:
        """Of the packer."""
        return PackSettings(
            sequence_length=sequence_length,
            alignment=self.alignment,
            max_images_per_pack=self.max_images_per_pack,
            max_patches_per_pack=self.max_patches_per_pack,
            buffer_size=self.buffer_size,
        )

    def clusters(self) -> list[Cluster]:
        """One for each number of ranks."""
        return [
            Cluster(
                num_ranks=number,
                expert_parallel=self.expert_parallel,
                synchronises=self.synchronises,
                ranks_per_node=self.ranks_per_node,
            )
            for number in self.num_ranks
        ]


def forecast(url: str, profile: str | None, question: Question, say: Callable[[str], None] = lambda _: None) -> Document:
    """All figures as one document.

    Raises:
        UsageError: no dataset, no such profile, settings that cannot be, no sample that fits. FormatError: a damaged index.
    """
    clusters = question.clusters()
    storage = open_storage(url)
    require_identity(storage)
    stored = _profile(storage, profile)
    name = stored.profile.name
    lengths = list(question.sequence_lengths) or list(stored.profile.sequence_lengths)
    if not lengths:
        raise UsageError(f"found no sequence length: profile {name!r} names none; give --sequence-length")
    settings = [question.settings(length) for length in lengths]
    model, is_default = _cost_model(question.cost, stored.profile.images.rule)
    blend = read_blend(storage, name)
    table = open_index(storage.url, name, sources=[source.name for source in blend])
    sources = read_rows(table, blend, model, seed=question.seed)
    say(f"{sum(source.num_read for source in sources):,} rows of the index read")
    size = pack_size(stored.profile.images.rule, stored.profile.images.parameters)
    notes = _notes(stored, model, is_default, size is not None, sources)
    most = max(question.num_ranks) * max(question.num_microbatches)
    pools = []
    for one in settings:
        _refuse_nothing_fits(sources, one)
        pool = pack_pool(
            sources,
            one,
            num_packs=most,
            num_replicates=question.num_batches,
            num_streams=max(question.num_ranks),
            size=size,
            seed=question.seed,
        )
        say(f"{len(pool):,} packs of {one.sequence_length:,} tokens packed from {pool.num_drawn_rows:,} samples")
        pools.append(pool)
    found = []
    for pool, cluster, number in itertools.product(pools, clusters, question.num_microbatches):
        found.append((pool, balance(pool, cluster, number, seed=question.seed)))
        say(f"{cluster.num_ranks:,} ranks x {number:,} microbatches of {pool.limits.sequence_length:,} tokens dealt")
    return {
        "bayplan_forecast": VERSION,
        "dataset": storage.url,
        "profile": name,
        "profile_fingerprint": stored.fingerprint,
        "cost": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "unit": model.unit.of_costs,
            "source": model.source,
            "is_default": is_default,
        },
        "settings": {
            "alignment": question.alignment,
            "max_images_per_pack": question.max_images_per_pack,
            "max_patches_per_pack": question.max_patches_per_pack,
            "buffer_size": question.buffer_size,
            "max_age": settings[0].max_age,
            "expert_parallel": question.expert_parallel,
            "synchronises": question.synchronises,
            "ranks_per_node": question.ranks_per_node,
            "num_batches": question.num_batches,
            "seed": question.seed,
        },
        "sources": [_source(source) for source in sources],
        "packing": [_packing(pool, sources, one) for pool, one in zip(pools, settings, strict=True)],
        "balance": [_balance(pool, one, sources) for pool, one in found],
        "notes": notes,
    }


def _profile(storage: Storage, name: str | None) -> StoredProfile:
    known = profile_names(storage)
    if not known:
        raise UsageError(f"{storage.url}: found no index, expected at least one profile: run `bayplan index` first")
    if name is None and len(known) > 1:
        raise UsageError(f"{storage.url}: found {len(known)} profiles ({', '.join(known)}), expected one; choose by --profile")
    name = known[0] if name is None else name
    if name not in known:
        raise UsageError(f"{storage.url}: found no profile {name!r} in its index{nearest(name, known)}")
    stored = read_profile(storage, name)
    assert stored is not None
    return stored


def _cost_model(name: str | None, rule: str | None) -> tuple[CostModel, bool]:
    if name is not None:
        return cost_model(name), False
    encoder = next((encoder for prefix, encoder in _ENCODERS.items() if (rule or "").startswith(prefix)), _OTHER_ENCODER)
    return cost_model(f"{encoder}+{_LLM}"), True


def _refuse_nothing_fits(sources: Sequence[SourceRows], settings: PackSettings) -> None:
    limits = settings.limits(Peers())
    counts = _refused(sources, settings)
    num_rows = sum(len(piece) for source in sources for piece in source.slices)
    if num_rows and sum(counts.values()) == num_rows:
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items())
        shortest = min(int(piece.num_tokens.min()) for source in sources for piece in source.slices)
        raise UsageError(
            f"found no sample that fits a pack of {limits.sequence_length:,} tokens among {num_rows:,} ({reasons}; the shortest has "
            f"{shortest:,} tokens), expected some: raise the limits, or take the profile that was made for them"
        )


def _refused(sources: Sequence[SourceRows], settings: PackSettings) -> dict[str, int]:
    counts: dict[str, int] = {}
    for source in sources:
        for reason, count in source.refused(settings.limits(Peers())).items():
            counts[reason.name.lower()] = counts.get(reason.name.lower(), 0) + count
    return counts


def _notes(
    stored: StoredProfile, model: CostModel, is_default: bool, knows_size: bool, sources: Sequence[SourceRows]
) -> list[str]:
    notes = []
    if is_default:
        notes.append(f"costs are those of {model.name}, the default for this profile; name your model's by --cost")
    if empty := [source.name for source in sources if not source.slices]:
        notes.append(f"nothing to draw from {', '.join(empty)}: no usable training sample in what was read")
    if not any((piece.num_images > 0).any() for source in sources for piece in source.slices):
        notes.append("no sample has an image: the encoder does nothing, and packs differ by the attention of their samples alone")
    elif not knows_size:
        notes.append(f"bytes are not known: image rule {stored.profile.images.rule!r} has no pixels of a known size")
    if any(not source.is_whole for source in sources):
        notes.append("of large sources random slices of 256 rows were read; figures of samples that fit no pack are of these")
    return notes


def _source(source: SourceRows) -> Document:
    return {
        "name": source.name,
        "weight": source.weight,
        "num_rows": source.num_rows,
        "num_read": source.num_read,
        "num_train": source.num_train,
        "is_whole": source.is_whole,
    }


def _packing(pool: PackPool, sources: Sequence[SourceRows], settings: PackSettings) -> Document:
    limits = settings.limits(Peers())
    refused = {source.name: source.refused(limits) for source in sources}
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
        "refused": _refused(sources, settings),
        "refused_by_source": {name: _named(counts) for name, counts in refused.items() if counts},
    }


def _named(counts: Mapping[Refusal, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}


def _balance(pool: PackPool, found: BalanceForecast, sources: Sequence[SourceRows]) -> Document:
    cluster = found.cluster
    num_packs = cluster.num_ranks * found.num_microbatches
    num_samples = num_packs * pool.mean("num_samples").value
    whole = sum(source.weight for source in sources if source.slices)
    repeats = {
        source.name: num_samples * source.weight / whole / source.num_train
        for source in sources
        if source.slices and num_samples * source.weight / whole > source.num_train
    }
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
