import pytest

from packer.format.errors import RecipeError
from pipelines.recipe_paths import fits, is_below, resolve_path, resolve_pattern, source_root, written_form


@pytest.mark.parametrize(
    ("patterns", "root"),
    [
        (["/d/a/x.jsonl"], "/d/a"),
        (["/d/a/*.jsonl"], "/d/a"),
        (["/d/a/**/x.jsonl", "/d/a/b/c/*.gz"], "/d/a"),
        (["/d/a*/x.jsonl"], "/d"),
        (["/d/ab/x.jsonl", "/d/abc/x.jsonl"], "/d"),
        (["/d/?/x.jsonl", "/d/[ab]/x.jsonl"], "/d"),
        (["/d/[[]1]/x.jsonl"], "/d/[1]"),
        (["/d/[*][?]/a/*.jsonl"], "/d/*?/a"),
        (["/x.jsonl"], "/"),
        (["/*/x.jsonl", "/a/x.jsonl"], "/"),
        (["s3://b/x.jsonl"], "s3://b"),
        (["s3://b/a/c/*.jsonl", "s3://b/a/d/*.jsonl"], "s3://b/a"),
        (["s3://b/a/*.jsonl", "s3://b/c/*.jsonl"], "s3://b"),
        (["https://h.org/a/x.jsonl"], "https://h.org/a"),
        (["memory://a/x.jsonl", "memory://b/x.jsonl"], "memory://"),
        (["memory://a/*.jsonl"], "memory://a"),
        (["file:///d/a/*.jsonl"], "file:///d/a"),
        (["file:///x.jsonl"], "file:///"),
    ],
)
def test_root_is_the_common_folder_of_what_is_not_a_glob(patterns: list[str], root: str) -> None:
    assert source_root(patterns) == root
    assert all(is_below(pattern, root) for pattern in patterns)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["s3://a/x", "s3://a/y", "s3://b/x"], r"files in 's3://a' and in 's3://b' \('s3://b/x'\), expected one store; make one"),
        (["s3://a/x", "gs://a/x"], "files in 's3://a' and in 'gs://a'"),
        (["/a/x", "s3://a/x"], "files in '/' and in 's3://a'"),
        (["s3://a*/x"], r"found 's3://a\*/x', expected a store's name and a path"),
        (["s3://a"], "found 's3://a', expected a store's name and a path"),
        (["zip://*.jsonl::s3://a/b.zip"], "found the chained URL 'zip://.*', whose folder cannot be told; give `root`"),
    ],
)
def test_patterns_without_a_common_folder(patterns: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        source_root(patterns)


@pytest.mark.parametrize(
    ("pattern", "root"),
    [
        ("/d/ab/x", "/d/a"),
        ("/d/x", "/d/a"),
        ("/d/*/x", "/d/a"),
        ("s3://b/a/x", "s3://c/a"),
        ("s3://b/x", "s3://b/a"),
        ("/b/x", "s3://b"),
    ],
)
def test_what_is_not_below_a_root(pattern: str, root: str) -> None:
    assert not is_below(pattern, root)


@pytest.mark.parametrize("root", ["/d", "/d/", "/", "/d/a"])
def test_what_is_below_a_root(root: str) -> None:
    assert is_below("/d/a/*.jsonl", root)


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("a/b", "/r/a/b"),
        ("./a/", "/r/a"),
        ("../a", "/a"),
        (".", "/r"),
        ("/a//b/../c", "/a/c"),
        ("//a", "/a"),
        ("~/a", "/home/me/a"),
        ("s3://b//a/", "s3://b//a/"),
        ("${X}/a", "/r/${X}/a"),
    ],
)
def test_paths_become_absolute(written: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_path(written, "/r") == resolve_pattern(written, "/r") == path
    assert resolve_path(path, "/elsewhere") == path
    assert fits(written_form(written), path)


def test_magic_characters_of_the_folder_stand_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/m?")
    assert resolve_path("a/*", "/r[1]") == "/r[1]/a/*"
    assert resolve_pattern("a/*", "/r[1]") == "/r[[]1]/a/*"
    assert resolve_pattern("~/a/*", "/r[1]") == "/home/m[?]/a/*"
    assert source_root([resolve_pattern("a/*", "/r[1]")]) == "/r[1]/a"
    assert is_below(resolve_pattern("a/*", "/r[1]"), "/r[1]")


@pytest.mark.parametrize(
    ("written", "resolved"), [("a", "/r/b"), ("a/b", "/r/b"), ("/a", "/b"), ("s3://a", "s3://b"), ("../ab", "/r/xab")]
)
def test_a_path_that_cannot_have_meant_this(written: str, resolved: str) -> None:
    assert not fits(written, resolved)
