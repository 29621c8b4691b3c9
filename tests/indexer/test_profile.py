"""Profiles: a fingerprint that changes with whatever changes a length, the round trip through a dataset, and wrong use."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import processors
import pytest

from indexer.image_layouts import DEFAULTS
from indexer.image_rules import PRESETS
from indexer.profile import (
    ImageSettings,
    OpenProfile,
    Profile,
    TemplateSettings,
    TokenizerSettings,
    counted_with,
    difference,
    open_profile,
    open_stored,
    profile_names,
    read_profile,
    write_profile,
)
from packer.format import layout
from packer.format.errors import FormatError, UsageError
from packer.storage import LocalStorage
from pipelines.recipe_profiles import ProfileModel

QWEN_VL = (Path(__file__).parent / "data" / "templates" / "qwen_vl.jinja").read_text()
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
RECORD = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, {"type": "image", "image": 0}]}],
    "images": [{"width": 60, "height": 40}],
}
OWN_RULE = """
from indexer.image_rules import image_counts

def fixed(sizes, tokens=7):
    return image_counts(sizes, image_tokens=tokens, patches=tokens, grid=(1, 1), grid_unit="tiles")

class Fixed:
    def __call__(self, sizes):
        return fixed(sizes)

instance = Fixed()
"""
OWN_LAYOUT = {"layout": "wrapped", "layout_parameters": {"token": "<|image_pad|>", "before": [], "after": []}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return str(processors.write_tokenizer(tmp_path))


def settings(
    *,
    name: str = "small",
    tokenizer: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
    images: Mapping[str, Any] | None = None,
    sequence_lengths: tuple[int, ...] = (),
) -> Profile:
    """A profile of Qwen's template and rule, some of its settings replaced."""
    return Profile(
        name=name,
        tokenizer=TokenizerSettings(**(tokenizer or {})),
        template=TemplateSettings(**({"name": "jinja", "text": QWEN_VL} | dict(template or {}))),
        images=ImageSettings(**({"rule": "qwen2_5_vl"} | dict(images or {}))),
        sequence_lengths=list(sequence_lengths),
    )


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a module `small_rules` with a rule, as a user would, and edits it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> None:
        (tmp_path / "small_rules.py").write_text(source)
        sys.modules.pop("small_rules", None)
        importlib.invalidate_caches()

    write(OWN_RULE)
    yield write
    sys.modules.pop("small_rules", None)


# --- the fingerprint ------------------------------------------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "special_tokens": {"tokenizer": {"special_tokens": ["<extra>"]}},
    "other ids of special_tokens": {"tokenizer": {"special_tokens": {"<extra>": 5000}}},
    "template": {"template": {"text": QWEN_VL.replace("helpful", "brief")}},
    "name of template": {"template": {"name": "chatml", "text": None}},
    "documents": {"template": {"name": "document", "text": None}},
    "bos": {"template": {"bos": "<|endoftext|>"}},
    "eos": {"template": {"eos": "<|endoftext|>"}},
    "placeholder": {"template": {"placeholder": "<|image_pad|>"}},
    "variables": {"template": {"variables": {"number_images": True}}},
    "date": {"template": {"date": "2025-07-26"}},
    "content": {"template": {"content": "string"}},
    "assistant_tokens": {"template": {"assistant_tokens": ["<|im_start|>"]}},
    "no rule": {"images": {"rule": None}, "template": {"placeholder": QWEN_IMAGE}},
    "rule": {"images": {"rule": "qwen3_vl"}},
    "layout": {"images": {"layout_parameters": {"before": []}}},
    "token": {"images": {"layout_parameters": {"token": "<|video_pad|>"}}},
}


def test_the_fingerprint_changes_with_what_changes_a_length(tokenizer: str, tmp_path: Path) -> None:
    found = {name: open_profile(settings(**changes), tokenizer).fingerprint for name, changes in OTHERS.items()}
    found["as it was"] = open_profile(settings(), tokenizer).fingerprint
    other = processors.byte_level_tokenizer(processors.QWEN_TOKENS.values(), vocab_size=300)
    other.save(str(tmp_path / "other.json"))
    found["tokenizer"] = open_profile(settings(), str(tmp_path / "other.json")).fingerprint
    documents = {"name": "document", "text": None}
    for end in ("bos", "eos"):
        changed = settings(template={**documents, end: "<|endoftext|>"})
        found[f"{end} of documents"] = open_profile(changed, tokenizer).fingerprint
    assert len(set(found.values())) == len(found)
    assert all(re.fullmatch("[0-9a-f]{32}", fingerprint) for fingerprint in found.values())


def test_the_fingerprint_changes_with_nothing_else(tokenizer: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "a name.json"
    elsewhere.parent.mkdir()
    shutil.copy(tokenizer, elsewhere)
    same = [
        open_profile(settings(), str(elsewhere)),
        open_profile(settings(name="other", sequence_lengths=(4096,)), tokenizer),
        open_profile(settings(images={"parameters": {"patch_size": 14}}), tokenizer),
        open_profile(settings(images={"rule": "qwen2_5_vl_max1280", "parameters": {"max_pixels": 12845056}}), tokenizer),
        open_profile(settings(images={"layout": "wrapped"}), tokenizer),
        open_profile(settings(template={"content": "parts"}), tokenizer),
        open_profile(settings(tokenizer={"kind": "huggingface"}), tokenizer),
    ]
    assert {profile.fingerprint for profile in same} == {open_profile(settings(), tokenizer).fingerprint}


def other_value(value: Any, kind: Any) -> Any:
    """Another value of a parameter's type; None where a profile cannot change it."""
    kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    if bool in kinds:
        return not value
    return (value or 1) + 1 if int in kinds or float in kinds else None


def document_profile(**images: Any) -> Profile:
    template = TemplateSettings(name="document")
    return Profile(name="small", tokenizer=TokenizerSettings(), template=template, images=ImageSettings(**images))


@pytest.mark.parametrize("rule", PRESETS)
def test_the_fingerprint_changes_with_every_parameter_of_a_rule(rule: str, tokenizer: str) -> None:
    values = dataclasses.asdict(PRESETS[rule].rule)  # type: ignore[call-overload]
    kinds = get_type_hints(type(PRESETS[rule].rule))
    changed = {name: other_value(value, kinds[name]) for name, value in values.items()}
    found = [
        open_profile(document_profile(rule=rule, parameters={name: value}, **OWN_LAYOUT), tokenizer).fingerprint
        for name, value in changed.items()
        if value is not None
    ]
    assert found
    assert open_profile(document_profile(rule=rule, **OWN_LAYOUT), tokenizer).fingerprint not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("rule", ["qwen3_vl", "pixtral_hf", "smolvlm_2b", "gemma3", "llama4", "minicpmv_2_6"])
def test_the_fingerprint_changes_with_every_string_of_a_layout(rule: str, tmp_path: Path) -> None:
    image_layout: Any = DEFAULTS[rule].layout
    file = str(processors.write_tokenizer(tmp_path, ["<|other|>", *image_layout.required()]))
    values = {name: value for name, value in dataclasses.asdict(image_layout).items() if name not in ("tag_tokens", "texts")}
    changed = {
        name: not value if isinstance(value, bool) else "<|other|>" if isinstance(value, str) else ["<|other|>"]
        for name, value in values.items()
    }
    found = [
        open_profile(document_profile(rule=rule, layout_parameters={name: value}), file).fingerprint
        for name, value in changed.items()
    ]
    assert open_profile(document_profile(rule=rule), file).fingerprint not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["fixed", "instance"])
def test_the_fingerprint_of_an_own_rule_is_that_of_its_file(name: str, tokenizer: str, own_rule: Callable[[str], None]) -> None:
    def opened(**images: Any) -> OpenProfile:
        return open_profile(document_profile(rule=f"small_rules:{name}", **OWN_LAYOUT, **images), tokenizer)

    before = opened()
    assert opened().fingerprint == before.fingerprint
    assert before.encoder.lengths([RECORD])[0].num_image_tokens == 7  # type: ignore[union-attr]
    own_rule(OWN_RULE + "\n# edited\n")
    after = opened()
    assert after.fingerprint != before.fingerprint
    assert difference(before, after).startswith("image_rule.file_digest: found ")
    if name == "fixed":
        assert opened(parameters={"tokens": 8}).fingerprint != after.fingerprint


def test_the_file_of_an_own_rule_is_also_the_one_it_comes_from(
    tokenizer: str, tmp_path: Path, own_rule: Callable[[str], None]
) -> None:
    front = "from functools import lru_cache\nfrom small_rules import fixed\nrule = lru_cache(fixed)\n"
    found = set()
    for its_text, own_text in [(front, OWN_RULE), (front, OWN_RULE + "# edited"), (front + "# edited", OWN_RULE)]:
        (tmp_path / "front.py").write_text(its_text)
        sys.modules.pop("front", None)
        own_rule(own_text)
        found.add(open_profile(document_profile(rule="front:rule", **OWN_LAYOUT), tokenizer).fingerprint)
    sys.modules.pop("front", None)
    assert len(found) == 3


# --- in a dataset ---------------------------------------------------------------------------------------------------------


def stored(folder: Path, profile: Profile, tokenizer: str) -> LocalStorage:
    """A dataset that holds a profile."""
    storage = LocalStorage(str(folder), fsync=False)
    write_profile(storage, open_profile(profile, tokenizer), tokenizer, Path(tokenizer).read_bytes())
    return storage


def test_a_dataset_opens_its_profile_by_itself_wherever_it_lies(tokenizer: str, tmp_path: Path) -> None:
    profile = settings(
        tokenizer={"special_tokens": {"<extra>": 600}},
        template={"variables": {"number_images": True}},
        images={"parameters": {"max_pixels": 4000}},
        sequence_lengths=(64,),
    )
    opened = open_profile(profile, tokenizer)
    storage = stored(tmp_path / "dataset", profile, tokenizer)
    Path(tokenizer).unlink()
    shutil.move(tmp_path / "dataset", tmp_path / "moved")
    moved = LocalStorage(str(tmp_path / "moved"))
    assert profile_names(storage) == []
    assert profile_names(moved) == ["small"]
    again = open_stored(moved, "small")
    assert (again.profile, again.fingerprint, again.identity) == (profile, opened.fingerprint, opened.identity)
    assert again.encoder.encode(RECORD).ids.tolist() == opened.encoder.encode(RECORD).ids.tolist()
    found = read_profile(moved, "small")
    assert found is not None
    assert (found.profile, found.fingerprint, found.identity) == (profile, opened.fingerprint, opened.identity)
    assert (found.tokenizer_file, found.tokenizer_origin) == ("index/small/tokenizer.json", tokenizer)


def test_the_same_profile_is_written_the_same(tokenizer: str, tmp_path: Path, tree_digest: Callable[[Path], Any]) -> None:
    for name in ("one", "two"):
        stored(tmp_path / name, settings(), tokenizer)
    assert tree_digest(tmp_path / "one") == tree_digest(tmp_path / "two")


def test_a_difference_names_both_values(tokenizer: str) -> None:
    old = open_profile(settings(), tokenizer)
    new = open_profile(settings(images={"parameters": {"patch_size": 16}, "layout_parameters": {"after": []}}), tokenizer)
    assert difference(old, new) == (
        "image_layout.after: found [], the index has ['<|vision_end|>']; image_rule.patch_size: found 16, the index has 14"
    )
    no_rule = open_profile(settings(images={"rule": None}, template={"placeholder": QWEN_IMAGE}), tokenizer)
    assert "image_rule.patch_size: found None, the index has 14" in difference(old, no_rule)
    assert difference(old, old) == ""


BRIEF = QWEN_VL.replace("helpful", "brief")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": {"special_tokens": ["<x>"]}}, "tokenizer.special_tokens: found ['<x>'], the index has []"),
        ({"template": {"bos": "<|endoftext|>"}}, "template.bos: found '<|endoftext|>', the index has None"),
        ({"template": {"date": "2025-07-26"}}, "template.date: found '2025-07-26', the index has None"),
        ({"template": {"variables": {"a": 1}}}, "template.variables: found {'a': 1}, the index has {}"),
        (
            {"template": {"placeholder": "<|image_pad|>"}},
            f"template.placeholder: found '<|image_pad|>', the index has {QWEN_IMAGE!r}",
        ),
        ({"template": {"name": "chatml", "text": None}}, "template.name: found 'chatml', the index has 'jinja'"),
        ({"template": {"text": BRIEF + "\n"}}, "the template's text: first differing line "),
        ({"template": {"text": QWEN_VL + "\nmore"}}, ": found 'more', the index has its end"),
    ],
)
def test_a_difference_names_the_setting(changes: dict[str, Any], message: str, tokenizer: str) -> None:
    found = difference(open_profile(settings(), tokenizer), open_profile(settings(**changes), tokenizer))
    assert message in found
    assert "; " not in found


def test_a_difference_of_texts_shows_where_they_differ(tokenizer: str) -> None:
    old, new = (open_profile(settings(template={"text": text}), tokenizer) for text in (QWEN_VL, BRIEF))
    found = re.fullmatch(r"the template's text: first differing line (\d+): found (.*), the index has (.*)", difference(old, new))
    assert found is not None
    assert QWEN_VL.split("\n")[int(found[1]) - 1] != BRIEF.split("\n")[int(found[1]) - 1]
    assert "brief" in found[2]
    assert "helpful" in found[3]


def counted(folder: Path, **changes: Any) -> None:
    """Edit what a stored profile says of the libraries it was counted with."""
    file = folder / layout.profile_file("small")
    document = json.loads(file.read_bytes())
    file.write_text(json.dumps(document | {"counted_with": document["counted_with"] | changes}))


def test_libraries_that_give_other_ids_are_refused_with_both_versions(tokenizer: str, tmp_path: Path) -> None:
    storage = stored(tmp_path / "dataset", settings(), tokenizer)
    known = read_profile(storage, "small")
    assert known is not None
    here = known.counted_with.libraries
    assert list(here) == ["tokenizers", "jinja2"]
    versions = {"tokenizers": "0.1.2", "jinja2": "3.0"}
    counted(tmp_path / "dataset", libraries=versions)
    assert open_stored(storage, "small").fingerprint == known.fingerprint
    for probe in ("text", "conversation"):
        stored(tmp_path / "dataset", settings(), tokenizer)
        counted(tmp_path / "dataset", libraries=versions, **{f"probe_{probe}": "0" * 32})
        expected = (
            f"profile 'small': counted with tokenizers 0.1.2 and jinja2 3.0, here tokenizers {here['tokenizers']} and jinja2 "
            f"{here['jinja2']} gives other ids for a fixed {probe}"
        )
        with pytest.raises(UsageError, match=re.escape(expected)):
            open_stored(storage, "small")


def test_the_probe_sees_what_the_fingerprint_does(tokenizer: str) -> None:
    """Another template or vocabulary gives another digest: the probe is really rendered and tokenized."""
    first, chatml = (counted_with(open_profile(settings(**c), tokenizer)) for c in ({}, OTHERS["name of template"]))
    assert first.probe_text == chatml.probe_text
    assert first.probe_conversation != chatml.probe_conversation
    assert list(counted_with(open_profile(document_profile(), tokenizer)).libraries) == ["tokenizers"]
    file = str(Path(tokenizer).with_name("other.json"))
    processors.byte_level_tokenizer(processors.QWEN_TOKENS.values(), vocab_size=300).save(file)
    assert counted_with(open_profile(settings(), file)).probe_text != first.probe_text


def test_a_path_opens_a_stored_profile(tokenizer: str, tmp_path: Path) -> None:
    storage = stored(tmp_path / "dataset", settings(), tokenizer)
    for dataset in (str(tmp_path / "dataset"), (tmp_path / "dataset").as_uri()):
        assert open_stored(dataset, "small").fingerprint == open_stored(storage, "small").fingerprint


def test_another_way_of_counting_is_refused_with_both_values(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = stored(tmp_path / "dataset", settings(), tokenizer)
    monkeypatch.setattr("indexer.profile.opening.COUNTING_VERSION", 2)
    with pytest.raises(UsageError, match=r"profile 'small': counted by counting_version: found 2, the index has 1: index again"):
        open_stored(storage, "small")


def test_another_tokenizer_in_the_place_of_the_copy_is_refused(tokenizer: str, tmp_path: Path) -> None:
    storage = stored(tmp_path / "dataset", settings(), tokenizer)
    other = processors.byte_level_tokenizer(processors.QWEN_TOKENS.values(), vocab_size=300)
    other.save(str(tmp_path / "dataset" / "index" / "small" / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"profile 'small': counted by the tokenizer's file: found other contents than "):
        open_stored(storage, "small")


def test_a_profile_or_its_tokenizer_that_is_not_there(tokenizer: str, tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "dataset"), fsync=False)
    assert read_profile(storage, "small") is None
    with pytest.raises(UsageError, match=r"found no profile 'smal' in .*dataset; its profiles: none"):
        open_stored(storage, "smal")
    stored(tmp_path / "dataset", settings(), tokenizer)
    with pytest.raises(UsageError, match=r"found no profile 'smal' in .*dataset; its profiles: small"):
        open_stored(storage, "smal")
    copy = tmp_path / "dataset" / "index" / "small" / "tokenizer.json"
    copy.write_bytes(copy.read_bytes()[:100])
    with pytest.raises(UsageError, match=re.escape(f"profile 'small': tokenizer file {copy} is cut or damaged JSON")):
        open_stored(storage, "small")
    copy.unlink()
    with pytest.raises(FormatError, match=re.escape(f"{copy}: found no file, the profile names it")):
        open_stored(storage, "small")


def test_an_own_rule_that_was_edited_is_refused(tokenizer: str, tmp_path: Path, own_rule: Callable[[str], None]) -> None:
    storage = stored(tmp_path / "dataset", document_profile(rule="small_rules:fixed", **OWN_LAYOUT), tokenizer)
    assert open_stored(storage, "small")
    own_rule(OWN_RULE.replace("tokens=7", "tokens=8"))
    with pytest.raises(UsageError, match=r"image_rule.file_digest: found '\w{32}', the index has '\w{32}'"):
        open_stored(storage, "small")


def change(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def without(key: str) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({name: value for name, value in json.loads(data).items() if name != key}).encode()


def with_setting(key: str, value: Any) -> Callable[[bytes], bytes]:
    return lambda data: change(settings=json.loads(data)["settings"] | {key: value})(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:200], "found 200 bytes that are not JSON"),
        (lambda data: b"", "found 0 bytes that are not JSON"),
        (lambda data: b"[]", "found list, expected a JSON object"),
        (lambda data: b"{}", "format"),
        (change(kind="source"), "found kind 'source', expected 'profile'"),
        (change(format_version=99), "99"),
        (change(fingerprint=5), "Expected `str`, got `int` - at `$.fingerprint`"),
        (change(fingerprint="0" * 32), f"found fingerprint {'0' * 32}, its identity has "),
        (change(identity=[]), "Expected `object`, got `array` - at `$.identity`"),
        (change(identity={}), "the file is damaged; remove it and index again"),
        (change(settings={"name": "small"}), "missing required field `tokenizer` - at `$.settings`"),
        (without("counted_with"), "missing required field `counted_with`"),
        (without("tokenizer_file"), "missing required field `tokenizer_file`"),
        (with_setting("sequence_length", [1]), "unknown field `sequence_length` - at `$.settings`"),
        (with_setting("template", {"name": "llama"}), "Invalid enum value 'llama' - at `$.settings.template.name`"),
    ],
)
def test_a_damaged_profile_is_refused(damage: Callable[[bytes], bytes], message: str, tokenizer: str, tmp_path: Path) -> None:
    storage = stored(tmp_path / "dataset", settings(), tokenizer)
    file = tmp_path / "dataset" / layout.profile_file("small")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(FormatError, match=re.escape(message)) as caught:
        open_stored(storage, "small")
    assert str(caught.value).startswith(f"{file}: ")


# --- wrong use ------------------------------------------------------------------------------------------------------------

NO_TOKEN = (
    "image layout 'rows' needs the special token '[IMG]', '[IMG_BREAK]', '[IMG_END]', which the tokenizer does not have; "
    "name another in the layout, or add it with special_tokens of the tokenizer"
)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"images": {"rule": "qwen25_vl"}}, "unknown image rule 'qwen25_vl', .*; did you mean 'qwen2_5_vl'?"),
    ({"images": {"rule": ""}}, "unknown image rule ''"),
    ({"images": {"parameters": {"max_pixel": 9}}}, "'qwen2_5_vl' has no parameter 'max_pixel'; did you mean 'max_pixels'?"),
    ({"images": {"layout_parameters": {"befor": []}}}, "'wrapped' has no parameter 'befor'; did you mean 'before'?"),
    ({"images": {"layout": "row"}}, "unknown image layout 'row'; did you mean 'rows'?"),
    ({"images": {"rule": "pixtral_hf"}}, NO_TOKEN),
    ({"images": {"rule": None, **OWN_LAYOUT}}, "given without an image rule: name the rule, or leave them out"),
    ({"images": {"rule": None, "parameters": {"a": 1}}}, "given without an image rule"),
    (
        {"images": {"rule": "no_such_rules:rule"}},
        "image rule no_such_rules:rule cannot be loaded: .* put the module on PYTHONPATH",
    ),
    ({"images": {"rule": "math:sqrt"}}, "an image rule of your own needs an image layout: kind 'wrapped' with token"),
    (
        {"images": {"rule": "small_rules:fixed", "parameters": {"token": 1}, **OWN_LAYOUT}},
        "image rule small_rules:fixed cannot be called with the parameters {'token': 1}: got an unexpected keyword argument",
    ),
    (
        {"images": {"rule": "small_rules:fixed", "parameters": {"tokens": {1: 2}}, **OWN_LAYOUT}},
        "image rule parameters: found {'tokens': {1: 2}}, expected JSON values under strings",
    ),
    ({"template": {"bos": "<BOS>"}}, "template: bos: '<BOS>' is not a special token of the tokenizer, which has <|endoftext|>"),
    ({"template": {"text": "{% for m in messages %}\n{{ m. }}{% endfor %}"}}, "the chat template has a mistake in line 2"),
    ({"template": {"placeholder": ""}}, "template placeholder: found an empty string"),
    ({"template": {"placeholder": "<image>"}}, "writes '<|vision_start|><|image_pad|><|vision_end|>' for an image, not"),
    (
        {"template": {"name": "document", "text": None, "placeholder": "<image>"}},
        "template 'document': placeholder: found '<image>', but that is for what a chat template writes for an image and changes",
    ),
    ({"template": {"date": "today"}}, "template date: found 'today', expected YYYY-MM-DD"),
    ({"template": {"variables": {"a": {1: 2}}}}, "template variables: found {'a': {1: 2}}, expected JSON values under strings"),
    ({"template": {"variables": {"a": float("nan")}}}, "template variables: found {'a': nan}, expected JSON values"),
    ({"tokenizer": {"kind": "tekken"}}, "is a tokenizer.json of Hugging Face, expected a tekken JSON of Mistral; set kind to"),
    ({"tokenizer": {"pattern": "qwen"}}, "pattern is given, but .* has its own; leave pattern out"),
    ({"tokenizer": {"special_tokens": ["<a>", "<a>"]}}, "special token '<a>' is named twice"),
]


@pytest.mark.usefixtures("own_rule")
@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_wrong_use_is_one_line_that_names_the_profile(changes: dict[str, Any], message: str, tokenizer: str) -> None:
    expected = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(UsageError, match=f"^profile 'small': .*{expected}") as caught:
        open_profile(settings(**changes), tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no tokenizer file .*; expected a local tokenizer.json or another kind of it"),
        (b"", "is empty, expected a tokenizer.json of Hugging Face"),
        (b'{"chat_template": ""}', "is a tokenizer_config.json, expected a tokenizer.json"),
        (b"\x89PNG\r\n", "is no tokenizer known here, expected"),
    ],
)
def test_files_that_are_no_tokenizer(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"^profile 'small': .*{message}"):
        open_profile(settings(), str(file))


def test_a_template_that_is_not_there_is_told_when_the_recipe_is_read(tokenizer: str, tmp_path: Path) -> None:
    model = ProfileModel(tokenizer=tokenizer, template=str(tmp_path / "gone.jinja"), image_rule=None)
    with pytest.raises(UsageError, match=r"^profile 'small': template: chat template .*gone.jinja: cannot be read: No such file"):
        model.settings("small")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chatmll", "No such file or directory; did you mean the built-in 'chatml'?"),
        ("Documents", "No such file or directory; did you mean the built-in 'document'?"),
        ("qwen.jinja", "No such file or directory; expected such a file, or the built-in document or chatml"),
    ],
)
def test_a_misspelt_template_names_the_built_in_one(name: str, message: str, tokenizer: str, tmp_path: Path) -> None:
    model = ProfileModel(tokenizer=tokenizer, template=str(tmp_path / name), image_rule=None)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / name}: cannot be read: {message}")):
        model.settings("small")


def test_settings_survive_json(tokenizer: str) -> None:
    profile = settings(template={"variables": {"a": [1, {"b": None}]}}, tokenizer={"special_tokens": {"<a>": 900}})
    assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile
    assert open_profile(profile, tokenizer).identity == json.loads(json.dumps(open_profile(profile, tokenizer).identity))


@pytest.mark.parametrize(
    "changed",
    [{"images": {"parameters": {"max_pixels": 10**30}}}, {"template": {"name": "jinja", "text": "x", "variables": {"a": 2**70}}}],
)
def test_whole_numbers_beyond_64_bit_are_refused(tokenizer: str, changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"expected JSON values under strings, whole numbers within 64 bit"):
        open_profile(settings(**changed), tokenizer)
