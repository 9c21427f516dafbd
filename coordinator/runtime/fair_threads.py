"""Threads for expensive checks of requests, shared fairly between clients.

A job works in steps of about a millisecond. After a slice of processor time it yields to the job of
the client that has used the least processor time, so a small batch does not wait for earlier large
ones. A client that was idle starts with the lowest usage of the active clients, minus a small
credit.

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
"""The processor time in seconds of a job's slice."""

CREDIT_S: Final = 0.1
"""The credit of a client that was idle, in seconds of processor time: enough for the check of an
ordinary batch."""


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
        """The processor time used."""
        self.is_dropped = False
        """Whether the job's result is no longer needed."""


class FairThreads:
    """``count`` threads, started with the first job."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._ready: list[_Job] = []
        """Jobs that wait for a thread."""
        self._jobs: list[_Job] = []
        """Waiting and running jobs."""
        self._had: dict[Hashable, float] = {}
        """The processor time that each client has used, in seconds. Only the differences matter."""
        self._floor = 0.0
        """The lowest processor time of any client; it never decreases."""

    async def run(
        self, steps: Steps[T], client: Hashable, took: Callable[[float], None] | None = None
    ) -> T:
        """Run ``steps`` in a thread, alternating with other clients' jobs; return their result.

        ``took`` is called with the processor time in seconds, also after a failure or a
        cancellation of the caller.
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
        """Run no further slice, wait for the current ones, and end the threads."""
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
            least = min((had[job.client] for job in self._jobs), default=self._floor)
            self._floor = max(self._floor, least)
            ahead = self._floor - CREDIT_S
            busy = {job.client for job in self._jobs}
            for client in [client for client, seconds in had.items() if seconds < ahead]:
                if client not in busy:
                    del had[client]  # long idle times give no advantage
            had.setdefault(job.client, ahead)
            self._jobs.append(job)
            self._ready.append(job)

    def _turn(self) -> None:
        """Run a slice of the job whose client has used the least processor time."""
        with self._lock:
            if not self._ready:
                return
            job = min(self._ready, key=lambda candidate: self._had[candidate.client])
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
        except BaseException as error:  # noqa: BLE001 - the caller gets it
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
            return  # the threads or the event loop were closed in the meantime


def _settle(job: _Job, result: object, failure: BaseException | None) -> None:
    if job.took is not None:
        job.took(job.seconds)
    if job.future.done():
        return
    if failure is None:
        job.future.set_result(result)
    else:
        job.future.set_exception(without_traceback(failure))
