"""The process of one custom assignor, whose name is its argument.

It reads requests from standard input and writes responses to standard output, see ``frames.py``.
The assignor's own output goes to standard error. The memory of the process is limited. The parent
process kills it if a response is late; if the parent has ended, this process exits.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from importlib.metadata import entry_points
from typing import Any, BinaryIO

from fencepost.coordinator.services.assignors.frames import (
    ENTRY_POINTS,
    HEADER_BYTES,
    answer_of,
    frame,
    group_of,
    unpack,
)
from fencepost.groups.assignors.model import Assignor, AssignorFault, run
from fencepost.logcore.system import limit_memory

MAX_MEMORY_BYTES = 1 << 30
"""The maximum address space of the process. An assignor that needs more gets MemoryError, which is
reported."""

ORPHAN_CHECK_S = 1.0
"""How often a process checks that its parent still exists, even while the assignor hangs."""


def _load(name: str) -> Assignor:
    for point in entry_points(group=ENTRY_POINTS, name=name):
        assignor: Assignor = point.load()()
        return assignor
    raise AssignorFault(name, f"no entry point of that name in {ENTRY_POINTS}")


def _read(source: BinaryIO) -> Any | None:
    """Read one request; return None at the end of the input."""
    header = source.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return unpack(source.read(int.from_bytes(header)))


def _answer(assignor: Assignor, request: Any) -> list[object]:
    try:
        return answer_of(run(assignor, group_of(request)))
    except AssignorFault as fault:
        return [None, fault.problem]


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


def main(name: str) -> None:
    """Serve requests until standard input ends."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_memory(MAX_MEMORY_BYTES)
    assignor, problem = None, ""
    try:
        assignor = _load(name)
    except Exception as error:  # noqa: BLE001 - user code may raise any error
        problem = f"it cannot be loaded: {type(error).__name__}: {error}"
    while (request := _read(sys.stdin.buffer)) is not None:
        answer = [None, problem] if assignor is None else _answer(assignor, request)
        answers.write(frame(answer))
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
