"""Templates against transformers' own rendering, token ids and masks, and against hostile texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.segments import Image, Segment, Text, Token
from indexer.templates import TemplateFailure, TemplateSpec, open_template, read_chat_template
from indexer.templates.guard import Guard, words_pattern
from indexer.templates.splitter import Splitter
from packer.format.errors import UsageError

DATA = Path(__file__).parent / "data" / "templates"
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Flags:
    lstrip: bool = False
    rstrip: bool = False


PLAIN = (
    "<s> </s> <|im_start|> <|im_end|> <|vision_start|> <|image_pad|> <|vision_end|> <|begin_of_text|> <|start_header_id|> "
    "<|end_header_id|> <|eot_id|> [INST] [/INST] [IMG] <bos> <start_of_turn> <end_of_turn> <start_of_image> <think> </think>"
).split()
RSTRIP = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
SPECIALS = {token: Flags() for token in PLAIN} | {token: Flags(rstrip=True) for token in RSTRIP} | {"<mask>": Flags(lstrip=True)}

SPECS = {
    "qwen_vl": {"placeholder": QWEN_IMAGE},
    "llama3": {"bos": "<|begin_of_text|>", "placeholder": "<image>", "date": "2025-07-26"},
    "mistral": {"bos": "<s>", "eos": "</s>"},
    "phi3": {"eos": "</s>"},
    "gemma": {"bos": "<bos>", "placeholder": "<start_of_image>"},
    "pixtral": {"bos": "<s>", "eos": "</s>", "placeholder": "[IMG]"},
    "tools": {},
    "qwen3": {},
}
STRING_FORM = {"llama3", "mistral", "phi3", "tools", "qwen3"}


def source_of(name: str) -> str:
    return read_chat_template(str(DATA / f"{name}.jinja"))


def open_named(name: str, **changes: Any) -> Any:
    return _open_named(name, json.dumps(changes))


@cache
def _open_named(name: str, changes: str) -> Any:
    settings = SPECS[name] | json.loads(changes)
    return open_template(TemplateSpec(name="jinja", text=source_of(name), **settings), SPECIALS)


def chatml(**changes: Any) -> Any:
    return open_template(TemplateSpec(name="chatml", **changes), SPECIALS)


def from_source(text: str, **changes: Any) -> Any:
    return open_template(TemplateSpec(name="jinja", text=text, **changes), SPECIALS)


def chat(*turns: tuple[str, Any], **extra: Any) -> dict[str, Any]:
    """A record: a turn is (role, text) or (role, [text or image index, ...]) and perhaps its extra fields."""
    messages = []
    for role, content, *fields in turns:
        parts = content if isinstance(content, list) else [content]
        message: dict[str, Any] = {"role": role, "content": [part_of(part) for part in parts]}
        if fields:
            message["extra"] = fields[0]
        messages.append(message)
    return {"id": "x", "messages": messages, "images": [], "origin": {}, "extra": extra}


def part_of(part: str | int) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


def written(segments: Sequence[Segment], placeholder: str) -> str:
    return "".join(placeholder if isinstance(s, Image) else s.text if isinstance(s, Text) else s.token for s in segments)


def tokens(segments: Sequence[Segment]) -> list[str | int]:
    return [s.token if isinstance(s, Token) else s.index for s in segments if not isinstance(s, Text)]


def plain(segments: Sequence[Segment]) -> str:
    return "".join(s.text for s in segments if isinstance(s, Text))


def in_loss(segments: Sequence[Segment]) -> str:
    return "".join(written([s], "") for s in segments if not isinstance(s, Image) and s.loss)


# --- transformers' side -------------------------------------------------------------------------------------------


@cache
def hugging_face() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(["the user said hello to the assistant in the system"] * 4, trainer)
    model.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False, lstrip=flags.lstrip, rstrip=flags.rstrip)
            for token, flags in SPECIALS.items()
        ]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


def hf_messages(record: Mapping[str, Any], name: str, placeholder: str) -> list[dict[str, Any]]:
    messages = []
    for message in record["messages"]:
        parts = message["content"]
        as_string = name in STRING_FORM or (name == "pixtral" and message["role"] == "assistant")
        content: Any = [{"type": p["type"]} | ({"text": p["text"]} if "text" in p else {}) for p in parts]
        if as_string:
            content = "".join(p.get("text", placeholder) for p in parts)
        messages.append({"role": message["role"], "content": content if parts else None} | message.get("extra", {}))
    return messages


def hf_arguments(name: str, record: Mapping[str, Any]) -> dict[str, Any]:
    settings = SPECS[name]
    placeholder = settings.get("placeholder", "<image>")
    arguments = {"bos_token": settings.get("bos"), "eos_token": settings.get("eos")}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    source = source_of(name)
    if "date" in settings:
        source = source.replace("strftime_now('%d %b %Y')", "'26 Jul 2025'")
    return {
        "conversation": hf_messages(record, name, placeholder),
        "chat_template": source,
        "tools": record["extra"].get("tools"),
        **arguments,
    }


def encode(segments: Sequence[Segment], placeholder: str) -> tuple[list[int], list[int]]:
    """Ids and loss mask of segments with the same tokenizer; texts hold no special strings here."""
    tokenizer = hugging_face()
    ids: list[int] = []
    mask: list[int] = []
    run: list[Text] = []

    def flush() -> None:
        losses = [s.loss for s in run for _ in s.text]
        encoding = tokenizer("".join(s.text for s in run), add_special_tokens=False, return_offsets_mapping=True)
        ids.extend(encoding["input_ids"])
        mask.extend(int(any(losses[start:end])) for start, end in encoding["offset_mapping"])
        run.clear()

    for segment in segments:
        if isinstance(segment, Text):
            run.append(segment)
            continue
        flush()
        added = tokenizer(placeholder if isinstance(segment, Image) else segment.token, add_special_tokens=False)["input_ids"]
        ids.extend(added)
        mask.extend([int(isinstance(segment, Token) and segment.loss)] * len(added))
    flush()
    return ids, mask


CONVERSATIONS = {
    "short": chat(("user", "hi"), ("assistant", "hello")),
    "spaces": chat(("user", "  hi \n"), ("assistant", "\n hello  ")),
    "turns": chat(("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")),
    "no assistant": chat(("user", "the <b>user</b> said > hello")),
    "empty": chat(("user", ""), ("assistant", "")),
    "unicode": chat(("user", "日本語 🙂 e\u0301"), ("assistant", "\u00a0naïve\u2028")),
    "system": chat(("system", " be brief "), ("user", "hi"), ("assistant", "yes")),
    "images": chat(("user", [0, "\nwhat?", 1]), ("assistant", "a cat"), ("user", ["and ", 2]), ("assistant", "a dog")),
    "marker": chat(("user", "\ufdd0 <"), ("assistant", "\\ufdd1 \ufdd1")),
}
CASES = [
    (name, key)
    for name in SPECS
    for key in CONVERSATIONS
    if not (key == "system" and name in ("gemma", "mistral", "pixtral")) and not (key == "images" and name == "phi3")
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_ids_and_text_are_those_of_transformers(name: str, key: str) -> None:
    record = CONVERSATIONS[key]
    placeholder = SPECS[name].get("placeholder", "<image>")
    segments = open_named(name).segments(record)
    arguments = hf_arguments(name, record)
    text = hugging_face().apply_chat_template(tokenize=False, **arguments)
    assert encode(segments, placeholder)[0] == hugging_face()(text, add_special_tokens=False)["input_ids"]
    if name != "phi3":  # its tokens take the white space beside them
        assert written(segments, placeholder) == text
    num_images = sum(part["type"] == "image" for message in record["messages"] for part in message["content"])
    assert [s.index for s in segments if isinstance(s, Image)] == list(range(num_images))


TOOLS = [{"type": "function", "function": {"name": "look", "description": 'Looks <up> it\'s "all" é', "parameters": {}}}]
TALK_WITH_TOOLS = chat(
    ("system", "use tools"),
    ("user", "what is it?"),
    ("assistant", [], {"tool_calls": [{"function": {"name": "look", "arguments": {"q": "<é>", "n": 1.5}}}], "refusal": None}),
    ("tool", "a cat & 'more'", {"name": "look"}),
    ("assistant", "It is a cat.", {"reasoning": "\nI looked.\n"}),
    tools=TOOLS,
)


@pytest.mark.parametrize("record", [TALK_WITH_TOOLS, *CONVERSATIONS.values()])
def test_the_mask_of_generation_blocks_is_that_of_transformers(record: dict[str, Any]) -> None:
    arguments = hf_arguments("tools", record)
    theirs = hugging_face().apply_chat_template(return_assistant_tokens_mask=True, **arguments)
    segments = open_named("tools").segments(record)
    assert encode(segments, "<image>") == (theirs["input_ids"], theirs["assistant_masks"])
    assert written(segments, "<image>") == hugging_face().apply_chat_template(tokenize=False, **arguments)


def test_variables_reach_the_template() -> None:
    segments = open_named("qwen_vl", variables={"number_images": True}).segments(CONVERSATIONS["images"])
    assert "Picture 3: " in plain(segments)


# --- loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("qwen_vl", "1<|im_end|>2<|im_end|>"),
        ("llama3", "1<|eot_id|>2<|eot_id|>"),
        ("mistral", " 1</s> 2</s>"),
        ("gemma", "1<end_of_turn>2<end_of_turn>"),
        ("pixtral", "1</s>2</s>"),
        ("tools", "1<|im_end|>2<|im_end|>"),
        ("qwen3", "1<|im_end|><think>\n\n</think>\n\n2<|im_end|>"),
    ],
)
def test_the_loss_is_on_what_assistants_write_and_its_end(name: str, loss: str) -> None:
    assert in_loss(open_named(name).segments(CONVERSATIONS["turns"])) == loss


def test_prefixes_find_the_same_loss_as_generation_blocks() -> None:
    source = (Path(__file__).parents[2] / "indexer" / "templates" / "chatml.jinja").read_text(encoding="utf-8")
    without = from_source(re.sub(r"\{%- (end)?generation -%\}", "", source))
    for record in CONVERSATIONS.values():
        assert without.segments(record) == chatml().segments(record)


def test_what_ends_the_conversation_is_not_looked_for_behind_earlier_turns() -> None:
    template = open_named("phi3")  # writes EOS behind the last message only
    assert in_loss(template.segments(CONVERSATIONS["turns"])) == "1<|end|>2<|end|></s>"


def test_thinking_that_only_the_last_turn_keeps() -> None:
    thinking = {"reasoning_content": "2 + 2"}
    record = chat(("user", "a"), ("assistant", "2 + 4", thinking), ("user", "b"), ("assistant", "4", thinking))
    assert in_loss(open_named("qwen3").segments(record)) == "2 + 4<|im_end|><think>\n2 + 2\n</think>\n\n4<|im_end|>"


def test_a_turn_of_many_places_to_try_is_found() -> None:
    """The last turn keeps a beginning; where it ends is looked for at every `a`, up to the far end of the same text."""
    template = from_source(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if loop.last and m.role == 'assistant' %}{{ start }}-{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        content="string",
        variables={"start": "a" * 100_000},
    )
    text = "a" * 50_000 + "b"
    record = chat(("user", "x"), ("assistant", text), ("user", "y"), ("assistant", "z"))
    assert in_loss(template.segments(record)) == f"{text}<|im_end|>{'a' * 100_000}-z<|im_end|>"


def test_a_turn_that_cannot_be_found_again_is_refused() -> None:
    template = from_source(
        "{% for m in messages %}<|im_start|>{{ m.content if loop.last else m.content | upper }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}",
        content="string",
    )
    assert in_loss(template.segments(chat(("assistant", "ab")))) == "ab<|im_end|>"
    with pytest.raises(TemplateFailure, match=r"message 0: .*\{% generation %\}"):
        template.segments(chat(("assistant", "ab"), ("user", "c")))


def test_a_prompt_that_is_no_prefix_leaves_the_header_in_the_loss() -> None:
    template = from_source(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    assert in_loss(template.segments(CONVERSATIONS["short"])) == "<|im_start|>assistant\nhello<|im_end|>"


def test_an_assistant_may_begin() -> None:
    assert in_loss(open_named("qwen_vl").segments(chat(("assistant", "I begin")))).endswith("I begin<|im_end|>")


def test_images_are_never_in_the_loss() -> None:
    segments = chatml().segments(chat(("assistant", ["see ", 0, " there"])))
    assert in_loss(segments) == "see  there<|im_end|>"
    assert Image(0) in segments


def test_a_generation_block_inside_a_macro_is_refused() -> None:
    template = from_source(
        "{% macro say(m) %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}",
        content="string",
    )
    with pytest.raises(TemplateFailure, match="inside a macro"):
        template.segments(CONVERSATIONS["short"])


# --- documents ----------------------------------------------------------------------------------------------------

DOCUMENT = {"id": "x", "content": [part_of(p) for p in ("a</s>", 0, "", " b")], "images": [], "origin": {}, "extra": {}}
DOCUMENT_SEGMENTS = [Token("<s>", False), Text("a</s>", True), Image(0), Text(" b", True), Token("</s>", True)]


@pytest.mark.parametrize("name", ["document", "chatml"])
def test_documents_stand_between_bos_and_eos_in_every_profile(name: str) -> None:
    template = open_template(TemplateSpec(name=name, bos="<s>", eos="</s>"), SPECIALS)
    assert template.segments(DOCUMENT) == DOCUMENT_SEGMENTS


def test_documents_without_bos_and_eos() -> None:
    assert open_template(TemplateSpec(name="document"), SPECIALS).segments(DOCUMENT) == DOCUMENT_SEGMENTS[1:-1]


def test_conversations_as_documents_are_joined_by_a_blank_line() -> None:
    record = chat(("user", [0, "hi"]), ("assistant", []), ("user", ""), ("assistant", "hello"))
    segments = open_template(TemplateSpec(name="document", eos="</s>"), SPECIALS).segments(record)
    assert segments == [Image(0), Text("hi", True), Text("\n\n", True), Text("hello", True), Token("</s>", True)]


# --- text never becomes structure ---------------------------------------------------------------------------------

HOSTILE = [
    *SPECIALS,
    QWEN_IMAGE,
    *("<image>", "<|", "|>", "<|im_", "im_end", "im_end|>", "end|>", "<", ">", "<|im_end|", "s", "/s", "[", "]", "INST"),
    *("<|im_<|im_end|>end|>", "<|im_end<|im_start|>", "\ufdd0", "\ufdd1", "\\ufdd0", "\ue000", " ", "\n", "a", "word", "é"),
]
hostile_text = st.lists(st.sampled_from(HOSTILE), max_size=6).map("".join)
hostile_parts = st.lists(hostile_text | st.just(0), min_size=1, max_size=4)


def numbered(turns: list[list[str | int]]) -> list[list[str | int]]:
    count = iter(range(1000))
    return [[part if isinstance(part, str) else next(count) for part in parts] for parts in turns]


def harmless(turns: list[list[str | int]]) -> list[list[str | int]]:
    return [[part if isinstance(part, int) else "w" if part.strip() else part for part in parts] for parts in turns]


def alternating(turns: list[list[str | int]]) -> dict[str, Any]:
    return chat(*((("user", "assistant")[i % 2], parts) for i, parts in enumerate(turns)))


# Parts of one message stand side by side in these, which tempts them most; the others trim.
@pytest.mark.parametrize("name", ["chatml", "qwen_vl", "qwen_numbered", "gemma", "llama3", "mistral"])
@settings(max_examples=120, deadline=None)
@given(turns=st.lists(hostile_parts, min_size=1, max_size=4).map(numbered))
def test_texts_never_become_structure(name: str, turns: list[list[str | int]]) -> None:
    if name == "chatml":
        template = chatml()
    else:
        template = open_named("qwen_vl", variables={"number_images": True}) if name == "qwen_numbered" else open_named(name)
    segments = template.segments(alternating(turns))
    assert tokens(segments) == tokens(template.segments(alternating(harmless(turns))))
    if name in ("chatml", "qwen_vl"):
        texts = "".join(part for parts in turns for part in parts if isinstance(part, str))
        scaffold = plain(template.segments(alternating([[p for p in parts if p != ""] for parts in blank(turns)])))
        assert len(plain(segments)) == len(scaffold) + len(texts)
        assert all(str(part) in plain(segments) for parts in turns for part in parts if isinstance(part, str))


def blank(turns: list[list[str | int]]) -> list[list[str | int]]:
    return [["" if isinstance(part, str) else part for part in parts] or [""] for parts in turns]


@st.composite
def torn_words(draw: st.DrawFn) -> tuple[str, str, str]:
    """What stands before a text, the text, and what stands behind it; often a special string in three pieces."""
    word = draw(st.sampled_from([*SPECIALS, QWEN_IMAGE]))
    start, end = sorted((draw(st.integers(0, len(word))), draw(st.integers(0, len(word)))))
    filling = draw(st.sampled_from(["", "", " ", "x", "a longer text without an end"]))
    text = draw(
        st.sampled_from([word[start:end], word[start:] + filling, filling + word[:end], word[start:] + filling + word[:end]])
    )
    return draw(hostile_text) + word[:start], text, word[end:] + draw(hostile_text)


@settings(max_examples=500, deadline=None)
@given(pieces=torn_words() | st.tuples(hostile_text, hostile_text, hostile_text))
def test_the_guard_is_right_about_every_neighbour(pieces: tuple[str, str, str]) -> None:
    """A protected text completes nothing and holds nothing, whatever stands beside it, and loses nothing."""
    before, text, after = pieces
    words = [*SPECIALS, "<image>"]
    guard, pattern, marker = Guard(words), words_pattern(words), "\ufdef"
    protected = guard.protect(text, marker)
    assert protected.replace(marker, "") == text
    assert protected.strip().replace(marker, "") == text.strip()
    assert (protected == text) == guard.is_clean(text)
    start, end = len(before), len(before) + len(protected)
    for match in pattern.finditer(before + protected + after):
        assert match.end() <= start or match.start() >= end or not text.strip()


@pytest.mark.parametrize("text", ["im_end", " im_end ", "im_end|>", "m", "_"])
def test_a_template_that_writes_half_a_token_around_a_text(text: str) -> None:
    template = from_source("{% for m in messages %}<|{{ m.content }}|>|>{% endfor %}", content="string")
    assert template.segments(chat(("user", text))) == [Text(f"<|{text}|>|>", False)]


def test_roles_and_names_are_the_templates_vocabulary() -> None:
    template = from_source("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}", content="string")
    assert tokens(template.segments(chat(("user", "x"), ("system", "<|user|>")))) == ["<|user|>", "<|system|>"]
    assert tokens(template.segments(chat(("<|end|>", "x"), ("end|><|end", "x")))) == []


@pytest.mark.parametrize("place", ["key", "value", "name", "reasoning", "tools"])
def test_extra_fields_never_become_structure(place: str) -> None:
    bad = "x<|im_end|>\ufdd0\ufdd1<image>"
    fields: dict[str, Any] = {"tool_calls": [{"function": {"name": "look", "arguments": {"q": "v"}}}]}
    record = chat(("user", "hi"), ("assistant", "yes", fields), ("tool", "seen", {"name": "look"}))
    good = tokens(open_named("tools").segments(record | {"extra": {"tools": TOOLS}}))
    tools = TOOLS
    if place == "key":
        fields["tool_calls"][0]["function"]["arguments"] = {bad: 1}
    elif place == "value":
        fields["tool_calls"][0]["function"]["arguments"] = {"q": [bad]}
    elif place == "name":
        fields["tool_calls"][0]["function"]["name"] = bad
    elif place == "tools":
        tools = [{"function": {"name": bad}}]
    else:
        fields["thinking"] = bad
        good[good.index("<|im_end|>", 4) : 0] = []
    segments = open_named("tools").segments(record | {"extra": {"tools": tools}})
    assert [t for t in tokens(segments) if t not in ("<think>", "</think>")] == good
    assert bad in plain(segments)


def test_markers_written_as_escapes_are_taken_out_too() -> None:
    template = from_source("{% for m in messages %}{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}", content="string")
    assert template.segments(chat(("user", "<|im_end|>"))) == [Text('"<|im_end|>"', False)]
    template = from_source("{% for m in messages %}{{ [m.content] }}{% endfor %}", content="string")
    assert template.segments(chat(("user", "<|im_end|>"))) == [Text("['<|im_end|>']", False)]


def test_markers_are_none_of_the_templates_own_characters() -> None:
    template = from_source("{% for m in messages %}\ufdd0{{ '\\ufdd1' }}{{ m.content }}{% endfor %}", content="string")
    assert template.segments(chat(("user", "<|im_end|>"))) == [Text("\ufdd0\ufdd1<|im_end|>", False)]


def test_assistants_may_write_the_tokens_they_are_allowed() -> None:
    record = chat(("user", "what does </think> do?"), ("assistant", "<think>hm</think>\n\nyes</s>"))
    closed = open_named("tools").segments(record)
    assert tokens(closed) == ["<|im_start|>", "<|im_end|>"] * 2
    assert "<think>hm</think>\n\nyes</s>" in plain(closed)
    allowed = chatml(assistant_tokens=("<think>", "</think>")).segments(record)
    assert tokens(allowed) == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|im_end|>"]
    # and templates that look for them see them
    assert in_loss(open_named("tools", assistant_tokens=["<think>", "</think>"]).segments(record)) == "yes</s><|im_end|>"


@settings(max_examples=200, deadline=None)
@given(words=st.sets(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=9), text=st.text("ab<| ", max_size=40))
def test_special_strings_are_found_leftmost_longest(words: set[str], text: str) -> None:
    found, position = [], 0
    while position < len(text):
        longest = max((w for w in words if text.startswith(w, position)), key=len, default="")
        if longest:
            found.append(longest)
        position += len(longest) or 1
    assert words_pattern(words).findall(text) == found


STRIPPING = ["[L]", "[R]", "[LR]", "[N]", " ", "\n", "\t", "\u3000", "\x1c", "a"]


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.sampled_from(STRIPPING), max_size=12).map("".join))
def test_white_space_beside_tokens_goes_as_in_tokenizers(text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    flags = {"[L]": Flags(True, False), "[R]": Flags(False, True), "[LR]": Flags(True, True), "[N]": Flags()}
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(t, lstrip=f.lstrip, rstrip=f.rstrip, normalized=False, special=True) for t, f in flags.items()]
    )
    encoding = tokenizer.encode(text)
    theirs = set()
    for start, end in encoding.offsets:
        theirs |= set(range(start, end))
    segments = Splitter(flags, "<image>").split(text, [], [], None)
    assert tokens(segments) == [tokenizer.id_to_token(i) for i in encoding.ids]
    assert plain(segments) == "".join(c for i, c in enumerate(text) if i not in theirs)


def test_a_special_token_of_one_character() -> None:
    template = open_template(
        TemplateSpec(name="jinja", text="{% for m in messages %}◆{{ m.content }}{% endfor %}", content="string"), {"◆": Flags()}
    )
    assert template.segments(chat(("user", "a◆b◆"))) == [Token("◆", False), Text("a◆b◆", False)]


# --- probing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "placeholder", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "<image>", "<image>x"),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", "<image>", '"<image>x"'),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text or '[IMG]' }}{% endfor %}{% endfor %}", "[IMG]", "[IMG]x"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "[IMG]", None),
    ],
)
def test_the_form_of_content_is_found_by_a_probe(text: str, placeholder: str, expected: str | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match=r"renders no conversation .*content: parts"):
            from_source(text, placeholder=placeholder)
    else:
        segments = from_source(text, placeholder=placeholder).segments(chat(("user", [0, "x"])))
        assert written(segments, placeholder) == expected


def test_tool_messages_have_a_form_of_their_own() -> None:
    text = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% elif m.role == 'tool' %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"
    )
    assert plain(from_source(text).segments(chat(("user", "a"), ("tool", "b")))) == "ab"
    assert plain(from_source(SAY).segments(chat(("user", "a"), ("tool", "b")))) == "ab"


def test_a_wrong_placeholder_is_named() -> None:
    with pytest.raises(UsageError, match=r"writes '<\|vision_start\|><\|image_pad\|><\|vision_end\|>' for an image, not"):
        from_source(source_of("qwen_vl"), placeholder="<image>")


def test_a_clock_needs_a_date() -> None:
    with pytest.raises(UsageError, match="strftime_now"):
        open_named("llama3", date=None)
    late = from_source("{% for m in messages %}{{ m.content }}{% if m.ask %}{{ strftime_now('%Y') }}{% endif %}{% endfor %}")
    with pytest.raises(TemplateFailure, match="strftime_now"):
        late.segments(chat(("user", "x", {"ask": True})))
    assert "26 Jul 2025" in plain(open_named("llama3").segments(CONVERSATIONS["short"]))


# --- failures -----------------------------------------------------------------------------------------------------

SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"
IF_BAD = SAY + "{% if messages[0].bad %}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (IF_BAD + "{{ raise_exception('not this') }}{% endif %}", "refuses it: not this"),
        (IF_BAD + "{{ nothing.at.all }}{% endif %}", "UndefinedError: 'nothing' is undefined"),
        (IF_BAD + "{{ 1 + 'a' }}{% endif %}", "TypeError: "),
        (IF_BAD + "{{ range(10 ** 9) }}{% endif %}", "OverflowError: "),
        (IF_BAD + "{{ 'a' * 10 ** 9 }}{% endif %}", "OverflowError: "),
        (IF_BAD + "{{ 9 ** 999999999 }}{% endif %}", "OverflowError: "),
        (
            IF_BAD + "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif %}",
            "OverflowError: its ranges",
        ),
        (
            IF_BAD + "{% for i in range(99) %}{{ 'a' * 1000000 }}{% endfor %}{% endif %}",
            "more than 67108864",
        ),
        (IF_BAD + "<image>{% endif %}", "placeholder '<image>' 2 times for 1 images"),
    ],
)
def test_a_record_that_cannot_be_rendered_fails_alone(text: str, message: str) -> None:
    template = from_source(text)
    with pytest.raises(TemplateFailure, match=re.escape(message)) as caught:
        template.segments(chat(("user", ["x", 0], {"bad": True})))
    assert len(str(caught.value)) < 400
    assert tokens(template.segments(chat(("user", ["x", 0])))) == [0]


def test_long_messages_of_templates_are_cut() -> None:
    template = from_source(IF_BAD + "{{ raise_exception('x' * 999) }}{% endif %}")
    with pytest.raises(TemplateFailure, match=r"^the template refuses it: x{200}$"):
        template.segments(chat(("user", "hi", {"bad": 1})))


def test_roles_out_of_order_fail_with_the_templates_words() -> None:
    with pytest.raises(TemplateFailure, match="roles must alternate, found assistant"):
        open_named("mistral").segments(chat(("assistant", "I begin")))


def test_chatml_does_not_drop_tool_calls() -> None:
    with pytest.raises(TemplateFailure, match="no form for tool calls"):
        chatml().segments(TALK_WITH_TOOLS)


def test_tools_that_are_no_list() -> None:
    with pytest.raises(TemplateFailure, match=r"extra.tools: found 'look'"):
        open_named("tools").segments(chat(("user", "x"), tools="look"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "jinja", "text": "{% for m in messages %}\n{{ m. }}{% endfor %}"}, "mistake in line 2"),
        ({"name": "jinja"}, "`jinja` needs it"),
        ({"name": "chatml", "text": "x"}, "for `jinja` alone"),
        ({"name": "llama"}, "found 'llama', expected one of document"),
        ({"name": "chatml", "content": "list"}, "found 'list'"),
        (
            {"name": "chatml", "variables": {"a": 1}, "content": "string"},
            "template 'chatml': variables: found {'a': 1}, but that is for variables of a Jinja chat template and changes "
            "nothing here: leave it out; template 'chatml': content: found 'string', but that is for the form in which",
        ),
        (
            {"name": "chatml", "date": "2025-01-01"},
            "date: found '2025-01-01', but that is for the day that a Jinja chat template",
        ),
        ({"name": "document", "variables": {"a": 1}}, "template 'document': variables: found {'a': 1}, but"),
        ({"name": "document", "content": "parts"}, "content: found 'parts', but"),
        ({"name": "document", "date": "2025-01-01"}, "date: found '2025-01-01', but"),
        ({"name": "document", "placeholder": "<image>"}, "placeholder: found '<image>', but that is for what a chat template"),
        ({"name": "document", "assistant_tokens": ("<think>",)}, "assistant_tokens: found ('<think>',), but that is for special"),
        ({"name": "chatml", "placeholder": ""}, "placeholder"),
        ({"name": "chatml", "date": "today"}, "expected YYYY-MM-DD"),
        ({"name": "chatml", "variables": {"x": {1}}}, "JSON"),
        ({"name": "document", "bos": "<BOS>"}, "bos: '<BOS>' is not a special token"),
        ({"name": "chatml", "assistant_tokens": ("<x>",)}, "assistant_tokens"),
    ],
)
def test_wrong_specs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        open_template(TemplateSpec(**changes), SPECIALS)


def test_chatml_needs_its_tokens() -> None:
    with pytest.raises(UsageError, match=r"'<\|im_start\|>' is not a special token .* which has </s>"):
        open_template(TemplateSpec(name="chatml"), {"</s>": Flags()})


# --- fingerprints and files ---------------------------------------------------------------------------------------


def test_the_fingerprint_tells_what_changes_the_segments() -> None:
    def of(specials: Mapping[str, Any] = SPECIALS, **changes: Any) -> str:
        return str(open_template(TemplateSpec(**({"name": "chatml"} | changes)), specials).fingerprint)

    variants = [
        of(),
        of(bos="<s>"),
        of(eos="</s>"),
        of(placeholder="[IMG]"),
        of(name="jinja", text=source_of("mistral"), eos="</s>", date="2025-01-01"),
        of(name="jinja", text=source_of("mistral"), eos="</s>", variables={"a": 1}),
        of(assistant_tokens=("<think>",)),
        of(SPECIALS | {"<new>": Flags()}),
        of(SPECIALS | {"<s>": Flags(lstrip=True)}),
        of(name="jinja", text=source_of("mistral"), eos="</s>"),
        of(name="document"),
        of(name="document", bos="<s>"),
    ]
    assert len(set(variants)) == len(variants)
    assert variants[0] == of(dict(reversed(SPECIALS.items())))
    assert len(variants[0]) == 32


def test_chat_templates_are_found_in_files_and_folders(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A\n"}]
    (tmp_path / "x.jinja").write_bytes(b"A\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "other.json").write_text(json.dumps({"chat_template": "A\n"}))
    for path in (tmp_path, *tmp_path.iterdir()):
        assert read_chat_template(str(path)) == "A\n"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "newer"}))
    assert read_chat_template(str(tmp_path)) == "newer"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jinja", b"\xff", "not UTF-8"),
        ("tokenizer_config.json", b'{"chat_template": "', "not JSON (cut?)"),
        ("tokenizer_config.json", b"{}", "no chat_template in it"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag", "template": ""}]}', "no template named default, only rag"),
        ("tokenizer_config.json", b'{"chat_template": 1}', "chat_template is int"),
        ("gone.jinja", None, "cannot be read: No such file"),
    ],
)
def test_files_without_a_chat_template(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_chat_template(str(tmp_path / name))


def test_folders_without_a_chat_template(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none of these is there"):
        read_chat_template(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match="none of these holds a chat_template"):
        read_chat_template(str(tmp_path))
