"""Samples that could not be read or decoded while a model trains: what is kept of them, and when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packer.format.errors import BayplanError
from plugin.settings import PackSettings

SHARE_FROM_SAMPLES = 1000
"""A share of fewer samples says little."""
_NAMED = 5


class SampleFailed(BayplanError):
    """A sample could not be read, decoded or encoded. Made from its message alone, as torch does across processes."""


class TooManyFailures(BayplanError):
    """More samples failed than the settings allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One sample that failed."""

    sample: str
    """Its source, part and line; its id too where the record could be read."""
    error: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.error}"


def refuse_too_many(settings: PackSettings, num_failed: int, num_samples: int, latest: Sequence[Failure]) -> None:
    """Args:
        num_failed, num_samples: of this loader worker, since the run began; a resumed run counts on.

    Raises:
        TooManyFailures: naming the limit and the latest cases.
    """
    share = num_failed / num_samples if num_samples else 0.0
    if settings.max_failures is not None and num_failed > settings.max_failures:
        limit = f"max_failures {settings.max_failures}"
    elif settings.max_failure_share is not None and num_samples >= SHARE_FROM_SAMPLES and share > settings.max_failure_share:
        limit = f"max_failure_share {settings.max_failure_share}"
    else:
        return
    cases = "; ".join(map(str, latest[-_NAMED:]))
    raise TooManyFailures(
        f"{num_failed} of {num_samples} samples of this loader worker could not be used, above {limit}; the latest: {cases}. "
        "Check the dataset with `bayplan verify`; raise the limit to resume, or leave such samples out with a list in `exclude/` "
        "and start the data over"
    )
