"""The one change made to a sentencepiece model: some of its pieces become control symbols, which no text is encoded to.

Written by hand, since protobuf's runtime is a large dependency for one number. The format: sentencepiece_model.proto,
`ModelProto.pieces = 1`, `SentencePiece.type = 3`, `CONTROL = 3`; later fields win over earlier ones of the same number.
"""

from __future__ import annotations

from collections.abc import Collection

_PIECES = 0x0A
"""Field 1, with a length before it."""
_TYPE_CONTROL = b"\x18\x03"
"""Field 3, the number 3."""


def as_control(model: bytes, pieces: Collection[int]) -> bytes:
    """The serialized model with these pieces, by id, as control symbols."""
    out, position, piece = bytearray(), 0, 0
    while position < len(model):
        key, begin = _varint(model, position)
        if key & 7 != 2:
            # Pieces are all at the front; what follows them stays as it is.
            break
        length, begin = _varint(model, begin)
        message = model[begin : begin + length]
        if key == _PIECES and piece in pieces:
            message += _TYPE_CONTROL
        piece += key == _PIECES
        out += _as_varint(key) + _as_varint(len(message)) + message
        position = begin + length
    return bytes(out) + model[position:]


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
