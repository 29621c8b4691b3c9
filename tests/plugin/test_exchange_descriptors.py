"""Connections to thousands of ranks under a limit of open files, in a process of its own, since the limit is the process's."""

import re
import subprocess
import sys

import pytest

ROOM = """
import resource
from plugin.exchange.descriptors import make_room
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
try:
    make_room({connections})
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "said"),
    [
        (1024, "most", 63, "1024"),
        (1024, 8192, 4095, "4[34]"),
        (
            300,
            2048,
            4095,
            "UsageError found a limit of 2,048 open files, expected at least 4,.* to connect to 4,095 ranks; raise it",
        ),
    ],
)
def test_the_limit_is_raised_only_where_that_is_needed_and_allowed(soft: int, hard: object, connections: int, said: str) -> None:
    source = ROOM.format(soft=soft, hard=hard, connections=connections)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert re.match(said, run.stdout), run.stdout
    if "UsageError" in said:
        assert run.stdout.splitlines()[-1] == str(soft)
