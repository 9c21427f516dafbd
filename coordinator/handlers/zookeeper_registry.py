"""The APIs of a broker in a ZooKeeper cluster: for clients, brokers and the controller.

Source: the listeners of each request in ``common/message/*.json`` of branch 3.9.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.image import BROKER_RESOURCE
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.config.broker_config import is_password
from fencepost.coordinator.handlers import Context, Registry, Run
from fencepost.coordinator.handlers.controller_registry import controller_registry
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.turns import Work
from fencepost.protocol import Entity
from fencepost.protocol.api import (
    APIS,
    FORWARDED,
    KNOWN_APIS,
    TELEMETRY_APIS,
    ZOOKEEPER_APIS,
    ApiKey,
)

_OF_THE_CONTROLLER: Final = frozenset(
    {
        ApiKey.ALTER_PARTITION,
        ApiKey.ENVELOPE,
        ApiKey.ALLOCATE_PRODUCER_IDS,
        ApiKey.CONTROLLED_SHUTDOWN,
    }
)
"""APIs that only the active controller answers."""

_SETTINGS: Final = frozenset({ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS})
"""APIs that clients send to any broker, and do not retry at the controller."""

_OF_QUORUMS: Final = frozenset(
    {
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.UNREGISTER_CONTROLLER,
        ApiKey.UPDATE_FEATURES,
    }
)
"""APIs that need a KRaft quorum."""

_ACLS: Final = frozenset({ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS})

WRITTEN_BY_ANY_BROKER: Final = _ACLS | frozenset(
    {
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
    }
)
"""APIs whose changes every broker writes to ZooKeeper itself. (In Kafka only the controller changes
SCRAM credentials.)"""


def zookeeper_registry(services: Services) -> Registry:
    """Return the registry for all listeners of a broker in a ZooKeeper cluster."""
    apis = {key: api.module for key, api in APIS.items() if key not in _OF_QUORUMS | TELEMETRY_APIS}
    apis |= {key: KNOWN_APIS[key].module for key in (*ZOOKEEPER_APIS, *_OF_THE_CONTROLLER)}
    inside = controller_registry(ApiKey.CONTROLLED_SHUTDOWN)

    def as_controller(_run: Run) -> Run:
        return lambda ctx: decided(ctx) or ctx.respond.error(ErrorCode.not_controller)

    def up_to_date(run: Run) -> Callable[[Context], Work[Entity]]:
        """Handle changes of users, quotas and ACLs once other brokers' changes are applied."""

        def after_others(ctx: Context) -> Work[Entity]:
            yield from _caught_up(ctx)
            authorizer = services.authorizer
            acls = None if authorizer is None else authorizer.rules
            decisions = services.on_zookeeper.own_access_decisions(acls)
            decided_here = run(replace(ctx, zookeeper_controller=decisions))
            answer: Entity = yield from decided_here  # type: ignore[misc]
            return answer

        return after_others

    def one_at_a_time(run: Run) -> Run:
        """Handle changes of ACLs, each after the previous one, as ``AclAuthorizer`` does."""
        after_others = up_to_date(run)
        return lambda ctx: services.acl_requests.run(after_others(ctx))

    def decided_or_forwarded(forwarded: Run) -> Run:
        return lambda ctx: decided(ctx) or forwarded(ctx)

    def decided_forwarded_or_written(forwarded: Run) -> Run:
        """Handle configuration changes in one of three ways.

        The controller decides on them. Another broker forwards them, or writes them to ZooKeeper
        itself: if the controller does not support Envelope, or if the changes contain passwords,
        which only this broker can read.
        """

        def run(ctx: Context) -> Any:
            node = services.on_zookeeper
            is_elsewhere = node.elected is None and not node.takes_envelopes
            if is_elsewhere or _keeps_passwords(ctx.body):
                return _write_to_zookeeper(ctx, inside)
            return decided(ctx) or forwarded(ctx)

        return run

    def decided(ctx: Context) -> Any:
        """Answer as the active controller; return None if another broker is the controller."""
        elected = services.on_zookeeper.elected
        if elected is None:
            return None
        handler = inside.handler(ctx.api_key)
        return handler.run(replace(ctx, zookeeper_controller=elected.services, registry=inside))

    return Registry(
        modules=apis,
        forwards=services.controller_versions,
        own=WRITTEN_BY_ANY_BROKER,
        wrapped={
            **dict.fromkeys(FORWARDED - _OF_QUORUMS - WRITTEN_BY_ANY_BROKER, decided_or_forwarded),
            **dict.fromkeys(map(int, _SETTINGS), decided_forwarded_or_written),
            **dict.fromkeys(map(int, WRITTEN_BY_ANY_BROKER), up_to_date),
            **dict.fromkeys(map(int, _ACLS), one_at_a_time),
            **dict.fromkeys(map(int, _OF_THE_CONTROLLER), as_controller),
            ApiKey.DESCRIBE_CONFIGS: _as_in_zookeeper,
        },
    )


def _caught_up(ctx: Context) -> Work[None]:
    """Wait until other brokers' changes are applied."""
    catching_up = spawn(ctx.broker.on_zookeeper.catch_up(), "read others' changes")
    yield catching_up
    catching_up.result()


def _as_in_zookeeper(run: Run) -> Callable[[Context], Work[Entity]]:
    """Describe settings as they are in ZooKeeper, where Kafka's brokers read them."""

    def after_others(ctx: Context) -> Work[Entity]:
        yield from _caught_up(ctx)
        answer: Entity = yield from run(ctx)  # type: ignore[misc]
        return answer

    return after_others


def _keeps_passwords(body: Any) -> bool:
    """Return whether a request changes passwords of brokers."""
    return any(
        resource.resource_type == BROKER_RESOURCE and is_password(entry.name)
        for resource in body.resources
        for entry in resource.configs
    )


def _write_to_zookeeper(ctx: Context, inside: Registry) -> Work[Entity]:
    """Write configuration changes to ZooKeeper, as the brokers of Kafka 3.9 do."""
    named = {(resource.resource_type, resource.resource_name) for resource in ctx.body.resources}
    reading = spawn(ctx.broker.on_zookeeper.own_decisions(named), "read settings")
    yield reading
    handler = inside.handler(ctx.api_key)
    context = replace(ctx, zookeeper_controller=reading.result(), registry=inside)
    answer: Entity = yield from handler.run(context)  # type: ignore[misc]
    return answer
