"""FindCoordinator (10): find the coordinator of a group or a transactional id.

On a standalone broker the first request creates the internal topic; the response is sent once the
shards of the requested keys are open, and the other shards are opened afterwards. In a cluster the
controller creates the topic. As in Kafka, clients get COORDINATOR_NOT_AVAILABLE until the key's
partition has a leader that clients of this listener can reach.

Version 1 adds the key type, version 4 several keys, version 6 share coordinators, whose keys are
``group:topicId:partition``; only brokers ask for them.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from fencepost.cluster.acl import Operation, ResourceType
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.endpoints import Endpoints, Node
from fencepost.coordinator.handlers.topic_creation import ask_for_topic
from fencepost.coordinator.metadata.names import (
    CONSUMER_OFFSETS,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)
from fencepost.groups.share.coordinator_key import parse_coordinator_key
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey, Entity
from fencepost.protocol.steps import Steps

GROUP = 0
TRANSACTION = 1
SHARE = 2
FIRST_WITH_MANY_KEYS = 4
FIRST_WITH_SHARE_COORDINATORS = 6


_AUTHORIZED: Final = {
    GROUP: (ResourceType.GROUP, ErrorCode.group_authorization_failed),
    TRANSACTION: (
        ResourceType.TRANSACTIONAL_ID,
        ErrorCode.transactional_id_authorization_failed,
    ),
}
"""By key type: the resource type, and the error for a client that may not describe the resource."""

Verdict = tuple[ErrorCode, str | None, Node | None]
"""An error, its message, and the coordinator if the error is NONE."""

_TOPICS: Final = {
    GROUP: CONSUMER_OFFSETS,
    TRANSACTION: TRANSACTION_STATE,
    SHARE: SHARE_GROUP_STATE,
}


@handles(ApiKey.FIND_COORDINATOR, versions=(0, 6), permission="DESCRIBE Group or TransactionalId")
def run(ctx: Context) -> Steps[Entity]:
    """Respond with the coordinator or the error of each key."""
    respond, body = ctx.respond, ctx.body
    key_type = getattr(body, "key_type", GROUP)
    endpoints = Endpoints(ctx)
    results = []
    for key in (body.key,) if ctx.version < FIRST_WITH_MANY_KEYS else body.coordinator_keys:
        verdict = _denied(ctx, key_type, key)
        if verdict is None and ctx.broker.controller is not None:
            verdict = _look_up(ctx, endpoints, key_type, key)
        elif verdict is None:
            verdict = yield from _open(ctx, endpoints, key_type, key)
        results.append((key, _coordinator_fields(*verdict)))
        yield
    if ctx.version < FIRST_WITH_MANY_KEYS:
        return respond.FindCoordinatorResponse(**results[0][1])
    coordinators = []
    for key, place in results:
        coordinators.append(respond.Coordinator(key=key, **place))
        yield
    return respond.FindCoordinatorResponse(coordinators=tuple(coordinators))


def _denied(ctx: Context, key_type: int, key: str) -> Verdict | None:
    """Return the error for an unknown key type or a missing permission, or None."""
    if key_type in _AUTHORIZED:
        resource, code = _AUTHORIZED[key_type]
        return None if ctx.may(Operation.DESCRIBE, resource, key) else (code, None, None)
    if key_type == SHARE and ctx.version < FIRST_WITH_SHARE_COORDINATORS:
        return ErrorCode.invalid_request, None, None
    if ctx.version >= FIRST_WITH_SHARE_COORDINATORS and not ctx.may_on_cluster(
        Operation.CLUSTER_ACTION
    ):
        return ErrorCode.cluster_authorization_failed, None, None
    if key_type == SHARE:
        try:
            parse_coordinator_key(key)
        except DomainError as error:
            return error_code(error), str(error), None
        return None
    return ErrorCode.invalid_request, f"no coordinators of type {key_type}", None


def _coordinator_fields(code: ErrorCode, message: str | None, node: Node | None) -> dict[str, Any]:
    return {
        "error_code": code,
        "error_message": message,
        "node_id": -1 if node is None else node.node_id,
        "host": "" if node is None else node.host,
        "port": -1 if node is None else node.port,
    }


def _look_up(ctx: Context, endpoints: Endpoints, key_type: int, key: str) -> Verdict:
    """Return the leader of the key's partition."""
    broker, name = ctx.broker, _TOPICS[key_type]
    topic = broker.metadata.topic(name)
    if topic is None:
        ask_for_topic(ctx, name)
        return ErrorCode.coordinator_not_available, f"{name} is being created", None
    coordinator = broker.coordinators[name]
    state = endpoints.state(topic, coordinator.partition_for(key))
    node = endpoints.nodes.get(state.leader)
    if node is None:
        return ErrorCode.coordinator_not_available, "its partition has no leader", None
    return ErrorCode.none, None, node


def _open(ctx: Context, endpoints: Endpoints, key_type: int, key: str) -> Steps[Verdict]:
    coordinator = ctx.broker.coordinators[_TOPICS[key_type]]
    try:
        yield from coordinator.open_in_steps(key)
    except DomainError as error:
        return error_code(error), str(error), None
    return ErrorCode.none, None, endpoints.nodes[ctx.broker.node_id]
