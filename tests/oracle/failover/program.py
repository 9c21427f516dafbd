"""The shared code of the Python programs: arguments, counts and output lines.

There is one NAME and one set of counts per process, so both are globals of this module.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

BOOTSTRAP, NAME, STOP = sys.argv[1], sys.argv[2], Path(sys.argv[3])
MORE = sys.argv[4:]
SOURCE, TARGET, PARTITIONS = f"in-{NAME}", f"out-{NAME}", 3

at = dict.fromkeys(("sent", "acknowledged", "read", "copied"), 0)
seen: set[int] = set()


def say(line: str) -> None:
    """Print one line atomically, even while other threads print."""
    print(line.replace("\n", " ") + "\n", end="", flush=True)


def tell(role: str, what: str) -> None:
    say(f"ERROR {role} {what}")


def say_where() -> None:
    """Print the present counts as an ``AT`` line."""
    say(" ".join(["AT", *map(str, at.values())]))


def work(*roles: Callable[[], None]) -> None:
    """Run each role in a thread, until the process is killed."""
    for role in roles:
        threading.Thread(target=role, daemon=True).start()
    while True:
        time.sleep(0.1)
        say_where()
