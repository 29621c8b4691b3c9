"""What may pass and what will not: retries with pauses, and the one message of a dataset that cannot be written."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from packer.format.errors import BayplanError, OutputError, StorageFault

T = TypeVar("T")

RETRY_DELAYS_SECONDS: tuple[float, ...] = (0.2, 1.0, 4.0)
"""Pauses between the tries of one read or write; the executor's own, longer pauses come after these."""
_PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError, BayplanError)
_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM})
_UNWRITABLE_ERRNOS = _FULL_ERRNOS | {errno.ENOTDIR, errno.EEXIST}
_PERMANENT_ERRNOS = _FULL_ERRNOS | {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
_CLIENT_MODULES = frozenset({"botocore", "aiobotocore", "aiohttp", "gcsfs", "google", "azure", "requests", "urllib3"})


class TooLarge(BayplanError):
    """A file is larger than the caller allows; nothing of it was kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"{size} bytes")


def may_pass(error: BaseException) -> bool:
    """Whether trying again could help: time-outs, lost connections, throttling, stale handles."""
    if isinstance(error, _PERMANENT):
        return False
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNOS
    return type(error).__module__.partition(".")[0] in _CLIENT_MODULES


def with_retries(operation: Callable[[], T], what: str) -> T:
    """The operation's result, tried again with growing, jittered pauses while its faults may pass.

    Raises:
        StorageFault: when the last try failed as well.
    """
    for delay in (*RETRY_DELAYS_SECONDS, None):
        try:
            return operation()
        except Exception as error:
            if not may_pass(error):
                raise
            if delay is None:
                raise StorageFault(f"{what}: {type(error).__name__}: {error}") from error
        time.sleep(delay * random.uniform(0.5, 1.5))
    raise AssertionError("unreachable: the last try either returns or raises")


@contextmanager
def writes_to(where: str) -> Iterator[None]:
    """Turn a full, read-only or forbidden file system into an OutputError that says so."""
    try:
        yield
    except OSError as error:
        if error.errno in _UNWRITABLE_ERRNOS:
            raise OutputError(
                f"cannot write to {where}: {error.strerror}: free space or change permissions, then run the same command "
                "again; what is published stays and is not done twice"
            ) from error
        raise
