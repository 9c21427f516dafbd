"""The network between the nodes of a cluster in one process; a test can partition it.

Each node runs on an event loop of :meth:`Network.loop_factory`, which registers the connections
that the node opens. A cut from one node to another resets these connections; a new connection waits
until the cut is healed.
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
    """The reachability between nodes. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._addresses: dict[Address, int] = {}
        self._cut: set[tuple[int, int]] = set()
        self._open: list[tuple[int, Address, asyncio.AbstractEventLoop, Any]] = []

    def place(self, node: int, address: Address) -> None:
        """Register a node's address."""
        with self._lock:
            self._addresses[address] = node

    def loop_factory(self, node: int) -> Callable[[], asyncio.AbstractEventLoop]:
        """Return a factory of a node's event loops."""
        return type("NodeLoop", (_NodeLoop,), {"network": self, "node": node})

    def cut(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Cut connections that any of the sources opens to any of the targets."""
        targets = tuple(targets)
        with self._lock:
            self._cut |= {(source, target) for source in sources for target in targets}
            broken = [connection for connection in self._open if self._is_cut(*connection[:2])]
        for _, _, loop, transport in broken:
            if not loop.is_closed():
                loop.call_soon_threadsafe(transport.abort)

    def heal(self) -> None:
        """Remove all cuts."""
        with self._lock:
            self._cut.clear()

    def is_cut(self, source: int, address: Address) -> bool:
        """Return whether connections from a node to an address are cut."""
        with self._lock:
            return self._is_cut(source, address)

    def _is_cut(self, source: int, address: Address) -> bool:
        return (source, self._addresses.get(address, source)) in self._cut

    def opened(
        self, source: int, address: Address, loop: asyncio.AbstractEventLoop, transport: Any
    ) -> None:
        """Register a connection that a node has opened."""
        with self._lock:
            self._open = [connection for connection in self._open if not connection[3].is_closing()]
            self._open.append((source, address, loop, transport))


class _NodeLoop(RealTimeLoop):
    """An event loop of a node."""

    network: Network
    node: int

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        """Open a connection, once the address is no longer cut off."""
        address = tuple(args[1:3])
        if len(address) == len(("host", "port")):
            while self.network.is_cut(self.node, address):  # noqa: ASYNC110 - healed by any thread
                await asyncio.sleep(_POLL_S)
        transport, protocol = await super().create_connection(*args, **options)
        self.network.opened(self.node, address, self, transport)
        return transport, protocol
