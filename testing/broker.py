"""A broker under a test's control: in a thread of its own, with clock, faults and kills."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self, TypeVar

from fencepost.coordinator.daemon.broker import Broker, MovedClock
from fencepost.coordinator.daemon.in_thread import BrokerThread
from fencepost.coordinator.runtime.loop import RealTimeLoop
from fencepost.logcore.clock import Clock
from fencepost.testing.crash import CrashableFileSystem
from fencepost.testing.faults import Faults
from fencepost.testing.positions import FetchPositions
from fencepost.testing.waiting import BrokerDownError
from fencepost.tools.ports import hold_port

T = TypeVar("T")

_SUSPEND_DELAY_S: Final = 0.005

ANY_PORT: Final = "127.0.0.1:0"
"""A free port, which stays reserved for the broker until :meth:`OwnBroker.stop`."""


class OwnBroker:
    """One broker on one data directory; a test can stop, kill and restart the broker.

    ``config`` holds settings by Kafka's names; ``add_scram`` creates SCRAM users (see ``Broker``).
    With a :class:`fencepost.testing.clock.TestClock` as ``clock`` the test controls the broker's
    time. ``forces=False`` skips all flushes to disk, which makes a difference only in a power loss.
    The address stays the same over crashes and restarts. Call all methods from the test's thread.
    The object is a context manager.
    """

    def __init__(
        self,
        data_dir: str | Path,
        listen: str = ANY_PORT,
        config: Mapping[str, str] | None = None,
        *,
        clock: Clock | None = None,
        forces: bool = True,
        add_scram: Sequence[str] = (),
        faults: Faults | None = None,
        positions: FetchPositions | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = RealTimeLoop,
    ) -> None:
        self.data_dir = Path(data_dir)
        self.config = dict(config or {})
        """Settings, read at each start."""
        self.clock = clock
        self.faults = Faults() if faults is None else faults
        """Faults, which stay in effect over restarts."""
        self._positions = FetchPositions() if positions is None else positions
        self.ends = 0
        """The number of stops and crashes so far; each breaks all connections to the broker."""
        self._listen = listen
        self._forces = forces
        self._add_scram = tuple(add_scram)
        self._files = CrashableFileSystem(forces=self._forces)
        self._broker: Broker | None = None
        self._thread = BrokerThread(self._serve, loop_factory)
        self._gate: threading.Event | None = None
        self._place: socket.socket | None = None
        """Reserves the port over restarts."""

    @property
    def bootstrap(self) -> str:
        """HOST:PORT, for ``bootstrap.servers``; empty before the first start."""
        return self._thread.bootstrap

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; port 0 before the first start."""
        return self._thread.address

    @property
    def is_running(self) -> bool:
        """Whether the broker runs, even if it is paused."""
        return self._broker is not None

    @property
    def is_paused(self) -> bool:
        """Whether the broker is paused."""
        return self._gate is not None

    def start(self) -> Self:
        """Start, and wait until the broker listens. Raises the errors of the broker's start."""
        if not self.is_running:
            if self._listen == ANY_PORT:
                self._place = hold_port()
                self._listen = f"127.0.0.1:{self._place.getsockname()[1]}"
            try:
                self._thread.start()
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Stop in an orderly way, and wait for it."""
        self.resume()
        self._thread.stop()
        if self._place is not None:
            self._place.close()
            self._place = None

    def crash(self) -> None:
        """End like ``kill -9``: sockets are reset, and files stay as they are.

        The files hold everything acknowledged, but nothing that an orderly stop would write.
        """
        self.resume()
        if self.is_running:
            self._thread.call(self._crash)
            self._thread.stop()

    def pause(self) -> None:
        """Suspend like ``SIGSTOP``: nothing runs until :meth:`resume`, not even heartbeats."""
        if self._gate is None:
            gate = threading.Event()
            self.call(lambda broker: _suspend(broker, gate))
            self._gate = gate

    def resume(self) -> None:
        """Resume a paused broker; otherwise do nothing."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set()
            if self.is_running:
                self.call(_resume)

    def restart(self) -> Self:
        """Start again on the same directory and port; stop first if the broker still runs."""
        self.resume()
        if self.is_running:
            self._thread.stop()
        return self.start()

    def call(self, work: Callable[[Broker], Awaitable[T]]) -> T:
        """Run ``work`` on the broker's loop. Raises BrokerDownError if the broker does not run."""
        broker = self._broker
        if broker is None:
            raise BrokerDownError("the broker is down; restart() starts it again")
        if self._gate is not None:
            raise BrokerDownError("the broker is paused; resume() lets it go on")
        return self._thread.call(lambda: work(broker))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    # --- inside ---

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[Broker]:
        self._files = CrashableFileSystem(forces=self._forces)
        async with Broker(
            self.data_dir,
            self._listen,
            self.config,
            add_scram=self._add_scram,
            fs=self._files,
            clock=self.clock,
        ) as broker:
            self._broker = broker
            self._positions.attach(broker)
            self.faults.attach(broker)
            try:
                yield broker
            finally:
                self.faults.detach(broker)
                self._broker = None
                self.ends += 1

    async def _crash(self) -> None:
        if self._broker is not None:
            self._files.die()
            await self._broker.go_silent()
            await asyncio.sleep(0)


async def _suspend(broker: Broker, gate: threading.Event) -> None:
    # An advance of the clock must not wait for a paused broker.
    if isinstance(broker.clock, MovedClock):
        broker.clock.detach(broker)
    if broker.member is not None:
        broker.member.membership.call(gate.wait)
    # Block the loop only after the test's thread has the result of this call.
    asyncio.get_running_loop().call_later(_SUSPEND_DELAY_S, gate.wait)


async def _resume(broker: Broker) -> None:
    if isinstance(broker.clock, MovedClock):
        broker.clock.attach(broker)
