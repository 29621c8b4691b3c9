"""A vision-language model small enough to read and to train on a CPU: it shows what a model must do with a pack.

Three things keep the samples of a pack apart: attention stays within a segment, positions restart in each, and labels are
shifted where a sample's first token has none. Everything else is an ordinary transformer. Without dropout, so nothing is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plugin.batch import IGNORED, Form
from plugin.batch.torch_batch import TorchBatch

Normalise = Callable[[Tensor], Tensor]
"""uint8 patches or tiles, as the pack holds them -> floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmSizes:
    """What a `TinyVlm` is built from."""

    vocab_size: int
    patch_size: int = 14
    """Pixels a side."""
    merge_size: int = 2
    """So many patches a side become one image token."""
    hidden: int = 64
    heads: int = 4
    """`hidden` is a multiple of 4 * heads: each head turns by two coordinates."""
    vision_layers: int = 2
    layers: int = 2


class TinyVlm(nn.Module):
    """Token logits of a pack whose images go through a vision encoder of their own."""

    def __init__(self, sizes: VlmSizes, normalise: Normalise | None) -> None:
        super().__init__()
        self.normalise = normalise
        self.vision = VisionEncoder(sizes)
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.heads) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, pack: TorchBatch) -> Tensor:
        """Logits [T, vocab_size]; those at padding mean nothing."""
        return self.head(self._hidden(pack))

    def loss(self, pack: TorchBatch) -> tuple[Tensor, int]:
        """Sum over the tokens that are predicted, and their number: sums of several packs add up, means would not."""
        # Labels of a pack are not shifted. Position i predicts i + 1, which has no label if a sample starts there.
        targets = pack.views["labels"][1:]
        predicted = targets != IGNORED
        logits = self.head(self._hidden(pack)[:-1][predicted])
        return F.cross_entropy(logits, targets[predicted], reduction="sum"), pack.batch.num_loss_tokens

    def _hidden(self, pack: TorchBatch) -> Tensor:
        views, host = pack.views, pack.batch
        hidden = self.embedding(views["tokens"])
        if len(host.image_sample):
            features, num_places = self._image_features(pack), int(host.feature_mask.sum())
            if len(features) != num_places:
                raise ValueError(f"found {len(features)} image features, expected {num_places}, as the pack has places for")
            # Images stand in the order of the sequence, so the k-th feature belongs to the k-th place.
            hidden = hidden.masked_scatter(views["feature_mask"][:, None], features)
        # The padded form: it says where segments stand. Padding is at their end, so causal attention never looks at it.
        boundaries = host.cu_seqlens_padded.tolist()
        angles = rotary_angles(views["position_ids"][:, None], self.blocks[0].head_size)
        for block in self.blocks:
            hidden = block(hidden, angles, boundaries, causal=True)
        return self.norm(hidden)

    def _image_features(self, pack: TorchBatch) -> Tensor:
        if self.normalise is None or not pack.batch.has_pixels:
            raise ValueError("found images without pixels or without `normalise`, expected both: this model has all its stages")
        if pack.batch.form == Form.TILES:
            return self.vision.of_tiles(self.normalise(pack.views["tiles"]))
        return self.vision(self.normalise(pack.views["pixels"]), pack.batch.image_grid_thw.tolist())


class VisionEncoder(nn.Module):
    """Patches of any number of images -> features for the places of the sequence."""

    def __init__(self, sizes: VlmSizes) -> None:
        super().__init__()
        self.patch_size, self.merge_size = sizes.patch_size, sizes.merge_size
        self.embedding = nn.Linear(3 * sizes.patch_size**2, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes.hidden, sizes.heads) for _ in range(sizes.vision_layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.merge = nn.Linear(sizes.merge_size**2 * sizes.hidden, sizes.hidden)

    def forward(self, patches: Tensor, grids: Sequence[Sequence[int]]) -> Tensor:
        """[features, hidden]. `patches` of one feature follow one another; `grids` are (time, rows, columns) of each image."""
        # Qwen's patches hold each channel once for every frame; those of a still are equal, and one will do.
        frames = patches.unflatten(1, (3, -1, self.patch_size**2))
        hidden = self.embedding(frames[:, :, 0].flatten(1))
        boundaries = [0, *accumulate(time * rows * columns for time, rows, columns in grids)]
        angles = rotary_angles(self._places(grids).to(patches.device), self.blocks[0].head_size)
        for block in self.blocks:
            hidden = block(hidden, angles, boundaries, causal=False)
        return self.merge(self.norm(hidden).view(-1, self.merge.in_features))

    def of_tiles(self, tiles: Tensor) -> Tensor:
        """The same for tiles [N, 3, side, side], each of them an image of its own."""
        number, side = len(tiles), tiles.shape[-1] // self.patch_size
        cells = (side // self.merge_size, self.merge_size, self.patch_size)
        patches = tiles.unflatten(3, cells).unflatten(2, cells).permute(0, 2, 5, 3, 6, 1, 4, 7)
        return self(patches.reshape(number * side**2, -1), [(1, side, side)] * number)

    def _places(self, grids: Sequence[Sequence[int]]) -> Tensor:
        """[P, 2]: row and column of every patch, in the order patches stand."""
        merge, found = self.merge_size, []
        for time, rows, columns in grids:
            places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
            merged = places.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
            found.append(merged.reshape(-1, 2).repeat(time, 1))
        return torch.cat(found)


class Block(nn.Module):
    """Attention within segments, then a feed-forward layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_size = heads, hidden // heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.feed = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, hidden: Tensor, angles: Tensor, boundaries: Sequence[int], *, causal: bool) -> Tensor:
        """[N, hidden] -> the same; rows see those between the same two boundaries."""
        qkv = self.qkv(self.attention_norm(hidden)).unflatten(1, (3, self.heads, self.head_size))
        query, key, value = qkv.permute(1, 2, 0, 3)
        query, key = rotated(query, angles), rotated(key, angles)
        # One call a segment needs no kernel for packs and no T x T mask. With flash attention, `boundaries` are cu_seqlens.
        segments = [tuple(vectors[None, :, a:b] for vectors in (query, key, value)) for a, b in pairwise(boundaries)]
        seen = torch.cat([F.scaled_dot_product_attention(*segment, is_causal=causal) for segment in segments], dim=2)
        hidden = hidden + self.out(seen[0].transpose(0, 1).flatten(1))
        return hidden + self.feed(self.feed_norm(hidden))


def rotary_angles(coordinates: Tensor, head_size: int) -> Tensor:
    """[N, head_size / 2] for [N, d] coordinates, which share the angles (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    number = head_size // (2 * coordinates.shape[1])
    frequencies = 10_000.0 ** -(torch.arange(number, device=coordinates.device) / number)
    return (coordinates[:, :, None] * frequencies).flatten(1)


def rotated(vectors: Tensor, angles: Tensor) -> Tensor:
    """[heads, N, head_size], each half of a vector one coordinate of the points turned."""
    one, other = vectors.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)
