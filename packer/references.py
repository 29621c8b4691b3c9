"""An image reference of a row -> its bytes, or why there are none. The kinds of reference are told apart here.

Only relative paths are confined to `image_root`; an absolute path or URL was written out by whoever made the row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import unquote

from packer import storage
from packer.archives import ArchivePool
from packer.format.errors import RowError, StorageFault
from packer.format.reasons import Reason
from packer.http_images import fetch
from packer.inline import decode_bare_base64, decode_data_url, is_bare_base64, is_data_url, mime_type
from packer.local_files import read_file
from packer.redact import has_password, one_line, safe_place, split_member, without_query, without_signature
from packer.refusals import empty, row_error, scrubbed_fault, too_large, unsupported

SAFE_CHARS = 200
STORE_SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "hdfs", "oci", "memory"})
"""Stores a row may name. Those that speak HTTP to a host of the row's choice are left to `image_root` and `allow_hosts`."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_CHAIN = re.compile(r"://.*::|::.*://|\A[A-Za-z][A-Za-z0-9+.\-]*::/", re.DOTALL)
_NEEDS_NORMAL_FORM = re.compile(r"\.\.|//|/\.|\A\.|[%\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRules:
    """How the references of one source are read."""

    image_root: str | None
    """Absolute path or URL that relative references start from."""
    archive: str | None
    """Absolute path or URL of a zip or tar; then a relative reference is one of its members."""
    allow_hosts: tuple[str, ...]
    """`host` or `host:port` that http(s) references may name."""
    max_bytes: int
    """A larger image is refused, before it is read where its size is known."""


class ReferenceReader:
    """Reads the images of one source, from many threads. Opens nothing until the first read."""

    def __init__(self, rules: ReferenceRules, *, cache_dir: str | None = None) -> None:
        self._rules = rules
        root = rules.image_root
        self._local_root = None
        if root is not None and storage.is_local(root):
            self._local_root = storage.local_path(root).rstrip("/") + "/"
        self._archives = ArchivePool(cache_dir=cache_dir)

    @property
    def is_remote(self) -> bool:
        """Whether references are, by default, not on a local file system."""
        return any(not storage.is_local(place) for place in (self._rules.image_root, self._rules.archive) if place is not None)

    def read(self, ref: str) -> bytes:
        """The bytes of an image.

        Raises:
            RowError: when the reference or what it names is bad.
            StorageFault: when a store kept failing, after tries with pauses.
        """
        if not isinstance(ref, str) or not ref.strip():
            raise unsupported(f"found {one_line(repr(ref), SAFE_CHARS)}, expected a path, a URL or base64 text")
        max_bytes = self._rules.max_bytes
        if is_data_url(ref):
            return decode_data_url(ref, max_bytes)
        if is_bare_base64(ref):
            return decode_bare_base64(ref, max_bytes)
        path, member = split_member(ref)
        scheme = _scheme(path)
        if member is None and scheme in ("http", "https"):
            return fetch(ref, self._rules.allow_hosts, max_bytes)
        if member is None and scheme is None and self._rules.archive is not None and path[0] != "/":
            path, member = self._rules.archive, path
            scheme = _scheme(path)
        url = self._resolved(path, scheme)
        try:
            if member is not None:
                return self._archives.read(url, confined(member), max_bytes)
            return read_file(url, max_bytes) if url[0] == "/" else _read_remote(url, max_bytes)
        except RowError as error:
            raise RowError(error.reason, self._without_places(error.detail)) from error

    def _without_places(self, detail: str) -> str:
        """A detail that is the same wherever the source's images are mounted."""
        for name, place in (("archive", self._rules.archive), ("image_root", self._rules.image_root)):
            if place is not None:
                detail = detail.replace(safe_place(storage.local_path(place)).rstrip("/"), f"<{name}>", 1)
        return detail

    def close(self) -> None:
        """Close the descriptors; a later read opens them again."""
        self._archives.close()

    def __enter__(self) -> ReferenceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _resolved(self, path: str, scheme: str | None) -> str:
        """The local path (beginning with a slash) or store URL that a path or URL stands for."""
        if "\0" in path:
            raise unsupported(f"{safe_ref(path)}: found a NUL byte, expected a path or URL")
        if "::" in path and (_CHAIN.search(path) is not None or (path[0] != "/" and self._local_root is None)):
            raise unsupported(f"{safe_ref(path)}: found `::`, chained URLs are not read; name the file or archive itself")
        if scheme is None:
            if path[0] == "/":
                return path
            if self._local_root is not None:
                return self._local_root + confined(path)
            if self._rules.image_root is None:
                raise unsupported(f"{safe_ref(path)}: found a relative path; set `image_root` of the source to where it starts")
            return storage.join_url(self._rules.image_root, confined(path))
        if scheme == "file":
            return _local_file_url(path)
        if scheme not in STORE_SCHEMES:
            known = ", ".join(sorted(STORE_SCHEMES | {"file"}))
            hint = "an archive is read from a file or store, so download it first" if scheme in ("http", "https") else known
            raise unsupported(f"{safe_ref(path)}: found scheme {scheme[:50]}, expected: {hint}")
        if has_password(path):
            raise unsupported(
                f"{safe_ref(path)}: found a password in the URL; give the store its keys by its own settings instead"
            )
        return path


def stored_ref(ref: str, data_digest: str) -> str:
    """What a record keeps of a reference; `data_digest` stands for the bytes of an image written into the row."""
    if is_data_url(ref):
        return f"data:{mime_type(ref)};blake3={data_digest}"
    if is_bare_base64(ref):
        return f"base64;blake3={data_digest}"
    return without_signature(ref) if "://" in ref else ref  # a local name may hold a question mark


def safe_ref(ref: str) -> str:
    """A reference for messages: at most 200 characters of one line, without user, query string or image bytes."""
    if is_data_url(ref):
        return f"data:{mime_type(ref)} ({len(ref)} characters)"
    if is_bare_base64(ref):
        return f"base64 text ({len(ref)} characters)"
    return one_line(without_query(ref), SAFE_CHARS)


def _scheme(path: str) -> str | None:
    found = _SCHEME.match(path) if "://" in path else None
    return None if found is None else found[1].lower()


def confined(path: str) -> str:
    """A relative path in normal form.

    Raises:
        RowError: when it climbs out of its root, also once percent-encoding is undone or backslashes are read as slashes.
    """
    if _NEEDS_NORMAL_FORM.search(path) is None:
        return path
    if _normal(path) is None or _normal(_decoded(path)) is None:
        raise RowError(
            Reason.REFERENCE_OUTSIDE_ROOT, f"{safe_ref(path)}: found a path that climbs out of its root, expected one inside it"
        )
    return _normal(path) or "."


def _normal(path: str) -> str | None:
    """The path without `.`, `..` and empty steps; None when `..` climbs above where it starts."""
    steps: list[str] = []
    for step in path.split("/"):
        if step == "..":
            if not steps:
                return None
            steps.pop()
        elif step not in ("", "."):
            steps.append(step)
    return "/".join(steps)


def _decoded(path: str) -> str:
    """`path` as the most lenient store could read it."""
    for _ in range(8):
        plain = unquote(path).replace("\\", "/")
        if plain == path:
            break
        path = plain
    return path


def _local_file_url(url: str) -> str:
    path = storage.local_path("file" + url[4:])
    if path[:1] != "/":
        raise unsupported(f"{safe_ref(url)}: found a file URL with a host, expected file:///absolute/path")
    return path


def _read_remote(url: str, max_bytes: int) -> bytes:
    try:
        data = storage.read_url(url, max_bytes)
    except storage.TooLarge as error:
        raise too_large(url, error.size, max_bytes) from error
    except StorageFault as error:
        raise scrubbed_fault(error, url) from None
    except (OSError, ValueError, ImportError) as error:
        raise row_error(error, url) or scrubbed_fault(error, url) from None
    if not data:
        raise empty(url)
    return data
