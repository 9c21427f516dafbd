"""Tasks on a log that wait for the disk in between, independent of the thread that waits.

A generator of this kind changes the log on its owner's thread and yields each call that only waits
for the disk. The caller that drives it runs the call, possibly in another thread, and resumes the
generator afterwards. Other tasks may use the log meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

DiskSteps = Generator[Callable[[], None], None, T]
"""Yields calls that may raise OSError, which the driver throws into it; returns T."""


def run_here(steps: DiskSteps[T]) -> T:
    """Run ``steps`` to their end in this thread."""
    try:
        wait = next(steps)
        while True:
            try:
                wait()
            except OSError as error:
                wait = steps.throw(error)
            else:
                wait = next(steps)
    except StopIteration as end:
        result: T = end.value
        return result
