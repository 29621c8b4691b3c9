"""`PackedBatch`: one pack as views over one flat buffer; what it holds and how samples come out of it. No torch.

Numbers: n samples, g segments (the samples, and one more if an image was ensured), T tokens (padding included), m images,
k sources, P patches, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from indexer.encode import EncodedSample, ImageSpan
from packer.format.errors import FormatError, UsageError
from plugin.batch import format as buffer_format
from plugin.batch.checks import refuse_inconsistent, texts
from plugin.batch.facts import Cost, Count, Fact, Form
from plugin.batch.images import ImageState, PackImage, PatchImage, TileImage
from plugin.batch.samples import PackSample

if TYPE_CHECKING:
    from plugin.batch.torch_batch import TorchBatch

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PackedBatch:
    """One pack. Every array is a read-only view of `buffer`; made by `build` or `from_buffer`.

    | field | dtype | shape | field | dtype | shape |
    |---|---|---|---|---|---|
    | tokens | int64 | [T] | image_sample | int32 | [m] |
    | labels | int64 | [T] | image_index | int32 | [m] |
    | position_ids | int64 | [T] | image_span | int64 | [m, 2] |
    | loss_mask | bool | [T] | image_state | uint8 | [m] |
    | feature_mask | bool | [T] | image_size | int64 | [m, 2] |
    | cu_seqlens | int32 | [g + 1] | image_grid_thw | int64 | [m, 3], tiles: [0, 3] |
    | cu_seqlens_padded | int32 | [g + 1] | num_tiles | int64 | [m], patches: [0] |
    | sample_row | int64 | [n] | pixels | uint8 | [P, patch_bytes], tiles: [0, 0] |
    | sample_source | int32 | [n] | tiles | uint8 | [N, channels, side, side], patches: [0, 0, 0, 0] |
    | sample_counts | int64 | [n, 5] | facts | int64 | [7] |
    | sample_costs | int64 | [n, 2] | fingerprint_bytes | uint8 | [bytes] |
    | sample_id_bytes | uint8 | [bytes] | source_name_bytes | uint8 | [bytes] |
    | sample_id_offsets | int64 | [n + 1] | source_name_offsets | int64 | [k + 1] |

    Without pixels (`has_pixels`), P and N are 0 and everything else about the images is there.
    """

    buffer: Bytes
    """[bytes]: everything, header included."""
    tokens: Ints
    """Sample s at [cu_seqlens_padded[s], + cu_seqlens[s + 1] - cu_seqlens[s]), then padding up to the next."""
    labels: Ints
    """Not shifted: the token itself where it is predicted, else `IGNORED`. Trainers of Megatron shift (`to_megatron`)."""
    position_ids: Ints
    """Restart at each segment; padding counts on."""
    loss_mask: Mask
    """As encoded, at the token itself; a sample's first token may be set, and has no label."""
    feature_mask: Mask
    cu_seqlens: Int32s
    """Tokens before each segment, padding not counted."""
    cu_seqlens_padded: Int32s
    """Where each segment starts. The last one ends at T: the padding of the pack is its."""
    sample_row: Ints
    """Of the index of the sample's source."""
    sample_source: Int32s
    """Into `sources`."""
    sample_counts: Ints
    """Columns: `Count`."""
    sample_costs: Ints
    """Columns: `Cost`."""
    sample_id_bytes: Bytes
    sample_id_offsets: Ints
    source_name_bytes: Bytes
    source_name_offsets: Ints
    image_sample: Int32s
    """Ascending; -1, at the end, for an ensured image."""
    image_index: Int32s
    """Into the `images` of the sample's record; -1 for an ensured image."""
    image_span: Ints
    """Half-open, in the pack: from the first special token or feature of the image to its last."""
    image_state: Bytes
    """`ImageState`."""
    image_size: Ints
    """Height and width in pixels; zeros where not given."""
    image_grid_thw: Ints
    num_tiles: Ints
    facts: Ints
    """`Fact`."""
    fingerprint_bytes: Bytes
    pixels: Bytes
    """Patches of all images behind each other, in the order of the sequence."""
    tiles: Bytes

    @classmethod
    def from_buffer(cls, buffer: Any, *, check_payload: bool = True) -> PackedBatch:
        """Views over a buffer, which nobody may change from now on.

        Args:
            buffer: bytes, or a uint8 array of one dimension; copied only if it does not start at a multiple of 8 in memory.
            check_payload: compare the checksum of all of it (0.04 ms/MiB), not of the header alone.

        Raises:
            FormatError: a foreign, cut, damaged or newer buffer.
        """
        flat = _flat(buffer)
        layout = buffer_format.read_fields(flat, check_payload=check_payload)
        found = buffer_format.views(_read_only(flat), layout)
        batch = cls(buffer=_read_only(flat), **found)
        refuse_inconsistent(batch)
        return batch

    @classmethod
    def written(cls, buffer: Bytes, layout: tuple[buffer_format.Field, ...]) -> PackedBatch:
        """A buffer that was sealed with this layout just now: nothing is looked at again."""
        flat = _read_only(buffer)
        return cls(buffer=flat, **buffer_format.views(flat, layout))

    def __reduce__(self) -> tuple[Any, tuple[Bytes]]:
        # The buffer was checked when this was made, and pickling does not change bytes.
        return partial(PackedBatch.from_buffer, check_payload=False), (self.buffer,)

    def __repr__(self) -> str:
        counts = self.num_tokens_by_kind
        return (
            f"PackedBatch({self.num_samples} samples, {self.num_images} images, {self.num_tokens} of {len(self.tokens)} tokens: "
            f"{counts['text']} text, {counts['image']} image, {counts['other']} other; {len(self.buffer):,} bytes)"
        )

    @property
    def num_samples(self) -> int:
        return len(self.sample_row)

    @property
    def num_images(self) -> int:
        """Those of samples: an ensured image is none."""
        return int((self.image_state != ImageState.ENSURED).sum())

    @property
    def num_blank_images(self) -> int:
        """Those that could not be read."""
        return int((self.image_state == ImageState.BLANK).sum())

    @property
    def num_tokens(self) -> int:
        """Those of samples: neither padding nor an ensured image."""
        return int(self.sample_counts[:, : Count.LOSS].sum())

    @property
    def num_loss_tokens(self) -> int:
        """Labels that are not `IGNORED`: the denominator of a loss per token."""
        return int(self.sample_counts[:, Count.LOSS].sum())

    @property
    def num_patches(self) -> int:
        return int(self.sample_counts[:, Count.PATCHES].sum())

    @property
    def num_tokens_by_kind(self) -> dict[str, int]:
        """text, image, other and padding make up the pack; loss counts some of them again."""
        text, image, other, loss, _ = self.sample_counts.sum(axis=0).tolist()
        return {"text": text, "image": image, "other": other, "padding": len(self.tokens) - text - image - other, "loss": loss}

    @property
    def encoder_cost(self) -> int:
        return int(self.sample_costs[:, Cost.ENCODER].sum())

    @property
    def llm_cost(self) -> int:
        return int(self.sample_costs[:, Cost.LLM].sum())

    @property
    def sequence_length(self) -> int:
        """What was packed into; `tokens` are fewer only where the pack was not filled up."""
        return int(self.facts[Fact.SEQUENCE_LENGTH])

    @property
    def alignment(self) -> int:
        return int(self.facts[Fact.ALIGNMENT])

    @property
    def pad_id(self) -> int:
        return int(self.facts[Fact.PAD_ID])

    @property
    def max_seqlen(self) -> int:
        """The longest segment with its padding."""
        return int(self.facts[Fact.MAX_SEQLEN])

    @property
    def merge_size(self) -> int | None:
        return int(self.facts[Fact.MERGE_SIZE]) or None

    @property
    def form(self) -> Form:
        return Form(int(self.facts[Fact.FORM]))

    @property
    def has_pixels(self) -> bool:
        """Whether there are images and their pixels."""
        return bool(self.facts[Fact.HAS_PIXELS])

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return texts(self.sample_id_bytes, self.sample_id_offsets)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources in this pack, in the order they appear."""
        return texts(self.source_name_bytes, self.source_name_offsets)

    @property
    def fingerprint(self) -> str:
        """Of the profile the samples were encoded with."""
        return self.fingerprint_bytes.tobytes().decode()

    def refuse_other(self, *, fingerprint: str, sequence_length: int, alignment: int) -> None:
        """Raises:
        UsageError: when the pack was made with other settings; the message shows each one that differs.
        """
        expected = {"fingerprint": fingerprint, "sequence_length": sequence_length, "alignment": alignment}
        wrong = [
            f"{name} {getattr(self, name)!r} instead of {value!r}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        if wrong:
            raise UsageError(f"pack: found {', '.join(wrong)}; give all ranks the same profile and limits")

    def unpack(self) -> tuple[PackSample, ...]:
        """The samples as they were packed; masks and pixels are views of the buffer, ids are not."""
        images: list[list[tuple[ImageSpan, PackImage]]] = [[] for _ in range(self.num_samples)]
        for place, image in enumerate(self._images()):
            if (sample := int(self.image_sample[place])) >= 0:
                first, end = (self.image_span[place] - self.cu_seqlens_padded[sample]).tolist()
                images[sample].append((ImageSpan(index=int(self.image_index[place]), start=first, end=end), image))
        return tuple(self._sample(place, id_, images[place]) for place, id_ in enumerate(self.sample_ids))

    def _sample(self, place: int, sample_id: str, images: list[tuple[ImageSpan, PackImage]]) -> PackSample:
        start = int(self.cu_seqlens_padded[place])
        where = slice(start, start + int(self.cu_seqlens[place + 1] - self.cu_seqlens[place]))
        return PackSample(
            sample_id=sample_id,
            source=self.sources[self.sample_source[place]],
            row=int(self.sample_row[place]),
            encoded=EncodedSample(
                ids=self.tokens[where].astype(np.int32),
                loss_mask=self.loss_mask[where],
                feature_mask=self.feature_mask[where],
                image_spans=tuple(span for span, _ in images),
            ),
            images=tuple(image for _, image in images),
            num_text_tokens=int(self.sample_counts[place, Count.TEXT]),
            num_patches=int(self.sample_counts[place, Count.PATCHES]),
            encoder_cost=int(self.sample_costs[place, Cost.ENCODER]),
            llm_cost=int(self.sample_costs[place, Cost.LLM]),
        )

    def _images(self) -> list[PackImage]:
        of_tiles = self.form == Form.TILES
        store = self.tiles if of_tiles else self.pixels
        numbers = self.num_tiles if of_tiles else self.image_grid_thw.prod(axis=1)
        ends = np.cumsum(numbers)
        found: list[PackImage] = []
        for place, (number, end) in enumerate(zip(numbers.tolist(), ends.tolist(), strict=True)):
            pixels = store[end - number : end] if self.has_pixels else None
            height, width = self.image_size[place].tolist()
            size, state = ((height, width) if height else None), ImageState(int(self.image_state[place]))
            if of_tiles:
                found.append(TileImage(num_tiles=number, tiles=pixels, size=size, state=state))
            else:
                time, rows, columns = self.image_grid_thw[place].tolist()
                found.append(PatchImage(grid_thw=(time, rows, columns), pixels=pixels, size=size, state=state))
        return found

    def to_torch(self) -> TorchBatch:
        """The same memory as one tensor; a buffer that cannot be written to (bytes) is copied once."""
        from plugin.batch.torch_batch import TorchBatch

        return TorchBatch.of(self)


def _flat(buffer: Any) -> Bytes:
    """One dimension of bytes, aligned for int64."""
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise FormatError(f"pack: found {buffer.dtype} of shape {buffer.shape}, expected contiguous uint8 of one dimension")
        flat = buffer
    else:
        try:
            flat = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"pack: found a {type(buffer).__name__}, expected contiguous bytes: {error}") from error
    if flat.ctypes.data % 8:
        flat, misaligned = buffer_format.new_buffer(len(flat)), flat
        flat[:] = misaligned
    return flat


def _read_only(flat: Bytes) -> Bytes:
    view = flat.view()
    view.flags.writeable = False
    return view
