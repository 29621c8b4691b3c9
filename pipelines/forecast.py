"""`bayplan forecast`: what packing and balancing will give on a dataset, for one or many settings. Reads the index only.

The figures are `plugin.forecast`'s; here a dataset, a profile, its blend and a cost model are found, and one plain JSON document
is made of what comes out (`forecast_document`). `forecast_text` prints it, the report shows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from indexer.image_rules.lookup import nearest
from indexer.profile import StoredProfile, profile_names, read_profile
from indexer.table import open_index
from packer.format.errors import UsageError
from packer.storage import Storage, open_storage
from pipelines.blend_reading import read_blend
from pipelines.dataset import require_identity
from pipelines.forecast_document import VERSION, balance_dict, cost_dict, notes, packing_dict, refused, source_dict
from plugin.cost import CostModel, cost_model
from plugin.forecast import Cluster, PackPool, PackSize, SourceRows, balance, pack_pool, pack_size, read_rows
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
MOST_PACKS = 1 << 22
"""Of a global batch: eight times that of 4,096 ranks x 128 microbatches, in some gigabyte of memory."""


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

    def as_dict(self) -> Document:
        """What decides the figures, beside the lists of settings and the costs."""
        left_out = {"num_ranks", "num_microbatches", "sequence_lengths", "cost"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

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
    _refuse_too_large(question)
    clusters = question.clusters()
    storage = open_storage(url)
    require_identity(storage)
    stored = _profile(storage, profile)
    lengths = list(question.sequence_lengths) or list(stored.profile.sequence_lengths)
    if not lengths:
        raise UsageError(f"found no sequence length: profile {stored.profile.name!r} names none; give --sequence-length")
    settings = [question.settings(length) for length in lengths]
    model, is_default = _cost_model(question.cost, stored.profile.images.rule)
    blend = read_blend(storage, stored.profile.name)
    table = open_index(storage.url, stored.profile.name, sources=[source.name for source in blend])
    sources = read_rows(table, blend, model, seed=question.seed)
    say(f"{sum(source.num_read for source in sources):,} rows of the index read")
    size = pack_size(stored.profile.images.rule, stored.profile.images.parameters)
    pools = [_pool(sources, one, question, size, say) for one in settings]
    found = []
    for pool, cluster, number in itertools.product(pools, clusters, question.num_microbatches):
        found.append((pool, balance(pool, cluster, number, seed=question.seed)))
        say(f"{cluster.num_ranks:,} ranks x {number:,} microbatches of {pool.limits.sequence_length:,} tokens dealt")
    return {
        "bayplan_forecast": VERSION,
        "dataset": storage.url,
        "profile": stored.profile.name,
        "profile_fingerprint": stored.fingerprint,
        "cost": cost_dict(model, is_default),
        "settings": question.as_dict() | {"max_age": settings[0].max_age},
        "sources": [source_dict(source) for source in sources],
        "packing": [packing_dict(pool, sources) for pool in pools],
        "balance": [balance_dict(pool, one, sources) for pool, one in found],
        "notes": notes(stored, model, is_default, size, sources),
    }


def _refuse_too_large(question: Question) -> None:
    number = max(question.num_ranks) * max(question.num_microbatches)
    if number > MOST_PACKS:
        raise UsageError(
            f"found global batches of up to {number:,} packs ({max(question.num_ranks):,} ranks x "
            f"{max(question.num_microbatches):,} microbatches), expected at most {MOST_PACKS:,}: ask for fewer"
        )


def _pool(
    sources: Sequence[SourceRows], settings: PackSettings, question: Question, size: PackSize | None, say: Callable[[str], None]
) -> PackPool:
    _refuse_nothing_fits(sources, settings)
    pool = pack_pool(
        sources,
        settings,
        num_packs=max(question.num_ranks) * max(question.num_microbatches),
        num_replicates=question.num_batches,
        num_streams=max(question.num_ranks),
        size=size,
        seed=question.seed,
    )
    say(f"{len(pool):,} packs of {settings.sequence_length:,} tokens packed from {pool.num_drawn_rows:,} samples")
    return pool


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
    counts = refused(sources, settings.limits(Peers()))
    num_rows = sum(len(piece) for source in sources for piece in source.slices)
    if num_rows and sum(counts.values()) == num_rows:
        reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.items())
        shortest = min(int(piece.num_tokens.min()) for source in sources for piece in source.slices)
        raise UsageError(
            f"found no sample that fits a pack of {settings.sequence_length:,} tokens among {num_rows:,} ({reasons}; the "
            f"shortest has {shortest:,} tokens), expected some: raise the limits, or take the profile that was made for them"
        )
