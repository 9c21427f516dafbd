"""Waiting for states, each with a deadline. Nothing in the tests sleeps for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.01
"""The interval at which states without notifications are polled."""

DEADLINE_S = 60.0
"""Default deadline; generous, because only a failing test reaches it."""


def until(
    probe: Callable[[], T | None],
    what: str,
    *,
    deadline_s: float = DEADLINE_S,
    poll_s: float = POLL_S,
) -> T:
    """Call ``probe`` until it returns a true value, and return that.

    Raise TimeoutError with ``what`` and the last value.
    """
    end = time.monotonic() + deadline_s
    while True:
        result = probe()
        if result:
            return result
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s; last seen: {result!r}")
        time.sleep(poll_s)


async def until_async(
    probe: Callable[[], Awaitable[T | None]],
    what: str,
    *,
    deadline_s: float = DEADLINE_S,
    poll_s: float = POLL_S,
) -> T:
    """Do as :func:`until` does, for a coroutine function."""
    end = time.monotonic() + deadline_s
    while True:
        result = await probe()
        if result:
            return result
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s} s; last seen: {result!r}")
        await asyncio.sleep(poll_s)


async def until_true(
    probe: Callable[[], object],
    what: str = "the state",
    *,
    deadline_s: float = DEADLINE_S,
    poll_s: float = POLL_S,
) -> None:
    """Do as :func:`until_async` does, for a plain function that reads state of this loop."""

    async def asked() -> object:
        return probe()

    await until_async(asked, what, deadline_s=deadline_s, poll_s=poll_s)
