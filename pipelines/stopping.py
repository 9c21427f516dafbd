"""A pipeline's stop request, which interrupts each of its waits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

STOP_MS = 1_000
"""The time that a transaction in progress has to end after the request."""

CLEAN_UP_S = 1.0
"""The time for aborting and closing afterwards."""

LEAST_S = 0.05
"""The minimum time for each step of a stop, even if the time limits have passed."""


class StopRequest(asyncio.Event):
    """Set by a signal or by ``stop()``; time limits count from then on."""

    def __init__(self, stop_ms: int = STOP_MS) -> None:
        super().__init__()
        self._grace_s = stop_ms / 1000
        self._end = 0.0

    def set(self) -> None:
        """Request the stop."""
        if not self.is_set():
            self._end = time.monotonic() + self._grace_s + CLEAN_UP_S
        super().set()

    def left_s(self, most_s: float) -> float:
        """Return ``most_s``, or the time left before the end if that is shorter."""
        if not self.is_set():
            return most_s
        return max(LEAST_S, min(most_s, self._end - time.monotonic()))

    async def pause(self, seconds: float) -> None:
        """Wait for this time, or until the stop request."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), seconds)

    async def run_until_set(
        self, work: Coroutine[Any, Any, Any], is_worth_waiting: Callable[[], bool] = bool
    ) -> bool:
        """Run ``work`` until its end or the stop request; return whether it was interrupted.

        After the request, if ``is_worth_waiting``, it continues for the grace period; then it is
        cancelled. Raises the errors of ``work``.
        """
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and is_worth_waiting():
                await asyncio.wait([working], timeout=self.left_s(self._grace_s))
            if working.done():
                working.result()
                return False
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                working.add_done_callback(consume_exception)
                await asyncio.wait([working], timeout=self.left_s(self._grace_s + CLEAN_UP_S))
        return True


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Make SIGTERM and SIGINT call ``stop`` within the context.

    Only the main thread of a Unix process can set handlers; elsewhere signals are left alone.
    """
    loop = asyncio.get_running_loop()
    taken = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, stop)
            taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


def consume_exception(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of cancelled work, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
