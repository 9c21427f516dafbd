"""Long work in steps, so that no caller has to wait for as long as all of the work takes.

A generator yields wherever others may have their turn, and returns its result. Its caller decides
how many steps to take at a time: all of them (:func:`finish`), or as many as fit into a slice of
time (``fencepost.coordinator.runtime.turns``, ``fencepost.coordinator.runtime.fair_threads``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in steps with a result."""


def finish(steps: Generator[object, None, T]) -> T:
    """Take all steps at once; returns the result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
