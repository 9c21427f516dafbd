"""Long work in steps, run on the event loop in slices of time.

A request may contain a hundred thousand items. Its handling, from frame to response, is therefore a
generator that yields between items (``fencepost.protocol.steps``); most requests finish within the
first slice. Longer ones are queued and take turns with each other; between two slices
the loop runs all other work.

A request that ends the wait of other requests, such as an append, puts the completion of those
requests into the :class:`ActionQueue`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import cache
from types import GeneratorType
from typing import Any, TypeVar

from fencepost.coordinator.runtime.background import SLICE_MS, Pace, log_failure
from fencepost.logcore.clock import monotonic_s

FIRST_SLICE_MS = 1
"""The time in milliseconds for which new work may occupy the loop while other work waits."""


class Pause:
    """A wait that resumes its work in the turn in which it ends.

    The callbacks of a future run in the next turn instead. Call :meth:`end` from an action of the
    :class:`ActionQueue`, never while a request is handled, because it runs the resumed work.
    """

    __slots__ = ("_resume", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self._resume: Callable[[Any], object] | None = None

    def add_done_callback(self, resume: Callable[[Any], object]) -> None:
        """Call ``resume`` at the end of the wait. Call this method once, before the end."""
        self._resume = resume

    def end(self) -> None:
        """End the wait, unless it is over."""
        if not self.is_over:
            resume = self._resume
            self.cancel()
            if resume is not None:
                resume(self)

    def cancel(self) -> None:
        """End the wait without resuming the work."""
        self.is_over, self._resume = True, None


Wait = asyncio.Future[Any] | Pause
"""Work that yields a wait resumes when the wait is over; None lets the event loop run."""

T = TypeVar("T")

Work = Generator[Wait | None, None, T]
"""Steps that may wait."""


def _is_pending_work(kind: type) -> bool:
    return kind is GeneratorType or hasattr(kind, "__await__")


is_pending_work: Callable[[type], bool] = cache(_is_pending_work)
"""Returns whether instances of a class are generators or awaitables, rather than results."""


async def completed(work: Work[T]) -> T:
    """Run steps to the end in a task, which yields to other tasks between slices of time."""
    pace = Pace()
    try:
        while True:
            wait = next(work)
            if wait is None:
                await pace()
            elif isinstance(wait, Pause):
                over: asyncio.Future[Pause] = asyncio.get_running_loop().create_future()
                wait.add_done_callback(over.set_result)
                await over
            else:
                await asyncio.wait({wait})
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        work.close()


class Job:
    """Work in progress. Created by :meth:`Turns.begin`."""

    __slots__ = ("_on_end", "_turns", "_work", "has_given_way", "is_over", "waits_for")

    def __init__(self, turns: Turns, work: Work[None], on_end: Callable[[], None]) -> None:
        self._turns = turns
        self._work = work
        self._on_end = on_end
        self.has_given_way = False
        """Whether the work took more than one slice of time."""
        self.is_over = False
        self.waits_for: Wait | None = None

    def advance(self, until: float) -> None:
        """Run steps until all are done, one waits, or ``monotonic_s()`` reaches ``until``."""
        for wait in self._work:
            if self.stops(wait, until):
                return
        self.is_over = True
        self._on_end()

    def stops(self, wait: Wait | None, until: float) -> bool:
        """Return whether the work pauses after this step, to be resumed later."""
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
        """Stop: the result is not needed. Cancel the future that the work waits for."""
        if self.is_over:
            return
        self.is_over = True
        self._turns.forget(self)
        wait, self.waits_for = self.waits_for, None
        if wait is not None:
            wait.cancel()
        with suppress(ValueError):  # the work itself may have called this, and is about to end
            self._work.close()


class ActionQueue:
    """Completes waiting requests after the request that ended their wait.

    An append only adds actions. No action runs inside an append or inside another action. The
    connection that serves the request releases the actions once its own responses are sent. The
    actions run in the same turn of the event loop, so that a record reaches a waiting consumer
    without another turn. Once the request's slice of time is used up, the remaining actions are
    left for later turns.

    Source: ``ActionQueue``, ``DelayedActionQueue``.
    """

    def __init__(self) -> None:
        self._actions: deque[Callable[[], object]] = deque()
        self._is_held = False
        self._is_armed = False

    def add(self, action: Callable[[], object]) -> None:
        """Run ``action`` later, after those added before."""
        self._actions.append(action)
        if not self._is_held:
            self._arm()

    def hold(self) -> bool:
        """Keep actions until :meth:`release`, which the caller must call if this returns True.

        The result is False if an earlier caller already holds the actions, and will release them:
        an action may serve requests, which call this method again.
        """
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self, until: float) -> None:
        """Run actions until ``monotonic_s()`` reaches ``until``; leave the others for a later turn.

        An action that begins in time may take a whole slice of time beyond ``until``.
        """
        actions = self._actions
        try:
            while actions and monotonic_s() < until:
                try:
                    actions.popleft()()
                except Exception as error:  # noqa: BLE001 - the others must run
                    log_failure("complete a waiting request", error)
        finally:
            self._is_held = False
            if actions:
                self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_armed = False
        if self.hold():
            self.release(monotonic_s() + SLICE_MS / 1000)


class OneAtATime:
    """Runs requests one after the other, in the order of arrival."""

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: list[asyncio.Future[None]] = []

    def run(self, work: Work[T]) -> Work[T]:
        """Run the steps of ``work`` once all earlier work is finished."""
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
            for turn in waiting:  # wake all: the client of the first may have disconnected
                if not turn.done():
                    turn.set_result(None)


class Turns:
    """Runs the jobs of one event loop in turn, a slice of time each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: deque[Job] = deque()
        self._is_armed = False

    def begin(self, work: Work[None], until: float, on_end: Callable[[], None]) -> Job | None:
        """Run the first steps of ``work``; see :meth:`Job.advance`. The steps must not raise.

        Returns None if all steps are done. Otherwise ``on_end`` will be called after the last step,
        but not before this method has returned.
        """
        for wait in work:
            if wait is not None or monotonic_s() >= until:
                job = Job(self, work, on_end)
                job.stops(wait, until)
                return job
        return None

    def until(self) -> float:
        """Return the ``monotonic_s`` time at which work that starts now must yield."""
        slice_ms = FIRST_SLICE_MS if self._queue else SLICE_MS
        return monotonic_s() + slice_ms / 1000

    def queue(self, job: Job) -> None:
        """Resume ``job`` after the jobs that are queued already."""
        self._queue.append(job)
        if not self._is_armed:
            self._is_armed = True
            self.loop.call_soon(self._next)

    def forget(self, job: Job) -> None:
        """Remove a job from the queue, if it is there."""
        if job in self._queue:
            self._queue.remove(job)

    def _next(self) -> None:
        """Run the waiting jobs for one slice of time, and again later if any is left."""
        until = monotonic_s() + SLICE_MS / 1000
        try:
            while self._queue and monotonic_s() < until:
                self._queue.popleft().advance(until)
        finally:
            self._is_armed = bool(self._queue)
            if self._is_armed:
                self.loop.call_soon(self._next)
