"""Lets a job in this process end before any of its storage operations, as SIGKILL would.

Ending is an exception that no code may catch, after which every further operation fails as well, so that no clean-up of a
dying process helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from packer.storage import LocalStorage

T = TypeVar("T")


class ProcessEnds(BaseException):
    """Stands for SIGKILL."""


class Fuse:
    """Lets a job make `length` storage operations and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.length: int | None = None
        monkeypatch.setattr(LocalStorage, "on_operation", lambda storage, verb, name: self.burn())

    def burn(self) -> None:
        if self.length is not None and self.count >= self.length:
            raise ProcessEnds
        self.count += 1

    def run(self, job: Callable[[], T], length: int | None) -> T | None:
        """What the job gave, or None when it ended."""
        self.count, self.length = 0, length
        try:
            return job()
        except ProcessEnds:
            return None
