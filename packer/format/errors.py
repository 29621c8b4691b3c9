"""The one error tree. A user's mistake or bad input is a BayplanError; our own bugs are AssertionErrors.

BayplanError                 one clear message: found, expected, what to do
|- RecipeError               the recipe (exit 2); carries every mistake at once
|- UsageError                wrong use of a command or function (exit 2)
|- FormatError               a file of a dataset is foreign, cut, or inconsistent
|- InputError                one source's input cannot be used; the other sources go on (exit 1)
|- OutputError               the dataset cannot be written (full, read-only, not allowed); the job stops (exit 1)
|- StorageFault              a store failed in a way that may pass; the executor tries again
`- RowError                  one row cannot become a record; carries the reason code for its quarantine line
"""

from __future__ import annotations

from packer.format.reasons import Reason


class BayplanError(Exception):
    """A mistake or bad input that the user can act on; the message is shown as it stands."""


class RecipeError(BayplanError):
    """The recipe cannot be used. `problems` lists every mistake, one line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[list[str]]]:
        return type(self), (self.problems,)


class UsageError(BayplanError):
    """A command or function was used in a way that cannot work."""


class FormatError(BayplanError):
    """A dataset file is not what its manifest or the format says."""


class InputError(BayplanError):
    """The input of one source cannot be read as the recipe says; costs that source only."""


class OutputError(BayplanError):
    """The dataset's own storage refuses writes; nothing published so far is lost."""


class StorageFault(BayplanError):
    """A read or write failed for a reason that may pass (time-out, connection, throttling)."""


class RowError(BayplanError):
    """One row (or one image of it) is bad: becomes a quarantine line, or a dropped image by policy."""

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")

    def __reduce__(self) -> tuple[type[RowError], tuple[Reason, str]]:
        return type(self), (self.reason, self.detail)
