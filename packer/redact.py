"""References and places as text that may be kept or shown: no passwords, no signed query strings, one short line."""

from __future__ import annotations

import re
from urllib.parse import unquote

PLACE_CHARS = 1000

MEMBER_MARK = re.compile(
    r"\.(?:zip|tar|t[abgx]z|tbz2|tzst|7z|rar|tar\.(?:gz|bz2|xz|zst|lz4|lzma|lz|z))(?:\?[^!]*)?(?P<mark>!/)", re.IGNORECASE
)
"""Where `archive.zip!/member` parts. Without an archive's ending before it, `!/` is part of a path."""

# The second form is a password with a slash in it, which a port (digits) is not.
_USER_INFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*://)(?:[^/?#]*@|[^/?#@:]*:(?!\d+(?:/|$))[^?#@]*@)")
# Azure writes a container, not a user, before the @.
_CONTAINER_SCHEMES = ("abfs://", "abfss://", "az://")
_SIGNED = re.compile(
    r"(?:^|[?&;#~])(?:x-(?:amz|goog|oss|cos|obs|ms)-|ossaccesskeyid|awsaccesskeyid|googleaccessid|q-sign|key-pair-id=|policy="
    r"|expires=|exp=|s[epvrt]=|sig=|hmac=|auth=|hash=|key="
    r"|[a-z0-9_.\-]{0,40}(?:signature|token|secret|password|passwd|credential|api_?key))",
    re.IGNORECASE,
)

_QUOTED_USER = re.compile(r"://[^/\s@]*:[^\s@]*@")
_QUOTED_QUERY = re.compile(r"\?[^\s'\")]+")


_URL_IN_LINE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:(?:\\?/){2}[^\s\"\\<>]*(?:\\/[^\s\"\\<>]*)*")
"""A URL inside a JSON line, its slashes escaped or not."""


def without_signatures_in(line: str) -> str:
    """A JSON line with every URL in it as `without_signature` leaves it."""
    if "?" not in line and "@" not in line and "#" not in line:
        return line
    return _URL_IN_LINE.sub(_cleaned_url, line)


def _cleaned_url(found: re.Match[str]) -> str:
    url = found[0]
    plain = url.replace("\\/", "/")
    clean = without_signature(plain)
    return url if clean == plain else clean


def split_member(ref: str) -> tuple[str, str | None]:
    """`archive.zip!/a/b.jpg` as archive and member; the member is None for anything else."""
    if "!/" in ref and (found := MEMBER_MARK.search(ref)) is not None:
        return ref[: found.start("mark")], ref[found.end("mark") :]
    return ref, None


def without_signature(ref: str) -> str:
    """`ref` without user info, and without a query string or fragment that looks signed."""
    return _clean(ref, keep_plain_query=True)


def without_query(ref: str) -> str:
    """`ref` without user info and without any query string."""
    return _clean(ref, keep_plain_query=False)


def safe_place(url: str, member: str | None = None) -> str:
    """A resolved place for messages: one line, whole up to 1,000 characters, without user info and query string."""
    return one_line(without_query(url if member is None else f"{url}!/{member}"), PLACE_CHARS)


def scrubbed(text: str) -> str:
    """A library's own words for a message: one line, without the user info and query strings it may quote."""
    return one_line(_QUOTED_QUERY.sub("?...", _QUOTED_USER.sub("://", " ".join(text.split()))), PLACE_CHARS)


def one_line(text: str, limit: int) -> str:
    """At most `limit` printable characters; says how many there were."""
    if len(text) > limit:
        note = f"... ({len(text)} characters)"
        text = text[: limit - len(note)] + note
    return text if text.isprintable() else ascii(text)[1:-1][:limit]


def _clean(ref: str, *, keep_plain_query: bool) -> str:
    url, member = split_member(ref)
    url = _without_user(url)
    for mark in "?#":
        head, found, query = url.partition(mark)
        is_query = mark == "?" and "://" in head and not keep_plain_query
        if found and (is_query or _SIGNED.search(unquote(query)) is not None):
            url = head
    return url if member is None else f"{url}!/{member}"


def has_password(url: str) -> bool:
    """Whether a URL carries `user:password@`."""
    found = _USER_INFO.match(url) if "@" in url else None
    return found is not None and ":" in url[found.end("scheme") : found.end()]


def _without_user(url: str) -> str:
    if "@" not in url or (found := _USER_INFO.match(url)) is None:
        return url
    if url.lower().startswith(_CONTAINER_SCHEMES) and not has_password(url):
        return url
    return found["scheme"] + url[found.end() :]
