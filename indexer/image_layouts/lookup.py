"""From what a profile says to a layout that fits its image rule and its tokenizer."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from indexer.image_layouts.core import ImageLayout, StringLayout
from indexer.image_layouts.defaults import LayoutDefault, default_layout
from indexer.image_layouts.kinds import KINDS, Wrapped
from indexer.image_rules.lookup import nearest
from packer.format.errors import UsageError

_MARKUP = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
"""Nobody writes this around an image as plain text: a special token then, so that a misspelt one does not become text."""
_NOT_FOR_PROFILES = "tag_tokens"
"""Found in the tokenizer."""


def image_layout(
    kind: str | None, preset: str | None, parameters: Mapping[str, Any] | None, specials: Collection[str]
) -> ImageLayout:
    """The layout of a preset of the image rules, `parameters` in place of its strings.

    A rule that is no preset (None or `module:function`) takes kind `wrapped` and its `token`, and any preset may.

    Raises:
        UsageError: unknown kind, preset or parameter (with the nearest one), a kind that does not fit the preset, a value of
            the wrong type, or a special token that is not among `specials`, those of the tokenizer.
    """
    default = None if preset is None or ":" in preset else default_layout(preset)
    if kind is None and default is None:
        raise UsageError(
            "an image rule of your own needs an image layout: kind 'wrapped' with token, the tokenizer's image token"
        )
    kind = kind or typing.cast(LayoutDefault, default).kind
    if kind not in KINDS:
        raise UsageError(f"unknown image layout {kind!r}{nearest(kind, KINDS)}")
    base = default.layout if default is not None and default.kind == kind else None
    if base is None and kind != "wrapped":
        raise UsageError(f"image layout {kind!r} does not fit the counts of image rule {preset!r}; {_fitting(default)}")
    given = _checked(kind, parameters or {})
    if isinstance(base, Wrapped) or base is None:
        layout: StringLayout = _wrapped(base, given, specials)
    else:
        layout = replace(base, **given).resolved(specials)
    _refuse_missing(kind, layout.required(), specials)
    return layout


def _fitting(default: LayoutDefault | None) -> str:
    return "expected 'wrapped'" if default is None else f"expected {default.kind!r}, or 'wrapped' with a token of your own"


def _checked(kind: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as the kind's fields hold them."""
    types = typing.get_type_hints(KINDS[kind])
    known = [name for name in types if name != _NOT_FOR_PROFILES]
    given: dict[str, Any] = {}
    for key, value in parameters.items():
        if key not in known:
            raise UsageError(f"image layout {kind!r} has no parameter {key!r}{nearest(key, known)}")
        if typing.get_origin(types[key]) is tuple:
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise UsageError(f"image layout {kind!r}: {key} is {value!r}, expected a list of strings")
            given[key] = tuple(value)
        elif type(value) is not types[key]:
            raise UsageError(f"image layout {kind!r}: {key} is {value!r}, expected {types[key].__name__}")
        else:
            given[key] = value
    return given


def _wrapped(base: Wrapped | None, given: Mapping[str, Any], specials: Collection[str]) -> Wrapped:
    """A string around the image is text if the profile or the default says so, or if nothing says it is a token."""
    if base is None and "token" not in given:
        raise UsageError("image layout 'wrapped' needs token, the tokenizer's special token that stands for image features")
    layout = Wrapped(**given) if base is None else replace(base, **given)
    strings = dict.fromkeys(layout.before + layout.after)
    texts = (s for s in strings if s in layout.texts or (s not in specials and not _MARKUP.fullmatch(s)))
    return replace(layout, texts=tuple(texts))


def _refuse_missing(kind: str, required: tuple[str, ...], specials: Collection[str]) -> None:
    missing = [token for token in dict.fromkeys(required) if token not in specials]
    if not missing:
        return
    near = difflib.get_close_matches(missing[0], specials, n=1)
    raise UsageError(
        f"image layout {kind!r} needs the special token {', '.join(map(repr, missing))}, which the tokenizer does not have"
        f"{f' (it has {near[0]!r})' if near else ''}; name another in the layout, or add it with special_tokens of the tokenizer"
    )
