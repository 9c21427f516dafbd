"""Background tasks, timers and threads, which continue after failures.

All work that the daemon does by itself (cleaning, retention, checkpoints, flushes, sweeps, loads)
uses this module, so one rule holds for all of it: an unexpected failure is logged with its
traceback, and later work continues as usual. A test in ``tests/test_tidy.py`` forbids
other ways of creating tasks or timers.

Source: ``KafkaScheduler`` and ``CoreUtils.swallow``, which log and continue as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from fencepost.logcore.clock import Clock, SystemClock, monotonic_s
from fencepost.logcore.disk_steps import DiskSteps
from fencepost.logcore.tracebacks import without_traceback

T = TypeVar("T")

SLICE_MS = 8
"""The time in milliseconds for which one task may occupy the event loop before it yields to others.
It is well below what a client notices, and long compared to the cost of switching."""

AFTER_FAILURE_MS = 1_000
"""The pause in milliseconds before failed work is retried, or after ``pause_ms`` itself has failed.
"""

_log = structlog.get_logger(__name__)


class Pace:
    """Lets other work run during a long task, which calls ``await pace()`` between its steps.

    Tasks that run concurrently share one instance, so that a hundred small shards that load
    together do not block the loop for longer than one large shard. The instance uses real time, not
    the daemon's clock, because it only limits processor use.
    """

    def __init__(self, slice_ms: int = SLICE_MS) -> None:
        self._slice_seconds = slice_ms / 1000
        self._since = monotonic_s()

    async def __call__(self) -> None:
        """Yield to the event loop if the slice is used up."""
        if monotonic_s() - self._since >= self._slice_seconds:
            await asyncio.sleep(0)
            self._since = monotonic_s()


def log_failure(what: str, error: BaseException, **fields: object) -> None:
    """Log an unexpected failure, with its traceback."""
    cause = f"{type(error).__name__}: {error}"
    _log.error("background work failed", what=what, **fields, cause=cause, exc_info=error)


@contextmanager
def swallow(what: str, **fields: object) -> Iterator[None]:
    """Log an exception of the ``with`` block, and continue after the block.

    ``fields`` are added to the log line.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - that is its purpose
        log_failure(what, error, **fields)


def spawn(work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
    """Run ``work`` on the running loop; log its failure, whether it is awaited or not."""

    def ended(task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_failure(what, error)

    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(ended)
    return task


def call_later(
    loop: asyncio.AbstractEventLoop, delay_ms: float, what: str, callback: Callable[[], object]
) -> asyncio.TimerHandle:
    """Call ``callback`` in ``delay_ms`` milliseconds, and log its failure."""

    def call() -> None:
        with swallow(what):
            callback()

    return loop.call_later(delay_ms / 1000, call)


def report(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that the event loop has caught: the loop's exception handler."""
    error = context.get("exception")
    if isinstance(error, BaseException):
        log_failure(str(context.get("message")), error)
    else:
        _log.error("background work failed", what=str(context.get("message")))


Work = Callable[[], Awaitable[bool] | Awaitable[None] | None]
"""One round of repeated work; returns True if there is more to do at once."""


class Repeated:
    """Repeats ``work``, with pauses, from :meth:`start` to :meth:`stop`.

    ``work`` may be a coroutine function. ``pause_ms`` is called before each pause, which is skipped
    if there is more to do. The pauses are measured on ``clock``, by default the system's.
    """

    def __init__(
        self,
        what: str,
        work: Work,
        pause_ms: Callable[[], int],
        clock: Clock | None = None,
    ) -> None:
        self.what = what
        self.due_ms: int | None = None
        """When the next round begins, on the clock's monotonic time; None during a round and after
        :meth:`stop`."""
        self._work = work
        self._pause_ms = pause_ms
        self.clock: Clock = SystemClock() if clock is None else clock
        self._is_stopping = False
        self._wake = asyncio.Event()
        """Set when the clock was moved, and by :meth:`stop`."""
        self._pausing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_stopping(self) -> bool:
        """Return whether no new work should begin."""
        return self._is_stopping

    @property
    def is_started(self) -> bool:
        """Return whether the work was started and not stopped."""
        return self._task is not None

    def start(self, first_ms: int = 0) -> None:
        """Start on the running loop, after ``first_ms``."""
        self._is_stopping = False
        self._task = spawn(self._run(first_ms), self.what)

    async def stop(self) -> None:
        """Stop; return when the current round is finished."""
        self._is_stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
            self._task = None

    async def catch_up(self) -> None:
        """Run the round that became due when the clock was moved; return at the next pause."""
        if self._task is not None and not self._task.done():
            self._pausing.clear()
            self._wake.set()
            await self._pausing.wait()

    async def _run(self, first_ms: int) -> None:
        try:
            await self._repeat(first_ms)
        finally:
            self.due_ms = None
            self._pausing.set()

    async def _repeat(self, first_ms: int) -> None:
        await self._pause(first_ms)
        while not self._is_stopping:
            more: bool | None = False
            with swallow(self.what):
                done = self._work()
                if done is not None:
                    more = await done
            pause_ms = 0 if more else AFTER_FAILURE_MS
            if not more:
                with swallow(self.what):
                    # Some of Kafka's settings allow a pause of 0, which would use up the processor.
                    pause_ms = max(1, self._pause_ms())
            await self._pause(pause_ms)

    async def _pause(self, pause_ms: int) -> None:
        """Wait until the pause is over or :meth:`stop` is called."""
        due_ms, left_ms = self.clock.monotonic_ms() + pause_ms, pause_ms
        if pause_ms <= 0:
            await asyncio.sleep(0)
        while not self._is_stopping and left_ms > 0:
            self.due_ms = due_ms
            self._wake.clear()
            self._pausing.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), left_ms / 1000)
            left_ms = due_ms - self.clock.monotonic_ms()
        self.due_ms = None


class Threads:
    """Threads for steps that block on the disk or take a long time; started by the first step."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._name = name
        self._count = count
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, step: Callable[[], T]) -> T:
        """Run ``step`` in a thread and return its result; a single thread runs steps in order."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        is_given_up = False

        def begin() -> T:
            if is_given_up:
                raise RuntimeError(f"{self._name}: no caller waits for this any longer")
            return step()

        try:
            future = asyncio.get_running_loop().run_in_executor(self._pool, begin)
        except RuntimeError:
            # No thread can be started, but a running one may still find the step in the queue.
            is_given_up = True
            raise
        try:
            return await future
        finally:
            del future  # a stored exception would keep this frame and its callers' frames alive

    async def attempt(self, step: Callable[[], Exception | None]) -> Exception | None:
        """Run ``step`` in a thread; return the exception that it returns or raises, or None."""
        try:
            return await self.run(step)
        except Exception as error:  # noqa: BLE001 - the caller must know
            return without_traceback(error)

    async def drive(self, steps: DiskSteps[T]) -> T:
        """Run ``steps`` on the event loop, and the blocking calls that they yield in a thread."""
        try:
            wait = next(steps)
            while True:
                failure = await self.attempt(partial(_failure_of, wait))
                wait = next(steps) if failure is None else steps.throw(failure)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            failure = None  # its traceback refers to this frame, as in ``run``

    def close(self) -> None:
        """Wait for the started steps, and end the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _failure_of(wait: Callable[[], None]) -> Exception | None:
    try:
        wait()
    except OSError as error:
        return without_traceback(error)
    return None


Step = tuple[str, Callable[[], Awaitable[None] | None]]
"""The name and the action of a shutdown step."""


async def each_in_turn(steps: Sequence[Step]) -> None:
    """Run every step, even after a failed one.

    A cancellation in between is raised again after the last step.
    """
    cancelled: asyncio.CancelledError | None = None
    for what, step in steps:
        try:
            with swallow(what):
                done = step()
                if isinstance(done, Awaitable):
                    await done
        except asyncio.CancelledError as error:
            cancelled = without_traceback(error)
    if cancelled is not None:
        raise cancelled
