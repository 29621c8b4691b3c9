"""A profile: one way of counting, with everything that decides a length, and its fingerprint.

`profile.json` and a copy of the tokenizer lie in the dataset, so whoever has the dataset can open the same encoder.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from blake3 import blake3

from indexer.encode import SampleEncoder
from indexer.image_layouts import ImageLayout, default_layout, image_layout
from indexer.image_rules import PRESETS, ImageRule, image_rule
from indexer.image_rules.lookup import OwnRule
from indexer.templates import TemplateSpec, open_template
from indexer.tokenizers import TextTokenizer, TokenizerSpec, open_tokenizer
from indexer.tokenizers.core import Kind
from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.format.manifest import encode_document, parse_document
from packer.storage import Storage, join_url

COUNTING_VERSION = 1
"""Raised whenever a release counts a sample differently: indexes of another version are stale."""


class TokenizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Text -> ids."""

    kind: Kind | None = None
    pattern: str | None = None
    special_tokens: dict[str, int] | list[str] = []


class TemplateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages -> text. `text` is the Jinja source when `name` is `jinja`."""

    name: Literal["document", "chatml", "jinja"]
    text: str | None = None
    bos: str | None = None
    eos: str | None = None
    placeholder: str | None = None
    """What the chat template writes for an image; None: what the image rule's models use."""
    content: Literal["auto", "parts", "string"] = "auto"
    date: str | None = None
    variables: dict[str, Any] = {}
    assistant_tokens: list[str] = []
    """Special tokens that an assistant's own text may hold, such as `<think>`."""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sizes -> tokens. `rule` None: samples with images cannot be counted."""

    rule: str | None = None
    parameters: dict[str, Any] = {}
    layout: str | None = None
    layout_parameters: dict[str, Any] = {}


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One way of counting; the tokenizer's file is given when it is opened."""

    name: str
    tokenizer: TokenizerSettings
    template: TemplateSettings
    images: ImageSettings
    sequence_lengths: list[int] = []
    """Lengths to report over-long samples for; no part of the fingerprint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenProfile:
    """A profile with its encoder."""

    profile: Profile
    encoder: SampleEncoder
    identity: Mapping[str, Any]
    """All that decides a length, as plain JSON; the fingerprint is its digest."""

    @property
    def fingerprint(self) -> str:
        return self.encoder.fingerprint


def open_profile(profile: Profile, tokenizer_file: str) -> OpenProfile:
    """Everything a profile names, checked and ready to count.

    Raises:
        UsageError: naming the profile and what of it cannot be used.
    """
    try:
        return _opened(profile, tokenizer_file)
    except UsageError as error:
        raise UsageError(f"profile {profile.name!r}: {error}") from error


def _opened(profile: Profile, tokenizer_file: str) -> OpenProfile:
    _check_free_values(profile)
    settings = profile.tokenizer
    spec = TokenizerSpec(
        file=tokenizer_file, kind=settings.kind, pattern=settings.pattern, special_tokens=settings.special_tokens
    )
    tokenizer = open_tokenizer(spec)
    images = profile.images
    rule = None if images.rule is None else image_rule(images.rule, images.parameters)
    block = None if images.rule is None else _layout(images, tokenizer)
    chat = profile.template
    template = open_template(
        TemplateSpec(
            name=chat.name,
            text=chat.text,
            bos=chat.bos,
            eos=chat.eos,
            placeholder=_placeholder(images) if chat.placeholder is None else chat.placeholder,
            content=chat.content,
            date=chat.date,
            variables=chat.variables,
            assistant_tokens=tuple(chat.assistant_tokens),
        ),
        tokenizer.special_tokens,
    )
    identity = {
        "counting_version": COUNTING_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "template": template.fingerprint,
        "image_rule": _plain(rule) if rule else None,
        "image_layout": _plain(block) if block else None,
    }
    encoder = SampleEncoder(fingerprint=_fingerprint(identity), tokenizer=tokenizer, template=template, rule=rule, layout=block)
    return OpenProfile(profile=profile, encoder=encoder, identity=identity)


def _fingerprint(identity: Mapping[str, Any]) -> str:
    return blake3(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _check_free_values(profile: Profile) -> None:
    """Refuse what would be dropped without a word, or cannot be written to `profile.json` as it is."""
    images = profile.images
    if images.rule is None and (images.parameters or images.layout or images.layout_parameters):
        raise UsageError("image parameters or an image layout are given without an image rule: name the rule, or leave them out")
    for name, values in (("image rule parameters", images.parameters), ("template variables", profile.template.variables)):
        try:
            is_json = json.loads(json.dumps(values, allow_nan=False)) == values
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            raise UsageError(f"{name}: found {values!r}, expected JSON values under strings")


def _layout(images: ImageSettings, tokenizer: TextTokenizer) -> ImageLayout:
    preset = images.rule if images.rule in PRESETS else None
    return image_layout(images.layout, preset, images.layout_parameters, tokenizer.special_tokens)


def _placeholder(images: ImageSettings) -> str:
    return default_layout(images.rule).placeholder if images.rule in PRESETS else "<image>"


def _plain(value: ImageRule | ImageLayout) -> dict[str, Any]:
    """A rule or layout as JSON: its class and every parameter; a user's own function with the digest of its file."""
    plain: dict[str, Any] = {"class": type(value).__name__}
    if isinstance(value, OwnRule):
        return plain | {"name": value.name, "parameters": dict(value.parameters), "file_digest": _file_digest(value)}
    parameters: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(cast(Any, value)), default=sorted))
    return plain | parameters


def _file_digest(rule: OwnRule) -> str:
    """Of the file a user's function is named in, and of the one it comes from; it may be any callable."""
    names = (rule.name.partition(":")[0], inspect.unwrap(rule.function).__module__)
    digest = blake3()
    for module in map(sys.modules.get, dict.fromkeys(names)):
        if file := getattr(module, "__file__", None):
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:32]


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


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """`profile.json` without its header."""

    name: str
    fingerprint: str
    identity: dict[str, Any]
    tokenizer_file: str
    tokenizer_origin: str
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
    try:
        document = msgspec.convert(content, _Document)
    except msgspec.ValidationError as error:
        raise FormatError(f"{where}: not a profile this release reads: {error}") from error
    if (expected := _fingerprint(document.identity)) != document.fingerprint:
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
    )


def profile_names(storage: Storage) -> list[str]:
    """Profiles a dataset has been indexed by, sorted."""
    return [name for name in storage.list_dirs(layout.INDEX_DIR) if storage.stat(layout.profile_file(name)) is not None]


def open_stored(storage: Storage, name: str) -> OpenProfile:
    """The encoder of a dataset's profile, from the dataset alone; exactly what its index was made with.

    Raises:
        UsageError: no such profile, or this release or machine counts differently.
    """
    stored = read_profile(storage, name)
    if stored is None:
        known = ", ".join(profile_names(storage)) or "none"
        raise UsageError(f"found no profile {name!r} in {storage.url}; its profiles: {known}")
    opened = open_copy(storage, stored.profile, stored.tokenizer_file)
    if opened.fingerprint != stored.fingerprint:
        raise UsageError(
            f"profile {name!r}: counted by {difference(stored.identity, opened.identity)}: "
            "index again with `--replace-changed`, or use the release it was indexed with"
        )
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


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In words, where two identities differ: both values of each."""
    old_flat, new_flat = dict(_flat(old)), dict(_flat(new))
    keys = [key for key in sorted(old_flat.keys() | new_flat.keys()) if old_flat.get(key) != new_flat.get(key)]
    return "; ".join(f"{key}: found {new_flat.get(key)!r}, the index has {old_flat.get(key)!r}" for key in keys)


def _flat(identity: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in identity.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((prefix + key, value))
    return found
