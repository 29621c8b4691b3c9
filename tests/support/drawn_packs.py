"""Costs of drawn packs: samples of a mix of sources, packed, with the encoder and LLM cost of each pack.

Text and images are log-normal with heavy tails, 64 to 16,384 LLM tokens an image, four patches a token. Costs are those of a
vision encoder of 27 layers, width 1152 and MLP 4304, and of an LLM with 4.3 billion active parameters whose attention over one
sample of 8,192 tokens adds half as much, in units of 10^8 operations. On `web` the encoder costs 0.44 of the LLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plugin.packing import PackLimits, Refusal, Samples, pack, refusals, shuffled

IntArray = npt.NDArray[np.int64]

MIXES = {"web": (0.3, 0.4, 0.2, 0.1), "doc": (0.15, 0.25, 0.15, 0.45), "text": (0.6, 0.25, 0.1, 0.05)}
"""Shares of text, caption, interleaved and document samples."""

TEXT = {"median": (600, 60, 150, 1100), "spread": (1.3, 0.7, 0.8, 0.95), "low": (16, 8, 32, 32), "high": (1e6, 2000, 1e6, 1e6)}
IMAGE_MEDIAN, IMAGE_SPREAD = (1, 600, 350, 3400), (0.1, 0.9, 0.9, 0.55)
BUFFER = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Samples as columns."""

    samples: Samples
    encoder: IntArray
    llm: IntArray


def encoder_cost(num_patches: IntArray, sum_squared: IntArray, num_images: IntArray) -> IntArray:
    """8.22 units a patch, 0.00124 a pair of patches, 100 an image."""
    return (822 * num_patches) // 100 + (124 * sum_squared) // 100_000 + 100 * num_images


def llm_cost(num_tokens: IntArray) -> IntArray:
    """86 units a token, 0.0056 a pair of tokens of a sample."""
    return 86 * num_tokens + (56 * num_tokens * num_tokens) // 10_000


def draw(shares: tuple[float, ...], number: int, seed: int) -> Drawn:
    """Samples in random order; kinds are drawn by `shares`."""
    chance = np.random.default_rng(seed)
    kinds = chance.choice(4, number, p=shares)
    num_images = np.choose(kinds, [0, 1, 0, 1])
    inter = np.flatnonzero(kinds == 2)
    num_images[inter] = np.clip(chance.lognormal(np.log(5), 0.8, len(inter)), 2, 64).astype(np.int64)
    median, spread, low, high = (np.array(TEXT[name], float)[kinds] for name in TEXT)
    median[inter] *= num_images[inter]
    text = np.clip(chance.lognormal(np.log(median), spread), low, high).astype(np.int64)
    of = np.repeat(np.arange(number), num_images)
    medians, spreads = np.array(IMAGE_MEDIAN, float)[kinds[of]], np.array(IMAGE_SPREAD)[kinds[of]]
    tokens = np.clip(chance.lognormal(np.log(medians), spreads), 64, 16_384).astype(np.int64)
    image_tokens, sum_squared = (sums(values, of, number) for values in (tokens, (4 * tokens) ** 2))
    samples = Samples.of(text + image_tokens, num_images=num_images, num_patches=4 * image_tokens)
    return Drawn(
        samples=samples,
        encoder=encoder_cost(4 * image_tokens, sum_squared, num_images),
        llm=llm_cost(text + image_tokens),
    )


def sums(values: IntArray, of: IntArray, number: int) -> IntArray:
    totals = np.zeros(number, np.int64)
    np.add.at(totals, of, values)
    return totals


def packed(drawn: Drawn, number: int, *, sequence_length: int = 8192, seed: int = 0) -> tuple[IntArray, IntArray]:
    """Encoder and LLM costs of the first `number` packs in the order in which a loader yields them; fewer if samples run out."""
    limits = PackLimits(sequence_length=sequence_length)
    fits = np.flatnonzero(refusals(drawn.samples, limits) == Refusal.NONE)
    encoder: list[int] = []
    llm: list[int] = []
    held, ages, start, call = np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0
    while len(llm) < number and start < len(fits):
        more = fits[start : start + BUFFER - len(held)]
        start += len(more)
        held, ages = np.concatenate([held, more]), np.concatenate([ages, np.zeros(len(more), np.int64)])
        columns = (drawn.samples.num_tokens, drawn.samples.num_images, drawn.samples.num_patches)
        tokens, images, patches = (column[held] for column in columns)
        packing = pack(Samples.of(tokens, num_images=images, num_patches=patches, age=ages), limits, max_age=5)
        for members in shuffled(packing.packs, worker_seed=seed, sample_index=call):
            encoder.append(int(drawn.encoder[held[members]].sum()))
            llm.append(int(drawn.llm[held[members]].sum()))
        held, ages, call = held[packing.leftovers], packing.leftover_age, call + 1
    return np.array(encoder[:number], np.int64), np.array(llm[:number], np.int64)


def dealt(
    shares: tuple[float, ...], num_ranks: int, num_microbatches: int, *, sequence_length: int = 8192, seed: int = 0
) -> tuple[IntArray, IntArray]:
    """Costs [rank, microbatch] of a mix; packs that were made together mostly lie on one rank, as with a loader per rank."""
    number = num_ranks * num_microbatches
    drawn = draw(shares, number * sequence_length // 1200 + 4 * BUFFER, seed)
    encoder, llm = packed(drawn, number, sequence_length=sequence_length, seed=seed)
    return encoder.reshape(num_ranks, num_microbatches), llm.reshape(num_ranks, num_microbatches)
