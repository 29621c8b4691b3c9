"""What a failed read says about a row: the one place where errors of files and stores become reason codes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeVar

from packer import storage
from packer.format.errors import RowError, StorageFault
from packer.format.reasons import Reason
from packer.redact import safe_place, scrubbed

T = TypeVar("T")

_MISSING_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ})
_UNREADABLE_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV})


def with_row_errors(operation: Callable[[], T], url: str) -> T:
    """The operation's result, tried again while its faults may pass.

    Raises:
        RowError: for an error that says something about this one file.
        StorageFault: when the last try failed as well.
    """

    def once() -> T:
        try:
            return operation()
        except (OSError, ValueError, ImportError) as error:
            if (refusal := row_error(error, url)) is not None:
                raise refusal from error
            raise

    try:
        return storage.with_retries(once, url)
    except StorageFault as error:
        raise scrubbed_fault(error, url) from None


def scrubbed_fault(error: Exception, url: str) -> StorageFault:
    """A fault of the store at `url`, without the user info and query strings its text may quote."""
    return StorageFault(f"{safe_place(url)}: {scrubbed(str(error).removeprefix(f'{url}: '))}")


def row_error(error: Exception, url: str) -> RowError | None:
    """What a permanent error says about the file at `url`; None for a fault that may pass."""
    place = safe_place(url)
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or number in _MISSING_ERRNOS:
        why = "" if number in (errno.ENOENT, None) else f" ({os.strerror(number)})"
        return RowError(Reason.MISSING_IMAGE, f"{place}: no such file{why}; check the reference and `image_root`")
    if isinstance(error, IsADirectoryError):
        return unreadable(url, "found a folder, expected a file")
    if isinstance(error, PermissionError) or number in _UNREADABLE_ERRNOS:
        return unreadable(url, f"cannot be opened: {os.strerror(number) if number else 'permission denied'}")
    if isinstance(error, ImportError):
        return unsupported(f"{place}: this store needs a package that is not installed: {scrubbed(str(error))}")
    if isinstance(error, ValueError):
        return unsupported(f"{place}: not a usable path or URL: {scrubbed(str(error))}")
    return None


def missing(url: str, what: str) -> RowError:
    """Nothing is there."""
    return RowError(Reason.MISSING_IMAGE, f"{safe_place(url)}: {what}")


def unreadable(url: str, what: str) -> RowError:
    """Something is there, but not a readable image file."""
    return RowError(Reason.UNREADABLE_IMAGE, f"{safe_place(url)}: {what}")


def unsupported(what: str) -> RowError:
    """A kind of reference or archive that is not read."""
    return RowError(Reason.UNSUPPORTED_REFERENCE, what)


def too_large(url: str, size: int, max_bytes: int) -> RowError:
    """The image is above the source's limit."""
    found = f"{safe_place(url)}: found {size} bytes, expected at most {max_bytes}"
    return RowError(Reason.IMAGE_TOO_LARGE, f"{found}; raise `max_bytes` to keep it")


def empty(url: str) -> RowError:
    """The image has no bytes."""
    return RowError(Reason.EMPTY_IMAGE, f"{safe_place(url)}: found 0 bytes, expected an image")
