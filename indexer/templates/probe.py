"""Finds out which form of content a chat template reads, role by role, by rendering small conversations.

Templates of vision models take lists of parts, those of text models strings, and some a list from users and a string from
assistants. A list where a string is expected is an error at best, and is written as Python or JSON at worst.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from indexer.templates.jinja import JinjaTemplate, NoDate
from indexer.templates.spec import TemplateFailure
from packer.format.errors import UsageError

ContentForms = Mapping[str, str]
"""Role -> `parts` or `string`; a role that is not there is written like `user`."""

_FORMS = ("parts", "string")
_ROLES = ("system", "user", "assistant", "tool")
_SAME = {"developer": "system", "model": "assistant", "function": "tool"}
_TRACES = ("'type'", '"type"', "\\u0027type")
_CALL = {"id": "zqcall123", "function": {"name": "zqname", "arguments": {"zqkey": 1}}}


def probe(template: JinjaTemplate, placeholder: str, content: str) -> ContentForms:
    """The forms.

    Raises:
        UsageError: when the template asks for the day, reads neither form, or writes something else for an image.
    """
    try:
        if content != "auto":
            _try(template, placeholder, {"user": content, "assistant": content})
            return dict.fromkeys((*_ROLES, *_SAME), content)
        forms = _find(template, placeholder)
    except NoDate as error:
        raise UsageError("the chat template asks strftime_now for the day: say which with `date: YYYY-MM-DD`") from error
    return forms | {role: forms[same] for role, same in _SAME.items()}


def _find(template: JinjaTemplate, placeholder: str) -> dict[str, str]:
    problem = ""
    for roles in (("user", "assistant", "system"), ("user", "assistant")):
        for combination in itertools.product(_FORMS, repeat=len(roles)):
            forms = dict(zip(roles, combination, strict=True))
            found = _try(template, placeholder, forms)
            if found is None:
                if forms["user"] == "string":
                    _check_placeholder(template, placeholder, forms)
                calling = {"user": forms["user"], "assistant": forms["assistant"], "tool": "parts"}
                tool = "parts" if _try(template, placeholder, calling) is None else "string"
                return {"system": forms["user"]} | forms | {"tool": tool}
            problem = found
    raise UsageError(
        f"the chat template renders no conversation of a user (with an image) and an assistant: {problem}: "
        "check it, or say how it reads content with `content: parts` or `content: string`"
    )


def _message(role: str, form: str, placeholder: str, num_images: int) -> dict[str, Any]:
    text = f"zq{role}"
    if form == "string":
        return {"role": role, "content": text + placeholder * num_images}
    return {"role": role, "content": [{"type": "text", "text": text}] + [{"type": "image"}] * num_images}


def _render(template: JinjaTemplate, placeholder: str, forms: ContentForms, num_images: int) -> str:
    conversation = [
        _message(role, forms[role], placeholder, num_images if role == "user" else 0) for role in _ROLES if role in forms
    ]
    if "tool" in forms:
        conversation[-2]["tool_calls"] = [_CALL]
        conversation[-1] |= {"name": "zqname", "tool_call_id": _CALL["id"]}
    return template.render(conversation)[0]


def _try(template: JinjaTemplate, placeholder: str, forms: ContentForms) -> str | None:
    """What is wrong with these forms, or None."""
    try:
        text = _render(template, placeholder, forms, num_images=1)
    except TemplateFailure as failure:
        return failure.detail
    # An assistant that calls a tool may be written without its content.
    missing = [role for role in forms if f"zq{role}" not in text and (role != "assistant" or "tool" not in forms)]
    if missing:
        return f"the text of {missing[0]} is not in what it writes"
    if any(trace in text for trace in _TRACES):
        return "it writes the list of parts itself"
    if (found := text.count(placeholder)) != 1:
        return f"it writes the placeholder {placeholder!r} {found} times for one image"
    return None


def _check_placeholder(template: JinjaTemplate, placeholder: str, forms: ContentForms) -> None:
    """A template that reads parts and writes another text for images is used with the wrong placeholder."""
    listed = dict(forms) | {"user": "parts"}
    try:
        without, with_one = (_render(template, placeholder, listed, num_images) for num_images in (0, 1))
    except TemplateFailure:
        return
    if "zquser" not in without or without == with_one or any(trace in with_one for trace in _TRACES):
        return
    start = next((i for i, (a, b) in enumerate(zip(without, with_one, strict=False)) if a != b), len(without))
    length = len(with_one) - len(without)
    while start and with_one[start - 1] == with_one[start + length - 1]:  # "<|a|><|b|>" also differs from "<|b|>" by "a|><|"
        start -= 1
    written = with_one[start : start + length]
    raise UsageError(f"the chat template writes {written!r} for an image, not the placeholder {placeholder!r}: set `placeholder`")
