"""A model of kazoo's client, as far as ``coordinator/zookeeper/session.py`` uses it.

When the connection is lost, the model, like kazoo, fails the requests in flight and triggers all
watches. It keeps later requests for the next connection, and opens another session by itself when a
session has expired. Its threads are queues. Connection events reach the event loop in order, and so
do watches and answers, but there is no order between these three.

Source: ``kazoo.client``, ``kazoo.protocol.connection``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from kazoo.exceptions import ConnectionClosedError, ConnectionLoss, SessionExpiredError

from fencepost.coordinator.zookeeper.connection import ZooKeeperConfig
from tests.sim.loop import Loop
from tests.sim.zk_server import CLOSE, ENSEMBLE, Connection, Ensemble, Op, Request

CONNECT_MS: Final = 120
"""A connection attempt without an outcome is given up after this time."""
RETRY_MS: Final = 25
"""The longest pause before a reconnection."""
HOP_MS: Final = 1
"""The longest delay from one thread to another."""

_NOTHING: Final = object()


class AsyncResult:
    """The pending answer to a request."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.value: Any = _NOTHING
        self.exception: Exception | None = None
        self._callbacks: list[Callable[[AsyncResult], None]] = []

    def rawlink(self, callback: Callable[[AsyncResult], None]) -> None:
        """Call ``callback`` in the thread of answers, once the answer is set."""
        if self.exception is not None or self.value is not _NOTHING:
            self._client.hop("answers", callback, self)
        else:
            self._callbacks.append(callback)

    def settle(self, found: Any) -> None:
        """Set the answer or the error, unless one is set."""
        if self.exception is not None or self.value is not _NOTHING:
            return
        if isinstance(found, Exception):
            self.exception = found
        else:
            self.value = found
        for callback in self._callbacks:
            self._client.hop("answers", callback, self)


class _Begun:
    """The event that ``start_async`` returns. It is always set; requests wait for a connection."""

    def wait(self, _timeout_s: float) -> bool:
        return True


class _Transaction:
    """A transaction of several writes."""

    def __init__(self, client: Client) -> None:
        self._client, self._ops = client, []

    def create(
        self,
        path: str,
        value: bytes = b"",
        *,
        ephemeral: bool = False,
        sequence: bool = False,
        **_acl: Any,
    ) -> None:
        self._ops.append(Op("create", path, value, ephemeral=ephemeral, sequence=sequence))

    def set_data(self, path: str, value: bytes, version: int = -1) -> None:
        self._ops.append(Op("set", path, value, version))

    def delete(self, path: str, version: int = -1) -> None:
        self._ops.append(Op("delete", path, version=version))

    def check(self, path: str, version: int) -> None:
        self._ops.append(Op("check", path, version=version))

    def commit_async(self) -> AsyncResult:
        return self._client.submit(Request(tuple(self._ops), is_multi=True), None)


_Watch = Callable[[Any], None]


class Client:
    """Replaces ``KazooClient``, on the node of the running event loop."""

    chroot = ""
    problem = ""
    """Replaces an attribute of the daemon's handler for kazoo, which this client replaces, too."""

    @property
    def handler(self) -> Client:
        return self

    def __init__(self, ensemble: Ensemble, reach: ZooKeeperConfig) -> None:
        loop = cast("Loop", asyncio.get_running_loop())
        self.node = loop.node
        self._loop = loop
        self._ensemble = ensemble
        self._scheduler = self.node.scheduler
        self._timeout_ms = reach.timeout_ms
        self._listeners: list[Callable[[str], Any]] = []
        self._state = "LOST"
        self._session_id = 0
        self._last_zxid = 0
        self._is_stopped = self._is_live = self._is_expired = False
        self._connection: Connection | None = None
        self._attempt = 0
        """The number of connections so far; messages of earlier connections are ignored."""
        self._up_ms = self._down_ms = 0
        self._is_mute = self._is_deaf = False
        """Whether a message to the server (mute) or from it (deaf) was lost. No later message
        arrives.
        """
        self._is_pinged = True
        self._queue: deque[tuple[Request, AsyncResult, _Watch | None]] = deque()
        self._pending: deque[tuple[Request, AsyncResult, _Watch | None, int]] = deque()
        self._asked = 0
        self._data_watchers: dict[str, list[_Watch]] = {}
        self._child_watchers: dict[str, list[_Watch]] = {}
        self._hops: dict[str, int] = {}

    # --- the interface that Session uses ---

    def add_listener(self, listener: Callable[[str], Any]) -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[str], Any]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def client_id(self) -> tuple[int, bytes] | None:
        return (self._session_id, b"") if self._is_live else None

    def start_async(self) -> _Begun:
        self.node.after(0, self._connect, self._attempt)
        return _Begun()

    def stop(self) -> None:
        """End the session at the server, if connected, and fail all requests."""
        self._is_stopped = True
        if self._connection is not None:
            self._send(self._arrive, self._connection, -1, CLOSE)
        self._is_live = False
        self._fail(ConnectionClosedError())

    def close(self) -> None:
        """Do nothing: :meth:`stop` leaves nothing to close."""

    def get_async(self, path: str, watch: _Watch | None = None) -> AsyncResult:
        return self._read("get", path, watch)

    def exists_async(self, path: str, watch: _Watch | None = None) -> AsyncResult:
        return self._read("exists", path, watch)

    def get_children_async(self, path: str, watch: _Watch | None = None) -> AsyncResult:
        return self._read("children", path, watch)

    def ensure_path_async(self, path: str, **_acl: Any) -> AsyncResult:
        return self.submit(Request((Op("ensure", path),), is_multi=False), None)

    def sync_async(self, path: str) -> AsyncResult:
        return self.submit(Request((Op("sync", path),), is_multi=False), None)

    def transaction(self) -> _Transaction:
        return _Transaction(self)

    def _read(self, kind: str, path: str, watch: _Watch | None) -> AsyncResult:
        op = Op(kind, path, watch=watch is not None)
        return self.submit(Request((op,), is_multi=False), watch)

    def submit(self, request: Request, watch: _Watch | None) -> AsyncResult:
        """Send a request, now or over the next connection."""
        result = AsyncResult(self)
        if self._is_stopped:
            result.settle(ConnectionClosedError())
        elif self._is_expired:
            result.settle(SessionExpiredError())
        else:
            self._queue.append((request, result, watch))
            self._flush()
        return result

    # --- the threads ---

    def hop(self, thread: str, work: Callable[..., Any], *what: Any) -> None:
        """Run ``work`` in another thread, after that thread's earlier work."""
        now = self._scheduler.now
        at = max(self._hops.get(thread, 0), now + self._scheduler.draw.randint(0, HOP_MS))
        self._hops[thread] = at
        self.node.after(at - now, work, *what)

    def _tell(self, state: str) -> None:
        if self._state != state:
            self._state = state
            self.node.say(f"its session {self._session_id:#x} is {state}")
            for listener in tuple(self._listeners):
                listener(state)

    # --- the connection ---

    def _is_cut(self, *, up: bool) -> bool:
        way = (self.node.name, ENSEMBLE) if up else (ENSEMBLE, self.node.name)
        return way in self._ensemble.network.cut

    def _latency(self) -> int:
        return self._scheduler.draw.randint(*self._ensemble.network.weather.latency_ms)

    def _send(self, arrives: Callable[..., None], *what: Any) -> None:
        """Send a message to the server, in order."""
        if self._is_cut(up=True):
            self._is_mute = True
        if self._is_mute:
            return
        self._up_ms = max(self._up_ms, self._scheduler.now + self._latency())
        self._scheduler.after(self._up_ms - self._scheduler.now, arrives, *what)

    def _connect(self, attempt: int) -> None:
        """Begin another attempt to connect, if ``attempt`` has had no outcome."""
        if self._is_stopped or attempt != self._attempt or self._connection is not None:
            return
        self._is_expired = False
        self._attempt += 1
        self._up_ms = self._down_ms = 0
        self._is_mute = self._is_deaf = False
        number = self._scheduler.draw.randrange(len(self._ensemble.members))
        self._send(self._reach, self._attempt, number)
        self.node.after(CONNECT_MS, self._connect, self._attempt)

    def _reach(self, attempt: int, number: int) -> None:
        """Connect on the server's side, unless the process has ended or tries again."""
        if attempt != self._attempt or not self._loop.is_alive:
            return
        found = self._ensemble.connect(
            self.node, self._session_id, self._timeout_ms, self._last_zxid, number
        )
        if isinstance(found, Connection):
            found.tell = lambda kind, what: self._down(attempt, kind, what)
            found.tell("begin", found)
        elif found:
            self._down(attempt, "expired", None)

    def _down(self, attempt: int, kind: str, what: Any) -> None:
        """Send a message from the server to this client, in order."""
        if attempt != self._attempt or not self._loop.is_alive:
            return
        if self._is_cut(up=False):
            self._is_deaf = True
        if self._is_deaf:
            return
        now = self._scheduler.now
        self._down_ms = max(self._down_ms, now + self._latency())
        self.node.after(self._down_ms - now, self._hear, attempt, kind, what)

    def _hear(self, attempt: int, kind: str, what: Any) -> None:
        if attempt != self._attempt or self._is_stopped:
            return
        match kind:
            case "begin":
                self._connected(what)
            case "expired":
                self._expired()
            case "end":
                self._lost()
            case "pong":
                self._is_pinged = True
            case "event":
                self._event(*what)
            case "answer":
                self._answered(*what)

    def _connected(self, connection: Connection) -> None:
        self._connection = connection
        self._session_id = connection.session.session_id
        self._is_live = self._is_pinged = True
        self._tell("CONNECTED")
        self._flush()
        self._ping(self._attempt)

    def _expired(self) -> None:
        """Fail all requests with the expired session, and open another session."""
        self._is_live = False
        self._is_expired = True
        self._tell("LOST")
        self._fail(SessionExpiredError())
        self._set_off_all()
        self._session_id = self._last_zxid = 0
        self.node.after(self._scheduler.draw.randint(0, RETRY_MS), self._connect, self._attempt)

    def stall(self, for_ms: int) -> None:
        """Delay all messages that are sent from now on until ``for_ms`` have passed."""
        self._up_ms = max(self._up_ms, self._scheduler.now + for_ms)

    def drop(self) -> None:
        """Break the connection; the server notices the loss later than this client."""
        connection = self._connection
        if connection is not None:
            self._lost()
            self._scheduler.after(self._latency(), connection.close)

    def _lost(self) -> None:
        self._connection = None
        self._is_live = False
        self._attempt += 1
        self._fail(ConnectionLoss())
        self._tell("SUSPENDED")
        self._set_off_all()
        self.node.after(self._scheduler.draw.randint(0, RETRY_MS), self._connect, self._attempt)

    def _fail(self, error: Exception) -> None:
        pending = [sent[1] for sent in self._pending] + [queued[1] for queued in self._queue]
        self._pending.clear()
        self._queue.clear()
        for result in pending:
            result.settle(error)

    def _ping(self, attempt: int) -> None:
        if attempt != self._attempt or self._is_stopped:
            return
        if not self._is_pinged:
            self.drop()
            return
        assert self._connection is not None
        self._is_pinged = False
        self._send(self._connection.ping)
        self.node.after(self._timeout_ms // 3, self._ping, attempt)

    # --- requests ---

    def _flush(self) -> None:
        while self._queue and self._connection is not None:
            request, result, watch = self._queue.popleft()
            self._asked += 1
            self._pending.append((request, result, watch, self._asked))
            self._send(self._arrive, self._connection, self._asked, request)

    def _arrive(self, connection: Connection, number: int, request: Request) -> None:
        connection.arrive(number, request)

    def _answered(self, number: int, zxid: int, found: Any) -> None:
        request, result, watch, asked = self._pending.popleft()
        assert asked == number, f"{number} is answered where {asked} was asked"
        self._last_zxid = zxid
        result.settle(found)
        if watch is not None and not isinstance(found, Exception):
            kind, path = request.ops[0][:2]
            watchers = self._child_watchers if kind == "children" else self._data_watchers
            watchers.setdefault(path, []).append(watch)

    def _event(self, kind: str, path: str) -> None:
        watchers = self._child_watchers if kind == "children" else self._data_watchers
        for watch in watchers.pop(path, ()):
            self.hop("watches", watch, (kind, path))

    def _set_off_all(self) -> None:
        kept = [*self._child_watchers.values(), *self._data_watchers.values()]
        self._child_watchers, self._data_watchers = {}, {}
        for watch in (watcher for some in kept for watcher in some):
            self.hop("watches", watch, None)
