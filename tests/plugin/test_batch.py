from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib
from pack_samples import END, FEATURE, PATCHES, START, TILES, pack_sample, packs, patch_image, same, tile_image

from packer.format.errors import FormatError, UsageError
from plugin.batch import IGNORED, EnsuredImage, Form, ImageState, PackedBatch, PackSample, Patches, Tiles, build, mrope_positions
from plugin.batch import format as buffer_format

ROOT = Path(__file__).parents[2]
ENSURED = EnsuredImage(ids=(START, FEATURE, END), feature_mask=(False, True, False), image=PATCHES.smallest())
HEADER_BYTES = 1920


def mixed() -> list[PackSample]:
    """Text, two images, text with an image in front."""
    first = pack_sample([3, patch_image(4, 6, 1), 2, patch_image(2, 2, 2), 4], "a", row=7, encoder_cost=30, llm_cost=5)
    return [first, pack_sample([7], "b", 1, row=2, llm_cost=2), pack_sample([patch_image(2, 4, 3), 5], "c", 2, source="ocr")]


def packed(samples: list[PackSample] | None = None, **arguments: Any) -> PackedBatch:
    return build(samples or mixed(), **({"form": PATCHES, "sequence_length": 64, "pad_id": 0} | arguments))


def array_fields(batch: PackedBatch) -> dict[str, np.ndarray]:
    return {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "buffer"}


def resealed(buffer: np.ndarray) -> np.ndarray:
    """With checksums that fit whatever is in it."""
    content = isal_zlib.crc32(buffer[HEADER_BYTES:].tobytes())
    buffer[20:24] = np.frombuffer(struct.pack("<I", content), np.uint8)
    buffer[12:16] = np.frombuffer(struct.pack("<I", isal_zlib.crc32(buffer[16:HEADER_BYTES].tobytes())), np.uint8)
    return buffer


@given(packs())
def test_a_pack_crosses_as_bytes_and_gives_back_its_samples(pack: tuple[list[PackSample], dict[str, Any]]) -> None:
    samples, arguments = pack
    sent = build(samples, **arguments)
    found = PackedBatch.from_buffer(sent.buffer.tobytes())
    unpacked = found.unpack()
    assert len(unpacked) == len(samples)
    assert all(same(one, other) for one, other in zip(samples, unpacked, strict=True))
    # And what was unpacked makes the same pack again, byte for byte.
    assert build(unpacked, **arguments).buffer.tobytes() == sent.buffer.tobytes()


@given(packs())
def test_every_token_stands_where_the_boundaries_say(pack: tuple[list[PackSample], dict[str, Any]]) -> None:
    samples, arguments = pack
    batch = build(samples, **arguments)
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    starts, lengths = [0], [0]
    for place, sample in enumerate(samples):
        ids, mask = sample.encoded.ids.tolist(), sample.encoded.loss_mask.tolist()
        padded = -(-len(ids) // arguments["alignment"]) * arguments["alignment"]
        if place == len(samples) - 1 and arguments["fill"]:
            padded = arguments["sequence_length"] - starts[-1]
        tokens += ids + [arguments["pad_id"]] * (padded - len(ids))
        predicted = [False, *mask[1:]]
        labels += [id_ if loss else -100 for id_, loss in zip(ids, predicted, strict=True)] + [-100] * (padded - len(ids))
        positions += range(padded)
        starts.append(starts[-1] + padded)
        lengths.append(lengths[-1] + len(ids))
    assert batch.tokens.tolist() == tokens
    assert batch.labels.tolist() == labels
    assert batch.position_ids.tolist() == positions
    assert batch.cu_seqlens_padded.tolist() == starts
    assert batch.cu_seqlens.tolist() == lengths
    assert batch.max_seqlen == max(np.diff(starts))
    assert batch.num_tokens == lengths[-1]
    assert batch.num_loss_tokens == sum(label != -100 for label in labels)
    counts = batch.num_tokens_by_kind
    assert counts["text"] + counts["image"] + counts["other"] + counts["padding"] == len(batch.tokens)
    assert counts["image"] == batch.feature_mask.sum()


@given(packs())
def test_a_pack_is_one_buffer_and_its_fields_are_read_only_views(
    pack: tuple[list[PackSample], dict[str, Any]],
) -> None:
    samples, arguments = pack
    memory = np.array(build(samples, **arguments).buffer)
    batch = PackedBatch.from_buffer(memory)
    covered = np.zeros(len(memory), np.int64)
    covered[:HEADER_BYTES] += 1
    base = memory.ctypes.data
    for array in array_fields(batch).values():
        assert not array.flags.writeable
        assert not array.flags.owndata
        start = array.ctypes.data - base
        if array.size:
            assert 0 <= start <= len(memory) - array.nbytes
            assert start % 64 == 0
            covered[start : start + array.nbytes] += 1
    assert covered.max() == 1
    assert not memory[covered == 0].any()
    assert (covered == 0).sum() <= 64 * len(buffer_format.FIELDS)
    assert len(memory) % 64 == 0
    for sample in batch.unpack():
        assert np.shares_memory(sample.encoded.loss_mask, memory)


def test_the_table_of_fields_is_that_of_the_format() -> None:
    batch = packed()
    found = {name: (array.dtype.str, array.ndim) for name, array in array_fields(batch).items()}
    assert found == dict(buffer_format.FIELDS)
    for name in found:
        assert f"| {name} |" in (PackedBatch.__doc__ or "")
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0] = 1
    with pytest.raises(AttributeError):
        batch.tokens = batch.labels  # type: ignore[misc]


def test_one_pack_in_numbers() -> None:
    batch = packed(alignment=8, fingerprint="qwen")
    assert batch.cu_seqlens.tolist() == [0, 20, 27, 36]
    assert batch.cu_seqlens_padded.tolist() == [0, 24, 32, 64]
    assert batch.max_seqlen == 32
    assert batch.num_tokens_by_kind == {"text": 21, "image": 9, "other": 6, "padding": 28, "loss": 19}
    assert (batch.num_samples, batch.num_images, batch.encoder_cost, batch.llm_cost) == (3, 3, 30, 7)
    assert batch.sample_ids == ("a", "b", "c")
    assert [batch.sources[place] for place in batch.sample_source] == ["web", "web", "ocr"]
    assert batch.sample_row.tolist() == [7, 2, 0]
    assert batch.image_sample.tolist() == [0, 0, 2]
    assert batch.image_index.tolist() == [1, 0, 0]
    assert batch.image_span.tolist() == [[3, 11], [13, 16], [32, 36]]
    assert batch.image_grid_thw.tolist() == [[1, 4, 6], [1, 2, 2], [1, 2, 4]]
    assert batch.pixels.shape == (36, 12)
    assert batch.fingerprint == "qwen"
    assert repr(batch) == (
        f"PackedBatch(3 samples, 3 images, 36 of 64 tokens: 21 text, 9 image, 6 other; {len(batch.buffer):,} bytes)"
    )


def test_the_bytes_of_version_1_stay_as_they_are() -> None:
    image = patch_image(2, 4, pixels=np.arange(96, dtype=np.uint8).reshape(8, 12))
    sample = pack_sample([3, image, 2], "a", row=7, encoder_cost=30, llm_cost=5)
    sample = replace(sample, encoded=replace(sample.encoded, ids=np.arange(9, dtype=np.int32)))
    digest = sha256(packed([sample], alignment=8, fingerprint="qwen").buffer.tobytes()).hexdigest()
    assert digest == "9b0b628e0ff9a63bb5b802c7a0ce5edd1fbf830cdcc6dbe068d14e8de8dbeea3"


@given(st.data())
def test_a_damaged_or_cut_pack_is_refused(data: st.DataObject) -> None:
    buffer = np.array(packed().buffer)
    what = data.draw(st.sampled_from(["flip", "cut", "grow", "swap"]))
    place = data.draw(st.integers(0, len(buffer) - 1))
    if what == "flip":
        buffer[place] ^= data.draw(st.integers(1, 255))
    elif what == "cut":
        buffer = buffer[:place]
    elif what == "grow":
        buffer = np.concatenate([buffer, buffer[: place + 1]])
    else:
        buffer = np.roll(buffer, place or 1)
    with pytest.raises(FormatError, match=r"found .*, expected"):
        PackedBatch.from_buffer(buffer)


@given(st.data())
@settings(max_examples=400)
def test_a_pack_with_right_checksums_and_wrong_fields_is_refused_or_can_be_used(data: st.DataObject) -> None:
    samples, arguments = data.draw(packs())
    buffer = np.array(build(samples, **arguments).buffer)
    anything = ("tokens", "labels", "position_ids", "loss_mask", "feature_mask", "pixels", "tiles")
    fields_of_it = [field for field in buffer_format.read_fields(buffer, check_payload=True) if field.name not in anything]
    field = data.draw(st.sampled_from([field for field in fields_of_it if field.num_bytes]))
    in_header = data.draw(st.integers(0, 3)) == 0
    place = data.draw(
        st.integers(0, HEADER_BYTES - 1) if in_header else st.integers(0, field.num_bytes - 1).map(field.offset.__add__)
    )
    buffer[place] = data.draw(st.integers(0, 255))
    try:
        batch = PackedBatch.from_buffer(resealed(buffer))
    except FormatError:
        return
    assert len(batch.unpack()) == batch.num_samples
    assert batch.num_loss_tokens >= 0
    repr(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda buffer: np.zeros(0, np.uint8), "found 0 bytes, expected a header of at least 32"),
        (lambda buffer: np.zeros(4096, np.uint8), "not a pack"),
        (lambda buffer: np.frombuffer(b"PK\3\4" * 99, np.uint8), r"found b'PK.*' at its start, expected b'BAYPACK"),
        (lambda buffer: buffer[:-64], "found 5,184 bytes, expected 5,248 as its header says: cut"),
        (lambda buffer: np.concatenate([buffer, buffer]), "not one pack"),
        (lambda buffer: buffer.astype(np.int64), "found int64 of shape .*, expected contiguous uint8"),
        (lambda buffer: buffer[::2], "expected contiguous"),
        (lambda buffer: "text", "found a str, expected contiguous bytes"),
    ],
)
def test_what_is_no_pack_is_refused_with_what_was_found(change: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        PackedBatch.from_buffer(change(np.array(packed().buffer)))


def test_a_newer_pack_is_refused_whatever_else_it_holds() -> None:
    buffer = np.array(packed().buffer)
    buffer[8] = 2
    with pytest.raises(FormatError, match="found format version 2, expected 1: use the same bayplan on both sides"):
        PackedBatch.from_buffer(buffer)


def test_damage_in_the_content_is_seen_unless_it_is_not_asked_for() -> None:
    buffer = np.array(packed().buffer)
    buffer[-65] ^= 1
    with pytest.raises(FormatError, match=r"found crc32 .* of its content, expected .*: damaged on its way"):
        PackedBatch.from_buffer(buffer)
    assert PackedBatch.from_buffer(buffer, check_payload=False).num_samples == 3


def test_packs_behind_each_other_in_one_buffer_are_views_of_it() -> None:
    one, other = packed().buffer, packed([pack_sample([9])], alignment=16).buffer
    received = buffer_format.new_buffer(len(one) + len(other))
    received[: len(one)], received[len(one) :] = one, other
    found = PackedBatch.from_buffer(received[len(one) :])
    assert np.shares_memory(found.tokens, received)
    assert found.buffer.tobytes() == other.tobytes()


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, np.array])
def test_any_run_of_bytes_is_a_buffer(make: Any) -> None:
    found = PackedBatch.from_buffer(make(packed().buffer))
    assert all(same(one, other) for one, other in zip(found.unpack(), mixed(), strict=True))


def test_a_buffer_that_is_not_aligned_is_copied() -> None:
    buffer = packed().buffer
    memory = buffer_format.new_buffer(len(buffer) + 3)
    memory[3:] = buffer
    found = PackedBatch.from_buffer(memory[3:])
    assert not np.shares_memory(found.tokens, memory)
    assert found.tokens.flags.aligned
    assert found.buffer.tobytes() == buffer.tobytes()


def test_pickled_as_its_buffer_and_nothing_else() -> None:
    batch = packed()
    sent = pickle.dumps(batch, protocol=5)
    assert len(sent) < len(batch.buffer) + 500
    assert pickle.loads(sent).buffer.tobytes() == batch.buffer.tobytes()
    outside: list[pickle.PickleBuffer] = []
    assert len(pickle.dumps(batch, protocol=5, buffer_callback=outside.append)) < 500
    assert len(outside) == 1


def test_tiles_keep_their_images_apart() -> None:
    samples = [pack_sample([2, tile_image(3, 1), tile_image(1, 2), 1]), pack_sample([tile_image(2, 3)])]
    batch = packed(samples, form=TILES)
    assert batch.form == Form.TILES
    assert batch.num_tiles.tolist() == [3, 1, 2]
    assert batch.tiles.shape == (6, 3, 4, 4)
    assert (batch.image_grid_thw.shape, batch.pixels.shape) == ((0, 3), (0, 0))
    assert np.array_equal(batch.tiles[3:4], samples[0].images[1].tiles)  # type: ignore[union-attr]


def test_images_that_could_not_be_read_are_counted_and_can_be_named() -> None:
    samples = [pack_sample([patch_image(2, 2), patch_image(2, 2, state=ImageState.BLANK)], "a"), pack_sample([2], "b")]
    batch = packed(samples)
    assert (batch.num_images, batch.num_blank_images) == (2, 1)
    blank = np.flatnonzero(batch.image_state == ImageState.BLANK)
    assert [batch.sample_ids[place] for place in batch.image_sample[blank]] == ["a"]


def test_packs_without_pixels_hold_all_but_the_pixels() -> None:
    blind = packed([replace(sample, images=tuple(replace(image, pixels=None) for image in sample.images)) for sample in mixed()])
    whole = packed()
    assert not blind.has_pixels
    assert blind.pixels.shape == (0, 12)
    differing = [name for name, array in array_fields(blind).items() if not np.array_equal(array, array_fields(whole)[name])]
    assert differing == ["facts", "pixels"]


def test_an_image_is_ensured_where_there_is_none_and_counts_nowhere() -> None:
    samples = [pack_sample([5], "a", encoder_cost=1, llm_cost=3), pack_sample([7], "b")]
    plain, ensured = packed(samples, alignment=8), packed(samples, alignment=8, ensure_image=ENSURED)
    assert ensured.image_state.tolist() == [ImageState.ENSURED]
    assert ensured.image_sample.tolist() == [-1]
    assert ensured.pixels.shape == (4, 12)
    assert ensured.cu_seqlens_padded.tolist() == [0, 8, 16, 64]
    assert ensured.cu_seqlens.tolist() == [0, 5, 12, 15]
    assert ensured.tokens[16:20].tolist() == [START, FEATURE, END, 0]
    for name in ("labels", "loss_mask", "sample_counts", "sample_costs"):
        assert np.array_equal(getattr(ensured, name), getattr(plain, name))
    for name in ("num_tokens_by_kind", "num_images", "num_patches", "encoder_cost", "llm_cost", "num_loss_tokens"):
        assert getattr(ensured, name) == getattr(plain, name)
    assert all(same(one, other) for one, other in zip(ensured.unpack(), samples, strict=True))


def test_an_image_is_not_ensured_where_there_is_one() -> None:
    assert packed(ensure_image=ENSURED).buffer.tobytes() == packed().buffer.tobytes()


def test_every_form_has_a_smallest_image() -> None:
    for form in (PATCHES, TILES, Patches(patch_bytes=6, merge_size=None), Tiles(side=2, features_per_tile=None, channels=1)):
        number = form.num_features(form.smallest()) or 1
        ensured = EnsuredImage(ids=(FEATURE,) * number, feature_mask=(True,) * number, image=form.smallest())
        assert len(packed([pack_sample([1])], form=form, ensure_image=ensured).image_sample) == 1


def sample_with(**of_encoded: Any) -> PackSample:
    sample = mixed()[0]
    return replace(sample, encoded=replace(sample.encoded, **of_encoded))


TOO_WIDE = patch_image(2, 2, grid_thw=(1, 2, 1 << 20), pixels=None)


@pytest.mark.parametrize(
    ("samples", "arguments", "message"),
    [
        ([], {}, "found no sample, expected at least one"),
        (mixed(), {"sequence_length": 35}, "found 3 samples of 36 tokens, each a multiple of 1, expected at most 35"),
        (mixed(), {"sequence_length": 40, "alignment": 8}, "found 3 samples of 48 tokens, each a multiple of 8"),
        (mixed(), {"sequence_length": 63, "alignment": 8}, "found sequence_length 63 with alignment 8"),
        (mixed(), {"sequence_length": 1 << 31}, "expected less than 2"),
        (mixed(), {"form": None}, "sample 'a' of 'web': found 2 images, expected none"),
        (mixed(), {"form": TILES}, "found a PatchImage, expected a TileImage"),
        (mixed(), {"form": Patches(patch_bytes=13, merge_size=2)}, r"found pixels as uint8 of shape \(24, 12\), expected"),
        (mixed(), {"form": Patches(patch_bytes=12, merge_size=1)}, "image 0 with 6 features in the sequence, expected 24"),
        (mixed(), {"form": Patches(patch_bytes=12, merge_size=4)}, "expected multiples of the merge size 4"),
        ([replace(mixed()[0], images=mixed()[0].images[:1])], {}, "2 places for images and 1 images, expected as many of both"),
        ([replace(mixed()[0], images=mixed()[0].images[::-1])], {}, "image 0 with 6 features in the sequence, expected 1"),
        ([replace(mixed()[0], num_text_tokens=14)], {}, "14 text tokens beside 7 of images"),
        ([replace(mixed()[0], num_patches=-1)], {}, "found -1 patches, expected 0 or more"),
        ([pack_sample([patch_image(2, 2, state=7)])], {}, "image 0 in state 7, expected REAL or BLANK"),
        ([pack_sample([patch_image(2, 2, state=ImageState.ENSURED)])], {}, "an ensured image is no sample's"),
        ([replace(pack_sample([patch_image(2, 2)]), images=(TOO_WIDE,))], {}, r"found the grid \(1, 2, 1048576\), expected"),
        ([sample_with(ids=np.zeros(0, np.int32))], {}, "found 0 ids, a loss mask of 20"),
        ([sample_with(loss_mask=np.zeros(3, bool))], {}, "found 20 ids, a loss mask of 3"),
        ([sample_with(feature_mask=np.ones(20, bool))], {}, "image 0 with 8 features in the sequence, expected 6"),
        ([mixed()[0], pack_sample([patch_image(2, 2, pixels=None)])], {}, "found 3 images, 2 of them with pixels"),
        ([pack_sample([3])], {"sequence_length": 5, "ensure_image": ENSURED}, "3 of them for an ensured image: keep them free"),
        ([pack_sample([3])], {"form": None, "ensure_image": ENSURED}, "found an ensured image, expected none"),
        (
            [pack_sample([3])],
            {"ensure_image": replace(ENSURED, image=patch_image(2, 4))},
            "found 1 features among its ids",
        ),
    ],
)
def test_samples_that_make_no_pack_are_refused(samples: list[PackSample], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(samples, **({"form": PATCHES, "sequence_length": 64, "pad_id": 0} | arguments))


def test_an_image_cut_at_a_maximum_length_is_refused_before_the_pack_is_made() -> None:
    # Case 36: two images of 90 features each, cut at 120 tokens: a third of the second one is left.
    whole = pack_sample([patch_image(18, 20), patch_image(18, 20)])
    spans = (whole.encoded.image_spans[0], replace(whole.encoded.image_spans[1], end=120))
    cut = {name: getattr(whole.encoded, name)[:120] for name in ("ids", "loss_mask", "feature_mask")}
    with pytest.raises(UsageError, match="image 1 with 27 features in the sequence, expected 90, as its pixels give"):
        packed([replace(whole, encoded=replace(whole.encoded, image_spans=spans, **cut))], sequence_length=256)


def test_padding_is_known_by_place_not_by_token() -> None:
    # Case 38: a sample that begins and ends with the pad token loses nothing, another's padding does not get in.
    ids = np.array([0, 0, 5, 0], np.int32)
    first = pack_sample([4])
    first = replace(first, encoded=replace(first.encoded, ids=ids))
    batch = packed([first, pack_sample([3], "b")], alignment=8)
    assert batch.unpack()[0].encoded.ids.tolist() == [0, 0, 5, 0]
    assert batch.num_tokens == 7


def test_a_pack_of_other_settings_is_refused_with_each_that_differs() -> None:
    # Case 39.
    batch = packed(alignment=8, fingerprint="qwen")
    batch.refuse_other(fingerprint="qwen", sequence_length=64, alignment=8)
    with pytest.raises(UsageError, match="found fingerprint 'qwen' instead of 'gemma', alignment 8 instead of 16; give"):
        batch.refuse_other(fingerprint="gemma", sequence_length=64, alignment=16)


def test_images_stay_with_their_samples_in_any_order_of_packs() -> None:
    # Case 42: four samples of distinct sizes, every pixel filled with its sample's number.
    def numbered(number: int) -> PackSample:
        image = patch_image(2 * number, 4, pixels=np.full((8 * number, 12), number, np.uint8))
        return pack_sample([number, image, number], str(number), row=number)

    order = [3, 1, 4, 2]
    sent = [packed([numbered(first), numbered(second)]).buffer.tobytes() for first, second in (order[:2], order[2:])]
    found = [sample for pack in reversed(sent) for sample in PackedBatch.from_buffer(pack).unpack()]
    assert [sample.sample_id for sample in found] == ["4", "2", "3", "1"]
    for sample in found:
        assert same(sample, numbered(sample.row))


def test_loss_tokens_add_up_the_same_however_samples_are_dealt_to_packs() -> None:
    # Case 43: 5 and 1 loss tokens, and a first token that nothing predicts.
    samples = [pack_sample([6], "a"), pack_sample([2], "b")]
    together = packed(samples)
    apart = [packed([sample]) for sample in samples]
    assert [batch.num_loss_tokens for batch in apart] == [5, 1]
    assert together.num_loss_tokens == sum(batch.num_loss_tokens for batch in apart) == (together.labels != IGNORED).sum()


def test_positions_in_three_dimensions_are_of_patches_only() -> None:
    for arguments in (
        {"samples": [pack_sample([tile_image(1)])], "form": TILES},
        {"form": Patches(patch_bytes=12, merge_size=None)},
    ):
        with pytest.raises(UsageError, match="expected patches with a merge size"):
            mrope_positions(packed(**arguments))
    moving = pack_sample([replace(patch_image(4, 2), grid_thw=(2, 2, 2))])
    with pytest.raises(UsageError, match="expected one point in time"):
        mrope_positions(packed([moving]))


def test_packs_are_made_and_read_without_torch() -> None:
    code = f"""
import sys
sys.modules["torch"] = None
sys.path.append({str(ROOT / "tests" / "support")!r})
from pack_samples import PATCHES, pack_sample, patch_image
from plugin.batch import PackedBatch, build, mrope_positions, to_hf, to_megatron
batch = build([pack_sample([3, patch_image(2, 4)])], form=PATCHES, sequence_length=16, pad_id=0)
mrope_positions(PackedBatch.from_buffer(batch.buffer)), batch.unpack()
loaded = {{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}}
assert loaded.isdisjoint({{"torch", "megatron", "transformers", "ray", "pipelines"}}), loaded
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, check=True)
