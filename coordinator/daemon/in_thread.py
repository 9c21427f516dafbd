"""A broker for code without an event loop: one thread, one loop, one broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol, Self, TypeVar

from fencepost.coordinator.runtime.loop import RealTimeLoop
from fencepost.logcore.system import allow_usual_descriptors
from fencepost.logcore.tracebacks import without_traceback

T = TypeVar("T")


class Served(Protocol):
    """The addresses of a broker, which are all that its clients need."""

    @property
    def bootstrap(self) -> str:
        """HOST:PORT."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""


class BrokerThread:
    """Runs the broker that ``make`` returns, from :meth:`start` to :meth:`stop`; a context manager.

    Only the addresses may be used from outside; everything else belongs to the broker's own loop,
    on which :meth:`call` runs a function.
    """

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[Served]],
        # RealTimeLoop regardless of the event loop policy of the program.
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = RealTimeLoop,
    ) -> None:
        self._make, self._loop_factory = make, loop_factory
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread: threading.Thread | None = None
        self.bootstrap = ""
        """HOST:PORT; empty before :meth:`start`."""
        self.address: tuple[str, int] = ("", 0)
        """(host, port); ("", 0) before :meth:`start`."""

    def start(self) -> Self:
        """Start the broker and wait until it listens. Raises the errors of :meth:`Broker.start`."""
        allow_usual_descriptors()
        self._started.clear()
        self._thread = threading.Thread(target=self._run, name="fencepost", daemon=True)
        self._thread.start()
        self._started.wait()
        self._raise_failure()
        return self

    def stop(self) -> None:
        """Stop the broker in an orderly way, and wait for it."""
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._thread = None
        self._raise_failure()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run ``work`` on the broker's loop, and return its result.

        Raises RuntimeError while the broker is not started, and when called on the broker's thread.
        """
        if self._thread is None or self._thread is threading.current_thread():
            raise RuntimeError(
                "call() needs a started broker, and a thread other than the broker's"
            )

        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            self._thread = None
            raise failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised to the caller of start or stop
            self._failure = without_traceback(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with self._make() as broker:
            self.bootstrap, self.address = broker.bootstrap, broker.address
            self._started.set()
            await self._stop.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()
