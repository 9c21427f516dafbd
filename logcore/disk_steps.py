"""Work of a log's owner that waits for the disk on its way, without saying who waits.

A generator of this kind changes the log on its owner's thread and yields each call that only waits
for the disk; whoever drives it makes the call, in another thread if there is one to keep free, and
goes on behind it. Others may use the log meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

DiskSteps = Generator[Callable[[], None], None, T]
"""Yields calls that may raise OSError, which is to be thrown into it; returns T."""


def run_here(steps: DiskSteps[T]) -> T:
    """Drive ``steps`` to their end in this thread."""
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
