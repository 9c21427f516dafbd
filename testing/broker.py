"""A broker that a test owns: in a thread of its own, with its clock, its faults and its kills."""

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
from fencepost.coordinator.tools.ports import hold_port
from fencepost.logcore.clock import Clock
from fencepost.testing.crash import MortalFiles
from fencepost.testing.faults import Faults
from fencepost.testing.waiting import BrokerDownError

T = TypeVar("T")

_BEFORE_IT_STANDS_S: Final = 0.005

ANY_PORT: Final = "127.0.0.1:0"
"""A free port, which stays the broker's until its stop."""


class OwnBroker:
    """One broker on one data directory, which may be stopped, killed and started again.

    ``config`` holds settings by Kafka's names, ``add_scram`` users as ``Broker`` takes them. With a
    :class:`fencepost.testing.clock.TestClock` as ``clock`` its time is the test's. Without
    ``forces`` nothing is forced to a disk, which a crash does not show: it is the process's.
    ``faults`` may share a cluster's. The address stays the same over crashes and restarts. All
    methods are for the test's thread; a context manager.
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
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = RealTimeLoop,
    ) -> None:
        self.data_dir = Path(data_dir)
        self.config = dict(config or {})
        """Read at each start."""
        self.clock = clock
        self.faults = Faults() if faults is None else faults
        """They stay over a restart."""
        self.ends = 0
        """How often it has ended so far; connections of before are of no use then."""
        self._listen = listen
        self._forces = forces
        self._add_scram = tuple(add_scram)
        self._files = MortalFiles(forces=self._forces)
        self._broker: Broker | None = None
        self._thread = BrokerThread(self._serve, loop_factory)
        self._gate: threading.Event | None = None
        self._place: socket.socket | None = None
        """Keeps the port over restarts."""

    @property
    def bootstrap(self) -> str:
        """HOST:PORT, for ``bootstrap.servers``; empty before the first start."""
        return self._thread.bootstrap

    @property
    def address(self) -> tuple[str, int]:
        """Host and port; a port 0 before the first start."""
        return self._thread.address

    @property
    def is_running(self) -> bool:
        """Whether it serves, or is paused."""
        return self._broker is not None

    @property
    def is_paused(self) -> bool:
        """Whether it stands still."""
        return self._gate is not None

    def start(self) -> Self:
        """Start, and wait until it listens; raises what the start raised."""
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
        """End as by ``kill -9``: sockets are reset, files stay as they are at this moment.

        What was acknowledged is in them; what a stop would have written is not.
        """
        self.resume()
        if self.is_running:
            self._thread.call(self._die)
            self._thread.stop()

    def pause(self) -> None:
        """Stand still as by ``SIGSTOP``: nothing runs until :meth:`resume`, heartbeats neither."""
        if self._gate is None:
            gate = threading.Event()
            self.call(lambda broker: _stand_still(broker, gate))
            self._gate = gate

    def resume(self) -> None:
        """Go on; a broker that is not paused does so anyway."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.set()
            if self.is_running:
                self.call(_go_on)

    def restart(self) -> Self:
        """Start again, on the same directory and port; stops before that if it still runs."""
        self.resume()
        if self.is_running:
            self._thread.stop()
        return self.start()

    def call(self, work: Callable[[Broker], Awaitable[T]]) -> T:
        """Run ``work`` with the broker on its own loop; BrokerDownError while it does not run."""
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
        self._files = MortalFiles(forces=self._forces)
        async with Broker(
            self.data_dir,
            self._listen,
            self.config,
            add_scram=self._add_scram,
            fs=self._files,
            clock=self.clock,
        ) as broker:
            self._broker = broker
            self.faults.attach(broker)
            try:
                yield broker
            finally:
                self.faults.detach(broker)
                self._broker = None
                self.ends += 1

    async def _die(self) -> None:
        if self._broker is not None:
            self._files.die()
            await self._broker.go_silent()
            await asyncio.sleep(0)


async def _stand_still(broker: Broker, gate: threading.Event) -> None:
    # Whatever moves the clock meanwhile does not wait for this broker.
    if isinstance(broker.clock, MovedClock):
        broker.clock.detach(broker)
    if broker.member is not None:
        broker.member.membership.call(gate.wait)
    # Whoever asked for it is answered before.
    asyncio.get_running_loop().call_later(_BEFORE_IT_STANDS_S, gate.wait)


async def _go_on(broker: Broker) -> None:
    if isinstance(broker.clock, MovedClock):
        broker.clock.attach(broker)
