"""Settings come from files and command lines: what is of another kind is refused by name, before anything is opened."""

from __future__ import annotations

from typing import Any

import pytest

from packer.format.errors import UsageError
from plugin.settings import PackSettings, Peers

NAN = float("nan")


@pytest.mark.parametrize("value", ["10", 2.5, True, None, 0, -1])
@pytest.mark.parametrize(
    "name", ["sequence_length", "buffer_size", "packs_ahead", "prefetch_bytes", "num_threads", "num_decode_threads"]
)
def test_a_count_is_a_whole_number_above_0(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"found {name} .*expected a whole number of at least 1"):
        PackSettings(**{"sequence_length": 64, name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_age", [-1, 1.5, None, "1"]),
        ("pad_id", [-1, 1.5, None, 1 << 31]),
        ("max_failures", [-1, 1.5, "3", False]),
        ("max_failure_share", [-0.1, 1.1, NAN, "1", True]),
        ("max_host_bytes", [0, -1, "1", 1e9]),
        ("read_deadline_seconds", [0, -1, NAN, float("inf"), "5", None]),
        ("check_crc", ["no", 0, None]),
        ("ensure_image", ["no", 1]),
        ("draft", ["no", 1]),
        ("cost", [3, ("a", "b")]),
        ("sequence_length", [1 << 31]),
    ],
)
def test_what_a_setting_cannot_be_is_refused_by_its_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"found {name} .*expected"):
            PackSettings(**{"sequence_length": 64, name: value})


@pytest.mark.parametrize("value", ["2", 2.0, True, 0])
def test_sizes_of_peers_are_whole_numbers(value: Any) -> None:
    for name in ("tensor", "context", "pipeline"):
        with pytest.raises(UsageError, match=f"found {name} "):
            Peers(**{name: value})
