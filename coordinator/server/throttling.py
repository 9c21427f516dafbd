"""Throttling of a connection by the quotas of its client, request by request.

Source: ``RequestHandlerHelper``, ``RequestChannel``; KIP-219.
"""

from __future__ import annotations

import asyncio
from typing import Final

from fencepost.cluster.acl import Operation
from fencepost.coordinator.handlers import Context, replica_id_of, with_wait
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.throttle import LoopTime, RequestQuotas
from fencepost.logcore.system import has_hung_up
from fencepost.protocol.api import ApiKey
from fencepost.protocol.schema import Entity

BETWEEN_BROKERS: Final = frozenset(
    {
        ApiKey.LEADER_AND_ISR,
        ApiKey.STOP_REPLICA,
        ApiKey.UPDATE_METADATA,
        ApiKey.CONTROLLED_SHUTDOWN,
        ApiKey.WRITE_TXN_MARKERS,
        ApiKey.VOTE,
        ApiKey.BEGIN_QUORUM_EPOCH,
        ApiKey.END_QUORUM_EPOCH,
        ApiKey.ALTER_PARTITION,
        ApiKey.FETCH_SNAPSHOT,
    }
)
"""APIs that are exempt from quotas for authorized senders, like the Fetch of a follower.

Source: the callers of ``sendResponseExemptThrottle`` in ``KafkaApis`` (3.9, 4.3) and
``ControllerApis``."""


def throttle_of(
    context: Context, quotas: ClientQuotas | None, spent: LoopTime
) -> RequestQuotas | None:
    """Return the quotas of a request; None without quotas or for an exempt request."""
    if quotas is None or _is_exempt(context):
        return None
    user = context.connection.session.principal.name
    return RequestQuotas(quotas, spent, user, context.client_id)


def _is_exempt(context: Context) -> bool:
    key = context.api_key
    if key not in BETWEEN_BROKERS and (key != ApiKey.FETCH or replica_id_of(context.body) < 0):
        return False
    return context.may_on_cluster(Operation.CLUSTER_ACTION, audited=False) or (
        key == ApiKey.WRITE_TXN_MARKERS and context.may_on_cluster(Operation.ALTER, audited=False)
    )


def throttled(context: Context, entity: Entity | None) -> tuple[Entity | None, int]:
    """Return the response with its throttle time, and that time in milliseconds."""
    if context.throttle is None:
        return entity, 0
    produced = context.size_bytes if context.api_key == ApiKey.PRODUCE else None
    throttle_ms = context.throttle.decided(produced, is_answered=entity is not None)
    return (None, throttle_ms) if entity is None else with_wait(entity, throttle_ms)


def is_gone(transport: asyncio.Transport) -> bool:
    """Return whether the client has closed a connection that is not being read."""
    client = transport.get_extra_info("socket")
    if client is None or client.fileno() < 0:
        return True
    return has_hung_up(client.fileno())
