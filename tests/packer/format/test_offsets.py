import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import FormatError
from packer.format.offsets import decode_offsets, encode_offsets


@given(st.lists(st.integers(1, 2**40), max_size=30))
def test_offsets_are_little_endian_64_bit_numbers_and_are_read_back(sizes):
    offsets = array("Q", [0])
    for size in sizes:
        offsets.append(offsets[-1] + size)
    data = encode_offsets(offsets)
    assert data == struct.pack(f"<{len(offsets)}Q", *offsets)
    assert decode_offsets(data, "here") == offsets


@pytest.mark.parametrize("data", [b"", b"\0" * 7, struct.pack("<2Q", 0, 9)[:-1]])
def test_a_cut_offset_file_is_refused_with_its_size(data):
    with pytest.raises(FormatError, match=f"p.idx: found {len(data)} bytes, expected a multiple of 8"):
        decode_offsets(data, "p.idx")


@pytest.mark.parametrize("offsets", [[1], [1, 2], [0, 5, 5], [0, 9, 3]])
def test_offsets_that_do_not_rise_from_zero_are_refused(offsets):
    with pytest.raises(FormatError, match=r"p\.idx: offsets do not rise from 0"):
        decode_offsets(struct.pack(f"<{len(offsets)}Q", *offsets), "p.idx")
