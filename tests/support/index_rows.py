"""Rows and manifests of small made-up parts, for tests of what is built on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from indexer.rows import Rows, Status, id_hashes
from indexer.table import write_part
from packer.format import layout
from packer.format.manifest import FileEntry, InputSpan, PartManifest, encode_document, encode_source

PROFILE = "small"
FINGERPRINT = "c" * 32


def make_rows(images_per_row: Sequence[int], *, seed: int = 0, ids: Sequence[str] | None = None, unusable: Sequence[int] = ()):
    """Consistent rows with random counts; rows named by `unusable` are not usable."""
    random = np.random.default_rng(seed)
    num_rows = len(images_per_row)
    status = np.zeros(num_rows, np.uint8)
    status[list(unusable)] = Status.IMAGE_REFUSED
    usable = status == 0
    num_images = np.where(usable, np.array(images_per_row, np.int64), 0).astype(np.int32)
    owner = np.repeat(np.arange(num_rows), num_images)
    image = {name: random.integers(1, 900, len(owner)).astype(np.int32) for name in ("width", "height", "tokens", "patches")}
    per_row = {name: np.bincount(owner, image[name], minlength=num_rows).astype(np.int32) for name in ("tokens", "patches")}
    text = np.where(usable, random.integers(1, 500, num_rows), 0).astype(np.int32)
    size = random.integers(100, 900, num_rows)
    names = [f"sample-{seed}-{number}" for number in range(num_rows)] if ids is None else ids
    return Rows(
        num_text_tokens=text,
        num_image_tokens=per_row["tokens"],
        num_tokens=text + per_row["tokens"] + num_images * 2,
        num_loss_tokens=text // 2,
        num_images=num_images,
        num_patches=per_row["patches"],
        record_offset=np.concatenate(([0], np.cumsum(size)))[:num_rows].astype(np.int64),
        record_size=size,
        id_hash=id_hashes(names),
        status=status,
        image_width=image["width"],
        image_height=image["height"],
        image_num_tokens=image["tokens"],
        image_num_patches=image["patches"],
        image_sum_squared_attention=image["patches"].astype(np.int64) ** 2,
    )


def make_manifest(number: int, num_rows: int, source: str = "web", version: int = 0) -> PartManifest:
    """The manifest of a part with so many records; another `version` is the part packed again."""
    part_id = f"{number:012x}-r00000-p00000"
    return PartManifest(
        part_id=part_id,
        source=source,
        input=InputSpan(file=f"{number}.jsonl", byte_start=0, byte_end=9, file_size=9, digest="a" * 64),
        recipe_fingerprint="f" * 32,
        num_read=num_rows,
        num_written=num_rows,
        num_quarantined=0,
        quarantined_by_reason={},
        num_images=0,
        num_images_stored=0,
        check="structure",
        files={f"{part_id}{layout.RECORDS_SUFFIX}": FileEntry(size=9, digest=f"{version:064x}")},
        is_last_of_range=True,
    )


def write_parts(storage, pieces: Sequence[Rows], source: str = "web", profile: str = PROFILE) -> list[PartManifest]:
    """Write the parts of a source, its `source.json` and the profile, as packing and counting leave them; the manifests."""
    manifests = [make_manifest(number, len(rows), source) for number, rows in enumerate(pieces)]
    for manifest, rows in zip(manifests, pieces, strict=True):
        write_one(storage, manifest, rows, profile=profile)
    storage.publish_bytes(layout.source_file(source), encode_source(source, manifests))
    storage.publish_bytes(layout.profile_file(profile), encode_document("profile", {"fingerprint": FINGERPRINT, "more": 1}))
    return manifests


def write_one(storage, manifest: PartManifest, rows: Rows, *, profile: str = PROFILE, fingerprint: str = FINGERPRINT) -> None:
    """Write the index of one part."""
    write_part(
        storage,
        profile,
        manifest.source,
        manifest.part_id,
        rows,
        profile_fingerprint=fingerprint,
        part_fingerprint=manifest.fingerprint,
        stats=manifest.part_id.encode(),
    )
