"""The request to end a pipeline, an alternative of each of its waits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

STOP_MS = 1_000
"""How long the transaction under way may take to end after the request."""

CLEAN_UP_S = 1.0
"""How long aborting and closing may take after that, all together."""

LEAST_S = 0.05
"""The least that each of these steps gets."""


class StopRequest(asyncio.Event):
    """Set by a signal or by ``stop()``; the time that is left counts from then on."""

    def __init__(self, stop_ms: int = STOP_MS) -> None:
        super().__init__()
        self._grace_s = stop_ms / 1000
        self._end = 0.0

    def set(self) -> None:
        """Ask for the end."""
        if not self.is_set():
            self._end = time.monotonic() + self._grace_s + CLEAN_UP_S
        super().set()

    def left_s(self, most_s: float) -> float:
        """Return ``most_s``, or what is left of the time to end in if that is less."""
        if not self.is_set():
            return most_s
        return max(LEAST_S, min(most_s, self._end - time.monotonic()))

    async def pause(self, seconds: float) -> None:
        """Wait for so long, or until the end is asked for."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), seconds)

    async def interrupts(
        self, work: Coroutine[Any, Any, Any], is_worth_waiting: Callable[[], bool] = bool
    ) -> bool:
        """Do ``work`` until its end or the request; return whether it was interrupted.

        After the request it goes on for the time of grace, if ``is_worth_waiting``, and is
        cancelled then. Raises what ``work`` raises.
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
                working.add_done_callback(look_at)
                await asyncio.wait([working], timeout=self.left_s(self._grace_s + CLEAN_UP_S))
        return True


@contextlib.contextmanager
def signals_ask(stop: Callable[[], object]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call ``stop`` meanwhile, in the main thread of a Unix process."""
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


def look_at(done: asyncio.Future[Any]) -> None:
    """Take note of a failure of cancelled work, of which asyncio would complain."""
    if not done.cancelled():
        done.exception()
