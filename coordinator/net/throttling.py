"""What a connection does about the quotas of its client, request by request.

Source: ``RequestHandlerHelper``, ``RequestChannel``; KIP-219.
"""

from __future__ import annotations

import asyncio
import select
from typing import Final

from fencepost.coordinator.handlers import Context, with_wait
from fencepost.coordinator.security.acl import Operation
from fencepost.coordinator.security.quotas import ClientQuotas
from fencepost.coordinator.security.throttle import LoopTime, Throttle
from fencepost.coordinator.wire.api import ApiKey
from fencepost.coordinator.wire.schema import Entity

BETWEEN_BROKERS: Final = frozenset({ApiKey.WRITE_TXN_MARKERS})
"""APIs whose time is not counted, for those who may use them."""


def throttle_of(context: Context, quotas: ClientQuotas | None, spent: LoopTime) -> Throttle | None:
    """A request against the quotas of its client; None where there are none any more."""
    if quotas is None:
        return None
    counts_time = context.api_key not in BETWEEN_BROKERS or not any(
        context.may_on_cluster(one, audited=False)
        for one in (Operation.CLUSTER_ACTION, Operation.ALTER)
    )
    user = context.connection.session.principal.name
    return Throttle(quotas, spent, user, context.client_id, counts_time=counts_time)


def throttled(context: Context, entity: Entity | None) -> tuple[Entity | None, int]:
    """The answer with the time that the client has to wait, and that time in milliseconds."""
    if context.throttle is None:
        return entity, 0
    produced = context.size_bytes if context.api_key == ApiKey.PRODUCE else None
    throttle_ms = context.throttle.decided(produced, is_answered=entity is not None)
    return (None, throttle_ms) if entity is None else with_wait(entity, throttle_ms)


def is_gone(transport: asyncio.Transport) -> bool:
    """Whether the client has closed a connection that is not read."""
    client = transport.get_extra_info("socket")
    if client is None or client.fileno() < 0:
        return True
    ended = select.poll()
    ended.register(client.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(ended.poll(0))
