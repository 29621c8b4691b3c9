"""The input files of a source as they are now, and what a source's recipe means to the converter."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from packer.format.errors import InputError
from packer.format.layout import INVENTORY_FILE, file_hash
from packer.format.manifest import encode_document, parse_document
from packer.images import CheckLevel, Conversion, ImageLimits
from packer.loading import ImagePolicy
from packer.references import ReferenceRules
from packer.row_source import SourceConfig
from packer.schemas import SchemaConfig
from packer.sources import InputRange
from packer.storage import FileStat, Storage, is_local, list_matching, local_path
from pipelines.recipe import Source, source_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file of a source."""

    stat: FileStat
    file: str
    """Path relative to the source's root."""

    @property
    def whole(self) -> InputRange:
        """All of the file as one range."""
        return InputRange(url=self.stat.name, file=self.file, file_size=self.stat.size)


def first_not_empty(inputs: Sequence[InputFile]) -> InputFile | None:
    """The file a source is judged by before its ranges are cut."""
    return next((item for item in inputs if item.stat.size), None)


def list_inputs(source: Source, root: str) -> list[InputFile]:
    """Files of a source, sorted by their path relative to `root`.

    Raises:
        InputError: when a pattern matches nothing, or two paths share a part name.
    """
    found: dict[str, FileStat] = {}
    for pattern in source.files:
        matches = list_matching(pattern)
        if not matches:
            raise InputError(
                f"{pattern}: found no file, expected at least one: check the pattern (a glob: * ? [..] **) "
                "and that its folder is mounted"
            )
        found.update((file.name, file) for file in matches)
    inputs = [InputFile(stat=stat, file=_relative(name, root)) for name, stat in found.items()]
    hashes: dict[str, str] = {}
    for item in inputs:
        if not _is_text(item.file):
            raise InputError(f"{item.file!r}: found a name that is not UTF-8, expected one that is: rename the file")
        other = hashes.setdefault(file_hash(item.file), item.file)
        if other != item.file:
            raise InputError(f"{item.file} and {other}: found one part name for both files, expected two: rename one of them")
    return sorted(inputs, key=lambda item: item.file)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _relative(url: str, root: str) -> str:
    if is_local(url):
        return posixpath.relpath(local_path(url), local_path(root))
    scheme, _, path = url.partition("://")
    return posixpath.relpath("/" + path, "/" + root.removeprefix(scheme + "://"))


def source_config(source: Source, root: str) -> SourceConfig:
    """What the converter needs of a source."""
    fields = {key: value for key, value in source.fields.items() if key != "id"}
    images = source.images
    conversion = images.convert
    return SourceConfig(
        name=source.name,
        schema=SchemaConfig(
            name=source.schema_name,
            fields=fields,
            id_field=source.fields["id"],
            placeholder=source.placeholder,
            literal_placeholders=source.literal_placeholders,
        ),
        references=ReferenceRules(
            image_root=source.image_root if source.image_root is not None else root,
            archive=source.archive,
            allow_hosts=source.allow_hosts,
            max_bytes=images.max_bytes,
        ),
        images=ImagePolicy(
            limits=ImageLimits(min_side=images.min_side, max_pixels=images.max_pixels, max_aspect_ratio=images.max_aspect_ratio),
            check=CheckLevel(images.check),
            conversion=None
            if conversion is None
            else Conversion(longest_side=conversion.longest_side, format=conversion.format, quality=conversion.quality),
            drops_image=images.on_error == "drop_image",
            max_per_sample=images.max_per_sample,
            keeps_first=images.over_max == "keep_first",
        ),
        keep=None if source.keep == "all" else source.keep,
        nulls_non_finite=source.non_finite == "null",
        max_line_bytes=source.max_line_bytes,
        target_bundle_bytes=source.target_bundle_bytes,
        fingerprint=source_fingerprint(source),
    )


Inventory = dict[str, dict[str, tuple[int, str]]]
"""source -> file -> (size, stamp): what the inputs looked like when their parts were made."""


def read_inventory(storage: Storage) -> Inventory:
    """The inventory of the last run; empty when there is none."""
    try:
        data = storage.read_bytes(INVENTORY_FILE)
    except FileNotFoundError:
        return {}
    files = parse_document(data, INVENTORY_FILE, kind="inventory")["files"]
    return {source: {file: (size, stamp) for file, (size, stamp) in entries.items()} for source, entries in files.items()}


def write_inventory(storage: Storage, inventory: Inventory) -> None:
    """Publish an inventory."""
    plain = orjson.loads(orjson.dumps(inventory, option=orjson.OPT_SORT_KEYS))
    storage.publish_bytes(INVENTORY_FILE, encode_document("inventory", {"files": plain}))
