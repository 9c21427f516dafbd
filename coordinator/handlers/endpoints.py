"""The brokers of a cluster and the state of its partitions, as clients of one listener see them.

For these clients a broker without a listener of that name is unavailable. This broker is always
available: it is handling the request.

Source: ``KafkaApis.handleDescribeCluster``, ``KRaftMetadataCache.getAliveEndpoint``,
``getOfflineReplicas``, ``getPartitionMetadata``.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from kio.schema.errors import ErrorCode

from fencepost.cluster.image import NO_LEADER, PartitionRegistration, TopicImage
from fencepost.coordinator.handlers import Context


class Node(NamedTuple):
    """A broker's address for the clients of one listener."""

    node_id: int
    host: str
    port: int
    rack: str | None
    is_fenced: bool = False


class PartitionMetadata(NamedTuple):
    """The state of a partition as reported to clients."""

    error: ErrorCode
    """LISTENER_NOT_FOUND if the leader lacks the client's listener; old versions know only
    LEADER_NOT_AVAILABLE."""
    leader: int
    """-1 if the clients of this listener cannot reach a leader."""
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    offline: tuple[int, ...]


class Endpoints:
    """The cluster as seen through one listener, taken from the metadata image of one request."""

    def __init__(self, ctx: Context) -> None:
        broker, listener = ctx.broker, ctx.connection.session.listener
        self._broker_id, self._is_offline = broker.node_id, broker.logs.is_offline
        image = broker.metadata.image
        host, port = ctx.advertised
        self._registered = image.brokers
        self._zookeeper = broker.zookeeper
        self.nodes = {self._broker_id: Node(self._broker_id, host, port, broker.rack)}
        """All brokers with the listener, including fenced ones, by id."""
        for broker_id, registration in image.brokers.items():
            endpoint = registration.listeners.get(listener)
            if endpoint is not None and broker_id != self._broker_id:
                self.nodes[broker_id] = Node(
                    broker_id, endpoint.host, endpoint.port, registration.rack, registration.fenced
                )
        nodes = self.nodes.values()
        self.alive = [node for node in sorted(nodes) if not node.is_fenced]
        """The brokers that are not fenced, ordered by id."""
        self._states: dict[int, PartitionMetadata] = {}
        """The state by the ``id()`` of a registration; many partitions share a registration."""

    @property
    def controller_id(self) -> int:
        """The controller id reported to clients: any live broker, which forwards their requests.

        In a ZooKeeper cluster it is the id of the elected controller, as tools for such clusters
        expect; -1 if this broker knows no controller.
        """
        if self._zookeeper is not None:
            return self._zookeeper.controller_id
        alive = self.alive
        return alive[0].node_id if len(alive) == 1 else random.choice(alive).node_id  # noqa: S311 - not used for security

    def state(self, topic: TopicImage, index: int) -> PartitionMetadata:
        """Return the state of a partition."""
        registration = topic.partitions[index]
        metadata = self._states.get(id(registration))
        if metadata is None:
            metadata = self._states[id(registration)] = self._state(registration)
        if metadata.leader == self._broker_id and self._is_offline(topic.name, index):
            offline = tuple({*metadata.offline, self._broker_id})
            isr = tuple(broker_id for broker_id in metadata.isr if broker_id != self._broker_id)
            return metadata._replace(
                error=ErrorCode.leader_not_available, leader=NO_LEADER, isr=isr, offline=offline
            )
        return metadata

    def _state(self, registration: PartitionRegistration) -> PartitionMetadata:
        leader, error = registration.leader, ErrorCode.none
        if leader not in self.nodes:
            error = (
                ErrorCode.listener_not_found
                if leader in self._registered
                else ErrorCode.leader_not_available
            )
            leader = NO_LEADER
        return PartitionMetadata(
            error,
            leader,
            registration.leader_epoch,
            registration.replicas,
            registration.isr,
            tuple(
                replica for replica in registration.replicas if self._is_away(replica, registration)
            ),
        )

    def _is_away(self, broker_id: int, registration: PartitionRegistration) -> bool:
        node = self.nodes.get(broker_id)
        if node is None or node.is_fenced:
            return True
        broker = self._registered.get(broker_id)
        return broker is not None and not broker.has_online(registration.directory_of(broker_id))
