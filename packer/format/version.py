"""The format version written by this release and the ones it reads. See README.md beside this file for the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packer.format.errors import FormatError

FORMAT_VERSION = 1
READABLE_VERSIONS = frozenset({1})
MAGIC = "bayplan"


def check_version(document: Mapping[str, Any], where: str) -> None:
    """Refuse a document of another program or of a format version this release does not read.

    Raises:
        FormatError: naming `where`, what was found and what was expected.
    """
    if document.get("format") != MAGIC:
        raise FormatError(f"{where}: found format {document.get('format')!r}, expected {MAGIC!r}: not a bayplan file")
    version = document.get("format_version")
    if version not in READABLE_VERSIONS:
        readable = ", ".join(map(str, sorted(READABLE_VERSIONS)))
        raise FormatError(
            f"{where}: found format version {version!r}, this release reads {readable}: use the release that wrote it or newer"
        )
