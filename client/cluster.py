"""A client's metadata of a cluster: brokers, topics, leaders."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from kio.schema.errors import ErrorCode

from fencepost.logcore.values import dataclass
from fencepost.protocol.schema import Entity, fields_of


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """The address of one broker."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port."""
        return self.host, self.port


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """The leader and replicas of a partition; ``leader`` is -1 without a leader."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...] = ()
    """Replicas on offline brokers or log directories."""


@dataclass(frozen=True, slots=True)
class TopicMetadata:
    """One topic of a Metadata response. ``topic_id`` is None if the broker has no topic ids."""

    name: str
    topic_id: uuid.UUID | None
    is_internal: bool
    partitions: Mapping[int, PartitionInfo]
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """One Metadata response."""

    cluster_id: str | None
    controller_id: int
    brokers: Mapping[int, BrokerAddress]
    topics: Mapping[str, TopicMetadata]

    def leader(self, topic: str, partition: int) -> int | None:
        """Return a partition's leader, -1 if it has none; None for an unknown partition."""
        metadata = self.topics.get(topic)
        row = metadata.partitions.get(partition) if metadata is not None else None
        return row.leader if row is not None else None


def cluster_metadata(response: Entity) -> ClusterMetadata:
    """Read a Metadata response of any version."""
    return ClusterMetadata(
        cluster_id=getattr(response, "cluster_id", None),
        controller_id=getattr(response, "controller_id", -1),
        brokers={
            broker.node_id: BrokerAddress(
                broker.node_id, broker.host, broker.port, getattr(broker, "rack", None)
            )
            for broker in response.brokers
        },
        topics={topic.name: _topic(topic) for topic in response.topics if topic.name is not None},
    )


def _topic(topic: Entity) -> TopicMetadata:
    return TopicMetadata(
        name=topic.name,
        topic_id=getattr(topic, "topic_id", None),
        is_internal=getattr(topic, "is_internal", False),
        partitions={
            partition.partition_index: PartitionInfo(
                leader=partition.leader_id,
                leader_epoch=getattr(partition, "leader_epoch", -1),
                replicas=tuple(partition.replica_nodes),
                in_sync=tuple(partition.isr_nodes),
                offline=tuple(getattr(partition, "offline_replicas", ())),
            )
            for partition in topic.partitions
        },
        error=topic.error_code,
    )


def error_codes(entity: Entity) -> list[ErrorCode]:
    """Return every error code of a response, including 0, from the top level down.

    The order within a level is the wire order.
    """
    codes: list[ErrorCode] = []
    deeper: list[Entity] = []
    cls: type = type(entity)
    info = fields_of(cls)
    for field in info.plain + info.tagged:
        value = getattr(entity, field.name)
        if value is None:
            continue
        if field.kafka_type == "error_code":
            codes.extend(value if field.is_array else (value,))
        elif field.struct is not None:
            deeper.extend(value if field.is_array else (value,))
    for inner in deeper:
        codes.extend(error_codes(inner))
    return codes


@dataclass(frozen=True, slots=True)
class ErrorAction:
    """The meaning of a response's error codes for the sender of the request."""

    failed: tuple[ErrorCode, ...]
    """The codes other than 0."""
    top: ErrorCode
    """The response's own code; 0 if it has none."""
    retriable: bool
    """Whether nothing was done and all errors are retriable: the same request may be sent again."""


def classify_errors(response: Entity) -> ErrorAction:
    """Classify a response. If one item succeeded, the request must not be sent again."""
    codes = error_codes(response)
    top = ErrorCode(getattr(response, "error_code", 0))
    failed = tuple(ErrorCode(code) for code in codes if code)
    items = codes[1:] if hasattr(response, "error_code") else codes
    nothing_done = bool(top) or all(items)
    retriable = bool(failed) and nothing_done and all(code.retriable for code in failed)
    return ErrorAction(failed, top, retriable)


def parse_bootstrap(servers: str | list[str] | tuple[str, ...]) -> list[tuple[str, int]]:
    """Parse ``"host:port,[::1]:9092"`` or a list of addresses; the default port is 9092.

    Raises ValueError for an invalid address.
    """
    texts = servers.split(",") if isinstance(servers, str) else list(servers)
    addresses: list[tuple[str, int]] = []
    for text in texts:
        server = text.strip()
        host, colon, port = server.rpartition(":")
        if not colon or host.endswith(":") or server.endswith("]"):
            host, port = server, "9092"
        if not port.isdecimal() or not host:
            raise ValueError(f"not host:port: {text!r}")
        addresses.append((host.strip("[]"), int(port)))
    if not addresses:
        raise ValueError("no bootstrap server is given")
    return addresses
