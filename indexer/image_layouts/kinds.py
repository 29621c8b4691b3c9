"""The kinds of layouts: where wrappers, tags, separators and filler text stand between the features of one image.

Sources, of transformers 5.24: `processing_*.py` of `models/pixtral` (mistral-common's `tokens/tokenizers/image.py` writes the
same), `models/idefics3`, `models/smolvlm`, `models/gemma3`, `models/llama4` and `models/minicpmv4_6`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Self

from indexer.image_layouts.core import StringLayout, plain, special
from indexer.image_rules import ImageCount
from indexer.segments import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped(StringLayout):
    """One run of features between strings that are the same for every image."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """Which of them are plain text (Kimi's word "image"); the others are special tokens."""

    def required(self) -> tuple[str, ...]:
        return (self.token, *(string for string in self.before + self.after if string not in self.texts))

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        return (count.num_image_tokens,)

    def _build(self, num_tokens: int) -> Iterator[Piece]:
        yield from map(self._piece, self.before)
        yield self.features(num_tokens)
        yield from map(self._piece, self.after)

    def _piece(self, string: str) -> Piece:
        return plain(string) if string in self.texts else special(string)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(StringLayout):
    """Pixtral, Mistral-3: a token after each row of features, another after the last."""

    row_break: str
    end: str

    def required(self) -> tuple[str, ...]:
        return self.token, self.row_break, self.end

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        # The grid is in patches, before they are merged; wrapper tokens are one a row.
        rows = count.num_wrapper_tokens
        return rows, count.num_image_tokens // rows

    def _build(self, rows: int, columns: int) -> Iterator[Piece]:
        for row in range(rows):
            yield self.features(columns)
            yield special(self.row_break if row < rows - 1 else self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3(StringLayout):
    """Idefics3, SmolVLM: each tile after a fake token and its place, a newline after each row, then the whole image."""

    fake: str
    global_tag: str
    tile_tag: str
    """With `{row}` and `{column}`, counted from 1."""
    tag_tokens: tuple[str, ...] | None = None
    """Tags that are special tokens of the tokenizer, the others are text; None: all of them are tokens."""

    def required(self) -> tuple[str, ...]:
        return self.token, self.fake

    def resolved(self, specials: Collection[str]) -> Self:
        """Tokenizers differ: tags are tokens, or text, or only those of the first rows are tokens."""
        place = re.escape(self.tile_tag).replace(r"\{row\}", r"\d+").replace(r"\{column\}", r"\d+")
        tags = (token for token in specials if token == self.global_tag or re.fullmatch(place, token))
        return replace(self, tag_tokens=tuple(sorted(tags)))

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        return count.grid_rows, count.grid_columns, count.num_image_tokens // count.num_segments

    def _build(self, rows: int, columns: int, num_tokens: int) -> Iterator[Piece]:
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                yield special(self.fake)
                yield self._tag(self.tile_tag.replace("{row}", str(row)).replace("{column}", str(column)))
                yield self.features(num_tokens)
            yield plain("\n")
        if rows:
            yield plain("\n")
        yield special(self.fake)
        yield self._tag(self.global_tag)
        yield self.features(num_tokens)
        yield special(self.fake)

    def _tag(self, tag: str) -> Piece:
        return special(tag) if self.tag_tokens is None or tag in self.tag_tokens else plain(tag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(StringLayout):
    """Gemma-3: a view between two tokens and two blank lines; with pan-and-scan, sentences and the crops' views after it."""

    start: str
    end: str
    around: str = "\n\n"
    intro: str = "Here is the original image "
    crops_intro: str = " and here are some crops to help you see better "
    between: str = " "
    """Of two crops."""

    def required(self) -> tuple[str, ...]:
        return self.token, self.start, self.end

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        return count.num_segments, count.num_image_tokens // count.num_segments

    def _build(self, views: int, num_tokens: int) -> Iterator[Piece]:
        if views > 1:
            yield plain(self.intro)
        for view in range(views):
            if view:
                yield plain(self.crops_intro if view == 1 else self.between)
            yield plain(self.around)
            yield special(self.start)
            yield self.features(num_tokens)
            yield special(self.end)
            yield plain(self.around)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4(StringLayout):
    """Llama-4: tiles with separators between the columns and after each row, then the image token and the whole image."""

    start: str
    end: str
    image: str
    column_separator: str
    row_separator: str

    def required(self) -> tuple[str, ...]:
        return self.token, self.start, self.end, self.image, self.column_separator, self.row_separator

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        return count.grid_rows, count.grid_columns, count.num_image_tokens // count.num_segments

    def _build(self, rows: int, columns: int, num_tokens: int) -> Iterator[Piece]:
        yield special(self.start)
        for _ in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                yield self.features(num_tokens)
                yield special(self.column_separator if column < columns - 1 else self.row_separator)
        yield special(self.image)
        yield self.features(num_tokens)
        yield special(self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPM(StringLayout):
    """MiniCPM-V: the image's number in its sample, the whole image, then the slices with a newline between their rows."""

    id_start: str
    id_end: str
    image_start: str
    image_end: str
    slice_start: str
    slice_end: str
    is_numbered: bool = True
    """False: as with `use_image_id` off; the image rule counts the two tokens around the number all the same."""

    def required(self) -> tuple[str, ...]:
        numbered = (self.id_start, self.id_end) if self.is_numbered else ()
        return self.token, *numbered, self.image_start, self.image_end, self.slice_start, self.slice_end

    def _numbers(self, count: ImageCount, index_in_sample: int) -> tuple[int, ...]:
        slices = count.grid_rows * count.grid_columns
        overview = count.num_overview_tokens or count.num_image_tokens // (slices + 1)
        in_slice = (count.num_image_tokens - overview) // slices if slices else 0
        return index_in_sample, count.grid_rows, count.grid_columns, overview, in_slice

    def _build(self, index: int, rows: int, columns: int, overview: int, in_slice: int) -> Iterator[Piece]:
        if self.is_numbered:
            yield special(self.id_start)
            yield plain(str(index))
            yield special(self.id_end)
        yield special(self.image_start)
        yield self.features(overview)
        yield special(self.image_end)
        for row in range(rows):
            if row:
                yield plain("\n")
            for _ in range(columns):
                yield special(self.slice_start)
                yield self.features(in_slice)
                yield special(self.slice_end)


KINDS: dict[str, type[StringLayout]] = {
    "wrapped": Wrapped,
    "rows": Rows,
    "idefics3": Idefics3,
    "gemma3": Gemma3,
    "llama4": Llama4,
    "minicpm": MiniCPM,
}
"""By the name that a profile gives."""
