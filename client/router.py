"""The common logic of the two clients: connections, versions, routing and retries.

The logic is written once, as coroutines over :class:`fencepost.client.channel.Io`. With blocking
sockets the coroutines never suspend.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.client.channel import (
    BrokerUnreachable,
    Channel,
    ConnectionLostError,
    Io,
)
from fencepost.client.cluster import (
    ClusterMetadata,
    classify_errors,
    cluster_metadata,
    parse_bootstrap,
)
from fencepost.client.security import PLAINTEXT, Security
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.tracebacks import without_traceback
from fencepost.protocol.api import APIS, KNOWN_APIS, Api, ApiKey
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory, request_factory
from fencepost.protocol.schema import Entity

DEFAULT_TIMEOUT_MS = 30_000
"""The total timeout of a call, including retries."""
CONNECT_TIMEOUT_MS = 5_000
"""The timeout of one attempt to connect."""
FIRST_BACKOFF_MS = 10
MAX_BACKOFF_MS = 500
"""The delays between attempts double from the first to the second value."""
METADATA_MAX_AGE_MS = 300_000
"""Kafka's ``metadata.max.age.ms``."""

UNKNOWN_TOPIC_PATIENCE_MS = 1_000
"""The time for which an unknown topic is retried. Kafka makes the error retriable because a new
topic takes a moment to be propagated; mostly, though, the name is wrong."""

LOGIN_AGAIN_AT = 0.85, 0.95
"""The client reauthenticates after a fraction of the session's lifetime, drawn from this range. It
is random, as in Kafka, so that clients that connected together do not reauthenticate together."""

GROUP, TRANSACTION = 0, 1
"""Coordinator key types."""

_SAFE_TO_REPEAT = frozenset(
    {
        ApiKey.FETCH,
        ApiKey.LIST_OFFSETS,
        ApiKey.METADATA,
        ApiKey.OFFSET_FETCH,
        ApiKey.FIND_COORDINATOR,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.LIST_GROUPS,
        ApiKey.API_VERSIONS,
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_PRODUCERS,
        ApiKey.DESCRIBE_TRANSACTIONS,
        ApiKey.LIST_TRANSACTIONS,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    }
)
"""Read-only requests, which are retried after a lost connection."""

_MOVED = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.not_controller,
    }
)
"""Errors after which the node must be looked up again."""

_UNKNOWN_TOPIC = frozenset({ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id})

ANY_NODE = -1

NEGOTIATION_VERSION = 4
"""The version of ApiVersions that is tried first. Version 5 only adds ids that this client does not
send, and brokers before 4.4 would need a second request."""


def api_versions_body(make: RequestFactory) -> Entity:
    """Build an ApiVersions request."""
    return make.message(client_software_name="fencepost", client_software_version="0.1.0")


class ApiError(WireError):
    """A broker answered with an error code."""

    def __init__(self, code: int, api: str, message: str | None = None) -> None:
        try:
            self.code = ErrorCode(code)
        except ValueError:
            self.code = ErrorCode.unknown_server_error
        self.api = api
        self.message = message
        text = f"{api}: {self.code.name.upper()} ({int(code)})"
        super().__init__(f"{text}: {message}" if message else text)


def _api(api: int | str) -> Api:
    """Return the API by key or name (``"OffsetCommit"``). Raises KeyError if it is unknown."""
    if isinstance(api, int):
        return KNOWN_APIS[api]
    for entry in KNOWN_APIS.values():
        if api in {entry.name, entry.module, entry.key.name}:
            return entry
    raise KeyError(api)


class NodeConnection:
    """The connection to one broker, and the versions it serves by API key."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.versions: dict[int, tuple[int, int]] = {}
        self.features: dict[str, int] = {}
        self.has_answered = False
        """Whether the broker has answered a request other than ApiVersions and SASL requests."""
        self.login_again_at = float("inf")
        """The time of the next authentication, on the router's clock."""
        self.logging_in = asyncio.Lock()
        """Held during authentication, when no other request may be sent."""


class Router:
    """A client's connections, metadata and coordinators. Times are in ms of the monotonic clock."""

    def __init__(
        self,
        io: Io,
        bootstrap: str | list[str] | tuple[str, ...],
        *,
        client_id: str | None,
        timeout_ms: float,
        security: Security = PLAINTEXT,
        negotiates: bool = True,
    ) -> None:
        """With ``negotiates`` false, send ApiVersions only if authentication needs it."""
        self._io = io
        self._security = security
        self._negotiates = negotiates or security.has_login
        self._tls = None
        if security.has_tls:
            from fencepost.client.tls import ssl_context  # noqa: PLC0415 - lazy

            self._tls = ssl_context(security)
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self.timeout_ms = timeout_ms
        """The default total timeout of a call."""
        self._correlation_id = 0
        self._nodes: dict[tuple[str, int], NodeConnection] = {}
        self._troubles: dict[tuple[str, int], str] = {}
        """By address: the reason why the last attempt to connect failed."""
        self._metadata: ClusterMetadata | None = None
        self._metadata_at_ms = 0.0
        self._coordinators: dict[tuple[int, str], tuple[str, int]] = {}

    # --- connections ---

    async def _connect(self, address: tuple[str, int], deadline: float) -> NodeConnection:
        node = self._nodes.get(address)
        if node is not None and await self._is_ready(node, deadline):
            return node
        where = f"{address[0]}:{address[1]}"
        try:
            time_left = min(CONNECT_TIMEOUT_MS, _remaining_ms(deadline))
            channel = await self._io.connect(*address, time_left, self._tls)
        except OSError as error:
            reason = str(error) or "timeout"
            if not isinstance(error, TimeoutError):
                self._troubles[address] = reason
            elif time_left < CONNECT_TIMEOUT_MS:
                # A short timeout says less than the previous attempt's error.
                reason = self._troubles.get(address, reason)
            raise BrokerUnreachable(f"{where}: {reason}") from error
        self._troubles.pop(address, None)
        node = NodeConnection(channel)
        try:
            if self._negotiates:
                await self._negotiate(node, deadline)
            await self._log_in(node, where, deadline)
        except ConnectionLostError as error:
            channel.close()
            raise BrokerUnreachable(f"{error}{self._probable_cause()}") from error
        except BaseException:
            # Close it also if the call was cancelled, because only this call knows the connection.
            channel.close()
            raise
        meanwhile = self._nodes.get(address)
        if meanwhile is not None and not meanwhile.channel.closed:
            channel.close()  # another task has connected in the meantime
            return meanwhile
        self._nodes[address] = node
        return node

    async def _any_node(self, deadline: float) -> NodeConnection:
        """Return a connection to any reachable broker, preferring an open one."""
        for node in list(self._nodes.values()):
            if await self._is_ready(node, deadline):
                return node
        addresses = [b.address for b in self._metadata.brokers.values()] if self._metadata else []
        problems: list[str] = []
        for address in dict.fromkeys([*self._bootstrap, *addresses]):
            try:
                return await self._connect(address, deadline)
            except (BrokerUnreachable, ConnectionLostError) as error:
                problems.append(str(error))
        raise BrokerUnreachable("; ".join(problems))

    async def _is_ready(self, node: NodeConnection, deadline: float) -> bool:
        """Return whether ``node`` accepts requests; reauthenticate if its session ends soon."""
        while not node.channel.closed:
            if not node.logging_in.locked() and _now() < node.login_again_at:
                return True
            async with node.logging_in:
                if not node.channel.closed and _now() >= node.login_again_at:
                    try:
                        await self._log_in(node, node.channel.where, deadline)
                    except ConnectionLostError:
                        return False
                    except WireError:
                        node.channel.close()
                        raise
        return False

    async def _log_in(self, node: NodeConnection, where: str, deadline: float) -> None:
        if not self._security.has_login:
            return
        from fencepost.client.login import log_in, login_unsupported  # noqa: PLC0415 - few log in

        async def ask(key: ApiKey, /, **fields: Any) -> Entity:
            api = KNOWN_APIS[key]
            if key not in node.versions:
                raise login_unsupported(self._security, where)
            # Brokers since Kafka 1.0 advertise the SASL versions before authentication.
            version = self._version(node, api)
            body = request_factory(key, version).message(**fields)
            return await self._call_node(node, api, version, body, deadline)

        began = _now()
        lifetime_ms = await log_in(ask, self._io.run, self._security, where)
        share = random.uniform(*LOGIN_AGAIN_AT)  # noqa: S311 - not used for security
        node.login_again_at = began + share * lifetime_ms if lifetime_ms > 0 else float("inf")

    def _probable_cause(self) -> str:
        """Return the probable reason why a connection was closed before its first response."""
        if self._security.has_login:
            return ""
        protocol = self._security.protocol
        if self._security.has_tls:
            return f" (perhaps the listener requires a login; security.protocol is {protocol} here)"
        return (
            f" (perhaps the listener requires TLS or a login; security.protocol is {protocol} here)"
        )

    async def _negotiate(self, node: NodeConnection, deadline: float) -> None:
        version = NEGOTIATION_VERSION
        frame = await self._ask_versions(node, version, deadline)
        if int.from_bytes(frame[4:6], "big") == ErrorCode.unsupported_version:
            # The response has the v0 body, which contains the range of ApiVersions (KIP-511).
            ranges = decode_response(ApiKey.API_VERSIONS, 0, frame)[1].api_keys
            versions = [key.max_version for key in ranges if key.api_key == ApiKey.API_VERSIONS]
            version = min(version, max(versions, default=0))
            frame = await self._ask_versions(node, version, deadline)
        answer = decode_response(ApiKey.API_VERSIONS, version, frame)[1]
        if answer.error_code:
            raise ApiError(answer.error_code, "ApiVersions")
        node.versions = {key.api_key: (key.min_version, key.max_version) for key in answer.api_keys}
        node.features = {
            feature.name: feature.max_version_level
            for feature in getattr(answer, "finalized_features", ())
        }

    async def _ask_versions(self, node: NodeConnection, version: int, deadline: float) -> bytes:
        body = api_versions_body(request_factory(ApiKey.API_VERSIONS, version))
        return (await self._send(node, ApiKey.API_VERSIONS, version, body, deadline))[1] or b""

    async def _send(
        self, node: NodeConnection, api_key: int, version: int, body: Entity, deadline: float
    ) -> tuple[int, bytes | None]:
        """Send a request; return its correlation id and the response frame, if there is one."""
        correlation_id = self._correlation_id = (self._correlation_id + 1) & 0x7FFFFFFF
        answered = api_key != ApiKey.PRODUCE or body.acks != 0
        chunks = encode_request(api_key, version, correlation_id, self._client_id, body)
        frame = await node.channel.exchange(
            chunks, answered=answered, timeout_ms=_remaining_ms(deadline)
        )
        return correlation_id, frame

    async def _exchange(
        self, node: NodeConnection, api: Api, version: int, body: Entity, deadline: float
    ) -> Entity:
        try:
            answer = await self._call_node(node, api, version, body, deadline)
        except ConnectionLostError as error:
            if node.has_answered:
                raise
            raise ConnectionLostError(f"{error}{self._probable_cause()}") from error
        node.has_answered = True
        return answer

    async def _call_node(
        self, node: NodeConnection, api: Api, version: int, body: Entity, deadline: float
    ) -> Entity:
        correlation_id, frame = await self._send(node, api.key, version, body, deadline)
        if frame is None:
            return None
        try:
            answered_id, entity = decode_response(api.key, version, frame)
            if answered_id != correlation_id:
                raise ConnectionLostError(f"response {answered_id} to request {correlation_id}")
        except WireError:
            node.channel.close()
            raise
        return entity

    def _version(
        self, node: NodeConnection, api: Api, version: int | None = None, at_most: int | None = None
    ) -> int:
        """Return the requested version, or else the highest that both sides support."""
        if version is not None:
            if not api.min_version <= version <= api.max_version:
                raise UnsupportedVersion(api.key, version)
            return version
        low, high = node.versions.get(api.key, (0, -1))
        best = min(high, api.stable_max if at_most is None else at_most)
        if best < max(low, api.min_version):
            raise UnsupportedVersion(api.key, best)
        return best

    # --- calls ---

    async def request(
        self, api_key: int, version: int, entity: Entity, node_id: int, timeout_ms: float | None
    ) -> Entity:
        """Send one request without retries; return its response unchecked."""
        deadline = self.deadline(timeout_ms)
        node = await self.node(node_id, deadline)
        return await self._exchange(node, KNOWN_APIS[api_key], version, entity, deadline)

    async def newest(
        self,
        api_key: int,
        at_most: int | None,
        build: Callable[[RequestFactory], Entity],
        timeout_ms: float | None,
    ) -> Entity:
        """Send one request to any node, in the newest version that both sides support."""
        deadline = self.deadline(timeout_ms)
        node = await self.node(ANY_NODE, deadline)
        api = KNOWN_APIS[api_key]
        version = self._version(node, api, at_most=at_most)
        entity = build(request_factory(api_key, version))
        return await self._exchange(node, api, version, entity, deadline)

    async def call(
        self,
        api: int | str,
        version: int | None,
        at_most: int | None,
        target: CallTarget,
        timeout_ms: float | None,
        check: bool,
        fields: dict[str, Any],
    ) -> Entity:
        """Find the node, send the request, and retry retriable errors until the deadline."""
        entry = _api(api)
        deadline = self.deadline(timeout_ms)
        began = _now()
        backoff_ms = FIRST_BACKOFF_MS
        while True:
            sent = False
            problem: WireError
            try:
                node = await target.find(self, deadline)
                used = self._version(node, entry, version, at_most)
                body = _body(entry, used, fields)
                sent = True
                answer = await self._exchange(node, entry, used, body, deadline)
            except (BrokerUnreachable, ConnectionLostError) as error:
                if sent and entry.key not in _SAFE_TO_REPEAT:
                    raise BrokerUnreachable(f"{entry.name}, outcome unknown: {error}") from error
                problem = without_traceback(error)
                self.forget(target.coordinator)
            except ApiError as error:
                if not error.code.retriable:
                    raise
                problem = without_traceback(error)
            else:
                action = classify_errors(answer) if answer is not None and check else None
                if action is None or not action.failed:
                    return answer
                if any(code in _MOVED for code in action.failed):
                    self.forget(target.coordinator)
                problem = ApiError(
                    action.top or action.failed[0],
                    entry.name,
                    getattr(answer, "error_message", None),
                )
                if not action.retriable:
                    if action.top:
                        raise problem
                    return answer
            # Too little time is left for a retry: it would time out, and the timeout would say less
            # than this problem.
            if _now() + 2 * backoff_ms >= min(deadline, began + _retry_limit_ms(problem)):
                if isinstance(problem, ConnectionLostError):
                    raise BrokerUnreachable(str(problem)) from problem
                raise problem
            await self._io.sleep(backoff_ms / 1000)
            backoff_ms = min(2 * backoff_ms, MAX_BACKOFF_MS)

    def deadline(self, timeout_ms: float | None = None) -> float:
        """Return the time by which a call that starts now must be finished."""
        return _now() + (self.timeout_ms if timeout_ms is None else timeout_ms)

    # --- routing ---

    async def node(self, node_id: int, deadline: float) -> NodeConnection:
        """Return an open connection to broker ``node_id``, or to any."""
        if node_id == ANY_NODE:
            return await self._any_node(deadline)
        metadata = await self.cluster(deadline)
        if node_id not in metadata.brokers:
            metadata = await self.cluster(deadline, refresh=True)
        if node_id not in metadata.brokers:
            raise BrokerUnreachable(f"the cluster has no broker {node_id}")
        return await self._connect(metadata.brokers[node_id].address, deadline)

    async def cluster(
        self, deadline: float, topic: str | None = None, *, refresh: bool = False
    ) -> ClusterMetadata:
        """Return the cached metadata if it is recent and contains ``topic``, else new metadata."""
        cached = self._metadata
        if cached is not None and not refresh:
            young = _now() - self._metadata_at_ms < METADATA_MAX_AGE_MS
            if young and (topic is None or topic in cached.topics):
                return cached
        fresh = cluster_metadata(await self._ask_for_topics(deadline))
        self._metadata, self._metadata_at_ms = fresh, _now()
        return fresh

    async def _ask_for_topics(self, deadline: float, name: str | None = None) -> Entity:
        """Return the Metadata response for one topic, or for all."""
        api = APIS[ApiKey.METADATA]
        # Open connections may be broken without notice: try each of them, then two new connections.
        attempts = 2 + sum(not node.channel.closed for node in self._nodes.values())
        while True:
            attempts -= 1
            node = await self._any_node(deadline)
            version = self._version(node, api)
            make = request_factory(api.key, version)
            # Version 0 has no null: an empty list means all topics.
            topics: tuple[Entity, ...] | None = None if version else ()
            if name is not None:
                topics = (make.MetadataRequestTopic(name=name),)
            body = make.message(topics=topics, allow_auto_topic_creation=False)
            try:
                return await self._exchange(node, api, version, body, deadline)
            except ConnectionLostError:
                if not attempts or _now() >= deadline:
                    raise

    async def leader(self, topic: str, partition: int, deadline: float) -> NodeConnection:
        """Return an open connection to a partition's leader."""
        metadata = await self.cluster(deadline, topic)
        leader = metadata.leader(topic, partition)
        if leader is None or leader not in metadata.brokers:
            self._metadata = None
            code = ErrorCode.leader_not_available
            if leader is None:
                code = ErrorCode.unknown_topic_or_partition
            if topic not in metadata.topics:
                # The topic may exist but be missing from the list of all topics: request it by
                # name.
                (row,) = (await self._ask_for_topics(deadline, topic)).topics
                code = row.error_code or code
            raise ApiError(code, "Metadata", f"{topic}-{partition}")
        return await self._connect(metadata.brokers[leader].address, deadline)

    async def coordinator(self, key_type: int, key: str, deadline: float) -> NodeConnection:
        """Return an open connection to the coordinator of ``key``."""
        address = self._coordinators.get((key_type, key))
        if address is None:
            node = await self._any_node(deadline)
            api = APIS[ApiKey.FIND_COORDINATOR]
            version = self._version(node, api)
            body = request_factory(api.key, version).message(
                key=key, key_type=key_type, coordinator_keys=[key]
            )
            answer = await self._exchange(node, api, version, body, deadline)
            row = answer.coordinators[0] if hasattr(answer, "coordinators") else answer
            if row.error_code:
                message = getattr(row, "error_message", None)
                raise ApiError(row.error_code, api.name, message)
            address = self._coordinators[key_type, key] = row.host, row.port
        return await self._connect(address, deadline)

    def forget(self, coordinator: tuple[int, str] | None) -> None:
        """Forget a coordinator that has moved; with None, forget all leaders."""
        if coordinator is None:
            self._metadata = None
        else:
            self._coordinators.pop(coordinator, None)

    @property
    def is_open(self) -> bool:
        """Return whether any connection is open."""
        return any(not node.channel.closed for node in self._nodes.values())

    def forget_all(self) -> None:
        """Forget everything that was learned about the cluster."""
        self._metadata = None
        self._coordinators.clear()

    def close(self) -> None:
        """Close all connections."""
        for node in self._nodes.values():
            node.channel.close()
        self._nodes.clear()


class CallTarget(NamedTuple):
    """The node that a call is sent to, looked up again for each attempt."""

    node: int = ANY_NODE
    leader: tuple[str, int] | None = None
    coordinator: tuple[int, str] | None = None

    async def find(self, router: Router, deadline: float) -> NodeConnection:
        """Return an open connection to the node."""
        if self.leader is not None:
            return await router.leader(*self.leader, deadline)
        if self.coordinator is not None:
            return await router.coordinator(*self.coordinator, deadline)
        return await router.node(self.node, deadline)


def _body(api: Api, version: int, fields: dict[str, Any]) -> Entity:
    entity = fields.get("entity")
    if entity is None:
        return request_factory(api.key, version).message(**fields)
    return entity(request_factory(api.key, version)) if callable(entity) else entity


def _retry_limit_ms(problem: WireError) -> float:
    """Return how long to retry after this problem, in milliseconds."""
    if isinstance(problem, ApiError) and problem.code in _UNKNOWN_TOPIC:
        return UNKNOWN_TOPIC_PATIENCE_MS
    return float("inf")


def _now() -> float:
    return monotonic_s() * 1000


def _remaining_ms(deadline: float) -> float:
    return max(1.0, deadline - _now())
