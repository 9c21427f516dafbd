"""Who leads instead: told with errors, so that a client need not ask for metadata (KIP-951).

Source: ``KafkaApis.getCurrentLeader``.
"""

from __future__ import annotations

from fencepost.coordinator.handlers import Context
from fencepost.coordinator.wire import Entity


def leader_hint(ctx: Context, topic: str, index: int, named: set[int]) -> dict[str, Entity]:
    """The fields that name the leader of a partition, which joins those ``named``.

    None where nobody knows of one.
    """
    known = ctx.broker.replicas.leader_of(topic, index)
    if known is None:
        return {}
    leader, epoch = known
    named.add(leader)
    return {"current_leader": ctx.respond.LeaderIdAndEpoch(leader_id=leader, leader_epoch=epoch)}


def endpoints(ctx: Context, named: set[int]) -> dict[str, tuple[Entity, ...]]:
    """The field that says where brokers are, as far as there are any to be named.

    It is the listener that the client uses; brokers that are down or lack it are left out. This
    broker is up, and its address is known even where its registration lacks it.
    """
    image = ctx.broker.replicas.image
    listener = ctx.connection.session.listener
    found = []
    for broker_id in sorted(named):
        if broker_id == ctx.broker.node_id:
            (host, port), rack = ctx.advertised, ctx.broker.rack
        else:
            broker = image.brokers.get(broker_id)
            endpoint = None if broker is None else broker.listeners.get(listener)
            if broker is None or endpoint is None or broker.fenced:
                continue
            host, port, rack = endpoint.host, endpoint.port, broker.rack
        found.append(ctx.respond.NodeEndpoint(node_id=broker_id, host=host, port=port, rack=rack))
    return {"node_endpoints": tuple(found)}
