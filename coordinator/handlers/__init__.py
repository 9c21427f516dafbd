"""Registry of the request handlers: one module per API, imported on the API's first request.

How to write a handler
----------------------
``coordinator/handlers/heartbeat.py`` (the module's name is the API's, in snake case)::

    # Heartbeat (12): keep a member of a classic group alive.

    from fencepost.coordinator.handlers import Context, handles
    from fencepost.protocol import ApiKey, Entity


    @handles(ApiKey.HEARTBEAT, versions=(0, 4), permission="READ Group")
    async def run(ctx: Context) -> Entity:
        await ctx.broker.groups.submit(...)
        return ctx.respond.HeartbeatResponse(error_code=0)

* ``run`` may be a plain function that returns the response entity (fastest), a plain function that
  returns a future, a coroutine function, or a generator function. None means that no response is
  sent (acks=0).
* A handler that loops over the items of a request is a generator and yields None between items,
  so that other requests get their turn (``fencepost.coordinator.runtime.turns``). A future that it
  yields is awaited, and cancelled if the client disconnects. The broker's state may have changed
  after a ``yield``. The handler does not resume after a ``yield`` if the client has disconnected,
  so cleanup belongs in a ``finally``.
* ``ctx.body`` is the request as kio's class for ``ctx.version``. A field that only newer versions
  have does not exist on older ones: read it with ``getattr(ctx.body, "name", default)``, or branch
  on ``ctx.version``. kio's types: durations are ``timedelta`` (``request_ms`` converts them to
  milliseconds), a timestamp of -1 is None, error codes are ``kio.schema.errors.ErrorCode``, the
  zero uuid is None.
* ``ctx.respond.<ClassName>(**fields)`` builds kio's response class of the same version; fields that
  this version lacks are dropped, missing ones get Kafka's defaults; see
  :class:`fencepost.protocol.messages.MessageFactory`. ``ctx.respond.error(code)`` is the
  response with only its top-level error.
* If a handler raises a ``DomainError``, the whole request fails with the error's code. After any
  other exception, which is also logged, it fails with UNKNOWN_SERVER_ERROR. The function
  ``refused`` that is passed to ``@handles`` builds the error response; by default the response is
  ``ctx.respond.error(code)``. If ``refused`` returns None, the connection is closed. The handler
  itself reports the errors of single items.
* ``raise CloseConnection(reason)`` closes the connection without a response, as after a failed
  Produce with acks=0.

The versions of an API are defined in ``protocol/api.py`` and repeated in ``@handles``, where the
reader of a handler sees them; the import of a module fails if the two ranges differ.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

from fencepost.cluster.acl import CLUSTER_NAME, Operation, ResourceType
from fencepost.cluster.topic_names import unlimited
from fencepost.coordinator.errors import ClusterAuthorizationError
from fencepost.coordinator.runtime.origin import Origin, origin_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import ClientSession
from fencepost.coordinator.security.throttle import RequestQuotas
from fencepost.logcore.values import dataclass
from fencepost.protocol.api import (
    APIS,
    FORWARDED,
    KNOWN_APIS,
    Api,
    ApiKey,
)
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.schema import Entity

if TYPE_CHECKING:
    from fencepost.coordinator.broker_services import Services
    from fencepost.coordinator.controller.active import ActiveController
    from fencepost.coordinator.controller.services import ControllerServices
    from fencepost.coordinator.controller.store import MetadataStore
    from fencepost.coordinator.metadata.metadata import Metadata

Answer = Entity | None
Run = Callable[["Context"], "Answer | Awaitable[Answer | Work[Answer]] | Work[Any]"]
"""A generator may return an awaitable, and an awaitable may return a generator, as in a long poll.
"""


class ClientConnection(Protocol):
    """The part of a request's connection that a handler can use."""

    client_software: tuple[str, str] | None
    """The client's name and version, if the client has sent them (KIP-511)."""
    peer_port: int
    """The client's port."""
    session: ClientSession
    """The client's principal and the listener that it connected to."""


class CloseConnection(Exception):  # noqa: N818 - an order, not an error
    """Raised by a handler to close the connection without a response."""


Refuse = Callable[["Context", int, str | None], Answer | Work[Answer]]
"""Builds the error response of a whole request from an error code and a message."""


def top_level_error(ctx: Context, code: int, message: str | None) -> Answer:
    """Return the response with only its top-level error; None if the response has no such field."""
    return ctx.respond.error(code, message)


@dataclass(frozen=True, slots=True)
class Handler:
    """The handler of one API, with its permission and its error response."""

    api: Api
    permission: str
    run: Run
    refused: Refuse = top_level_error


@dataclass(slots=True)
class Context:
    """One request, and everything that its handler may use."""

    broker: Services
    """The broker's services."""
    registry: Registry
    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body: Entity
    respond: ResponseFactory
    peer_host: str
    """The client's address; DescribeGroups shows it with a slash before it."""
    connection: ClientConnection
    """The connection that the request came on."""
    size_bytes: int = 0
    """The request's size on the wire, in bytes."""
    throttle: RequestQuotas | None = None
    """The request's quotas; None if no quota is configured or the request is exempt."""
    frame: bytes = b""
    """The raw request, kept if it may be forwarded to the active controller."""
    zookeeper_controller: ControllerServices | None = None
    """Set if this broker decides on the request and stores the result in ZooKeeper."""

    @property
    def controller(self) -> ActiveController:
        """Return the controller that decides on the request in this process."""
        return (
            self.broker.active_controller
            if self.zookeeper_controller is None
            else self.zookeeper_controller.active
        )

    @property
    def metadata(self) -> Metadata:
        """Return the metadata, including this process's decisions that are not published yet."""
        return (
            self.broker.metadata
            if self.zookeeper_controller is None
            else self.zookeeper_controller.metadata
        )

    @property
    def store(self) -> MetadataStore | None:
        """Return the store for this process's decisions; None if the controllers are remote."""
        if self.zookeeper_controller is None:
            return self.broker.storage.own_log
        return self.zookeeper_controller.active.store

    @property
    def keeps_all_brokers_settings(self) -> bool:
        """Return whether this process, as a controller, stores the settings of other brokers."""
        if self.zookeeper_controller is None:
            return self.broker.controller is None
        return self.zookeeper_controller.is_elected

    @property
    def advertised(self) -> tuple[str, int]:
        """Return the host and port at which this client reaches the broker."""
        return self.broker.advertised(self.connection.session.listener)

    def may(
        self,
        operation: Operation,
        resource: ResourceType,
        name: str,
        *,
        audited: bool = True,
        count: int = 1,
    ) -> bool:
        """Return whether the client may perform an operation; True without an authorizer.

        If ``audited`` is False, a denial is not logged: used for lists that omit hidden resources.
        ``count`` is the number of times that the request names the resource, for the audit log.
        """
        authorizer = self.broker.authorizer
        return authorizer is None or authorizer.allows(
            self.connection.session,
            operation,
            resource,
            name,
            audited=audited,
            request=KNOWN_APIS[self.api_key].name,
            count=count,
        )

    def may_on_cluster(self, operation: Operation, *, audited: bool = True) -> bool:
        """Return whether the client may perform an operation on the cluster."""
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME, audited=audited)

    def require_on_cluster(self, operation: Operation) -> None:
        """Check that the client may perform an operation on the cluster.

        Raises ClusterAuthorizationError.
        """
        if not self.may_on_cluster(operation):
            raise ClusterAuthorizationError("Cluster authorization failed.")

    def may_on_some(self, operation: Operation, resource: ResourceType) -> bool:
        """Return whether the client may perform an operation on one or more resources of a type."""
        authorizer = self.broker.authorizer
        return authorizer is None or authorizer.allows_some(
            self.connection.session, operation, resource
        )

    def takes_partitions(self, *, strict_since: int) -> Callable[[int], None]:
        """Return a function that charges created or deleted partitions to the client's quota.

        From version ``strict_since`` on, the function raises ThrottlingQuotaExceededError if the
        quota is exceeded. Older clients do not know that error; they are throttled after their
        response.
        """
        throttle = self.throttle
        if throttle is None:
            return unlimited
        return partial(throttle.take_partitions, is_strict=self.version >= strict_since)

    @property
    def origin(self) -> Origin:
        """Return the client as the origin of a change, for the history."""
        return origin_of(self.client_id, self.peer_host)


def with_wait(answer: Entity, throttle_ms: int) -> tuple[Entity, int]:
    """Return the response with its throttle time, and that time in milliseconds.

    A response from the active controller may already contain a longer throttle time, which is kept.
    A response without a throttle time field is returned unchanged.
    """
    if not hasattr(answer, "throttle_time"):
        return answer, throttle_ms
    stated: timedelta = answer.throttle_time or timedelta()
    wait = timedelta(milliseconds=throttle_ms)
    if wait <= stated:
        return answer, request_ms(stated)
    return replace(answer, throttle_time=wait), throttle_ms


def request_ms(duration: timedelta) -> int:
    """Return a request's duration field in milliseconds."""
    return (duration.days * 86_400 + duration.seconds) * 1000 + duration.microseconds // 1000


def replica_id_of(fetch: Any) -> int:
    """Return the follower's broker id in a Fetch request; negative for a consumer."""
    state = getattr(fetch, "replica_state", None)
    replica_id: int = fetch.replica_id if state is None else state.replica_id
    return replica_id


def handles(
    key: ApiKey,
    *,
    versions: tuple[int, int],
    permission: str,
    refused: Refuse = top_level_error,
) -> Callable[[Run], Run]:
    """Mark a module's ``run`` as the handler of an API.

    ``permission`` names the permission that a client needs, in Kafka's words: ``"READ Group"``,
    ``"WRITE Topic"``, ``"NONE"``. ``refused`` builds the API's error response, as
    ``AbstractRequest.getErrorResponse`` does. Raises ValueError if ``versions`` is not the API's
    range.
    """
    api = KNOWN_APIS[key]
    if versions != (api.min_version, api.max_version):
        raise ValueError(
            f"{api.name} is served at versions {api.min_version}-{api.max_version}, not {versions}"
        )

    def mark(run: Run) -> Run:
        run.handler = Handler(api, permission, run, refused)  # type: ignore[attr-defined]
        return run

    return mark


class Registry:
    """The served APIs, their versions and their handlers.

    By default it serves every API of :data:`fencepost.protocol.api.APIS` that has a module in this
    package. ``modules`` replaces that list (module names by key); tests pass ``{}`` and call
    :meth:`add`. Versions that Kafka marks unstable are served only for the APIs in
    ``unstable_apis``, or for all APIs with ``unstable_versions``.

    ``forwards`` returns the versions that the active controller supports. With ``forwards``,
    requests of the APIs in :data:`fencepost.protocol.api.FORWARDED`, except those in ``own``, go to
    the active controller.
    ``wrapped`` maps API keys to wrappers of their handlers. The APIs in ``without`` are not served.
    """

    def __init__(
        self,
        *,
        modules: Mapping[int, str] | None = None,
        unstable_versions: bool = False,
        unstable_apis: Collection[ApiKey] = (),
        forwards: Callable[[], Mapping[int, tuple[int, int]]] | None = None,
        wrapped: Mapping[int, Callable[[Run], Run]] | None = None,
        own: Collection[int] = (),
        without: Collection[int] = (),
    ) -> None:
        served = _own_modules() if modules is None else modules
        self._modules = {key: name for key, name in served.items() if key not in without}
        self._handlers: dict[int, Handler] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._unstable = frozenset(APIS if unstable_versions else unstable_apis)
        self._controller_versions = forwards
        self._wrapped = wrapped or {}
        decided = frozenset() if forwards is None else FORWARDED.difference(own)
        self.forwarded: frozenset[int] = decided
        """The APIs whose requests are forwarded to the active controller."""
        for key in self._modules:
            self._serve(KNOWN_APIS[key])

    def _serve(self, api: Api) -> None:
        self._versions[api.key] = (
            api.min_version,
            api.max_served(unstable=api.key in self._unstable),
        )

    def add(self, run: Run) -> None:
        """Serve the API of ``run``, which :func:`handles` has marked, regardless of ``modules``."""
        handler: Handler = run.handler  # type: ignore[attr-defined]
        self._handlers[handler.api.key] = handler
        self._serve(handler.api)

    def wrap(self, api_key: int, wrapper: Callable[[Run], Run]) -> None:
        """Replace the handler of a served API by ``wrapper(run)``."""
        handler = self.handler(api_key)
        self._handlers[api_key] = replace(handler, run=wrapper(handler.run))

    @property
    def versions(self) -> Mapping[int, tuple[int, int]]:
        """The lowest and the highest served version by API key."""
        return self._versions

    def advertised(self) -> Iterable[tuple[int, int, int]]:
        """Yield (key, lowest, highest version) of each API for ApiVersions, ordered by key."""
        versions_of_controllers = (
            {} if self._controller_versions is None else self._controller_versions()
        )
        for key in sorted(self._versions):
            low, high = KNOWN_APIS[key].advertised_min, self._versions[key][1]
            if versions_of_controllers and key in self.forwarded:
                supported = versions_of_controllers.get(key, (0, -1))
                low, high = max(low, supported[0]), min(high, supported[1])
            if low <= high:
                yield key, low, high

    def handler(self, api_key: int) -> Handler:
        """Return the handler of a served API; import its module on first use."""
        loaded = self._handlers.get(api_key)
        if loaded is None:
            module = import_module(f"{__name__}.{self._modules[api_key]}")
            loaded = module.run.handler
            if loaded.api.key != api_key:
                raise ValueError(f"{module.__name__} handles {loaded.api.name}")
            if api_key in self.forwarded:
                forwarding = import_module(f"{__name__}.forwarding")
                loaded = replace(loaded, run=forwarding.forwarding(loaded))
            if api_key in self._wrapped:
                loaded = replace(loaded, run=self._wrapped[api_key](loaded.run))
            self._handlers[api_key] = loaded
        return loaded

    def handlers(self) -> list[Handler]:
        """Return all handlers by key; import every module (for ``docs/protocol.md``)."""
        return [self.handler(key) for key in sorted(self._versions)]


@cache
def _own_modules() -> Mapping[int, str]:
    """Return the module of each API that has one here; read from disk once in a process."""
    present = {module.name for module in iter_modules(__path__)}
    return {key: api.module for key, api in APIS.items() if api.module in present}
