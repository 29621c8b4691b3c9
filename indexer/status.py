"""Why a record has no counts under a profile. Alone here, since not all who count need Arrow."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Whether a profile can count a record, and why not. Numbers are never reused."""

    USABLE = 0
    IMAGE_REFUSED = 1
    TEMPLATE_FAILED = 2
    NOT_TOKENIZED = 3
    KILLS_WORKER = 4
    EMPTY = 5


EXPLANATIONS: dict[Status, str] = {
    Status.USABLE: "counted; can be trained on",
    Status.IMAGE_REFUSED: "the image rule refuses the size of one of its images",
    Status.TEMPLATE_FAILED: "the template cannot render it",
    Status.NOT_TOKENIZED: "its text could not be tokenized",
    Status.KILLS_WORKER: "it killed or hung its worker process twice when tried alone",
    Status.EMPTY: "it has no token at all under this profile",
}
