"""Long tasks in steps, so that no caller must wait for the whole task.

A generator yields wherever other tasks may run, and returns its result. Its caller decides
how many steps to take at a time: all of them (:func:`finish`), or as many as fit into a slice of
time (``fencepost.coordinator.runtime.turns``, ``fencepost.coordinator.runtime.fair_threads``).
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""A task in steps with a result."""


def finish(steps: Generator[object, None, T]) -> T:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
