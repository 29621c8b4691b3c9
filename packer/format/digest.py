"""Digests of format version 1: blake3. Whole files use all 256 bits, image contents the first 128."""

from __future__ import annotations

import blake3

IMAGE_DIGEST_HEX = 32
_BLOCK_BYTES = 1 << 20


def image_digest(data: bytes) -> str:
    """Identity of an image's content: 128 bits of blake3, as 32 hex digits."""
    return blake3.blake3(data).hexdigest()[:IMAGE_DIGEST_HEX]


def bytes_digest(data: bytes) -> str:
    """blake3 of `data`, 64 hex digits."""
    return blake3.blake3(data).hexdigest()


def id_hash(sample_id: str) -> int:
    """What an index knows of a sample's id: the first 8 bytes of the blake3 of its UTF-8, as a little-endian integer."""
    return int.from_bytes(blake3.blake3(sample_id.encode()).digest(8), "little")


class FileDigest:
    """Digest and size of a file, fed piece by piece."""

    def __init__(self) -> None:
        self._hash = blake3.blake3()
        self.size = 0

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        self._hash.update(data)
        self.size += len(data)

    def hexdigest(self) -> str:
        """blake3 of all pieces so far, 64 hex digits."""
        return self._hash.hexdigest()


def digest_of_file(path: str) -> FileDigest:
    """Digest and size of a local file, read in blocks."""
    result = FileDigest()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            result.update(block)
    return result
