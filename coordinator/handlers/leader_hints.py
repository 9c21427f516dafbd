"""The current leader in error responses, which saves clients a Metadata request (KIP-951).

Source: ``KafkaApis.getCurrentLeader``.
"""

from __future__ import annotations

from fencepost.coordinator.handlers import Context
from fencepost.protocol import Entity


def leader_hint(ctx: Context, topic: str, index: int, named: set[int]) -> dict[str, Entity]:
    """Return the response fields with a partition's leader, and add the leader to ``named``.

    The result is empty if the leader is unknown.
    """
    leader_and_epoch = ctx.broker.replicas.leader_of(topic, index)
    if leader_and_epoch is None:
        return {}
    leader, epoch = leader_and_epoch
    named.add(leader)
    return {"current_leader": ctx.respond.LeaderIdAndEpoch(leader_id=leader, leader_epoch=epoch)}


def endpoints(ctx: Context, named: set[int]) -> dict[str, tuple[Entity, ...]]:
    """Return the response field with the endpoints of the brokers in ``named``.

    The endpoints are those for the client's listener; fenced brokers and brokers without that
    listener are left out. This broker is always included, even if its registration lacks the
    listener.
    """
    image = ctx.broker.replicas.image
    listener = ctx.connection.session.listener
    nodes = []
    for broker_id in sorted(named):
        if broker_id == ctx.broker.node_id:
            (host, port), rack = ctx.advertised, ctx.broker.rack
        else:
            broker = image.brokers.get(broker_id)
            endpoint = None if broker is None else broker.listeners.get(listener)
            if broker is None or endpoint is None or broker.fenced:
                continue
            host, port, rack = endpoint.host, endpoint.port, broker.rack
        nodes.append(ctx.respond.NodeEndpoint(node_id=broker_id, host=host, port=port, rack=rack))
    return {"node_endpoints": tuple(nodes)}
