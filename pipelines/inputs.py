"""The input files of a source as they are now, and what a source's recipe means to the converter."""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from packer.format.errors import FormatError, InputError
from packer.format.layout import INVENTORY_FILE, file_hash
from packer.format.manifest import encode_document, parse_document
from packer.images import CheckLevel, Conversion, ImageLimits
from packer.loading import ImagePolicy
from packer.references import ReferenceRules
from packer.row_source import SourceConfig
from packer.schemas import SchemaConfig
from packer.sources import InputRange
from packer.storage import FileStat, Storage, is_local, list_matching, local_path
from pipelines.recipe import Source, fingerprint_keys, source_fingerprint
from pipelines.recipe_paths import is_below


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


def naming_root(source: Source, pinned: str | None) -> str:
    """The folder that a source's file names are relative to: part names hang on it, so it is kept where it can be.

    A source that moved as a whole keeps its names; one that grew beyond its folder would change them.

    Raises:
        InputError: when only some of its patterns lie in the folder that the first run settled.
    """
    if source.root is not None or pinned is None:
        return source.resolved_root
    inside = [is_below(pattern, pinned) for pattern in source.files]
    if all(inside):
        return pinned
    if not any(inside):
        return source.resolved_root
    outside = source.files[inside.index(False)]
    raise InputError(
        f"{outside}: found a pattern outside of {pinned}, the folder that this source's part names are relative to: "
        "make it a source of its own, or pack into a new output"
    )


def list_inputs(source: Source, root: str, *, outside: str) -> list[InputFile]:
    """Files of a source, sorted by their path relative to `root`; files of the output (`outside`) and its trials are none.

    Raises:
        InputError: when a pattern matches nothing, or two paths share a part name.
    """
    found: dict[str, FileStat] = {}
    for pattern in source.files:
        matches = [file for file in list_matching(pattern) if not _is_inside(file.name, outside)]
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


def check_places(source: Source) -> None:
    """See that what a source names beside its files is there, as far as this machine can tell.

    Raises:
        InputError: naming the key and the place.
    """
    source_config(source, source.resolved_root)
    if source.image_root is not None and is_local(source.image_root) and not os.path.isdir(local_path(source.image_root)):
        raise InputError(f"image_root: found no folder {source.image_root}; a relative one starts at the recipe's folder")
    if source.archive is not None and is_local(source.archive) and not os.path.isfile(local_path(source.archive)):
        raise InputError(f"archive: found no file {source.archive}; a relative one starts at the recipe's folder")


def _is_inside(url: str, folder: str) -> bool:
    return re.match(re.escape(folder.rstrip("/")) + r"(\.limit-\d+)?/", url) is not None


def _relative(url: str, root: str) -> str:
    if is_local(url):
        return posixpath.relpath(local_path(url), local_path(root))
    scheme, _, path = url.partition("://")
    return posixpath.relpath("/" + path, "/" + root.removeprefix(scheme + "://"))


def source_config(source: Source, root: str) -> SourceConfig:
    """What the converter needs of a source.

    Raises:
        InputError: when the module of a `python:` schema is not found: its edits would go unnoticed.
    """
    if source.schema_name.startswith("python:") and fingerprint_keys(source)["schema_digest"] is None:
        raise InputError(
            f"schema {source.schema_name}: found no source file of its module on {', '.join(filter(None, sys.path[:3]))}, ...: "
            "run from its folder, put it on PYTHONPATH or into the job's working dir"
        )
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
    try:
        files = parse_document(data, INVENTORY_FILE, kind="inventory")["files"]
        return {source: {file: (size, stamp) for file, (size, stamp) in entries.items()} for source, entries in files.items()}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"{INVENTORY_FILE}: found no files in it: it is damaged; remove it, it is made anew") from error


def write_inventory(storage: Storage, inventory: Inventory) -> None:
    """Publish an inventory."""
    plain = orjson.loads(orjson.dumps(inventory, option=orjson.OPT_SORT_KEYS))
    storage.publish_bytes(INVENTORY_FILE, encode_document("inventory", {"files": plain}))
