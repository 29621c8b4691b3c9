"""What a template is made of, what it promises, how it fails. No rendering here."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol

from indexer.segments import Segment
from packer.format.errors import BayplanError, UsageError

NAMES = ("document", "chatml", "jinja")
CONTENT_FORMS = ("auto", "parts", "string")
DEFAULT_PLACEHOLDER = "<image>"

_OF_CHAT_TEMPLATES = {
    "variables": "variables of a Jinja chat template",
    "date": "the day that a Jinja chat template asks strftime_now for",
    "content": "the form in which a Jinja chat template reads messages",
}
_OF_CONVERSATIONS = {
    "placeholder": "what a chat template writes for an image",
    "assistant_tokens": "special tokens in the text of assistant turns",
}
_WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "document": _OF_CHAT_TEMPLATES | _OF_CONVERSATIONS,
    "chatml": _OF_CHAT_TEMPLATES,
}
"""Template -> the settings it has no use for, and what each is for."""


class TemplateFailure(BayplanError):
    """One record cannot be rendered by the profile's template; costs that record only."""

    def __init__(self, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class SpecialFlags(Protocol):
    """What a template needs to know of a special token: whether it takes the white space beside it."""

    @property
    def lstrip(self) -> bool: ...
    @property
    def rstrip(self) -> bool: ...


class Template(Protocol):
    """Record -> segments: the same record gives the same segments, on any machine and day."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits over everything that changes the segments."""

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Raises TemplateFailure for a record it cannot render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """What the profile says about its template."""

    name: str
    """`document`, `chatml` or `jinja`."""
    text: str | None = None
    """The source of a Jinja chat template; only with `jinja`."""
    bos: str | None = None
    """Special token that begins a document; `bos_token` in a chat template."""
    eos: str | None = None
    """Special token that ends a document; `eos_token` in a chat template."""
    placeholder: str | None = None
    """What the chat template writes for an image, where the image's whole block goes; None: DEFAULT_PLACEHOLDER."""
    date: str | None = None
    """YYYY-MM-DD, the day that `strftime_now` tells, since a count must not depend on the day it is made."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    content: str = "auto"
    """How messages hold their content: `parts`, `string`, or `auto`: whichever the template can read, role by role."""
    assistant_tokens: tuple[str, ...] = ()
    """Special tokens that the text of assistant turns may write itself (`<think>`); in other texts they stay text."""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"template name: found {self.name!r}, expected one of {', '.join(NAMES)}")
        if (self.name == "jinja") != (self.text is not None):
            raise UsageError(f"template {self.name!r}: its `text` is for `jinja` alone, and `jinja` needs it")
        if self.content not in CONTENT_FORMS:
            raise UsageError(f"template content: found {self.content!r}, expected one of {', '.join(CONTENT_FORMS)}")
        if self.placeholder == "":
            raise UsageError("template placeholder: found an empty string, expected what the template writes for an image")
        if self.date is not None:
            self.day()
        try:
            json.dumps(dict(self.variables), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(f"template variables: expected JSON values: {error}") from error
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        defaults = {item.name: None if item.default is MISSING else item.default for item in fields(self)}
        useless = [
            f"template {self.name!r}: {name}: found {value!r}, but that is for {purpose} and changes nothing here: leave it out"
            for name, purpose in _WITHOUT_EFFECT.get(self.name, {}).items()
            if (value := getattr(self, name)) not in (defaults[name], {})
        ]
        if useless:
            raise UsageError("; ".join(useless))

    def day(self) -> datetime.date | None:
        """`date` as a date."""
        if self.date is None:
            return None
        try:
            return datetime.date.fromisoformat(self.date)
        except ValueError as error:
            raise UsageError(f"template date: found {self.date!r}, expected YYYY-MM-DD") from error
