"""`SampleEncoder`: record -> token ids with image spans and loss mask; and the counts of many records at once.

Both go through one plan of a record, so an index can never hold another length than a trainer builds. Text is joined
across message and image borders before it is tokenized, as a model's own processor does with its expanded prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from indexer.image_layouts import ImageLayout
from indexer.image_rules import MAX_SIDE, ImageCount, ImageRule, ImageSizes
from indexer.rows import MAX_COUNT, Status
from indexer.segments import Features, Image, Text, Token
from indexer.templates import Template, TemplateFailure
from indexer.text_runs import Run, RunIds, run_ids, run_lengths
from indexer.tokenizers import TextTokenizer, TokenizationFailed, token_id
from packer.format.errors import BayplanError

Record = Mapping[str, Any]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class SampleRefused(BayplanError):
    """A sample that this profile cannot encode; costs that sample only."""

    def __init__(self, status: Status, detail: str) -> None:
        self.status = status
        self.detail = detail
        super().__init__(f"{status.name.lower()}: {detail}")

    def __reduce__(self) -> tuple[type[SampleRefused], tuple[Status, str]]:
        return type(self), (self.status, self.detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Where an image stands: positions [start, end), from its first special token or feature to its last."""

    index: int
    """Into the record's `images`."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """One sample as a model reads it."""

    ids: Ids
    """[num_tokens]"""
    loss_mask: Mask
    """[num_tokens], whether the token is a target; a trainer shifts it together with the labels."""
    feature_mask: Mask
    """[num_tokens], whether the position holds an image feature."""
    image_spans: tuple[ImageSpan, ...]
    """In reading order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCount:
    """The length of one sample by kind; `num_tokens` is text + image + special and wrapper tokens."""

    num_text_tokens: int
    num_image_tokens: int
    num_tokens: int
    num_loss_tokens: int
    images: tuple[ImageCount, ...]
    """In the order of the record's `images`."""


_Part = tuple[Run | Token | Features, int | None]
"""A part of a plan and, for what stands for an image, the index of that image."""


class SampleEncoder:
    """One way of counting: tokenizer, template and image rule. Safe to use in several threads."""

    def __init__(
        self,
        *,
        fingerprint: str,
        tokenizer: TextTokenizer,
        template: Template,
        rule: ImageRule | None,
        layout: ImageLayout | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self._template = template
        self._rule = rule
        self._layout = layout

    def encode(self, record: Record) -> EncodedSample:
        """The ids of a record.

        Raises:
            SampleRefused: when the index holds a status instead of a length for it.
        """
        (encoded,) = self.encode_all([record])
        if isinstance(encoded, SampleRefused):
            raise encoded
        return encoded

    def encode_all(self, records: Sequence[Record]) -> list[EncodedSample | SampleRefused]:
        """The ids of many records, in their order; what `encode` refuses is a refusal here. Faster than one by one."""
        all_counts = self._all_image_counts(records)
        plans = [self._parts(record, counts) for record, counts in zip(records, all_counts, strict=True)]
        runs, owners = _runs_of(plans)
        texts, failures = run_ids(self.tokenizer, runs)
        failed = {owners[place]: _refused(failures[place]) for place in reversed(failures)}  # of a record, its first
        found: list[EncodedSample | SampleRefused] = []
        first = 0
        for place, (plan, counts) in enumerate(zip(plans, all_counts, strict=True)):
            if isinstance(plan, SampleRefused):
                found.append(plan)
                continue
            own = texts[first : first + sum(isinstance(part, Run) for part, _ in plan)]
            first += len(own)
            found.append(failed.get(place) or self._assembled(plan, own, counts))
        return found

    def _parts(self, record: Record, counts: tuple[ImageCount, ...] | SampleRefused) -> list[_Part] | SampleRefused:
        if isinstance(counts, SampleRefused):
            return counts
        try:
            return list(self._plan(record, counts))
        except TemplateFailure as error:
            return _refused(error)

    def _assembled(self, plan: Sequence[_Part], texts: Sequence[RunIds], counts: Any) -> EncodedSample | SampleRefused:
        """The sample of a plan and the tokens of its texts."""
        num_tokens = sum(len(text.ids) for text in texts) + sum(_num_tokens(part) for part, _ in plan)
        if refused := _wrong_length(num_tokens, counts):
            return refused
        ids = np.empty(num_tokens, np.int32)
        loss_mask, feature_mask = np.zeros(num_tokens, np.bool_), np.zeros(num_tokens, np.bool_)
        spans: list[tuple[int, int, int]] = []
        rest = iter(texts)
        start = 0
        for part, image in plan:
            if isinstance(part, Run):
                text = next(rest)
                end = start + len(text.ids)
                ids[start:end], loss_mask[start:end] = text.ids, text.loss
            else:
                end = start + _num_tokens(part)
                ids[start:end] = token_id(self.tokenizer, part.token)
                if isinstance(part, Token):
                    loss_mask[start] = part.loss
                else:
                    feature_mask[start:end] = True
            if image is not None:
                spans.append((image, start, end))
            start = end
        return EncodedSample(ids=ids, loss_mask=loss_mask, feature_mask=feature_mask, image_spans=tuple(_joined(spans)))

    def lengths(self, records: Sequence[Record]) -> list[SampleCount | SampleRefused]:
        """The counts of many records, in their order; what `encode` refuses is a refusal here."""
        all_counts = self._all_image_counts(records)
        plans = [self._parts(record, counts) for record, counts in zip(records, all_counts, strict=True)]
        runs, owners = _runs_of(plans)
        sizes, losses, failures = run_lengths(self.tokenizer, runs)
        failed = {owners[place]: _refused(failures[place]) for place in reversed(failures)}  # of a record, its first
        text = np.bincount(owners, sizes, len(plans)).astype(np.int64).tolist()
        loss = np.bincount(owners, losses, len(plans)).astype(np.int64).tolist()
        return [
            plan if isinstance(plan, SampleRefused) else failed.get(k) or _counted(plan, counts, text[k], loss[k])
            for k, (plan, counts) in enumerate(zip(plans, all_counts, strict=True))
        ]

    def _plan(self, record: Record, counts: Sequence[ImageCount]) -> Iterator[_Part]:
        """Runs of text, special tokens and features in order, every image replaced by what stands for it."""
        texts: list[Text] = []
        is_first = True
        for piece, image in self._pieces(record, counts):
            if isinstance(piece, Text):
                if piece.text:
                    texts.append(piece)
                continue
            if texts:
                yield Run(texts, is_first), None
                texts = []
            is_first = False
            yield piece, image
        if texts:
            yield Run(texts, is_first), None

    def _pieces(self, record: Record, counts: Sequence[ImageCount]) -> Iterator[tuple[Text | Token | Features, int | None]]:
        num_images = 0
        for segment in self._template.segments(record):
            if not isinstance(segment, Image):
                yield segment, None
                continue
            assert self._layout is not None
            for piece in self._layout.pieces(counts[segment.index], num_images):
                yield piece, segment.index
            num_images += 1

    def _all_image_counts(self, records: Sequence[Record]) -> list[tuple[ImageCount, ...] | SampleRefused]:
        found: list[tuple[ImageCount, ...] | SampleRefused] = [self._unfit(record) or () for record in records]
        fit = [k for k, record in enumerate(records) if record["images"] and not isinstance(found[k], SampleRefused)]
        if not fit:
            return found
        assert self._rule is not None
        entries = [entry for k in fit for entry in records[k]["images"]]
        numbers = [len(records[k]["images"]) for k in fit]
        sizes = ImageSizes.of_arrays([entry["width"] for entry in entries], [entry["height"] for entry in entries], numbers)
        counts = self._rule(sizes)
        each = counts.each()
        first = 0
        for k, number in zip(fit, numbers, strict=True):
            refused = next((place for place in range(first, first + number) if place in counts.refusals), None)
            if refused is None:
                own = tuple(each[first : first + number])
                found[k] = _too_large(own) or own
            else:
                size = f"{entries[refused]['width']}x{entries[refused]['height']}"
                detail = f"image {refused - first} of {size}: {counts.refusals[refused]}"
                found[k] = SampleRefused(Status.IMAGE_REFUSED, detail)
            first += number
        return found

    def _unfit(self, record: Record) -> SampleRefused | None:
        """Why the rule is not even asked."""
        if not record["images"]:
            return None
        if self._rule is None:
            return SampleRefused(Status.IMAGE_REFUSED, "found an image, but the profile has no image rule")
        for k, entry in enumerate(record["images"]):
            if not 1 <= min(entry["width"], entry["height"]) <= max(entry["width"], entry["height"]) <= MAX_SIDE:
                detail = f"image {k}: found {entry['width']}x{entry['height']}, expected sides of 1 to {MAX_SIDE:,}"
                return SampleRefused(Status.IMAGE_REFUSED, detail)
        return None


def _runs_of(plans: Sequence[Sequence[_Part] | SampleRefused]) -> tuple[list[Run], list[int]]:
    """The texts of all plans, and the plan of each."""
    runs: list[Run] = []
    owners: list[int] = []
    for place, plan in enumerate(plans):
        if not isinstance(plan, SampleRefused):
            own = [part for part, _ in plan if isinstance(part, Run)]
            runs += own
            owners += [place] * len(own)
    return runs, owners


def _num_tokens(part: Run | Token | Features) -> int:
    """Of what needs no tokenizer."""
    return part.num_tokens if isinstance(part, Features) else int(isinstance(part, Token))


def _counted(plan: Sequence[_Part], counts: Any, num_text: int, num_text_loss: int) -> SampleCount | SampleRefused:
    num_image = num_special = num_loss = 0
    for part, _ in plan:
        if isinstance(part, Features):
            num_image += part.num_tokens
        elif isinstance(part, Token):
            num_special += 1
            num_loss += part.loss
    num_tokens = num_text + num_image + num_special
    if refused := _wrong_length(num_tokens, counts):
        return refused
    return SampleCount(
        num_text_tokens=num_text,
        num_image_tokens=num_image,
        num_tokens=num_tokens,
        num_loss_tokens=num_loss + num_text_loss,
        images=counts,
    )


def _wrong_length(num_tokens: int, images: Sequence[ImageCount]) -> SampleRefused | None:
    """Why a sample of this length has no place in an index."""
    if not num_tokens:
        return SampleRefused(Status.EMPTY, "found no token, expected at least one")
    if num_tokens > MAX_COUNT:
        status = Status.IMAGE_REFUSED if images else Status.NOT_TOKENIZED
        return SampleRefused(status, f"found {num_tokens:,} tokens, an index holds up to {MAX_COUNT:,} of a sample")
    return None


def _too_large(counts: Sequence[ImageCount]) -> SampleRefused | None:
    """Why the counts of a sample's images have no place in an index, where its columns would hold something else."""
    for name in ("num_image_tokens", "num_patches", "sum_squared_attention"):
        values = [getattr(count, name) for count in counts]
        if min(values) < 0:
            k = next(k for k, value in enumerate(values) if value < 0)
            return SampleRefused(Status.IMAGE_REFUSED, f"image {k}: found {name} {values[k]:,}, expected 0 or more")
        if name != "sum_squared_attention" and sum(values) > MAX_COUNT:
            detail = f"found {name} {sum(values):,} of its images, an index holds up to {MAX_COUNT:,} of a sample"
            return SampleRefused(Status.IMAGE_REFUSED, detail)
    return None


def _refused(error: TemplateFailure | TokenizationFailed) -> SampleRefused:
    status = Status.TEMPLATE_FAILED if isinstance(error, TemplateFailure) else Status.NOT_TOKENIZED
    return SampleRefused(status, str(error))


def _joined(pieces: Sequence[tuple[int, int, int]]) -> Iterator[ImageSpan]:
    """One span per image from the positions of its pieces, which follow each other."""
    index: int | None = None
    start = end = 0
    for image, first, last in pieces:
        if image != index:
            if index is not None:
                yield ImageSpan(index=index, start=start, end=end)
            index, start = image, first
        end = last
    if index is not None:
        yield ImageSpan(index=index, start=start, end=end)
