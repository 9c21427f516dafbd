"""End offsets of partitions that other brokers lead, for the lag of share groups.

Source: ``NetworkPartitionMetadataClient``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from kio.schema.errors import ErrorCode

from fencepost.cluster.errors import NotLeaderOrFollowerError
from fencepost.coordinator.errors import (
    OffsetNotAvailableError,
    RequestTimedOutError,
    TopicAuthorizationError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.logcore.errors import StorageError
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity
from fencepost.txn.commands import TopicPartition, by_topic

CONSUMER = -1
"""The replica id of a request that asks for the high watermark."""
LATEST = -1
"""The timestamp that stands for the end offset."""

ERRORS: Mapping[ErrorCode, type[DomainError]] = MappingProxyType(
    {
        ErrorCode.unknown_topic_or_partition: UnknownTopicOrPartitionError,
        ErrorCode.topic_authorization_failed: TopicAuthorizationError,
        ErrorCode.offset_not_available: OffsetNotAvailableError,
        ErrorCode.kafka_storage_error: StorageError,
    }
)
"""The exceptions that stand for a leader's error codes; for any other code,
NotLeaderOrFollowerError."""


class EndOffsets:
    """Asks other brokers for end offsets; see ``AskLeader`` in ``services/share_groups.py``."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def ask(
        self, broker_id: int, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, int | DomainError]:
        """Return the end offset of each partition that the broker leads, or its error."""
        peer = self._peers.channel(broker_id, Purpose.PARTITION_METADATA)
        try:
            answer = await peer.newest(ApiKey.LIST_OFFSETS, lambda make: _request(make, partitions))
        except WireError as error:
            lost = RequestTimedOutError(f"broker {broker_id} does not answer: {error}")
            return dict.fromkeys(partitions, lost)
        return {
            (topic.name, part.partition_index): _offset(broker_id, part)
            for topic in answer.topics
            for part in topic.partitions
        }


def _request(make: RequestFactory, partitions: Collection[TopicPartition]) -> Entity:
    return make.ListOffsetsRequest(
        replica_id=CONSUMER,
        isolation_level=0,
        topics=tuple(
            make.ListOffsetsTopic(
                name=name,
                partitions=tuple(
                    make.ListOffsetsPartition(
                        partition_index=index, current_leader_epoch=-1, timestamp=LATEST
                    )
                    for index in indexes
                ),
            )
            for name, indexes in by_topic(partitions).items()
        ),
    )


def _offset(broker_id: int, part: Entity) -> int | DomainError:
    code: ErrorCode = part.error_code
    if code is ErrorCode.none:
        offset: int = part.offset
        return offset
    kind = ERRORS.get(code, NotLeaderOrFollowerError)
    return kind(f"broker {broker_id} answers {code.name.upper()}")
