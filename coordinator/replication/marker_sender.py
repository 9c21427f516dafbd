"""WriteTxnMarkers requests to the brokers that lead partitions of ended transactions.

Source: ``TransactionMarkerChannelManager``, ``TransactionMarkerRequestCompletionHandler``.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from kio.schema.errors import ErrorCode

from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity
from fencepost.txn.commands import TopicPartition, by_topic
from fencepost.txn.marker_queues import Marker, SendMarkers

_log = structlog.get_logger(__name__)

Codes = dict[int, dict[TopicPartition, str]]


class MarkerSender:
    """Sends markers to other brokers; see ``OtherBrokers`` of the marker writer."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def send(self, send: SendMarkers) -> Codes | None:
        """Send markers to a broker, and return its error codes; None if it does not answer.

        The codes are by producer id, then by partition.
        """
        peer = self._peers.channel(send.broker_id, Purpose.TXN_MARKER_SENDER)
        try:
            answer = await peer.newest(
                ApiKey.WRITE_TXN_MARKERS, lambda make: _request(make, send.markers)
            )
        except WireError as error:
            _log.info("markers not sent", broker=send.broker_id, cause=str(error))
            return None
        return _codes(answer)

    def hang_up(self, broker_id: int) -> None:
        """Close the connection to a broker whose answer is no longer awaited."""
        self._peers.hang_up(broker_id, Purpose.TXN_MARKER_SENDER)


def _request(make: RequestFactory, markers: Sequence[Marker]) -> Entity:
    return make.WriteTxnMarkersRequest(
        markers=tuple(
            make.WritableTxnMarker(
                producer_id=marker.end.stamp.producer_id,
                producer_epoch=marker.end.stamp.producer_epoch,
                transaction_result=marker.end.commit,
                topics=tuple(
                    make.WritableTxnMarkerTopic(name=name, partition_indexes=tuple(indexes))
                    for name, indexes in by_topic(marker.partitions).items()
                ),
                coordinator_epoch=marker.end.coordinator_epoch,
                transaction_version=marker.end.transaction_version,
            )
            for marker in markers
        )
    )


def _codes(answer: Entity) -> Codes:
    codes: Codes = {}
    for marker in answer.markers:
        names = codes.setdefault(marker.producer_id, {})
        for topic in marker.topics:
            for part in topic.partitions:
                names[topic.name, part.partition_index] = _name(part.error_code)
    return codes


def _name(code: ErrorCode) -> str:
    return code.name.upper()
