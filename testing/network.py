"""The network between the nodes of a cluster in one process: who reaches whom.

Nodes reach each other by connections that one of them opens. Those are opened on event loops of
:class:`Network`, which knows whose they are; a connection that a cut is laid upon is reset, and one
that is opened meanwhile gets no answer until the cut is healed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

from fencepost.coordinator.runtime.loop import RealTimeLoop

Address = tuple[str, int]

_POLL_S: Final = 0.02


class Network:
    """Who reaches whom. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[Address, int] = {}
        self._cut: set[tuple[int, int]] = set()
        self._open: list[tuple[int, Address, asyncio.AbstractEventLoop, Any]] = []

    def place(self, node: int, address: Address) -> None:
        """Tell where a node listens."""
        with self._lock:
            self._addresses[address] = node

    def loop_factory(self, node: int) -> Callable[[], asyncio.AbstractEventLoop]:
        """Makes event loops of a node."""
        return type("NodeLoop", (_NodeLoop,), {"network": self, "node": node})

    def cut(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Let none of the sources reach any of the targets by a connection of its own."""
        targets = tuple(targets)
        with self._lock:
            self._cut |= {(source, target) for source in sources for target in targets}
            broken = [one for one in self._open if self._is_cut(*one[:2])]
        for _, _, loop, transport in broken:
            if not loop.is_closed():
                loop.call_soon_threadsafe(transport.abort)

    def heal(self) -> None:
        """Let everybody reach everybody."""
        with self._lock:
            self._cut.clear()

    def is_cut(self, source: int, address: Address) -> bool:
        """Whether a node gets no answer from an address."""
        with self._lock:
            return self._is_cut(source, address)

    def _is_cut(self, source: int, address: Address) -> bool:
        return (source, self._addresses.get(address, source)) in self._cut

    def opened(
        self, source: int, address: Address, loop: asyncio.AbstractEventLoop, transport: Any
    ) -> None:
        """A node has opened a connection."""
        with self._lock:
            self._open = [one for one in self._open if not one[3].is_closing()]
            self._open.append((source, address, loop, transport))


class _NodeLoop(RealTimeLoop):
    """An event loop of a node."""

    network: Network
    node: int

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Open a connection; whoever is cut off gets no answer."""
        address = tuple(args[1:3])
        if len(address) == len(("host", "port")):
            while self.network.is_cut(self.node, address):  # noqa: ASYNC110 - healed by any thread
                await asyncio.sleep(_POLL_S)
        transport, protocol = await super().create_connection(*args, **options)
        self.network.opened(self.node, address, self, transport)
        return transport, protocol
