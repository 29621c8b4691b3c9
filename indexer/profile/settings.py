"""What a profile says, as it stands in `profile.json`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from indexer.tokenizers.core import Kind


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
