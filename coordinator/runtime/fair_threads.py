"""Threads for the long checks of clients' requests, which clients share by turns.

A job works in steps of a millisecond or so. After a slice of processor time it makes room for the
job of the client that has had least, so a small batch does not wait for the large ones before it. A
client that was idle starts level with the least served of the others, and a little ahead of it.

Source: the weighted fair queue of Linux's CFS scheduler; Kafka's request handler threads take
requests in the order of their arrival.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from fencepost.logcore.steps import Steps
from fencepost.logcore.tracebacks import without_traceback

T = TypeVar("T")

SLICE_S: Final = 0.008
"""Processor time that a job takes before another has its turn, in seconds."""

CREDIT_S: Final = 0.1
"""How far a client that was idle is ahead of the others, in seconds of processor time: enough for
the check of an ordinary batch."""


class _Job:
    __slots__ = ("client", "future", "is_dropped", "seconds", "steps", "took")

    def __init__(
        self,
        steps: Steps[Any],
        client: Hashable,
        took: Callable[[float], None] | None,
        future: asyncio.Future[Any],
    ) -> None:
        self.steps = steps
        self.client = client
        self.took = took
        self.future = future
        self.seconds = 0.0
        """Processor time that it took."""
        self.is_dropped = False
        """Whether its result is no longer wanted."""


class FairThreads:
    """A few threads, which start with the first job."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._ready: list[_Job] = []
        """Jobs that wait for a thread."""
        self._jobs: list[_Job] = []
        """Jobs that wait, and jobs that a thread is at."""
        self._had: dict[Hashable, float] = {}
        """Processor time of each client, in seconds, from a start that all of them share."""
        self._floor = 0.0
        """The processor time of the least served client; it never goes back."""

    async def run(
        self, steps: Steps[T], client: Hashable, took: Callable[[float], None] | None = None
    ) -> T:
        """Take ``steps`` in a thread, in turns with those of other clients; return their result.

        ``took`` is told the processor time of it, in seconds, also where it fails or the caller is
        cancelled.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        job = _Job(steps, client, took, asyncio.get_running_loop().create_future())
        self._arrive(job)
        try:
            self._pool.submit(self._turn)
            result: T = await job.future
        finally:
            job.is_dropped = True
        return result

    def close(self) -> None:
        """Take no further slice, wait for those under way, and end the threads."""
        with self._lock:
            self._ready.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _arrive(self, job: _Job) -> None:
        with self._lock:
            had = self._had
            if not self._jobs:
                had.clear()
            least = min((had[one.client] for one in self._jobs), default=self._floor)
            self._floor = max(self._floor, least)
            ahead = self._floor - CREDIT_S
            busy = {one.client for one in self._jobs}
            for client in [one for one, seconds in had.items() if seconds < ahead]:
                if client not in busy:
                    del had[client]  # to have been idle for long is no advantage
            had.setdefault(job.client, ahead)
            self._jobs.append(job)
            self._ready.append(job)

    def _turn(self) -> None:
        """Take a slice of the job whose client has had least."""
        with self._lock:
            if not self._ready:
                return
            job = min(self._ready, key=lambda one: self._had[one.client])
            self._ready.remove(job)
        result: Any = None
        failure: BaseException | None = None
        is_over = False
        begun = time.thread_time()
        until = begun + SLICE_S
        try:
            while not job.is_dropped and time.thread_time() < until:
                next(job.steps)
            is_over = job.is_dropped
        except StopIteration as end:
            result, is_over = end.value, True
        except BaseException as error:  # noqa: BLE001 - it is for the caller
            failure, is_over = without_traceback(error), True
        seconds = time.thread_time() - begun
        job.seconds += seconds
        with self._lock:
            self._had[job.client] += seconds
            if is_over:
                self._jobs.remove(job)
            else:
                self._ready.append(job)
        self._go_on(job, result, failure, is_over=is_over)

    def _go_on(
        self, job: _Job, result: object, failure: BaseException | None, *, is_over: bool
    ) -> None:
        pool = self._pool
        try:
            if is_over:
                loop = job.future.get_loop()
                loop.call_soon_threadsafe(_settle, job, result, failure)
            elif pool is not None:
                pool.submit(self._turn)
        except RuntimeError:
            return  # the threads, or the loop, are closed meanwhile


def _settle(job: _Job, result: object, failure: BaseException | None) -> None:
    if job.took is not None:
        job.took(job.seconds)
    if job.future.done():
        return
    if failure is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(without_traceback(failure))
