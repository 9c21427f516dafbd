"""Clients that speak single requests: for the command line, tests and tools.

:class:`WireClient` blocks, :class:`AsyncWireClient` runs on an event loop; both have the same
methods, and both work against any Kafka broker. They negotiate versions, find leaders and
coordinators and repeat what Kafka calls retriable, and leave the rest to the caller: no batching,
no group membership, no producer state.

The logic stands in ``router.py``, as coroutines. Over blocking sockets those never suspend, so
:class:`WireClient` runs them to their end in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

from fencepost.coordinator.wire.client.channel import (
    ASYNC,
    BLOCKING,
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
    Io,
)
from fencepost.coordinator.wire.client.cluster import ClusterMetadata
from fencepost.coordinator.wire.client.router import (
    ANY_NODE,
    DEFAULT_TIMEOUT_MS,
    GROUP,
    TRANSACTION,
    ApiError,
    Router,
    Target,
)
from fencepost.coordinator.wire.client.security import PLAINTEXT, Security, SecurityError
from fencepost.coordinator.wire.messages import RequestFactory
from fencepost.coordinator.wire.schema import Entity

P = ParamSpec("P")
T = TypeVar("T")


class _Client:
    """What both clients can do.

    ``security`` says how connections are encrypted and who logs in. A file that it names and that
    can not be used raises :class:`SecurityError`.
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
        deadline_ms: float | None = None,
    ) -> Entity:
        """One exchange with no retry and no judgement: the response as it came.

        None for a Produce with acks=0. Raises :class:`BrokerUnreachable` or
        :class:`ConnectionLostError` (which an unsupported version causes too).
        """
        return await self._router.request(api_key, version, entity, to_node, deadline_ms)

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
        deadline_ms: float | None = None,
        check: bool = True,
        **fields: Any,
    ) -> Entity:
        """Send a request to the right broker and return its response.

        ``api`` is a key or a name (``"OffsetCommit"``); ``version`` None takes the highest that
        both sides know and that is not above ``at_most``. The request is built from ``fields`` as
        ``MessageFactory`` does, or given as ``entity=``: a kio entity, or a function from the
        version's :class:`RequestFactory` to one. It goes to the leader of partition ``to_leader``,
        to the coordinator of group ``to_group`` or of transactional id ``to_transaction``, to
        broker ``to_node``, or to any.

        While all errors in the answer are retriable, the call is repeated until ``deadline_ms`` are
        over. Then, and for other top-level errors, it raises :class:`ApiError`; errors of single
        items are left in the response. With ``check=False`` the first answer is returned, whatever
        it says. Raises :class:`BrokerUnreachable` if no broker can be reached, or if a connection
        is lost under a request that may not be repeated, :class:`UnsupportedVersion`, and
        :class:`AuthenticationError` if the broker does not believe the client or the reverse.
        """
        coordinator = None if to_group is None else (GROUP, to_group)
        if to_transaction is not None:
            coordinator = TRANSACTION, to_transaction
        target = Target(to_node, to_leader, coordinator)
        return await self._router.call(api, version, at_most, target, deadline_ms, check, fields)

    async def _metadata(self, *, refresh: bool = False) -> ClusterMetadata:
        """Brokers and topics; from the cache unless it is old or ``refresh`` is asked for."""
        return await self._router.cluster(self._router.deadline(), refresh=refresh)

    async def _versions(self, *, to_node: int = ANY_NODE) -> dict[int, tuple[int, int]]:
        """(lowest, highest) version by API key, as the broker advertises them."""
        return (await self._router.node(to_node, self._router.deadline())).versions

    def forget(self) -> None:
        """Look up anew which brokers, topics and coordinators there are; connections stay."""
        self._router.forget_all()

    def limit(self, timeout_ms: float) -> None:
        """Let each call take so long from now on."""
        self._router.timeout_ms = timeout_ms

    async def _features(self, *, to_node: int = ANY_NODE) -> dict[str, int]:
        """The finalized level of each feature."""
        return (await self._router.node(to_node, self._router.deadline())).features


def _finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, because its channels block."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call has tried to suspend")


def _blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a method blocking, for a client whose channels block."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return _finish(method(*args, **kwargs))

    return call


class WireClient(_Client):
    """A blocking client. Usable as a context manager; not for several threads at once."""

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
    """A client on an event loop; several calls may be under way. An async context manager."""

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
