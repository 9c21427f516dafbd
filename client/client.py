"""Clients that send single requests: for the command line, tests and tools.

:class:`WireClient` blocks, :class:`AsyncWireClient` runs on an event loop; both have the same
methods, and both work with any Kafka broker. They negotiate versions, find leaders and coordinators
and retry retriable errors. They do no batching, no group membership and no producer state.

The logic is in ``router.py``, as coroutines. Over blocking sockets the coroutines never suspend, so
:class:`WireClient` runs them to completion in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from fencepost.client.channel import (
    ASYNC,
    BLOCKING,
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
    Io,
)
from fencepost.client.cluster import ClusterMetadata
from fencepost.client.router import (
    ANY_NODE,
    DEFAULT_TIMEOUT_MS,
    GROUP,
    TRANSACTION,
    ApiError,
    CallTarget,
    Router,
)
from fencepost.client.security import PLAINTEXT, Security, SecurityError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

P = ParamSpec("P")
T = TypeVar("T")


class _Client:
    """The common methods of both clients.

    ``security`` configures TLS and authentication. A file in it that cannot be used raises
    :class:`SecurityError`.
    """

    _io: Io

    def __init__(
        self,
        bootstrap: str | list[str] | tuple[str, ...],
        *,
        client_id: str | None = "fencepost",
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
        security: Security = PLAINTEXT,
    ) -> None:
        self._router = Router(
            self._io, bootstrap, client_id=client_id, timeout_ms=timeout_ms, security=security
        )

    async def _request(
        self,
        api_key: int,
        version: int,
        entity: Entity,
        *,
        to_node: int = ANY_NODE,
        timeout_ms: float | None = None,
    ) -> Entity:
        """Send one request without retries; return the response without checking its errors.

        Returns None for a Produce with acks=0. Raises :class:`BrokerUnreachable` or
        :class:`ConnectionLostError` (also if the broker closes the connection because it does not
        support the version).
        """
        return await self._router.request(api_key, version, entity, to_node, timeout_ms)

    async def _call(
        self,
        api: int | str,
        version: int | None = None,
        *,
        at_most: int | None = None,
        to_node: int = ANY_NODE,
        to_leader: tuple[str, int] | None = None,
        to_group: str | None = None,
        to_transaction: str | None = None,
        timeout_ms: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Entity:
        """Send a request to the right broker and return its response.

        ``api`` is a key or a name (``"OffsetCommit"``); with ``version`` None the highest version
        that both sides support is used, up to ``at_most``. The request is built from ``fields`` as
        by :class:`RequestFactory`, or passed as ``entity=``: a kio entity, or a function from the
        version's :class:`RequestFactory` that returns an entity. It is sent to the leader of
        partition ``to_leader``, to the coordinator of group ``to_group`` or of transactional id
        ``to_transaction``, to broker ``to_node``, or to any broker.

        While all errors in the response are retriable, the call is retried until ``timeout_ms``
        have passed. Then, and for other top-level errors, it raises :class:`ApiError`; errors of
        single items remain in the response. With ``check=False`` the first response is returned
        with any errors. Raises :class:`UnsupportedVersion`; :class:`AuthenticationError` if the
        client or the broker fails to authenticate; and :class:`BrokerUnreachable` if no broker can
        be reached, or if a connection is lost during a request that must not be retried.
        """
        coordinator = None if to_group is None else (GROUP, to_group)
        if to_transaction is not None:
            coordinator = TRANSACTION, to_transaction
        target = CallTarget(to_node, to_leader, coordinator)
        return await self._router.call(api, version, at_most, target, timeout_ms, check, fields)

    async def _metadata(self, *, refresh: bool = False) -> ClusterMetadata:
        """Return brokers and topics, from the cache unless it is old or ``refresh`` is set."""
        return await self._router.cluster(self._router.deadline(), refresh=refresh)

    async def _versions(self, *, to_node: int = ANY_NODE) -> dict[int, tuple[int, int]]:
        """Return (lowest, highest) version by API key, as advertised by the broker."""
        return (await self._router.node(to_node, self._router.deadline())).versions

    def forget(self) -> None:
        """Forget cached brokers, topics and coordinators; keep the connections."""
        self._router.forget_all()

    def limit(self, timeout_ms: float) -> None:
        """Set the timeout of all later calls, in milliseconds."""
        self._router.timeout_ms = timeout_ms

    async def _features(self, *, to_node: int = ANY_NODE) -> dict[str, int]:
        """Return the finalized level of each feature."""
        return (await self._router.node(to_node, self._router.deadline())).features


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends because its channels block."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call has tried to suspend")


def _blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Turn a coroutine method of a client with blocking channels into a blocking method."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _finish(method(*args, **kwargs))

    return call


class WireClient(_Client):
    """A blocking client. Usable as a context manager; not thread-safe."""

    _io = BLOCKING
    request = _blocking(_Client._request)
    call = _blocking(_Client._call)
    metadata = _blocking(_Client._metadata)
    versions = _blocking(_Client._versions)
    features = _blocking(_Client._features)

    def close(self) -> None:
        """Close all connections."""
        self._router.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class AsyncWireClient(_Client):
    """A client on an event loop; several calls may run concurrently. An async context manager."""

    _io = ASYNC
    request = _Client._request
    call = _Client._call
    metadata = _Client._metadata
    versions = _Client._versions
    features = _Client._features

    async def close(self) -> None:
        """Close all connections."""
        self._router.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


__all__ = [
    "ApiError",
    "AsyncWireClient",
    "AuthenticationError",
    "BrokerUnreachable",
    "ConnectionLostError",
    "RequestFactory",
    "Security",
    "SecurityError",
    "WireClient",
]
