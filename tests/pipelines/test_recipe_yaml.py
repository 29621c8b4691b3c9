from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packer.format.errors import RecipeError
from pipelines.recipe_yaml import dump_yaml, parse_yaml


def problems(text: str) -> list[tuple[tuple[str | int, ...], str, int | None]]:
    return [(problem.path, problem.message, problem.line) for problem in parse_yaml(text, "r.yaml").problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E6", 1e6),
        ("1.5e+3", 1500.0),
        ("1_000", 1000),
        ("'1e-3'", "1e-3"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("no", False),
        ("~", None),
        ("", None),
        ("64 MiB", "64 MiB"),
        ("é", "é"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    assert repr(parse_yaml(f"a: {text}\n", "r.yaml").data) == repr({"a": value})


def test_lines_and_letters_of_every_place() -> None:
    document = parse_yaml("a:\n  b: no\n\nc:\n- 1_0\n- {d: x}\n", "r.yaml")
    assert document.lines == {(): 1, ("a",): 1, ("a", "b"): 2, ("c",): 4, ("c", 0): 5, ("c", 1): 6, ("c", 1, "d"): 6}
    assert document.written == {("a", "b"): "no", ("c", 0): "1_0", ("c", 1, "d"): "x"}


def test_a_key_given_twice_is_a_problem_and_the_first_one_counts() -> None:
    assert parse_yaml("a: {b: 1, b: 2}", "r.yaml").data == {"a": {"b": 1}}
    assert problems("a:\n  b: 1\n  c: 2\n  b: 3\n  b: 4\n") == [
        (("a", "b"), "the key is given twice (lines 2 and 4); keep one of them", 4),
        (("a", "b"), "the key is given twice (lines 2 and 5); keep one of them", 5),
    ]


@pytest.mark.parametrize(("key", "shown"), [("1", "'1'"), ("no", "'no'"), ("~", "'~'"), ("[x]", "a list or a mapping")])
def test_a_key_that_is_not_text_is_a_problem(key: str, shown: str) -> None:
    assert problems(f"a:\n  ? {key}\n  : 1\n") == [(("a",), f"found the key {shown}, expected text; put it in quotes", 2)]


def test_merge_keys_give_what_the_mapping_does_not_have() -> None:
    text = "x: &x {a: 1, b: 1}\ny: &y {b: 2, c: 2}\nz:\n  a: 3\n  <<: [*x, *y]\nw: {<<: *x}\n"
    document = parse_yaml(text, "r.yaml")
    assert document.data["z"] == {"a": 3, "b": 1, "c": 2}
    assert document.data["w"] == {"a": 1, "b": 1}
    assert document.problems == ()
    assert document.lines["z", "c"] == 2
    assert document.data == yaml.safe_load(text)


def test_merging_something_else_is_a_problem() -> None:
    message = "found `<<` with something else, expected the alias of a mapping"
    assert problems("a:\n  <<: 3\n") == [(("a",), message, 2)]
    assert problems("a: &a\n  <<: *a\n") == [(("a",), message, 1)]


def test_an_alias_that_contains_itself_is_a_problem() -> None:
    assert problems("a: &a [*a]") == [(("a", 0), "found an alias that contains itself; write the value out", 1)]


def test_aliases_that_stand_for_too_much_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 9)]
    with pytest.raises(RecipeError, match="the aliases stand for more than 1,000,000 values; write them out"):
        parse_yaml("\n".join(lines), "r.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!int abc", "found 'abc', which is no int"),
        ("!mine x", "found the YAML tag '!mine', expected a plain value; remove the tag"),
        ("!!set {x}", "found the YAML tag 'tag:yaml.org,2002:set', expected a plain value; remove the tag"),
        ("!!binary aGk=", "found the YAML tag 'tag:yaml.org,2002:binary', expected a plain value; remove the tag"),
    ],
)
def test_values_that_are_not_plain_are_problems(text: str, message: str) -> None:
    assert problems(f"a: 1\nb: {text}\n") == [(("b",), message, 2)]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=6,
)


@given(plain)
def test_what_is_dumped_is_read_back(value: Any) -> None:
    document = parse_yaml(dump_yaml({"value": value}), "r.yaml")
    assert repr(document.data) == repr({"value": value})
    assert document.problems == ()


@pytest.mark.parametrize(
    "value", ["1e5", "2024-01-01", "no", "=", "<<", "~", "1_0", "", "- a", "a: b", "\ufeff", "#", "😀", "\x85", "\u2028", "\r\n"]
)
def test_text_that_looks_like_something_else_is_read_back(value: str) -> None:
    assert parse_yaml(dump_yaml({value: [value]}), "r.yaml").data == {value: [value]}


def test_no_aliases_are_written() -> None:
    shared = {"a": 1}
    assert dump_yaml({"x": shared, "y": shared}) == "x:\n  a: 1\ny:\n  a: 1\n"
