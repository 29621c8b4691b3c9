"""Profiles in a dataset: `profile.json` and a copy of the tokenizer, so that whoever has the dataset has the encoder."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from indexer.profile.counted_with import CountedWith, check_counted_with, counted_with
from indexer.profile.difference import difference
from indexer.profile.opening import OpenProfile, identity_fingerprint, open_profile
from indexer.profile.settings import Profile
from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import encode_document, parse_document
from packer.storage import Storage, join_url, open_storage

_MEND = "remove it and index again with its recipe"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfile:
    """What `profile.json` of a dataset says."""

    profile: Profile
    fingerprint: str
    identity: Mapping[str, Any]
    tokenizer_file: str
    """Relative to the dataset."""
    tokenizer_origin: str
    """Where it was copied from."""
    counted_with: CountedWith


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """`profile.json` without its header."""

    name: str
    fingerprint: str
    identity: dict[str, Any]
    tokenizer_file: str
    tokenizer_origin: str
    counted_with: CountedWith
    settings: Profile


def write_profile(storage: Storage, opened: OpenProfile, tokenizer_origin: str, tokenizer: bytes) -> None:
    """Publish a profile: first a copy of its tokenizer's file, then `profile.json`."""
    name = opened.profile.name
    copy = layout.profile_tokenizer_file(name, Path(tokenizer_origin).suffix)
    storage.publish_bytes(copy, tokenizer)
    document = _Document(
        name=name,
        fingerprint=opened.fingerprint,
        identity=dict(opened.identity),
        tokenizer_file=copy,
        tokenizer_origin=tokenizer_origin,
        counted_with=counted_with(opened),
        settings=opened.profile,
    )
    storage.publish_bytes(layout.profile_file(name), encode_document("profile", msgspec.to_builtins(document)))


def read_profile(storage: Storage, name: str) -> StoredProfile | None:
    """A profile of a dataset; None when it has no such profile.

    Raises:
        FormatError: when its file is damaged or of another version.
    """
    file = layout.profile_file(name)
    where = join_url(storage.url, file)
    try:
        content = parse_document(storage.read_bytes(file), where, kind="profile")
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(f"{error}: {_MEND}") from error
    try:
        document = msgspec.convert(content, _Document)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}: not a profile this release reads: {error}: {_MEND}") from error
    if (expected := identity_fingerprint(document.identity)) != document.fingerprint:
        raise FormatError(
            f"{where}: found fingerprint {document.fingerprint}, its identity has {expected}: the file is damaged; "
            "remove it and index again with its recipe"
        )
    return StoredProfile(
        profile=document.settings,
        fingerprint=document.fingerprint,
        identity=document.identity,
        tokenizer_file=document.tokenizer_file,
        tokenizer_origin=document.tokenizer_origin,
        counted_with=document.counted_with,
    )


def profile_names(storage: Storage) -> list[str]:
    """Profiles a dataset has been indexed by, sorted."""
    return [name for name in storage.list_dirs(layout.INDEX_DIR) if storage.stat(layout.profile_file(name)) is not None]


def open_stored(dataset: Storage | str, name: str) -> OpenProfile:
    """The encoder of a dataset's profile, from the dataset (or its path or URL) alone; exactly what its index was made with.

    Raises:
        UsageError: no such profile, or this release, machine or library counts differently.
    """
    storage = open_storage(dataset) if isinstance(dataset, str) else dataset
    stored = read_profile(storage, name)
    if stored is None:
        known = ", ".join(profile_names(storage)) or "none"
        raise UsageError(f"found no profile {name!r} in {storage.url}; its profiles: {known}")
    opened = open_copy(storage, stored.profile, stored.tokenizer_file)
    if opened.fingerprint != stored.fingerprint:
        raise UsageError(
            f"profile {name!r}: counted by {difference(stored, opened)}: "
            "index again with `--replace-changed`, or use the release it was indexed with"
        )
    check_counted_with(opened, stored.counted_with)
    return opened


def open_copy(storage: Storage, profile: Profile, tokenizer_file: str) -> OpenProfile:
    """A profile with the dataset's own copy of its tokenizer, whatever fingerprint that gives.

    Raises:
        UsageError: as `open_profile`. FormatError: when the copy is gone.
    """
    where = join_url(storage.url, tokenizer_file)
    try:
        data = storage.read_bytes(tokenizer_file)
    except FileNotFoundError:
        raise FormatError(f"{where}: found no file, the profile names it: index again with its recipe") from None
    with tempfile.TemporaryDirectory(prefix="bayplan-") as folder:
        path = Path(folder) / Path(tokenizer_file).name
        path.write_bytes(data)
        try:
            return open_profile(profile, str(path))
        except UsageError as error:
            raise UsageError(str(error).replace(str(path), where)) from error
