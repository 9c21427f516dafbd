"""Long work in steps, which keeps the event loop for one slice of time after another.

A request may name a hundred thousand things. So its way from frame to response is a generator that
yields between them (``fencepost.coordinator.wire.steps``); most requests are through before the
first slice is over, and never notice. What is longer queues up, and takes turns with whatever else
is long; between two slices the loop looks after everybody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from types import GeneratorType
from typing import Any, TypeVar

from fencepost.coordinator.runtime.background import SLICE_MS
from fencepost.logcore.clock import monotonic_s

FIRST_SLICE_MS = 1
"""How long work that has just begun may keep the loop while other work waits, in milliseconds."""

Wait = asyncio.Future[Any]
"""What work may yield to be gone on with when it is done; None just gives way."""

T = TypeVar("T")

Work = Generator[Wait | None, None, T]
"""Steps that may wait."""


def _is_to_come(kind: type) -> bool:
    return kind is GeneratorType or hasattr(kind, "__await__")


is_to_come: Callable[[type], bool] = cache(_is_to_come)
"""Whether what is of a class is no result: it is work in steps, or can be waited for."""


class Job:
    """One piece of work under way. Made by :meth:`Turns.begin`."""

    __slots__ = ("_on_end", "_turns", "_work", "has_given_way", "is_over", "waits_for")

    def __init__(self, turns: Turns, work: Work[None], on_end: Callable[[], None]) -> None:
        self._turns = turns
        self._work = work
        self._on_end = on_end
        self.has_given_way = False
        """Whether it took more than one slice of time."""
        self.is_over = False
        self.waits_for: Wait | None = None

    def advance(self, until: float) -> None:
        """Take steps until they are over, one waits, or ``monotonic_s()`` is ``until``."""
        for wait in self._work:
            if self.stops(wait, until):
                return
        self.is_over = True
        self._turns.loop.call_soon(self._on_end)

    def stops(self, wait: Wait | None, until: float) -> bool:
        """Whether the work goes on later, after a step of it."""
        if wait is not None:
            self.waits_for = wait
            wait.add_done_callback(self._go_on)
        elif monotonic_s() >= until:
            self.has_given_way = True
            self._turns.queue(self)
        else:
            return False
        return True

    def _go_on(self, _wait: Wait) -> None:
        self.waits_for = None
        if not self.is_over:
            self.advance(self._turns.until())

    def drop(self) -> None:
        """Go no further: the result is not wanted. What the work waits for is cancelled."""
        if self.is_over:
            return
        self.is_over = True
        self._turns.forget(self)
        wait, self.waits_for = self.waits_for, None
        if wait is not None:
            wait.cancel()
        with suppress(ValueError):  # the work itself has led here, and is about to end
            self._work.close()


class OneAtATime:
    """Work of which each piece begins when the one before it is over, in the order they came."""

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[asyncio.Future[None]] = []

    def run(self, work: Work[T]) -> Work[T]:
        """Take the steps of ``work`` once the pieces before it are over."""
        while self._is_busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            yield turn
        self._is_busy = True
        try:
            return (yield from work)
        finally:
            self._is_busy = False
            waiting, self._waiting = self._waiting, []
            for turn in waiting:  # all of them: the client of the first may have gone by then
                if not turn.done():
                    turn.set_result(None)


class Turns:
    """The work of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: deque[Job] = deque()
        self._is_armed = False

    def begin(self, work: Work[None], until: float, on_end: Callable[[], None]) -> Job | None:
        """Take the first steps of ``work``, which raises nothing, at once; see :meth:`Job.advance`.

        Returns None if that was all of it. Else ``on_end`` will be called, in a turn of its own.
        """
        for wait in work:
            if wait is not None or monotonic_s() >= until:
                job = Job(self, work, on_end)
                job.stops(wait, until)
                return job
        return None

    def until(self) -> float:
        """When work that takes its first steps now gives way, by ``monotonic_s``."""
        slice_ms = FIRST_SLICE_MS if self._queue else SLICE_MS
        return monotonic_s() + slice_ms / 1000

    def queue(self, job: Job) -> None:
        """Have ``job`` go on when it is its turn."""
        self._queue.append(job)
        if not self._is_armed:
            self._is_armed = True
            self.loop.call_soon(self._next)

    def forget(self, job: Job) -> None:
        """Take a job out of the queue, if it is there."""
        if job in self._queue:
            self._queue.remove(job)

    def _next(self) -> None:
        """Give one slice of time to those that wait, and come again if any is left."""
        until = monotonic_s() + SLICE_MS / 1000
        try:
            while self._queue and monotonic_s() < until:
                self._queue.popleft().advance(until)
        finally:
            self._is_armed = bool(self._queue)
            if self._is_armed:
                self.loop.call_soon(self._next)
