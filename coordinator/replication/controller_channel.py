"""A channel for a broker's own requests to the active controller.

The channel keeps one connection, to the current active controller, and retries a request until a
controller answers it or its time limit passes.

Source: ``NodeToControllerChannelManager``, ``NodeToControllerRequestThread``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

import structlog
from kio.schema.errors import ErrorCode

from fencepost.client.cluster import error_codes
from fencepost.client.security import PLAINTEXT, Security
from fencepost.cluster.controller_queue import (
    ControllerQueue,
    QueueFullError,
    RequestsExpired,
    SendRequest,
)
from fencepost.coordinator.errors import RequestTimedOutError
from fencepost.coordinator.replication.controller_connection import (
    Address,
    ControllerConnection,
    NewestVersionRequest,
    Request,
)
from fencepost.coordinator.runtime.background import call_later, spawn
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.schema import Entity

_log = structlog.get_logger(__name__)

REQUEST_TIMEOUT_MS: Final = 30_000
"""``controller.socket.timeout.ms``."""

LOOK_MS: Final = 500
"""The interval in ms at which a pending request checks for a new active controller."""

FORWARDING_TIMEOUT_MS: Final = 60_000
"""The time limit of forwarded requests, and of requests for topics and producer ids."""


class ControllerChannel(Protocol):
    """Sends requests to the active controller."""

    def send(self, request: Request) -> asyncio.Future[Entity]:
        """Return a future for the response, which may hold any error but NOT_CONTROLLER.

        The future raises RequestTimedOutError if no controller accepts the request within the
        channel's time limit, and UnsupportedVersion if the controller lacks the API or version.
        """

    @property
    def versions(self) -> Mapping[int, tuple[int, int]]:
        """The versions that the controller supports, by API key; empty while unknown."""

    async def close(self) -> None:
        """Send nothing further, and fail pending requests."""


class _Watch:
    """Makes ``limit`` expire as soon as a periodic check finds ``is_over`` true."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, is_over: Callable[[], bool], limit: asyncio.Timeout
    ) -> None:
        self._loop, self._is_over, self._limit = loop, is_over, limit
        self._plan()

    def _plan(self) -> None:
        self._timer = call_later(self._loop, LOOK_MS, "look for the controller", self._check)

    def _check(self) -> None:
        if self._is_over():
            self._limit.reschedule(self._loop.time())
        else:
            self._plan()

    def end(self) -> None:
        """Stop checking."""
        self._timer.cancel()


class RemoteControllerChannel:
    """One connection to the active controller, on the running loop.

    ``find`` returns the active controller's address, or None if it is unknown. A request is
    retried for ``retry_timeout_ms``; None sets no limit. If ``takes`` returns False for an API,
    its requests fail with UnsupportedVersion, even if the controller's ApiVersions lists it.
    """

    def __init__(
        self,
        find: Callable[[], Address | None],
        *,
        client_id: str,
        retry_timeout_ms: int | None = FORWARDING_TIMEOUT_MS,
        request_timeout_ms: int = REQUEST_TIMEOUT_MS,
        security: Security = PLAINTEXT,
        takes: Callable[[int], bool] = lambda _api_key: True,
    ) -> None:
        self._find, self._takes = find, takes
        self._client_id = client_id
        self._queue = ControllerQueue(
            retry_timeout_ms=retry_timeout_ms, request_timeout_ms=request_timeout_ms
        )
        self._tokens = itertools.count()
        self._waiting: dict[int, tuple[Request, asyncio.Future[Entity]]] = {}
        self._wake = asyncio.Event()
        self._connection = ControllerConnection(client_id, security)
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def send(self, request: Request) -> asyncio.Future[Entity]:
        """See :class:`ControllerChannel`."""
        future: asyncio.Future[Entity] = asyncio.get_running_loop().create_future()
        if self._closed:
            future.set_exception(RequestTimedOutError("the broker stops"))
            return future
        token = next(self._tokens)
        try:
            self._queue.enqueue(token, self._now())
        except QueueFullError as error:
            future.set_exception(RequestTimedOutError(str(error)))
            return future
        self._waiting[token] = request, future
        if self._task is None:
            self._task = spawn(self._run(), f"requests to the controller ({self._client_id})")
        self._wake.set()
        return future

    def _now(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    @property
    def versions(self) -> Mapping[int, tuple[int, int]]:
        """The versions that the controller supports, by API key; empty before the first request."""
        return self._connection.versions

    async def _run(self) -> None:
        while not self._closed:
            match self._queue.next(self._find(), self._now()):
                case SendRequest(token, to, until_ms):
                    await self._exchange(token, to, until_ms)
                case RequestsExpired(tokens):
                    self._fail(tokens, "no controller has taken the request in time")
                case float(until_ms):
                    self._wake.clear()
                    pause_s = (until_ms - self._now()) / 1000
                    with suppress(TimeoutError):
                        async with asyncio.timeout(max(0.0, pause_s) if until_ms < 1e18 else None):
                            await self._wake.wait()

    async def _exchange(self, token: int, to: Address, until_ms: float) -> None:
        request, future = self._waiting[token]
        try:
            answer = await self._ask(to, request, max(1.0, until_ms - self._now()))
        except UnsupportedVersion as error:
            self._queue.on_answer(token, not_controller=False, now_ms=self._now())
            self._fail_request(token, error)
            return
        except Exception as error:  # noqa: BLE001 - the caller must get it
            if not isinstance(error, (WireError, OSError)):
                # The request itself caused the error; other requests must not wait behind it.
                self._queue.on_answer(token, not_controller=False, now_ms=self._now())
                self._fail_request(token, error)
                return
            _log.info("controller lost", address=f"{to[0]}:{to[1]}", cause=str(error))
            self._queue.on_disconnect(self._now())
            return
        moved = ErrorCode.not_controller in error_codes(answer)
        if moved:
            await self._connection.close()
        if self._queue.on_answer(token, not_controller=moved, now_ms=self._now()):
            self._waiting.pop(token, None)
            if not future.done():
                future.set_result(answer)

    async def _ask(self, to: Address, request: Request, timeout_ms: float) -> Entity:
        """Return the response; raise TimeoutError once ``find`` returns another controller."""
        api_key = (
            request.api_key if isinstance(request, NewestVersionRequest) else request.__api_key__
        )
        if not self._takes(api_key):
            raise UnsupportedVersion(api_key, 0)
        loop = asyncio.get_running_loop()
        # A controller that died without closing its connection would otherwise delay all requests
        # by the full request timeout.
        async with asyncio.timeout(None) as limit:
            watch = _Watch(loop, lambda: self._find() not in (None, to), limit)
            try:
                return await self._connection.ask(to, request, timeout_ms=timeout_ms)
            finally:
                watch.end()

    def _fail_request(self, token: int, error: Exception) -> None:
        _, future = self._waiting.pop(token)
        if not future.done():
            future.set_exception(without_traceback(error))

    def _fail(self, tokens: tuple[int, ...], why: str) -> None:
        for token in tokens:
            self._fail_request(token, RequestTimedOutError(why))

    async def close(self) -> None:
        """See :class:`ControllerChannel`."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        self._fail(self._queue.close(), "the broker stops")
        await self._connection.close()
