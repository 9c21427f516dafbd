"""The registry of request handlers: one module per API, imported when it is first asked for.

How to write one
----------------
``coordinator/handlers/heartbeat.py`` (the module's name is the API's, in snake case)::

    # Heartbeat (12): a classic member says that it is alive.

    from fencepost.coordinator.handlers import Context, handles
    from fencepost.coordinator.wire import ApiKey, Entity


    @handles(ApiKey.HEARTBEAT, versions=(0, 4), permission="READ Group")
    async def run(ctx: Context) -> Entity:
        await ctx.broker.groups.submit(...)
        return ctx.respond.HeartbeatResponse(error_code=0)

* ``run`` may be a plain function that returns the response entity (fastest), a plain function that
  returns a future, a coroutine function, or a generator function. None means that no response is
  sent (acks=0).
* A handler that walks over all that a request names does so in a generator, and yields None after
  each thing: other requests get their turn there (``fencepost.coordinator.runtime.turns``). A
  future that is yielded is waited for, and cancelled if the client goes. After a ``yield`` the
  world may have changed. A ``yield`` is the last one if the client has gone, so what must be done
  then stands in a ``finally``.
* ``ctx.body`` is the request as kio's class of ``ctx.version``. A field that only newer versions
  have does not exist on older ones: read it with ``getattr(ctx.body, "name", default)``, or branch
  on ``ctx.version``. kio's types: durations are ``timedelta`` (``request_ms`` makes milliseconds of
  them), a timestamp of -1 is None, error codes are ``kio.schema.errors.ErrorCode``, the zero uuid
  is None.
* ``ctx.respond.<ClassName>(**fields)`` builds kio's response class of the same version; fields that
  this version lacks are dropped, missing ones get Kafka's defaults; see
  :class:`fencepost.coordinator.wire.messages.MessageFactory`. ``ctx.respond.error(code)`` is the
  response with just its top-level error.
* A ``DomainError`` that escapes fails the request as a whole, and so does any other exception,
  which is logged and answered UNKNOWN_SERVER_ERROR. The error response is built by the function
  ``refused`` that is given to ``@handles``; by default it is ``ctx.respond.error(code)``. Where
  there is no error response, the connection is closed. Errors of single items are the handler's.
* ``raise CloseConnection(reason)`` closes the connection without an answer (a failed acks=0).

The versions of an API stand in ``coordinator/wire/api.py`` and are repeated in ``@handles``, so
that a handler's reader sees them; importing a module whose range differs fails.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Protocol

from fencepost.cluster.acl import CLUSTER_NAME, Operation, ResourceType
from fencepost.cluster.topic_names import unlimited
from fencepost.coordinator.errors import ClusterAuthorizationError
from fencepost.coordinator.runtime.origin import Origin, origin_of
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.principal import Session
from fencepost.coordinator.security.throttle import Throttle
from fencepost.coordinator.wire.api import (
    APIS,
    FORWARDED,
    KNOWN_APIS,
    MEMBER_APIS,
    Api,
    ApiKey,
)
from fencepost.coordinator.wire.messages import ResponseFactory
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.controller.active import ActiveController
    from fencepost.coordinator.controller.services import ControllerServices
    from fencepost.coordinator.controller.store import MetadataStore
    from fencepost.coordinator.metadata.metadata import Metadata
    from fencepost.coordinator.services import Services

Answer = Entity | None
Run = Callable[["Context"], "Answer | Awaitable[Answer | Work[Answer]] | Work[Any]"]
"""Steps may end in an awaitable, and an awaitable in steps: a long poll does both."""


class Peer(Protocol):
    """What a handler may know of the connection of a request."""

    client_software: tuple[str, str] | None
    """Name and version, if the client has given them (KIP-511)."""
    session: Session
    """Who is at its other end, and by which listener it came."""


class CloseConnection(Exception):  # noqa: N818 - an order, not an error
    """Raised by a handler to close the connection without an answer."""


Refuse = Callable[["Context", int, str | None], Answer | Work[Answer]]
"""Builds the response to a request that has failed as a whole, from an error code and a message."""


def top_level_error(ctx: Context, code: int, message: str | None) -> Answer:
    """Return the response with just its top-level error; None where the response has none."""
    return ctx.respond.error(code, message)


@dataclass(frozen=True, slots=True)
class Handler:
    """What the registry knows about one API."""

    api: Api
    permission: str
    run: Run
    refused: Refuse = top_level_error


@dataclass(slots=True)
class Context:
    """One request, and all that its handler may use."""

    broker: Services
    """What the broker does."""
    registry: Registry
    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body: Entity
    respond: ResponseFactory
    peer_host: str
    """The client's address; DescribeGroups shows it with a slash before it."""
    connection: Peer
    """Where the request came from."""
    size_bytes: int = 0
    """The request's size on the wire."""
    throttle: Throttle | None = None
    """The request against its client's quotas; None where nobody has one."""
    frame: bytes = b""
    """The request as it came, where the active controller has to answer it."""
    on_znodes: ControllerServices | None = None
    """Set where the request is decided on here, and kept in ZooKeeper."""

    @property
    def controller(self) -> ActiveController:
        """The controller that decides on the request here."""
        return self.broker.active_controller if self.on_znodes is None else self.on_znodes.active

    @property
    def metadata(self) -> Metadata:
        """The metadata with all decisions that were made here, told to brokers or not."""
        return self.broker.metadata if self.on_znodes is None else self.on_znodes.metadata

    @property
    def store(self) -> MetadataStore | None:
        """The store of decisions that are made here; None where the controllers are elsewhere."""
        if self.on_znodes is None:
            return self.broker.storage.own_log
        return self.on_znodes.active.store

    @property
    def keeps_all_brokers_settings(self) -> bool:
        """Whether settings of other brokers are changed here: a controller keeps them."""
        if self.on_znodes is None:
            return self.broker.controller is None
        return self.on_znodes.is_elected

    @property
    def advertised(self) -> tuple[str, int]:
        """Host and port at which this client finds the broker."""
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
        """Whether the client may do that with a resource; everything where nobody looks after it.

        With ``audited`` False a refusal is no news: for lists that leave out what is not allowed.
        ``count`` is how often the request names the resource, for the log.
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
        """The same with the cluster."""
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME, audited=audited)

    def require_on_cluster(self, operation: Operation) -> None:
        """Raise ClusterAuthorizationError if the client may not do that with the cluster."""
        if not self.may_on_cluster(operation):
            raise ClusterAuthorizationError("Cluster authorization failed.")

    def may_on_some(self, operation: Operation, resource: ResourceType) -> bool:
        """Whether the client may do that with at least one resource of a type."""
        authorizer = self.broker.authorizer
        return authorizer is None or authorizer.allows_some(
            self.connection.session, operation, resource
        )

    def takes_partitions(self, *, strict_since: int) -> Callable[[int], None]:
        """Counts partitions that the request creates or deletes against its client's quota.

        From version ``strict_since`` on it raises ThrottlingQuotaExceededError where they have to
        wait; clients of older ones do not know that, and wait once they have their answer.
        """
        throttle = self.throttle
        if throttle is None:
            return unlimited
        return partial(throttle.take_partitions, is_strict=self.version >= strict_since)

    @property
    def origin(self) -> Origin:
        """The client, for the history."""
        return origin_of(self.client_id, self.peer_host)


def with_wait(answer: Entity, throttle_ms: int) -> tuple[Entity, int]:
    """The answer with the time that its client has to wait, in milliseconds, and that time.

    Whoever answered in our place may have said more. Without a field for it the answer stays
    as it is.
    """
    if not hasattr(answer, "throttle_time"):
        return answer, throttle_ms
    said: timedelta = answer.throttle_time or timedelta()
    own = timedelta(milliseconds=throttle_ms)
    if own <= said:
        return answer, request_ms(said)
    return replace(answer, throttle_time=own), throttle_ms


def request_ms(duration: timedelta) -> int:
    """Milliseconds of a duration field of a request."""
    return (duration.days * 86_400 + duration.seconds) * 1000 + duration.microseconds // 1000


def replica_id_of(fetch: Any) -> int:
    """The broker that follows by a Fetch request; below 0 for a consumer."""
    state = getattr(fetch, "replica_state", None)
    found: int = fetch.replica_id if state is None else state.replica_id
    return found


def handles(
    key: ApiKey,
    *,
    versions: tuple[int, int],
    permission: str,
    refused: Refuse = top_level_error,
) -> Callable[[Run], Run]:
    """Mark a module's ``run`` as the handler of an API.

    ``permission`` says what a client would need, in Kafka's words: ``"READ Group"``,
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
    """Which APIs are served, and by what.

    By default: every API of ``fencepost.coordinator.wire.api`` that has a module here.
    ``modules`` narrows or replaces that list (module names by key); tests give ``{}`` and call
    :meth:`add`. ``unstable_versions`` serves what Kafka calls unstable of all APIs,
    ``unstable_apis`` of some.

    With ``forwards`` all that the active controller decides is its to answer; the versions that it
    knows come from there. What only brokers of a cluster are asked is answered then as well.
    ``wrapped`` puts something before the handlers of some APIs, ``own`` are those that this broker
    decides all the same.
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
    ) -> None:
        self._modules = dict(_own_modules() if modules is None else modules)
        self._handlers: dict[int, Handler] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._unstable = frozenset(APIS if unstable_versions else unstable_apis)
        self._controller_versions = forwards
        self._wrapped = wrapped or {}
        decided = frozenset() if forwards is None else FORWARDED.difference(own)
        self.forwarded: frozenset[int] = decided
        """What the active controller answers."""
        if forwards is not None:
            self._modules |= {key: api.module for key, api in MEMBER_APIS.items()}
        for key in self._modules:
            self._serve(KNOWN_APIS[key])

    def _serve(self, api: Api) -> None:
        self._versions[api.key] = (
            api.min_version,
            api.max_served(unstable=api.key in self._unstable),
        )

    def add(self, run: Run) -> None:
        """Serve the API of ``run``, which :func:`handles` has marked, whatever the modules say."""
        handler: Handler = run.handler  # type: ignore[attr-defined]
        self._handlers[handler.api.key] = handler
        self._serve(handler.api)

    @property
    def versions(self) -> Mapping[int, tuple[int, int]]:
        """The lowest and the highest served version by API key."""
        return self._versions

    def advertised(self) -> Iterable[tuple[int, int, int]]:
        """(key, lowest, highest version) of ApiVersions, by key."""
        theirs = {} if self._controller_versions is None else self._controller_versions()
        for key in sorted(self._versions):
            low, high = KNOWN_APIS[key].advertised_min, self._versions[key][1]
            if theirs and key in self.forwarded:
                both = theirs.get(key, (0, -1))
                low, high = max(low, both[0]), min(high, both[1])
            if low <= high:
                yield key, low, high

    def handler(self, api_key: int) -> Handler:
        """The handler of a served API; imports its module the first time."""
        found = self._handlers.get(api_key)
        if found is None:
            module = import_module(f"{__name__}.{self._modules[api_key]}")
            found = module.run.handler
            if found.api.key != api_key:
                raise ValueError(f"{module.__name__} handles {found.api.name}")
            if api_key in self.forwarded:
                forwarding = import_module(f"{__name__}.forwarding")
                found = replace(found, run=forwarding.forwarding(found))
            if api_key in self._wrapped:
                found = replace(found, run=self._wrapped[api_key](found.run))
            self._handlers[api_key] = found
        return found

    def handlers(self) -> list[Handler]:
        """All handlers by key; imports every module (for the README's API table)."""
        return [self.handler(key) for key in sorted(self._versions)]


def _own_modules() -> dict[int, str]:
    present = {module.name for module in iter_modules(__path__)}
    return {key: api.module for key, api in APIS.items() if api.module in present}
