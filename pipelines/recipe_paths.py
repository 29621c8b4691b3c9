"""Paths of a recipe as pure text: local or URL, relative to the recipe's folder, the common folder of globs.

Nothing here touches a file. Local paths are normalised as text, so `a/link/../b` is `a/b` even where `link` is a symlink.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from packer.format.errors import RecipeError

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ESCAPED = re.compile(r"\[([*?[])\]")
_MAGIC = re.compile(r"[*?[]")
# Their first component is a folder like any other, not the name of a bucket or a host.
_SCHEMES_WITHOUT_STORE = frozenset({"file", "local", "memory"})


def is_url(path: str) -> bool:
    """Say whether `path` is a URL (scheme://...), which stays as it is written."""
    return _URL.match(path) is not None


def resolve_path(written: str, folder: str) -> str:
    """Make a path absolute: `~` expanded, the rest relative to the recipe's `folder`, never to the current one."""
    if is_url(written):
        return written
    return _normal(os.path.join(folder, os.path.expanduser(written)))


def resolve_pattern(written: str, folder: str) -> str:
    """Like `resolve_path` for a glob: magic characters in the names of the folder or the home stand for themselves."""
    if is_url(written):
        return written
    first, slash, rest = written.partition("/")
    if first.startswith("~"):
        first = glob.escape(os.path.expanduser(first))
    return _normal(os.path.join(glob.escape(folder), first + slash + rest))


def written_form(written: str) -> str:
    """What a fingerprint keeps of a path: the user's own text, only `./a/` and `a` made equal."""
    if is_url(written):
        return written
    return _normal(written) if os.path.isabs(written) else os.path.normpath(written)


def fits(written: str, resolved: str) -> bool:
    """Say whether `resolved` can be what `written` meant in some folder: absolute ones are equal, else the tail is."""
    if is_url(written) or os.path.isabs(written):
        return written == resolved
    parts = [part for part in os.path.normpath(written).split("/") if part not in (".", "..")]
    if parts and parts[0].startswith("~"):
        del parts[0]
    return resolved.split("/")[-len(parts) :] == parts if parts else True


def source_root(patterns: Sequence[str]) -> str:
    """Give the common folder of absolute patterns or URLs, judged by what stands before their first glob character.

    Raises:
        RecipeError: the patterns lie in different stores, or a pattern names no folder.
    """
    places = [_static_folder(pattern) for pattern in patterns]
    store = places[0][0]
    for pattern, (other, _) in zip(patterns, places, strict=True):
        if other != store:
            message = f"found files in {store!r} and in {other!r} ({pattern!r}), expected one store"
            raise RecipeError([f"{message}; make one source for each store"])
    folders = [folder for _, folder in places]
    shortest = min(len(folder) for folder in folders)
    common = next((k for k in range(shortest) if len({folder[k] for folder in folders}) > 1), shortest)
    path = "/".join(folders[0][:common])
    if store.endswith("/"):
        return store + path
    return f"{store}/{path}" if path else store


def is_below(pattern: str, root: str) -> bool:
    """Say whether every file of `pattern` lies in the folder `root`."""
    store, folder = _static_folder(pattern)
    # With a name after it, the root's own last name counts as a folder.
    root_store, root_folder = _static_folder(glob.escape(root if root.endswith("/") else root + "/") + "*")
    return store == root_store and folder[: len(root_folder)] == root_folder


def _normal(path: str) -> str:
    return "/" + os.path.normpath(path).lstrip("/")


def _static_folder(pattern: str) -> tuple[str, list[str]]:
    """Split a pattern into its store ("/" is the local disk, else "s3://bucket") and its folders before any glob."""
    if "::" in pattern:
        raise RecipeError([f"found the chained URL {pattern!r}, whose folder cannot be told; give `root`"])
    url = _URL.match(pattern)
    if url is None:
        store, path = "/", pattern.lstrip("/")
    elif url[1] in _SCHEMES_WITHOUT_STORE:
        path = url[2].lstrip("/")
        store = f"{url[1]}://{url[2][: len(url[2]) - len(path)]}"
    else:
        name, slash, path = url[2].partition("/")
        if not name or not slash or _MAGIC.search(name):
            raise RecipeError([f"found {pattern!r}, expected a store's name and a path, as in 's3://bucket/a/*.jsonl'"])
        store = f"{url[1]}://{name}"
    folders = path.split("/")[:-1]
    magic = (k for k, folder in enumerate(folders) if _MAGIC.search(_ESCAPED.sub("", folder)))
    return store, [_ESCAPED.sub(r"\1", folder) for folder in folders[: next(magic, len(folders))]]
