"""From a profile's settings to its encoder, its identity and the fingerprint of that."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson
from blake3 import blake3

from indexer.encode import SampleEncoder
from indexer.image_layouts import ImageLayout, default_layout, image_layout
from indexer.image_rules import PRESETS, ImageRule, image_rule
from indexer.image_rules.lookup import OwnRule
from indexer.profile.settings import ImageSettings, Profile
from indexer.templates import TemplateSpec, open_template
from indexer.tokenizers import TextTokenizer, TokenizerSpec, open_tokenizer
from packer.format.errors import UsageError

COUNTING_VERSION = 1
"""Raised whenever a release counts a sample differently: indexes of another version are stale."""


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
    template = open_template(_template_spec(profile), tokenizer.special_tokens)
    identity = {
        "counting_version": COUNTING_VERSION,
        "tokenizer": tokenizer.fingerprint,
        "template": template.fingerprint,
        "image_rule": _plain(rule) if rule else None,
        "image_layout": _plain(block) if block else None,
    }
    encoder = SampleEncoder(
        fingerprint=identity_fingerprint(identity), tokenizer=tokenizer, template=template, rule=rule, layout=block
    )
    return OpenProfile(profile=profile, encoder=encoder, identity=identity)


def identity_fingerprint(identity: Mapping[str, Any]) -> str:
    return blake3(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _check_free_values(profile: Profile) -> None:
    """Refuse what would be dropped without a word, or cannot be written to `profile.json` as it is."""
    images = profile.images
    if images.rule is None and (images.parameters or images.layout or images.layout_parameters):
        raise UsageError("image parameters or an image layout are given without an image rule: name the rule, or leave them out")
    for name, values in (("image rule parameters", images.parameters), ("template variables", profile.template.variables)):
        try:
            is_json = json.loads(json.dumps(values, allow_nan=False)) == values
            orjson.dumps(values)  # refuses whole numbers beyond 64 bit
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            raise UsageError(f"{name}: found {values!r}, expected JSON values under strings, whole numbers within 64 bit")


def _layout(images: ImageSettings, tokenizer: TextTokenizer) -> ImageLayout:
    preset = images.rule if images.rule in PRESETS else None
    return image_layout(images.layout, preset, images.layout_parameters, tokenizer.special_tokens)


def _template_spec(profile: Profile) -> TemplateSpec:
    chat = profile.template
    return TemplateSpec(
        name=chat.name,
        text=chat.text,
        bos=chat.bos,
        eos=chat.eos,
        placeholder=used_placeholder(profile),
        content=chat.content,
        date=chat.date,
        variables=chat.variables,
        assistant_tokens=tuple(chat.assistant_tokens),
    )


def used_placeholder(profile: Profile) -> str | None:
    """What a profile's template writes for an image: its own, or that of the rule's models. None: the template's default."""
    template, rule = profile.template, profile.images.rule
    if template.placeholder is not None or template.name == "document" or rule not in PRESETS:
        return template.placeholder
    return default_layout(rule).placeholder


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
