"""Shares and weights: how often each source is drawn, and which share of the tokens that gives.

A weight is the probability that the next sample comes from the source; the sample is then drawn from the source's usable
training samples, without regard to its length. So a source's tokens come in proportion to weight x mean tokens of a sample,
and wanted token shares are met by weights of share / mean. Worked example: sources a (mean 100 tokens) and b (mean 900) with
equal weights give 10% and 90% of the tokens; for 50% and 50% the weights are 0.9 and 0.1.

`val` holds samples out by their ids, whatever their length: in expectation it takes the same share of samples and tokens, so
it changes how much data there is (own share, epochs), not the mean and not the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packer.format.errors import UsageError

EPOCH_TOKENS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTokens:
    """What a source has, and what the recipe wants of it."""

    name: str
    num_samples: int
    """Usable ones, validation included."""
    num_tokens: int
    """Of those samples."""
    weight: float | None = None
    """By samples; 1 when neither it nor `token_share` is given."""
    token_share: float | None = None
    val: float = 0.0
    """Share of the samples held out for validation."""

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.num_tokens < 0:
            raise UsageError(f"source {self.name!r}: found {self.num_samples} samples with {self.num_tokens} tokens")
        for key, value in (("weight", self.weight), ("token_share", self.token_share)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UsageError(f"source {self.name!r}: found {key} {value}, expected a number above 0")
        if not 0 <= self.val < 1:
            raise UsageError(f"source {self.name!r}: found val {self.val}, expected 0 or more and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRow:
    """One source in the mixture. Floats have 12 significant digits, so that files that hold them are reproducible."""

    name: str
    weight: float
    """Probability that the next sample is from this source; 0 for a source that is left out."""
    token_share: float | None
    """As the recipe gives it."""
    share_of_tokens: float
    """Of all training tokens there are."""
    expected_token_share: float
    """Of the tokens drawn with these weights."""
    epochs_per_billion_tokens: float
    """How often the source is gone through while 10^9 tokens are drawn from all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The rows in the order of the sources, and what a person has to be told."""

    rows: tuple[MixtureRow, ...]
    notes: tuple[str, ...]


def mixture_of(sources: Sequence[SourceTokens]) -> Mixture:
    """Weights and shares of all sources of a recipe; those without anything to draw are left out, and said.

    Raises:
        UsageError: when no source has a usable sample, or the recipe mixes weight and token_share.
    """
    by_tokens = _wants_token_shares(sources)
    drawn = [source for source in sources if source.num_samples and source.num_tokens]
    if not drawn:
        raise UsageError(
            f"none of the {len(sources)} sources has a usable sample with tokens: there is nothing to mix; see their status"
        )
    means = {source.name: source.num_tokens / source.num_samples for source in drawn}
    train_tokens = {source.name: source.num_tokens * (1 - source.val) for source in drawn}
    if by_tokens:
        weights = _normalised({source.name: (source.token_share or 0) / means[source.name] for source in drawn})
    else:
        weights = _normalised({source.name: 1.0 if source.weight is None else source.weight for source in drawn})
    own = _normalised(train_tokens)
    expected = _normalised({name: weight * means[name] for name, weight in weights.items()})

    def row(source: SourceTokens) -> MixtureRow:
        name, there = source.name, source.name in weights
        return MixtureRow(
            name=name,
            weight=_rounded(weights[name]) if there else 0.0,
            token_share=source.token_share,
            share_of_tokens=_rounded(own[name]) if there else 0.0,
            expected_token_share=_rounded(expected[name]) if there else 0.0,
            epochs_per_billion_tokens=_rounded(EPOCH_TOKENS * expected[name] / train_tokens[name]) if there else 0.0,
        )

    return Mixture(rows=tuple(map(row, sources)), notes=tuple(_note(source) for source in sources if source.name not in weights))


def _wants_token_shares(sources: Sequence[SourceTokens]) -> bool:
    if len({source.name for source in sources}) < len(sources):
        raise UsageError("two sources have the same name; give each its own")
    shared = [source.name for source in sources if source.token_share is not None]
    if not shared:
        return False
    if others := [source.name for source in sources if source.token_share is None or source.weight is not None]:
        raise UsageError(
            f"found token_share in {shared[0]!r}, but not it alone in {others[0]!r}: give token_share to all sources or to none"
        )
    return True


def _note(source: SourceTokens) -> str:
    wanted = f"token_share {source.token_share}" if source.token_share is not None else f"weight {source.weight or 1}"
    lacks = "no usable sample" if not source.num_samples else f"{source.num_samples} usable samples without a single token"
    return f"source {source.name!r} has {lacks}: its {wanted} cannot be met and goes to the other sources in proportion"


def _normalised(values: Mapping[str, float]) -> dict[str, float]:
    """To sum 1. `fsum` is exact, so the order of the sources does not matter; scaling first keeps huge values finite."""
    largest = max(values.values())
    scaled = {name: value / largest for name, value in values.items()}
    total = math.fsum(scaled.values())
    return {name: value / total for name, value in scaled.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")
