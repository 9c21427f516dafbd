"""Tasks on a log that wait for the disk between their steps.

A task is a generator. Its steps change the log on the owner's thread; it yields the calls that only
wait for the disk. The driver runs each call, possibly in another thread, and then resumes the
generator. Other tasks may use the log meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

DiskSteps = Generator[Callable[[], None], None, T]
"""A task that yields calls and returns T. If a call raises OSError, the driver throws the error
into the generator."""


def run_blocking(steps: DiskSteps[T]) -> T:
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
