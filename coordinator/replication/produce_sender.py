"""Produce requests to brokers that lead partitions of dead-letter queues.

Source: ``ShareGroupDLQStateManager.handleProduceResponse``.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.groups.share.dead_letters import LeaderUnreachableError, NotProducedError
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity

ALL: Final = -1
"""acks=-1: all in-sync replicas must have the records."""

TIMEOUT_MS: Final = 30_000
"""How long the leader waits for other replicas."""

RETRIED: Final = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        # Nothing was appended: the leader may not have received the latest metadata yet.
        ErrorCode.unknown_topic_id,
        ErrorCode.unknown_topic_or_partition,
    }
)
"""Errors after which the batch is sent again. Others are final."""


class ProduceSender:
    """Produces to other brokers; see ``OtherLeaders`` of the dead-letter queues."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def produce(
        self, broker_id: int, topic: str, topic_id: UUID, index: int, batch: bytes
    ) -> None:
        """Have a broker append a batch with acks=-1. Raises NotProducedError."""

        def request(make: RequestFactory) -> Entity:
            data = make.PartitionProduceData(index=index, records=batch)
            # From version 13 on, topics have ids and no names.
            row = make.TopicProduceData(name=topic, topic_id=topic_id, partition_data=(data,))
            return make.ProduceRequest(
                transactional_id=None, acks=ALL, timeout_ms=TIMEOUT_MS, topic_data=(row,)
            )

        peer = self._peers.channel(broker_id, Purpose.DEAD_LETTERS)
        try:
            answer = await peer.newest(ApiKey.PRODUCE, request)
        except UnsupportedVersion as error:
            raise NotProducedError(f"broker {broker_id}: {error}", is_final=True) from None
        except WireError as error:
            raise LeaderUnreachableError(f"broker {broker_id}: {error}") from None
        for topic_response in answer.responses:
            for part in topic_response.partition_responses:
                _check(part, f"{topic}-{index} on broker {broker_id}")
                return
        raise NotProducedError(f"broker {broker_id} gave no result", is_final=True)


def _check(part: Entity, where: str) -> None:
    """Raise NotProducedError if a partition's result is an error."""
    code: ErrorCode = part.error_code
    if code is ErrorCode.none:
        return
    reasons = [record_error.batch_index_error_message for record_error in part.record_errors]
    reason = part.error_message or next((reason for reason in reasons if reason), "")
    text = f"{where}: {code.name.upper()}{f': {reason}' if reason else ''}"
    raise NotProducedError(text, is_final=code not in RETRIED)
