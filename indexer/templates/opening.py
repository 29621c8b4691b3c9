"""Spec -> template, checked against the tokenizer's special tokens; and where a chat template's source is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3

from indexer.templates.chat import ChatTemplate
from indexer.templates.document import DocumentTemplate
from indexer.templates.guard import Guard
from indexer.templates.jinja import JinjaTemplate
from indexer.templates.messages import MessageWriter
from indexer.templates.probe import probe
from indexer.templates.spec import DEFAULT_PLACEHOLDER, SpecialFlags, Template, TemplateSpec
from indexer.templates.splitter import Splitter
from packer.format.errors import UsageError

_VERSION = 1
"""Raised when the same spec gives other segments than before."""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def open_template(spec: TemplateSpec, specials: Mapping[str, SpecialFlags]) -> Template:
    """The template of a profile.

    Raises:
        UsageError: the template has a mistake, cannot be used as the spec says, or names tokens the tokenizer lacks.
    """
    needed = {"bos": spec.bos, "eos": spec.eos} | {f"assistant_tokens[{i}]": t for i, t in enumerate(spec.assistant_tokens)}
    if spec.name == "chatml":
        needed |= {f"the chatml template's {token}": token for token in _CHATML_TOKENS}
    for name, token in needed.items():
        if token is not None and token not in specials:
            raise UsageError(f"template: {name}: {token!r} is not a special token of the tokenizer, which has {_some(specials)}")
    if spec.name == "document":
        return DocumentTemplate(spec.bos, spec.eos, _fingerprint(name="document", bos=spec.bos, eos=spec.eos))
    return _open_chat(spec, specials)


def _open_chat(spec: TemplateSpec, specials: Mapping[str, SpecialFlags]) -> ChatTemplate:
    source = spec.text if spec.text is not None else Path(__file__).with_name("chatml.jinja").read_text(encoding="utf-8")
    tokens = {name: token for name, token in (("bos_token", spec.bos), ("eos_token", spec.eos)) if token is not None}
    constants = tokens | dict(spec.variables)
    template = JinjaTemplate(source, spec.day(), constants)
    placeholder = DEFAULT_PLACEHOLDER if spec.placeholder is None else spec.placeholder
    forms = probe(template, placeholder, spec.content)
    splitter = Splitter(specials, placeholder)
    guard = Guard(splitter.words)
    free = frozenset(spec.assistant_tokens)
    writer = MessageWriter(
        forms=forms,
        placeholder=placeholder,
        guard=guard,
        assistant_guard=Guard([word for word in splitter.words if word not in free]) if free else guard,
        reserved=source + json.dumps(constants) + json.dumps(constants, ensure_ascii=False),
    )
    fingerprint = _fingerprint(
        name="chat",
        source=source,
        constants=constants,
        bos=spec.bos,
        eos=spec.eos,
        placeholder=placeholder,
        date=spec.date,
        forms=dict(forms),
        assistant_tokens=sorted(free),
        specials={token: [flags.lstrip, flags.rstrip] for token, flags in specials.items()},
    )
    return ChatTemplate(template, writer, splitter, DocumentTemplate(spec.bos, spec.eos, fingerprint), fingerprint)


def _fingerprint(**facts: Any) -> str:
    return blake3.blake3(json.dumps([_VERSION, facts], sort_keys=True).encode()).hexdigest()[:32]


def _some(specials: Mapping[str, SpecialFlags]) -> str:
    return ", ".join(sorted(specials)[:12]) + (", ..." if len(specials) > 12 else "") or "none"


def read_chat_template(path: str) -> str:
    """The Jinja source in a .jinja file, a tokenizer_config.json, a chat_template.json, or a folder with one of them.

    Raises:
        UsageError: when there is none.
    """
    file = Path(path)
    if file.is_dir():
        found = [file / name for name in _FILES if (file / name).is_file()]
        for candidate in found:
            source = _chat_template_in(candidate)
            if source is not None:
                return source
        looked = "none of these holds a chat_template" if found else "none of these is there"
        raise UsageError(f"chat template {path}: a folder in which {looked}: {', '.join(_FILES)}")
    source = _chat_template_in(file)
    if source is None:
        raise UsageError(f"chat template {path}: no chat_template in it: name the .jinja file that holds the template")
    return source


def _chat_template_in(file: Path) -> str | None:
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"chat template {file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"chat template {file}: not UTF-8: {error.reason} at byte {error.start}") from error
    if file.suffix != ".json":
        return text
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"chat template {file}: not JSON (cut?): {error}") from error
    named = document.get("chat_template") if isinstance(document, dict) else None
    if isinstance(named, list):
        templates = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
        named = templates.get("default")
        if named is None:
            raise UsageError(f"chat template {file}: no template named default, only {', '.join(map(str, templates))}")
    if named is not None and not isinstance(named, str):
        raise UsageError(f"chat template {file}: chat_template is {type(named).__name__}, expected a string or named templates")
    return named
