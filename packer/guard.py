"""Told which rows are being worked on, so that a death or a hang can be laid at the door of a few."""

from __future__ import annotations

from typing import Protocol


class Guard(Protocol):
    """Told which rows are being worked on, so that a death or a hang can be laid at the door of a few."""

    def begin(self, byte_offset: int) -> None:
        """Work on this row starts, while earlier ones may not be finished."""

    def progress(self) -> None:
        """An image is done."""

    def finish(self, next_offset: int) -> None:
        """All rows before `next_offset` are done."""


class NoGuard:
    """Guards nothing."""

    def begin(self, byte_offset: int) -> None:
        """Nothing to note."""

    def progress(self) -> None:
        """Nothing to note."""

    def finish(self, next_offset: int) -> None:
        """Nothing to note."""
