import re
import string
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from packer.format.errors import RecipeError, UsageError
from pipelines.recipe import (
    Conversion,
    Defaults,
    ImagePolicy,
    Limits,
    Pin,
    Recipe,
    Resources,
    Source,
    dump_recipe,
    load_recipe,
    recipe_schema,
    source_fingerprint,
)
from pipelines.recipe_types import FIELD_DEFAULTS
from pipelines.recipe_yaml import dump_yaml

DOCS = Path(__file__).parents[2] / "docs" / "recipe.md"
HEAD = "version: 1\nname: demo\noutput: out\n"
SOURCE = {"name": "a", "files": "a/*.jsonl", "schema": "text"}


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def recipe_of(folder: Path, *sources: dict[str, Any], **top: Any) -> Recipe:
    data = {"version": 1, "name": "demo", "output": "out", "sources": list(sources)} | top
    return load_recipe(write(folder, dump_yaml(data)))


def source_of(folder: Path, **keys: Any) -> Source:
    return recipe_of(folder, SOURCE | keys).sources[0]


def problems(folder: Path, text: str | bytes) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text))
    return caught.value.problems


def source_problems(folder: Path, text: str) -> list[str]:
    """Problems of one source, given as the inside of a flow mapping."""
    text = text if "name:" in text else f"name: a, files: a.jsonl, {text}"
    text = text if "schema:" in text else f"schema: text, {text}"
    return problems(folder, f"{HEAD}sources:\n  - {{{text}}}\n")


def test_smallest_recipe_has_every_default(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    assert source.files == (f"{tmp_path}/a/*.jsonl",)
    assert source.fields == {"text": "text", "id": "id"}
    assert (source.weight, source.token_share, source.keep, source.images) == (1.0, None, "all", ImagePolicy())
    assert (source.root, source.image_root) == (None, None)
    assert source.resolved_root == source.resolved_image_root == f"{tmp_path}/a"


def test_four_mistakes_of_one_source_are_shown_at_once(tmp_path: Path) -> None:
    text = HEAD + (
        "sources:\n"
        "  - name: laion\n"
        "    files: x/*.jsonl\n"
        "    schema: lava\n"
        "    images:\n"
        "      max_pixls: 3\n"
        '    weight: "abc"\n'
        "    val: 0.7\n"
    )
    assert problems(tmp_path, text) == [
        "source 'laion' schema: found \"lava\", expected one of interleaved, llava, chat, obelics, caption, text or "
        "python:module:function; did you mean 'llava'? (line 7)",
        "source 'laion' images.max_pixls: unknown key; did you mean 'max_pixels'? (line 9)",
        "source 'laion' weight: found \"abc\" (text), expected a number above 0 (line 10)",
        "source 'laion' val: found 0.7, expected a number from 0 to 0.5 (line 11)",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wieght: 1", "source 'a' wieght: unknown key; did you mean 'weight'?"),
        ("WEIGHT: 1", "source 'a' WEIGHT: unknown key; did you mean 'weight'?"),
        ("row_timeout_seconds: .inf", "source 'a' row_timeout_seconds: found .inf, expected a number above 0"),
        ("images: {check: DECODE}", "source 'a' images.check: found \"DECODE\", expected one of header, structure, decode; did"),
        ("max_pixels: 1", "source 'a' max_pixels: unknown key here; it belongs to images"),
        ("fields: {txt: t}", "source 'a' fields.txt: unknown field of the schema text; did you mean 'text'?"),
        ("fields: {zzz: t}", "source 'a' fields.zzz: unknown field of the schema text; expected one of text, id"),
        ("fields: {text: 1}", "source 'a' fields.text: found 1 (number), expected text that is not empty; put it in quotes"),
        ("placeholder: x", "source 'a' placeholder: only the schema llava has it, found `schema: text`; remove the key"),
        ("literal_placeholders: text", "source 'a' literal_placeholders: only the schema llava has it"),
        ('weight: "2"', "source 'a' weight: found \"2\" (text), expected a number above 0; remove the quotes"),
        ("weight: 0", "source 'a' weight: found 0, expected a number above 0"),
        ("weight: .nan", "source 'a' weight: found .nan, expected a number above 0"),
        ("weight: yes", "source 'a' weight: found yes (YAML reads it as true), expected a number above 0"),
        ("token_share: 1.5", "source 'a' token_share: found 1.5, expected a number above 0 and at most 1"),
        ("val: true", "source 'a' val: found true (truth value), expected a number from 0 to 0.5"),
        ("max_line_bytes: 64M", "source 'a' max_line_bytes: found \"64M\", expected a number of bytes, or a size such as"),
        ("max_line_bytes: 0.1kB1", 'source \'a\' max_line_bytes: found "0.1kB1", expected a number of bytes'),
        ("max_line_bytes: 1.0001kB", 'source \'a\' max_line_bytes: found "1.0001kB", expected a number of bytes'),
        ("max_line_bytes: 0", "source 'a' max_line_bytes: found 0, expected a number of bytes"),
        ("range_bytes: 1000", "source 'a' range_bytes: found 1000, expected a power of two in bytes"),
        ("target_bundle_bytes: 4GiB", "source 'a' target_bundle_bytes: found \"4GiB\", expected a number of bytes below 4 GiB"),
        ("keep: some", "source 'a' keep: found \"some\", expected \"all\" or a list of field names"),
        ("keep: [x, 1]", "source 'a' keep item 2: found 1 (number), expected text that is not empty"),
        ("non_finite: none", "source 'a' non_finite: found \"none\", expected one of quarantine, null"),
        ("allow_hosts: ['http://x/']", "source 'a' allow_hosts item 1: found \"http://x/\", expected the name of a host"),
        ("allow_hosts: x.org", "source 'a' allow_hosts: found \"x.org\" (text), expected a list"),
        ("schema: python:m", "source 'a' schema: found \"python:m\", expected one of interleaved"),
        ("images: null", "source 'a' images: found nothing, expected a mapping"),
        ("images: {check: Header}", "source 'a' images.check: found \"Header\", expected one of header, structure, decode; did"),
        ("images: {min_side: 1.5}", "source 'a' images.min_side: found 1.5, expected a whole number of at least 1"),
        ("images: {convert: {}}", "source 'a' images.convert: found nothing to convert; set longest_side or format"),
        ("images: {convert: {longest_side: 9, quality: 5}}", "source 'a' images.convert.quality: quality needs `format: jpeg`"),
        ("images: {convert: {format: png, quality: 5}}", "source 'a' images.convert.quality: quality needs `format: jpeg`"),
        ("root: other", "source 'a' root: found "),
        ("as_written: {image_root: x}", "source 'a' as_written: found 'x', which cannot mean image_root None; remove it"),
        ("image_root: /x/y, as_written: {image_root: z}", "source 'a' as_written: found 'z', which cannot mean"),
        ("name: b, name: c, files: f", "source 'b' name: the key is given twice (lines 5 and 5); keep one of them"),
        ("1: 2", "source 'a': found the key '1', expected text; put it in quotes"),
        ("val: !!python/object:os.x {}", "source 'a' val: found the YAML tag 'tag:yaml.org,2002:python/object:os.x', expected a"),
        ("name: Big Name, files: f", "source 'Big Name' name: found \"Big Name\", expected a name of a-z, 0-9,"),
        ("name: no, files: f", "source 1 name: found no (YAML reads it as false), expected a name of a-z"),
        ("name: 2024_01, files: f", "source 1 name: found 2024_01 (number), expected a name of a-z"),
        ("name: a", "source 'a' files: missing; expected a path, a glob or a URL, or a list of them"),
        ("name: a, files: []", "source 'a' files: found an empty list, expected a path, a glob or a URL, or a list of them"),
        ("name: a, files: ['']", "source 'a' files item 1: found \"\", expected text that is not empty"),
        ("name: a, files: [s3://x/a, s3://y/b]", "source 'a' files: found files in 's3://x' and in 's3://y' ('s3://y/b'), exp"),
    ],
)  # fmt: skip
def test_one_mistake_of_a_source_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    found = source_problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(message)
    assert found[0].endswith("(line 5)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vresion: 1", "vresion: unknown key; did you mean 'version'?"),
        ("weight: 1", "weight: unknown key here; it belongs to a source"),
        (
            "profiles: {My Model: {tokenizer: t, template: chatml, image_rule: null}}",
            "profiles.My Model: found the key 'My Model', expected a name of a-z",
        ),
        ("profiles: {m: 3}", "profiles.m: found 3 (number), expected a mapping"),
        ("resources: {num_cpus: 1.5}", "resources.num_cpus: found 1.5, expected a share of one (0.5) or a whole number"),
        ("resources: {custom: {CPU: 1}}", "resources.custom: found 'CPU', which is Ray's own, expected a custom resource"),
        ("resources: {custom: {disk: -1}}", "resources.custom.disk: found -1, expected a number above 0"),
        ("resources: {max_tasks_in_flight: 0}", "resources.max_tasks_in_flight: found 0, expected a whole number of at"),
        ("limits: {max_quarantined_share: 2}", "limits.max_quarantined_share: found 2, expected a number from 0 to 1"),
        ("limits: []", "limits: found an empty list, expected a mapping"),
        ("defaults: 3", "defaults: found 3 (number), expected a mapping"),
        ("defaults: {weight: 3}", "defaults weight: not possible in defaults; give it in each source"),
        ("defaults: {images: {min_side: 0}}", "defaults images.min_side: found 0, expected a whole number of at least 1"),
        ("defaults: {images: 1}", "defaults images: found 1 (number), expected a mapping"),
        ("defaults: {scema: text}", "defaults scema: unknown key; did you mean 'schema'?"),
    ],
)
def test_one_mistake_outside_the_sources_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    two = "".join(f"  - {{name: {name}, files: x.jsonl, schema: text}}\n" for name in "ab")
    found = problems(tmp_path, f"{HEAD}{text}\nsources:\n{two}")
    assert len(found) == 1
    assert found[0].startswith(message)
    assert found[0].endswith("(line 4)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\noutput: o\nsources: [{name: a, files: f, schema: text}]", "version: missing; expected 1 (line 1)"),
        (HEAD.replace("1", '"1"') + "sources: [{name: a, files: f, schema: text}]", 'version: found "1" (text), expected 1;'),
        (HEAD.replace("1", "1.0") + "sources: [{name: a, files: f, schema: text}]", "version: found 1.0, expected 1"),
        (HEAD.replace("1", "on") + "sources: [{name: a, files: f, schema: text}]", "version: found on (YAML reads it as true)"),
        (HEAD.replace("1", "2") + "new_key: 1", "version: found 2, expected 1; the recipe needs a newer bayplan, upgrade it"),
        (HEAD, "sources: missing; expected a list with at least one entry"),
        (HEAD + "sources: []", "sources: found an empty list, expected a list with at least one entry"),
        (HEAD + "sources: {a: {files: f}}", "sources: found a mapping, expected a list with at least one entry; begin each"),
        (HEAD + "sources: [a]", 'source 1: found "a" (text), expected a mapping (line 4)'),
        ("", "recipe '{path}': found an empty file, expected a mapping that begins with `version: 1`"),
        ("# only a comment\n", "recipe '{path}': found an empty file"),
        ("[1]", "recipe '{path}': found a list, expected a mapping"),
        ("text", "recipe '{path}': found a single value, expected a mapping"),
        ("a: [1\nb: 2", "recipe '{path}' line 2, column 2: not valid YAML: "),
        ("a: b\n\tc: d", "recipe '{path}' line 2, column 1: not valid YAML: "),
        ("a: 1\n---\na: 2", "recipe '{path}' line 2, column 1: not valid YAML: "),
        ("a: *b", "recipe '{path}' line 1, column 4: not valid YAML: "),
        ("a: \x01", "recipe '{path}': not valid YAML: "),
        ("version: 1\nname: café".encode("latin-1"), "recipe '{path}': found the byte 0xe9 in line 2, expected UTF-8; save"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe(tmp_path: Path, text: str | bytes, message: str) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1
    assert found[0].startswith(message.replace("{path}", str(tmp_path / "r.yaml")))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nope\.yaml': no such file"):
        load_recipe(tmp_path / "nope.yaml")
    with pytest.raises(RecipeError, match="found a folder, expected a YAML file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([{"weight": 1}, {"token_share": 1}], "sources: found weight in 'a' and token_share in 'b', expected one of the two"),
        ([{"token_share": 0.5}, {}], "sources: found token_share in 1 of 2 sources, not in 'b'; give it to all or to none"),
        ([{"token_share": 0.5}, {"token_share": 0.4}], "sources: found token_share values that sum to 0.9, expected 1"),
        ([{}, {"name": "a"}], "source 2 ('a') name: found 'a', which is source 1's name"),
    ],
)
def test_mistakes_of_the_mixture(tmp_path: Path, keys: list[dict[str, Any]], message: str) -> None:
    sources = [SOURCE | {"name": name} | more for name, more in zip("ab", keys, strict=True)]
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, *sources)
    assert [problem.startswith(message) for problem in caught.value.problems] == [True]
    plain = [Source.model_validate(source) for source in sources]
    with pytest.raises(ValidationError, match=re.escape(message.partition(": ")[2])):
        Recipe(version=1, name="x", output="o", sources=tuple(plain))


def test_token_shares_may_miss_one_by_rounding(tmp_path: Path) -> None:
    sources = [SOURCE | {"name": f"s{k}", "token_share": 0.333333} for k in range(3)]
    loaded = recipe_of(tmp_path, *sources[:2], sources[2] | {"token_share": 0.3333335})
    assert [source.weight for source in loaded.sources] == [None] * 3


def test_a_mixture_mistake_is_shown_beside_those_of_fields(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, SOURCE | {"val": 9}, SOURCE, nmae="x")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["source 1 ('a') val", "source 2 ('a') name", "nmae"]


def test_defaults_are_merged_under_each_source(tmp_path: Path) -> None:
    defaults = {"schema": "llava", "placeholder": "<i>", "val": 0.1, "keep": ["x"]}
    images = {"min_side": 8, "max_pixels": 100, "convert": {"longest_side": 9}}
    first = {"name": "a", "files": "a.jsonl", "val": 0, "images": {"min_side": 2, "convert": None}}
    second = {"name": "b", "files": "b.jsonl", "schema": "text"}
    a, b = recipe_of(tmp_path, first, second, defaults=defaults | {"images": images}).sources
    assert (a.schema_name, a.placeholder, a.val, a.keep) == ("llava", "<i>", 0.0, ("x",))
    assert a.images == ImagePolicy(min_side=2, max_pixels=100)
    assert (b.schema_name, b.placeholder, b.val) == ("text", "<image>", 0.1)
    assert b.images == ImagePolicy(min_side=8, max_pixels=100, convert=Conversion(longest_side=9))


def test_a_bad_schema_in_defaults_is_not_missing_in_the_sources(tmp_path: Path) -> None:
    text = HEAD + "defaults: {schema: txt}\nsources:\n  - {name: a, files: x}\n  - {name: b, files: y}\n"
    assert [problem.split(":")[0] for problem in problems(tmp_path, text)] == ["defaults schema"]


def test_paths_are_relative_to_the_recipe_and_not_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "in").mkdir()
    keys = {"files": ["x/*.jsonl", "~/y.jsonl"], "image_root": "../img", "archive": "s3://b/a.zip"}
    recipe_of(tmp_path / "in", SOURCE | keys)
    loaded = load_recipe("in/r.yaml")
    source = loaded.sources[0]
    assert loaded.output == f"{tmp_path}/in/out"
    assert source.files == (f"{tmp_path}/in/x/*.jsonl", "/home/me/y.jsonl")
    assert (source.image_root, source.archive) == (f"{tmp_path}/img", "s3://b/a.zip")
    assert source.as_written == {"image_root": "../img"}
    assert source_of(tmp_path, files="${DATA}/x.jsonl").files == (f"{tmp_path}/${{DATA}}/x.jsonl",)


@pytest.mark.parametrize(
    ("written", "size"),
    [(5, 5), ("5B", 5), ("2kB", 2000), ("2 KiB", 2048), ("1.5gib", 3 * 2**29), ("500MB", 5 * 10**8), ("1TB", 10**12)],
)
def test_sizes(tmp_path: Path, written: int | str, size: int) -> None:
    assert source_of(tmp_path, max_line_bytes=written).max_line_bytes == size


def test_null_is_the_word_null_for_non_finite(tmp_path: Path) -> None:
    assert source_of(tmp_path, non_finite=None).non_finite == source_of(tmp_path, non_finite="null").non_finite == "null"


def test_a_hundred_and_thirty_sources(tmp_path: Path) -> None:
    sources = [SOURCE | {"name": f"s{k}", "files": [f"s{k}/*.jsonl"], "weight": k + 0.5} for k in range(130)]
    loaded = recipe_of(tmp_path, *sources)
    assert [source.name for source in loaded.sources] == [f"s{k}" for k in range(130)]
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, *[source | {"token_share": 0} for source in sources])
    assert len(caught.value.problems) == 131
    assert "'s0', 's1', 's2' and 127 more" in caught.value.problems[0]


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
options = st.fixed_dictionaries(
    {"files": st.lists(texts.map(lambda text: f"d/{text.replace(':', '')}x"), min_size=1)},
    optional={
        "image_root": texts,
        "archive": texts,
        "keep": st.just("all") | st.lists(texts),
        "fields": st.dictionaries(texts, texts, max_size=2),
        "weight": st.floats(1e-9, 1e9),
        "val": st.floats(0, 0.5),
        "non_finite": st.sampled_from(["null", "quarantine", None]),
        "range_bytes": st.none() | st.integers(0, 60).map(lambda k: 2**k),
        "allow_hosts": st.lists(st.text(string.ascii_letters, min_size=1)),
        "images": st.fixed_dictionaries(
            {}, optional={"max_aspect_ratio": st.floats(1, 1e6), "convert": st.just({"format": "webp", "quality": 3})}
        ),
    },
)


profiles = st.fixed_dictionaries(
    {
        "tokenizer": texts | st.fixed_dictionaries({"file": texts, "special_tokens": st.dictionaries(texts, st.integers(0, 9))}),
        "template": st.sampled_from(["document", "chatml", "a.jinja"]),
        "image_rule": st.none() | texts | st.fixed_dictionaries({"name": texts, "parameters": st.dictionaries(texts, texts)}),
    },
    optional={
        "bos": texts,
        "date": st.just("2024-07-26"),
        "variables": st.dictionaries(texts, texts | st.floats(allow_nan=False)),
        "sequence_lengths": st.lists(st.integers(1, 2**20)),
    },
)


@settings(max_examples=60, deadline=None)
@given(sources=st.lists(options, min_size=1, max_size=3), profile=profiles)
def test_what_is_dumped_loads_as_the_same_recipe(
    tmp_path_factory: pytest.TempPathFactory, sources: list[dict[str, Any]], profile: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("dump")
    named = [source | {"name": f"s{k}", "schema": "python:m:f"} for k, source in enumerate(sources)]
    first = recipe_of(folder, *named, profiles={"p": profile})
    dumped = dump_recipe(first, {})
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    again = load_recipe(write(elsewhere, dumped))
    assert again == first
    assert [source_fingerprint(s) for s in again.sources] == [source_fingerprint(s) for s in first.sources]
    assert dump_recipe(again, {}) == dumped


@pytest.mark.parametrize("schema", [*FIELD_DEFAULTS, "python:a.b:c"])
def test_every_schema_loads_again_with_its_pins(tmp_path: Path, schema: str) -> None:
    first = recipe_of(tmp_path, SOURCE | {"schema": schema})
    pin = Pin(root=str(tmp_path), range_bytes=2**20)
    again = load_recipe(write(tmp_path, dump_recipe(first, {"a": pin})))
    pinned = first.sources[0].model_copy(update={"root": pin.root, "range_bytes": pin.range_bytes})
    assert again == first.model_copy(update={"sources": (pinned,)})


def test_a_dump_writes_out_every_key(tmp_path: Path) -> None:
    dumped = yaml.safe_load(dump_recipe(recipe_of(tmp_path, SOURCE | {"schema": "llava", "image_root": "i"}), {}))
    assert dumped.keys() == keys_of(Recipe) - {"defaults"}
    assert dumped["sources"][0].keys() == keys_of(Source)
    assert dumped["sources"][0]["images"].keys() == keys_of(ImagePolicy)


def test_a_dump_has_paths_as_written_only_where_they_differ(tmp_path: Path) -> None:
    assert "as_written" not in dump_recipe(recipe_of(tmp_path, SOURCE | {"image_root": "/x/y"}), {})


def test_names_that_differ_in_case_are_one_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="found 'A', which is source 1's name"):
        recipe_of(tmp_path, SOURCE, SOURCE | {"name": "A"})


def test_pins_of_an_unknown_source_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pins for 'b', expected names of the recipe's sources"):
        dump_recipe(recipe_of(tmp_path, SOURCE), {"b": Pin(root="/", range_bytes=1)})


def examples() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)


def test_the_examples_of_the_docs_load(tmp_path: Path) -> None:
    small, full = (load_recipe(write(tmp_path, example)) for example in examples())
    assert len(small.sources) == 1
    assert full.sources[0].images.min_side == 8
    assert full.sources[2].images.max_bytes == 20_000_000


@pytest.mark.parametrize(
    ("more", "is_valid"),
    [
        ({}, True),
        ({"files": ["x", "y"], "max_line_bytes": "64 MiB", "non_finite": None, "keep": [], "images": {"convert": None}}, True),
        ({"range_bytes": 4096, "val": 0, "weight": 2, "as_written": {}, "schema": "python:a.b:c"}, True),
        ({"wieght": 1}, False),
        ({"max_line_bytes": "64M"}, False),
        ({"name": "Big Name"}, False),
        ({"schema": "lava"}, False),
        ({"images": {"check": "all"}}, False),
    ],
)
def test_the_schema_for_editors_agrees_with_the_loader(tmp_path: Path, more: dict[str, Any], is_valid: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(recipe_schema())
    data = {"version": 1, "name": "x", "output": "o", "sources": [SOURCE | more]}
    assert validator.is_valid(data) is is_valid
    if is_valid:
        source_of(tmp_path, **more)
    else:
        with pytest.raises(RecipeError):
            source_of(tmp_path, **more)


def test_the_schema_for_editors_accepts_the_examples_and_dumps(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(recipe_schema())
    for example in examples():
        validator.validate(yaml.safe_load(example))
        validator.validate(yaml.safe_load(dump_recipe(load_recipe(write(tmp_path, example)), {})))
    data = {"version": 1, "name": "x", "output": "o", "defaults": {"schema": "text"}, "sources": [{"name": "a", "files": "f"}]}
    validator.validate(data)


def models() -> dict[str, type[BaseModel]]:
    return {
        "The top level": Recipe,
        "A source": Source,
        "images": ImagePolicy,
        "images.convert": Conversion,
        "resources": Resources,
        "limits": Limits,
    }


def keys_of(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize(("heading", "model"), models().items())
def test_the_docs_name_every_key_and_its_default(heading: str, model: type[BaseModel]) -> None:
    section = DOCS.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (`[^`]*`|required|by schema) \| .+ \|$", section, re.MULTILINE)
    defaults = dict(rows)
    assert len(rows) == len(defaults)
    assert defaults.keys() == keys_of(model)
    for name, field in model.model_fields.items():
        written = defaults[field.alias or name]
        assert (written == "required") == field.is_required()
        if written.startswith("`"):
            checked: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, field])  # type: ignore[arg-type]
            assert checked.validate_python(yaml.safe_load(written.strip("`"))) == field.default


def test_the_docs_name_the_fields_of_every_schema() -> None:
    for schema, fields in FIELD_DEFAULTS.items():
        own = ", ".join(f"`{key}: {field}`" for key, field in fields.items() if key != "id")
        assert re.search(rf"^\| `{schema}` \| .+ \| {re.escape(own)} \|$", DOCS.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("model", [*models().values(), Defaults])
def test_every_key_has_a_description_for_editors(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, b"\xef\xbb\xbf" + examples()[0].encode())).name == "demo"


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    (found,) = source_problems(tmp_path, f"weight: {'x' * 500}")
    assert found == f"source 'a' weight: found \"{'x' * 76}... (text), expected a number above 0 (line 5)"


def test_a_problem_stays_one_line_whatever_the_key(tmp_path: Path) -> None:
    (found,) = source_problems(tmp_path, '"a\\nb": 1')
    assert found.startswith("source 'a' 'a\\nb': unknown key; expected one of schema, root, ")
