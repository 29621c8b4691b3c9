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
from indexer.tokenizers import TextTokenizer, TokenizationFailed, token_id
from packer.format.errors import BayplanError

Record = Mapping[str, Any]
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


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


class _Run:
    """Texts that stand side by side, tokenized as one."""

    __slots__ = ("_texts", "loss", "starts", "text")

    def __init__(self, texts: Sequence[Text], starts: bool) -> None:
        self._texts = texts
        self.starts = starts
        """Whether nothing stands before it in the sample."""
        self.text = texts[0].text if len(texts) == 1 else "".join([text.text for text in texts])
        losses = {text.loss for text in texts}
        self.loss = losses.pop() if len(losses) == 1 else None
        """The same for all its text, or None."""

    def losses(self, offsets: Sequence[tuple[int, int]]) -> list[bool]:
        """Whether each token covers a character that is a target."""
        targets_before = [0]
        for text in self._texts:
            last = targets_before[-1]
            targets_before += range(last + 1, last + 1 + len(text.text)) if text.loss else [last] * len(text.text)
        return [targets_before[end] > targets_before[start] for start, end in offsets]


_Part = tuple[_Run | Token | Features, int | None]
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
        counts = self._all_image_counts([record])[0]
        if isinstance(counts, SampleRefused):
            raise counts
        ids: list[npt.ArrayLike] = []
        losses: list[npt.ArrayLike] = []
        features: list[npt.ArrayLike] = []
        spans: list[tuple[int, int, int]] = []
        position = 0
        try:
            for part, image in self._plan(record, counts):
                part_ids, part_losses = self._encoded(part)
                if image is not None and not isinstance(part, _Run):
                    spans.append((image, position, position + len(part_ids)))
                ids.append(part_ids)
                losses.append(part_losses)
                features.append(np.full(len(part_ids), isinstance(part, Features)))
                position += len(part_ids)
        except (TemplateFailure, TokenizationFailed) as error:
            raise _refused(error) from error
        if refused := _wrong_length(position, counts):
            raise refused
        return EncodedSample(
            ids=np.concatenate(ids).astype(np.int32),
            loss_mask=np.concatenate(losses).astype(np.bool_),
            feature_mask=np.concatenate(features).astype(np.bool_),
            image_spans=tuple(_joined(spans)),
        )

    def _encoded(self, part: _Run | Token | Features) -> tuple[npt.NDArray[Any], Mask]:
        if isinstance(part, Token):
            return np.array([token_id(self.tokenizer, part.token)]), np.array([part.loss])
        if isinstance(part, Features):
            return np.full(part.num_tokens, token_id(self.tokenizer, part.token)), np.zeros(part.num_tokens, np.bool_)
        loss = part.loss
        if loss is None:
            ids, offsets = self.tokenizer.encode_with_offsets(part.text, part.starts)
            return np.asarray(ids, np.int64), np.asarray(part.losses(offsets), np.bool_)
        ids = self.tokenizer.encode_batch([part.text], [part.starts])[0]
        return np.asarray(ids, np.int64), np.full(len(ids), loss)

    def lengths(self, records: Sequence[Record]) -> list[SampleCount | SampleRefused]:
        """The counts of many records, in their order; what `encode` refuses is a refusal here."""
        found: list[SampleCount | SampleRefused] = []
        runs: list[_Run] = []
        owners: list[int] = []
        for record, counts in zip(records, self._all_image_counts(records), strict=True):
            count, own = self._without_text(record, counts)
            owners += [len(found)] * len(own)
            runs += own
            found.append(count)
        sizes, losses, failures = self._text_lengths(runs)
        for place in reversed(failures):  # the first of a record is what `encode` meets
            found[owners[place]] = _refused(failures[place])
        text = np.bincount(owners, sizes, len(found)).astype(np.int64).tolist()
        loss = np.bincount(owners, losses, len(found)).astype(np.int64).tolist()
        return [item if isinstance(item, SampleRefused) else _completed(item, text[k], loss[k]) for k, item in enumerate(found)]

    def _without_text(
        self, record: Record, counts: tuple[ImageCount, ...] | SampleRefused
    ) -> tuple[SampleCount | SampleRefused, list[_Run]]:
        """What needs no tokenizer, and what does."""
        if isinstance(counts, SampleRefused):
            return counts, []
        runs: list[_Run] = []
        num_image = num_special = num_loss = 0
        try:
            for part, _ in self._plan(record, counts):
                if isinstance(part, Features):
                    num_image += part.num_tokens
                elif isinstance(part, Token):
                    num_special += 1
                    num_loss += part.loss
                else:
                    runs.append(part)
        except TemplateFailure as error:
            return _refused(error), []
        count = SampleCount(
            num_text_tokens=0,
            num_image_tokens=num_image,
            num_tokens=num_image + num_special,
            num_loss_tokens=num_loss,
            images=counts,
        )
        return count, runs

    def _text_lengths(self, runs: Sequence[_Run]) -> tuple[Ints, Ints, dict[int, TokenizationFailed]]:
        """Tokens and loss tokens of each run, and why some have none."""
        failures: dict[int, TokenizationFailed] = {}
        try:
            return *self._some_text_lengths(runs), failures
        except TokenizationFailed:
            sizes, losses = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
        for place, run in enumerate(runs):
            try:
                sizes[place : place + 1], losses[place : place + 1] = self._some_text_lengths([run])
            except TokenizationFailed as error:
                failures[place] = error
        return sizes, losses, failures

    def _some_text_lengths(self, runs: Sequence[_Run]) -> tuple[Ints, Ints]:
        sizes, losses = np.zeros(len(runs), np.int64), np.zeros(len(runs), np.int64)
        plain = [place for place, run in enumerate(runs) if run.loss is not None]
        if plain:
            texts, starts = [runs[place].text for place in plain], [runs[place].starts for place in plain]
            sizes[plain] = self.tokenizer.count_batch(texts, starts)
            losses[plain] = sizes[plain] * np.array([runs[place].loss for place in plain], np.int64)
        for place, run in enumerate(runs):
            if run.loss is None:
                ids, offsets = self.tokenizer.encode_with_offsets(run.text, run.starts)
                sizes[place] = len(ids)
                losses[place] = sum(run.losses(offsets))
        return sizes, losses

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
                yield _Run(texts, is_first), None
                texts = []
            is_first = False
            yield piece, image
        if texts:
            yield _Run(texts, is_first), None

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


def _completed(count: SampleCount, num_text: int, num_loss: int) -> SampleCount | SampleRefused:
    if refused := _wrong_length(count.num_tokens + num_text, count.images):
        return refused
    return SampleCount(
        num_text_tokens=num_text,
        num_image_tokens=count.num_image_tokens,
        num_tokens=count.num_tokens + num_text,
        num_loss_tokens=count.num_loss_tokens + num_loss,
        images=count.images,
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
