"""From the shape of a model to coefficients, by counting multiplications and additions of its matrix products.

A product of [m, k] and [k, n] takes 2 m k n FLOP. Norms, activations, rotations, softmax, biases and look-ups are left out: they
move memory rather than compute, and are below 2% of FLOP at these widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from packer.format.errors import UsageError
from plugin.cost.core import CostModel, EncoderCost, LlmCost, Unit

_CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """Linear layers behind each other, from the encoder to the width of the language model."""

    patches_per_feature: int
    """Patches that are joined into one feature; their widths add up."""
    inner: tuple[int | None, ...]
    """Widths between the joined patches and the language model; None: that of the language model."""
    count: int = 1
    """How many of them run, those on features of inner layers included."""

    def __post_init__(self) -> None:
        _refuse_sizes("projector", {"patches_per_feature": self.patches_per_feature, "count": self.count})
        for width in self.inner:
            _refuse_sizes("projector", {"inner": 1 if width is None else width})

    def flop_per_patch(self, hidden: int, llm_hidden: int) -> int:
        """Rounded up."""
        inner = (llm_hidden if width is None else width for width in self.inner)
        widths = (hidden * self.patches_per_feature, *inner, llm_hidden)
        return -(-2 * self.count * sum(a * b for a, b in pairwise(widths)) // self.patches_per_feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """A vision transformer."""

    num_layers: int
    hidden: int
    mlp: int
    patch_size: int
    temporal_patch_size: int = 1
    """Frames in a patch; an image is repeated so often."""
    gated_mlp: bool = False
    """Three matrices instead of two."""
    num_full_layers: int = 0
    """Layers in which patches attend to all of their image, whatever its windows. In the others they attend within a window or
    tile as the image rule counts it (`sum_squared_attention`), which is all of the image where the rule has neither."""
    projector: Projector | None = None

    def __post_init__(self) -> None:
        sizes = asdict(self)
        _refuse_sizes("encoder", {name: sizes[name] for name in _ENCODER_SIZES})
        if not isinstance(self.num_full_layers, int) or not 0 <= self.num_full_layers <= self.num_layers:
            raise UsageError(f"encoder: found num_full_layers {self.num_full_layers!r}, expected 0 to {self.num_layers} layers")

    def linear_flop(self, llm_hidden: int) -> int:
        """Forward, per patch."""
        embedding = _CHANNELS * self.temporal_patch_size * self.patch_size**2 * self.hidden
        layer = 4 * self.hidden**2 + (3 if self.gated_mlp else 2) * self.hidden * self.mlp
        projected = self.projector.flop_per_patch(self.hidden, llm_hidden) if self.projector else 0
        return 2 * (embedding + self.num_layers * layer) + projected

    def pair_flop(self) -> int:
        """Forward, per pair of patches and layer: scores and weighted values, heads together as wide as the layer."""
        return 4 * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmShape:
    """A decoder with gated MLPs, dense or with experts, and full causal attention in every layer."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    """Of the dense layers; of one expert where there are experts."""
    experts_per_token: int | None = None
    """None: no experts. Shared experts count as well."""
    num_experts: int | None = None
    """What the router chooses from."""

    def __post_init__(self) -> None:
        _refuse_sizes("llm", {name: value for name, value in asdict(self).items() if value is not None})
        if (self.experts_per_token is None) != (self.num_experts is None):
            raise UsageError(
                f"llm: found experts_per_token {self.experts_per_token} and num_experts {self.num_experts}, expected both or none"
            )

    def linear_flop(self) -> int:
        """Forward, per token, the output layer included."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden * self.ffn * (self.experts_per_token or 1)
        router = self.hidden * (self.num_experts or 0)
        return 2 * (self.num_layers * (attention + mlp + router) + self.hidden * self.vocab)

    def square_flop(self) -> int:
        """Forward, per squared token of a sample: a token sees half of its sample on average."""
        return 2 * self.num_layers * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How a step uses the model; what turns forward FLOP into coefficients."""

    encoder_passes: int = 3
    """In forwards: 3 forward and backward, 4 with recomputation, 1 for a frozen encoder."""
    llm_passes: int = 3
    attention_percent: int = 100
    """What a FLOP of attention costs beside one of a matrix product: 50 where its kernels are twice as fast."""
    encoder_ranks: int = 1
    """Ranks that share the encoder's work on one pack."""
    llm_ranks: int = 1
    """Ranks that share the language model's work on one pack: tensor times context times pipeline parallel."""

    def __post_init__(self) -> None:
        _refuse_sizes("work", asdict(self))


_ENCODER_SIZES = ("num_layers", "hidden", "mlp", "patch_size", "temporal_patch_size")


def from_shapes(
    encoder: EncoderShape, llm: LlmShape, work: Work | None = None, *, name: str = "shapes", fixed: int = 0, source: str = ""
) -> CostModel:
    """Coefficients in FLOP per rank, rounded half up.

    Args:
        fixed: FLOP per image that no product accounts for.
    """
    work = work or Work()
    num_windowed = encoder.num_layers - encoder.num_full_layers

    def of_encoder(flop: int, percent: int = 100) -> int:
        return _rounded(flop * work.encoder_passes * percent, 100 * work.encoder_ranks)

    def of_llm(flop: int, percent: int = 100) -> int:
        return _rounded(flop * work.llm_passes * percent, 100 * work.llm_ranks)

    return CostModel(
        name=name,
        unit=Unit.FLOP,
        source=source,
        encoder=EncoderCost(
            linear=of_encoder(encoder.linear_flop(llm.hidden)),
            quadratic=of_encoder(encoder.pair_flop() * num_windowed, work.attention_percent),
            full_quadratic=of_encoder(encoder.pair_flop() * encoder.num_full_layers, work.attention_percent),
            fixed=fixed,
        ),
        llm=LlmCost(
            linear=of_llm(llm.linear_flop()),
            quadratic=of_llm(llm.square_flop(), work.attention_percent),
        ),
    )


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def _refuse_sizes(part: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{part}: found {name} {value!r}, expected a whole number of at least 1")
