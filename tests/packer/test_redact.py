import pytest

from packer.redact import safe_place, scrubbed, split_member, without_query, without_signature, without_signatures_in

S3 = "https://b.s3.amazonaws.com/k/a.jpg"


@pytest.mark.parametrize(
    ("ref", "stored", "safe"),
    [
        ("a/b.jpg", "a/b.jpg", "a/b.jpg"),
        ("a b?c#d.jpg", "a b?c#d.jpg", "a b?c#d.jpg"),
        (f"{S3}?X-Amz-Algorithm=A&X-Amz-Signature=S", S3, S3),
        (f"{S3}?AWSAccessKeyId=A&Expires=1&Signature=S", S3, S3),
        (f"{S3}?w=1&%58-Amz-Signature=S", S3, S3),
        (f"{S3}?size=large", f"{S3}?size=large", S3),
        (f"{S3}#part", f"{S3}#part", f"{S3}#part"),
        (f"{S3}#access_token=S", S3, S3),
        ("az://c/a.jpg?sv=2022&se=2030&sp=r&sig=S", "az://c/a.jpg", "az://c/a.jpg"),
        ("a.jpg?Expires=1&GoogleAccessId=x&Signature=S", "a.jpg", "a.jpg"),
        ("https://u:p@h.org/a.jpg", "https://h.org/a.jpg", "https://h.org/a.jpg"),
        ("https://u:p@q@h.org:80/a@2x.jpg", "https://h.org:80/a@2x.jpg", "https://h.org:80/a@2x.jpg"),
        ("s3://KEY:sec/ret+x@bucket/k", "s3://bucket/k", "s3://bucket/k"),
        ("https://h.org:8080/@u/a.jpg", "https://h.org:8080/@u/a.jpg", "https://h.org:8080/@u/a.jpg"),
        ("s3://bucket/a:b@2x.jpg", "s3://bucket/a:b@2x.jpg", "s3://bucket/a:b@2x.jpg"),
        (
            "abfs://box@acct.dfs.core.windows.net/a",
            "abfs://box@acct.dfs.core.windows.net/a",
            "abfs://box@acct.dfs.core.windows.net/a",
        ),
        ("az://c/a.zip?sig=S!/m/x?y.jpg", "az://c/a.zip!/m/x?y.jpg", "az://c/a.zip!/m/x?y.jpg"),
    ],
)
def test_secrets_are_cut_and_names_are_kept(ref, stored, safe):
    assert (without_signature(ref), without_query(ref)) == (stored, safe)


@pytest.mark.parametrize(
    ("ref", "archive", "member"),
    [
        ("x/a.zip!/b/c.jpg", "x/a.zip", "b/c.jpg"),
        ("s3://b/A.TAR!/c.jpg", "s3://b/A.TAR", "c.jpg"),
        ("a.tar.gz!/c.jpg", "a.tar.gz", "c.jpg"),
        ("wow!/a.zip!/c!/d.jpg", "wow!/a.zip", "c!/d.jpg"),
        ("wow!/c.jpg", "wow!/c.jpg", None),
        ("a.zip", "a.zip", None),
    ],
)
def test_a_member_is_parted_from_its_archive(ref, archive, member):
    assert split_member(ref) == (archive, member)


def test_a_place_is_one_line_and_says_what_was_cut():
    assert safe_place("/a\nb\x1b[31m") == "/a\\nb\\x1b[31m"
    assert len(safe_place("/" + "a" * 5000)) == 1000
    assert safe_place("/" + "a" * 5000).endswith("... (5001 characters)")


def test_a_librarys_words_lose_what_they_quote():
    words = "cannot GET\n 'https://u:p@h/a?sig=S' (s3://k:se/c@b): Errno 5"
    assert scrubbed(words) == "cannot GET 'https://h/a?...' (s3://b): Errno 5"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('{"u": "https://h/a.png?X-Amz-Signature=abc", "n": 1}', '{"u": "https://h/a.png", "n": 1}'),
        ('{"u": "https:\\/\\/h\\/a.png?sig=abc"}', '{"u": "https://h/a.png"}'),
        ('{"u": "s3://user:secret@h/a.png"}', '{"u": "s3://h/a.png"}'),
        ('{"u": "https://h/a.png?page=2", "t": "why? me@home #1"}', '{"u": "https://h/a.png?page=2", "t": "why? me@home #1"}'),
        ('{"t": "no url at all?"}', '{"t": "no url at all?"}'),
    ],
)
def test_a_line_loses_its_signed_query_strings_and_nothing_else(line, kept):
    assert without_signatures_in(line) == kept
