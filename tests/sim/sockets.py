"""Byte streams between simulated processes, and an event loop that uses them as sockets.

The daemon binds, accepts, connects, reads and writes as on sockets of the system. A stream keeps
the order of its bytes, may split a write, holds back a writer whose peer does not read, and ends
like a TCP connection: closed, reset, or silent because the other machine has no power.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from tests.sim.loop import Loop
from tests.sim.network import NOTICED_MS, Network, Node

WINDOW_BYTES: Final = 65_536
"""The number of bytes in flight to a peer at which a writer is held back."""

RETRANSMIT_MS: Final = 40
"""The pause between two attempts to deliver bytes, in milliseconds."""

FIRST_PORT: Final = 40_000
"""The ports above this one are given to clients, and to listeners that bind port 0."""

HEADER_BYTES: Final = 8
"""The number of the first bytes of a request that are read: its size, API key and API version."""

SPLIT: Final = 0.05
"""The share of writes that arrive in two parts."""

Address = tuple[str, int]


class Wires:
    """All streams of a simulated run."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.hosts: dict[str, Node] = {}
        """Machines by their addresses."""
        self.dark: set[str] = set()
        """Names of nodes without power, which do not respond at all instead of refusing
        connections.
        """
        self.held: set[tuple[str, ...]] = set()
        """Connections on which nothing arrives in either direction.

        Each is (client, server), or (client, server, API key of the last request).
        """
        self.late: dict[tuple[str, str, int], list[int]] = {}
        """(client, server, API key) → delays of the next requests, in milliseconds."""
        self._listening: dict[Address, ListeningSocket] = {}
        self._ends: dict[str, dict[End, None]] = {}
        self._port = FIRST_PORT

    def port(self) -> int:
        """Return a port that has not been used yet."""
        self._port += 1
        return self._port

    def host_of(self, node: Node) -> str:
        """Return the address of a machine, assigned on first use."""
        for host, machine in self.hosts.items():
            if machine is node:
                return host
        host = f"127.0.{len(self.hosts) // 250}.{len(self.hosts) % 250 + 1}"
        self.hosts[host] = node
        return host

    # --- listeners ---

    def listen(self, loop: SocketLoop, host: str, port: int) -> ListeningSocket:
        """Bind a listener. Raises OSError if the address is in use."""
        address = host, port or self.port()
        if address in self._listening:
            raise OSError(98, "address already in use")
        made = self._listening[address] = ListeningSocket(self, loop, address)
        return made

    def unlisten(self, listener: ListeningSocket) -> None:
        """Free the address."""
        if self._listening.get(listener.address) is listener:
            del self._listening[listener.address]

    # --- connections ---

    def add(self, end: End) -> None:
        """Register an end of a stream."""
        self._ends.setdefault(end.node.name, {})[end] = None

    def remove(self, end: End) -> None:
        """Unregister an end of a stream."""
        self._ends.get(end.node.name, {}).pop(end, None)

    def connect(self, loop: SocketLoop, to: Address, made: asyncio.Future[End]) -> None:
        """Open a stream; ``made`` gets the caller's end."""
        self.scheduler.after(self.network.latency(), self._reach, loop, to, made)

    def _reach(self, loop: SocketLoop, to: Address, made: asyncio.Future[End]) -> None:
        if made.done() or not loop.is_alive:
            return
        target = self.hosts.get(to[0])
        if target is None:
            made.set_exception(OSError(113, f"no route to {to[0]}"))
            return
        here = loop.node.name
        cut = self.network.cut
        is_cut = (here, target.name) in cut or (target.name, here) in cut
        if is_cut or (here, target.name) in self.held or target.name in self.dark:
            self.scheduler.after(RETRANSMIT_MS, self._reach, loop, to, made)
            return
        listening = self._listening.get(to)
        if listening is None or not listening.loop.is_alive:
            made.set_exception(ConnectionRefusedError(111, f"{to[0]}:{to[1]} refuses"))
            return
        mine = self.host_of(loop.node), self.port()
        end, other = End(loop, mine, to), End(listening.loop, to, mine)
        end.other, other.other = other, end
        end.way = other.way = here, target.name
        self.add(end)
        self.add(other)
        listening.arrived(other)
        self.scheduler.after(self.network.latency(), self._made, end, made)

    def _made(self, end: End, made: asyncio.Future[End]) -> None:
        if made.done() or not end.is_there:
            end.other.reset_soon()
            self.remove(end)
        else:
            made.set_result(end)

    # --- faults ---

    def break_some(self, node: Node) -> int:
        """Break about half of a machine's streams; return how many."""
        ends = [end for end in self._ends.get(node.name, ()) if self.scheduler.chance(0.5)]
        for end in ends:
            end.break_off()
        return len(ends)

    def break_way(self, client: Node, server: str) -> None:
        """Break all connections from a client to a server."""
        for end in [*self._ends.get(client.name, ())]:
            if end.way == (client.name, server):
                end.break_off()

    def killed(self, node: Node, *, power_loss: bool) -> None:
        """Close a killed process's sockets; after a power loss the peers are not told."""
        for listener in [
            listener for listener in self._listening.values() if listener.loop.node is node
        ]:
            self.unlisten(listener)
        for end in self._ends.pop(node.name, {}):
            end.vanish(is_silent=power_loss)
        if power_loss:
            self.dark.add(node.name)

    def powered(self, node: Node) -> None:
        """Note that a machine has power again."""
        self.dark.discard(node.name)


class ListeningSocket:
    """A listener's socket."""

    def __init__(self, wires: Wires, loop: SocketLoop, address: Address) -> None:
        self.loop, self.address = loop, address
        self.reader: Callable[[], object] | None = None
        self._wires = wires
        self._pending: deque[End] = deque()
        self._is_open = True
        self._is_armed = False

    def arrived(self, end: End) -> None:
        """Queue a client's connection."""
        self._pending.append(end)
        self.arm()

    def arm(self) -> None:
        """Schedule calls of the reader until no connection waits."""
        if self.reader is not None and self._pending and not self._is_armed:
            self._is_armed = True
            self.loop.call_soon(self._call)

    def _call(self) -> None:
        self._is_armed = False
        if self.reader is not None and self._pending:
            self.reader()
            self.arm()

    def accept(self) -> tuple[ClientSocket, Address]:
        if not self._pending:
            raise BlockingIOError
        end = self._pending.popleft()
        return ClientSocket(end), end.peer_address

    def dup(self) -> ListeningSocket:
        return self

    def listen(self, _backlog: int) -> None:
        """Do nothing: the socket listens from the start."""

    def setblocking(self, _blocks: bool) -> None:
        """Do nothing: the socket never blocks."""

    def getsockname(self) -> Address:
        return self.address

    def fileno(self) -> int:
        return 1 if self._is_open else -1

    def close(self) -> None:
        self._is_open = False
        self._wires.unlisten(self)
        while self._pending:
            self._pending.popleft().abort()


class ClientSocket:
    """The socket of an accepted connection."""

    def __init__(self, end: End) -> None:
        self.end = end

    def fileno(self) -> int:
        """Return -1: a socket without a file descriptor is sent files from memory."""
        return -1

    def setsockopt(self, *_arguments: Any) -> None:
        """Do nothing: the daemon sets only SO_LINGER, and ``abort`` always resets."""

    def close(self) -> None:
        self.end.abort()


class _Bound:
    """The result of ``create_server``."""

    def __init__(self, listener: ListeningSocket) -> None:
        self.sockets = (listener,)

    def close(self) -> None:
        """Do nothing: the sockets stay open."""


class End(asyncio.Transport):
    """One end of a stream, as a transport of its event loop."""

    def __init__(self, loop: SocketLoop, address: Address, peer_address: Address) -> None:
        self.loop, self.node, self.wires = loop, loop.node, loop.wires
        self.address, self.peer_address = address, peer_address
        super().__init__(
            {"peername": peer_address, "sockname": address, "socket": ClientSocket(self)}
        )
        self.other: End
        self.way = "", ""
        """(client, server): the names of both nodes; the client opened the stream."""
        self.api_key = -1
        """The API key of the client's last request."""
        self._protocol: asyncio.BaseProtocol | None = None
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._under_way = 0
        """Number of bytes that the peer has not read."""
        self._arriving: deque[bytes | None] = deque()
        self._last_due = 0
        self._unread: deque[bytes | None] = deque()
        """Bytes that have arrived; None is the end of the stream."""
        self._reads = True
        self._is_closing = False
        self._is_lost = False
        self._is_broken = False
        self._high, self._low = 65_536, 16_384
        self._is_full = False

    # --- life ---

    @property
    def is_there(self) -> bool:
        """Whether this end is open and its process runs."""
        return self.loop.is_alive and not self._is_lost

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand arriving bytes to the protocol."""
        self._protocol = protocol
        protocol.connection_made(self)
        if self._unread:
            self.loop.call_soon(self._read)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing, self._reads = True, False
            if not self._unsent:
                self.loop.call_soon(self._finish)

    def abort(self) -> None:
        self._is_closing, self._reads = True, False
        if not self._is_lost:
            self.other.reset_soon()
            self.loop.call_soon(self._lose, None)

    def _finish(self) -> None:
        if not self._is_lost:
            self.other.comes(None)
            self._lose(None)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._unread.clear()
        self.wires.remove(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def vanish(self, *, is_silent: bool) -> None:
        """Drop this end, as its process was killed; tell the peer unless ``is_silent``."""
        was_lost, self._is_lost = self._is_lost, True
        if was_lost or is_silent:
            return
        if self._unread:
            self.other.reset_soon()
        else:
            self.other.comes(None)

    def reset_soon(self) -> None:
        """Reset this end after the network's latency, as the peer has reset the stream."""
        self.wires.scheduler.after(self.wires.network.latency(), self._reset)

    def _reset(self) -> None:
        if self.is_there:
            self._reads = False
            self.loop.call_soon(self._lose, ConnectionResetError(104, "reset by peer"))

    def break_off(self) -> None:
        """Break the stream: no more bytes arrive, and each end notices the loss after a while."""
        if self._is_broken:
            return
        self._is_broken = self.other._is_broken = True
        draw = self.wires.scheduler.draw
        for end in (self, self.other):
            self.wires.scheduler.after(draw.randint(1, NOTICED_MS), end._reset)

    # --- out ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or self._is_lost or not len(data):
            return
        held = bytes(data)
        self._unsent.append(held)
        self._unsent_bytes += len(held)
        if self.way[0] == self.node.name and len(held) > HEADER_BYTES:
            self._note_request(held)
        self._send()

    def _note_request(self, data: bytes) -> None:
        """Store the API key of the request that begins here.

        If the request must be late, reset this end, as a client does when it gives up. The kernel
        still delivers the bytes that were written, perhaps after requests on the client's next
        connection.
        """
        self.api_key = self.other.api_key = int.from_bytes(data[4:6], "big")
        late = self.wires.late.get((*self.way, self.api_key))
        if late:
            late_ms = late.pop(0)
            self.node.say(f"gives up request {self.api_key} to {self.other.node.name}")
            self.other._last_due = self.wires.scheduler.now + late_ms
            self.wires.scheduler.after(self.wires.network.latency(), self._reset)

    def _send(self) -> None:
        if self._is_lost:
            return
        while self._unsent and self._under_way < WINDOW_BYTES:
            data = self._unsent.popleft()
            self._unsent_bytes -= len(data)
            self._under_way += len(data)
            if len(data) > 1 and self.wires.scheduler.chance(SPLIT):
                at = self.wires.scheduler.draw.randrange(1, len(data))
                self.other.comes(data[:at])
                data = data[at:]
            self.other.comes(data)
        if not self._is_full and self._unsent_bytes > self._high:
            self._is_full = True
            cast("asyncio.Protocol", self._protocol).pause_writing()
        elif self._is_full and self._unsent_bytes <= self._low:
            self._is_full = False
            cast("asyncio.Protocol", self._protocol).resume_writing()
        if self._is_closing and not self._unsent:
            self._finish()

    def _taken(self, count: int) -> None:
        self._under_way -= count
        if self._unsent and self.is_there:
            self.loop.call_soon(self._send)

    # --- in ---

    def comes(self, data: bytes | None) -> None:
        """Queue bytes from the peer; None is the end of the stream."""
        if self._is_broken:
            return
        network, scheduler = self.wires.network, self.wires.scheduler
        if scheduler.chance(network.weather.lost):
            self.break_off()
            return
        due = max(self._last_due, scheduler.now + network.latency())
        self._last_due = due
        self._arriving.append(data)
        scheduler.after(due - scheduler.now, self._arrive)

    def _arrive(self) -> None:
        network = self.wires.network
        held = self.wires.held
        is_held = held and (self.way in held or (*self.way, str(self.api_key)) in held)
        if is_held or (self.other.node.name, self.node.name) in network.cut:
            self.wires.scheduler.after(RETRANSMIT_MS, self._arrive)
            return
        data = self._arriving.popleft()
        if self.is_there:
            self._unread.append(data)
            if self._protocol is not None:
                self.loop.call_soon(self._read)
        elif data is not None and self.node.name not in self.wires.dark:
            self.other.reset_soon()

    def _read(self) -> None:
        protocol = self._protocol
        while self._unread and self._reads and not self._is_lost:
            data = self._unread.popleft()
            if data is None:
                if not cast("asyncio.Protocol", protocol).eof_received():
                    self.close()
            elif isinstance(protocol, asyncio.BufferedProtocol):
                room = protocol.get_buffer(-1)
                count = min(len(room), len(data))
                memoryview(room)[:count] = data[:count]
                if count < len(data):
                    self._unread.appendleft(data[count:])
                self.other._taken(count)
                protocol.buffer_updated(count)
            else:
                self.other._taken(len(data))
                cast("asyncio.Protocol", protocol).data_received(data)

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._is_closing:
            self._reads = True
            if self._unread:
                self.loop.call_soon(self._read)

    # --- state ---

    def is_reading(self) -> bool:
        return self._reads

    def is_closing(self) -> bool:
        return self._is_closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast("asyncio.BaseProtocol", self._protocol)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 65_536 if high is None else high
        self._low = self._high // 4 if low is None else low

    def can_write_eof(self) -> bool:
        return False


class SocketLoop(Loop):
    """An event loop with sockets, and with threads whose work takes simulated time."""

    def __init__(self, node: Node, wires: Wires, disk_ms: tuple[int, int] = (0, 0)) -> None:
        super().__init__(node)
        self.wires = wires
        self.disk_ms = disk_ms
        """Bounds in milliseconds of two delays: before a thread begins its work, and before the
        loop gets the result.
        """
        self.others: list[SocketLoop] = []
        """The loops of other threads of the same process."""

    def set_exception_handler(self, _handler: Any) -> None:
        """Do nothing: an error that the daemon does not catch fails the simulated run."""

    # --- sockets ---

    async def create_server(self, _factory: Any, host: str, port: int, **_options: Any) -> Any:
        return _Bound(self.wires.listen(self, host, port))

    async def create_connection(self, factory: Any, host: str, port: int, **_options: Any) -> Any:
        made: asyncio.Future[End] = self.create_future()
        self.wires.connect(self, (host, port), made)
        end = await made
        protocol = factory()
        end.begin(protocol)
        return end, protocol

    async def connect_accepted_socket(self, factory: Any, sock: Any, **_options: Any) -> Any:
        protocol = factory()
        sock.end.begin(protocol)
        return sock.end, protocol

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        fd.reader = (lambda: callback(*args)) if args else callback
        fd.arm()

    def remove_reader(self, fd: Any) -> bool:
        was, fd.reader = fd.reader, None
        return was is not None

    # --- threads ---

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        pool = self if executor is None else executor
        work = Work(self, future, func, args)
        pool.begin(work)
        return future

    def begin(self, work: Work) -> None:
        """Run work in a thread of the loop's default executor, which always has a free thread."""
        self.node.after(self.disk_delay(), work)

    def disk_delay(self) -> int:
        """Draw a delay within the bounds of :attr:`disk_ms`."""
        return self.wires.scheduler.draw.randint(*self.disk_ms)


class Work:
    """Work for a thread, and its result."""

    def __init__(
        self,
        loop: SocketLoop,
        future: asyncio.Future[Any],
        func: Callable[..., Any],
        args: Sequence[Any],
    ) -> None:
        self._loop, self.future, self._func, self._args = loop, future, func, args
        self.is_done = False
        self.on_end: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        """Do the work, once."""
        if self.is_done or not self._loop.is_alive:
            return
        self.is_done = True
        result, failure = None, None
        try:
            result = self._func(*self._args)
        except Exception as error:  # noqa: BLE001 - as a thread would hand it over
            failure = error
        self._loop.node.after(self._loop.disk_delay(), self._tell, result, failure)
        self.on_end()

    def _tell(self, result: Any, failure: Exception | None) -> None:
        if self.future.done():
            return
        if failure is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(failure)
