"""Waits for a state, with a timeout in real time even if a test has frozen the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

from kio.schema.errors import ErrorCode

from fencepost.client.client import (
    ApiError,
    BrokerUnreachable,
    ConnectionLostError,
)
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.printable import printable

T = TypeVar("T")

TIMEOUT_S: Final = 30.0
"""The timeout of waits and of single requests; only a failing test reaches it."""

POLL_S: Final = 0.01
"""The pause between two polls of a state."""

LOOK_S: Final = 5.0
"""The time limit of a request in the first poll. The limit doubles after each failed poll; it is at
most the time that is left, but never below this value."""


class BrokerDownError(RuntimeError):
    """The broker was stopped or killed; another thread may start it again."""


def passes(error: Exception) -> bool:
    """Return whether an error is temporary.

    Examples are a coordinator that is loading, a partition between two leaders, a topic that one
    broker does not know yet, and a broker that is down.
    """
    if isinstance(error, ApiError):
        return bool(error.code.retriable) or error.code is ErrorCode.leader_not_available
    return isinstance(error, (BrokerUnreachable, ConnectionLostError, BrokerDownError))


def is_unknown_topic(error: Exception) -> bool:
    """Return whether the error means a missing topic or partition."""
    return isinstance(error, ApiError) and error.code is ErrorCode.unknown_topic_or_partition


def wait(
    look: Callable[[float], T | None],
    timeout: float,
    describe: Callable[[], str],
    passing: Callable[[Exception], bool] = passes,
    look_s: float = LOOK_S,
) -> T:
    """Call ``look`` repeatedly until its result is true, and return the result.

    The argument of ``look`` is a request's time limit in seconds. Raises TimeoutError with the text
    of ``describe()`` and the last poll's error; an error that is not ``passing`` is raised at once.
    """
    __tracebackhide__ = True
    end = monotonic_s() + timeout
    limit_s = look_s
    while True:
        trouble = ""
        try:
            result = look(max(look_s, min(limit_s, end - monotonic_s())))
        except (ApiError, BrokerUnreachable, ConnectionLostError, BrokerDownError) as error:
            if not passing(error):
                raise
            limit_s *= 2
            result, trouble = None, "" if is_unknown_topic(error) else f"; the last look: {error}"
        if result:
            return result
        if monotonic_s() >= end:
            # Names of groups and members come from clients, and may hold terminal control codes.
            raise TimeoutError(
                printable(f"not within {timeout} s: {describe()}{trouble}{_advice()}")
            )
        time.sleep(POLL_S)


def _advice() -> str:
    """Return a hint if the caller is a coroutine, whose call may have blocked its own client."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ""
    return "; the call blocked this thread's event loop, which `await kafka.aio.…` does not"
