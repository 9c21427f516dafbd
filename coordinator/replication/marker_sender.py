"""Markers of transactions for partitions that other brokers lead.

What this broker leads is written in the coordinator's own turn, as ever. Any other transaction
goes through the queues of ``txn/marker_queues.py``: a request at a time to each broker, this one
among them, and again until all is written.

Source: ``TransactionMarkerChannelManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.replication.marker_appends import MarkerAppends
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.coordinator.runtime.background import Pace, call_later, spawn, tell
from fencepost.coordinator.wire import ApiKey
from fencepost.coordinator.wire.errors import WireError
from fencepost.coordinator.wire.messages import RequestFactory
from fencepost.coordinator.wire.schema import Entity
from fencepost.logcore.machine import EndMarker
from fencepost.txn.commands import TopicPartition, WriteMarkers, by_topic
from fencepost.txn.marker_queues import (
    Cancelled,
    EpochOf,
    LeaderOf,
    Marker,
    MarkerQueues,
    MarkerWriter,
    Nowhere,
    Report,
    Result,
    Send,
)

RETRY_MS: Final = 20
"""Wait before markers are tried again, doubling up to :data:`MAX_RETRY_MS`."""

MAX_RETRY_MS: Final = 1_000
"""The longest wait; news of other leaders end it."""

_log = structlog.get_logger(__name__)

Codes = dict[int, dict[TopicPartition, str]]


class MarkerSender:
    """A :class:`MarkerWriter` for a broker among others. Belongs to the event loop.

    ``local`` writes what this broker leads; what it can't write any more it is to hand to
    :meth:`take_over`.
    """

    def __init__(
        self,
        storage: Storage,
        peers: Peers,
        local: MarkerWriter,
        *,
        leader_of: LeaderOf,
        epoch_of: EpochOf,
    ) -> None:
        self._storage, self._peers, self._local = storage, peers, local
        self._node_id, self._leader_of = storage.node_id, leader_of
        self.queues = MarkerQueues(leader_of, epoch_of)
        self._reports: dict[str, Report] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._backoff_ms = RETRY_MS
        self._sends: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        storage.metadata.subscribe(Subscriber.MARKERS, self._published)

    def _published(self, old: MetadataImage, image: MetadataImage) -> None:
        if len(self.queues) and (
            old.topics is not image.topics or old.brokers is not image.brokers
        ):
            self._loop.call_soon(self.leaders_changed)

    # --- the coordinator's side ---

    def write(
        self,
        request: WriteMarkers,
        shard: int,
        report: Report,
        first_attempt_done: Callable[[], None],
    ) -> None:
        """See :class:`MarkerWriter`. What others have to write no answer waits for."""
        here = {self._node_id, Nowhere.NO_PARTITION}
        if all(self._leader_of(partition) in here for partition in request.partitions):
            self._local.write(request, shard, report, first_attempt_done)
        else:
            self.take_over(request, shard, report, request.partitions)
            first_attempt_done()

    def take_over(
        self,
        request: WriteMarkers,
        shard: int,
        report: Report,
        partitions: Sequence[TopicPartition],
    ) -> None:
        """Have markers written wherever their partitions are led."""
        self._reports[request.transactional_id] = report
        self._take(self.queues.add(request, shard, partitions))
        self._go_on()

    def write_one(self, partition: TopicPartition, marker: EndMarker) -> bool:
        """See :class:`MarkerWriter`."""
        return self._local.write_one(partition, marker)

    def unload(self, shard: int) -> None:
        """See :class:`MarkerWriter`."""
        self._local.unload(shard)
        self.queues.unload(shard)

    def leaders_changed(self) -> None:
        """Look for the leaders of all that waits; hang up where nobody leads anything of it."""
        if self._closed:
            return
        self._backoff_ms = RETRY_MS
        results, abandoned = self.queues.leaders_changed()
        for broker_id in abandoned:
            self._peers.hang_up(broker_id, Purpose.TXN_MARKER_SENDER)
        self._take(results)
        self._go_on()

    def close(self) -> None:
        """See :class:`MarkerWriter`."""
        self._closed = True
        self._local.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._sends:
            task.cancel()

    # --- the brokers' side ---

    def _go_on(self) -> None:
        """Send what can be sent, and see to it that what waits is tried again."""
        if self._closed:
            return
        for send in self.queues.sends():
            task = spawn(self._exchange(send), f"markers to broker {send.broker_id}")
            self._sends.add(task)
            task.add_done_callback(self._sends.discard)
        if self.queues.has_waiting and self._timer is None:
            self._timer = call_later(self._loop, self._backoff_ms, "markers", self._retry)
            self._backoff_ms = min(2 * self._backoff_ms, MAX_RETRY_MS)

    def _retry(self) -> None:
        self._timer = None
        self._take(self.queues.retry())
        self._go_on()

    async def _exchange(self, send: Send) -> None:
        try:
            if send.broker_id == self._node_id:
                codes = await self._write_here(send.markers)
            else:
                codes = await self._write_there(send)
        except WireError as error:
            _log.info("markers not sent", broker=send.broker_id, cause=str(error))
            self.queues.failed(send)
        except Exception as error:  # noqa: BLE001 - whatever it is, the transactions have to end
            tell("markers", error, broker=send.broker_id)
            self.queues.failed(send)
        else:
            self._take(self.queues.answered(send, codes))
            if not self.queues.has_waiting:
                self._backoff_ms = RETRY_MS
        self._go_on()

    async def _write_there(self, send: Send) -> Codes:
        peer = self._peers.channel(send.broker_id, Purpose.TXN_MARKER_SENDER)
        answer = await peer.newest(
            ApiKey.WRITE_TXN_MARKERS, lambda make: _request(make, send.markers)
        )
        return _codes(answer)

    async def _write_here(self, markers: Iterable[Marker]) -> Codes:
        appends, pace = MarkerAppends(self._storage, self._local.write_one), Pace()
        for marker in markers:
            for partition in marker.partitions:
                appends.write(marker.end, partition)
                await pace()
        committed = appends.committed()
        if committed is not None:
            await committed
        appends.settle()
        return {
            producer_id: {partition: _name(code) for partition, code in told.items()}
            for producer_id, told in appends.codes.items()
        }

    def _take(self, results: Iterable[Result]) -> None:
        for result in results:
            request = result.request
            report = self._reports.get(request.transactional_id)
            if isinstance(result, Cancelled):
                _log.warning(
                    "markers given up",
                    transactional_id=request.transactional_id,
                    coordinator_epoch=request.coordinator_epoch,
                    cause=result.cause,
                )
            elif report is not None:
                report(request.written(result.partitions))
        if not len(self.queues):
            self._reports.clear()


def _request(make: RequestFactory, markers: Sequence[Marker]) -> Entity:
    return make.WriteTxnMarkersRequest(
        markers=tuple(
            make.WritableTxnMarker(
                producer_id=one.end.stamp.producer_id,
                producer_epoch=one.end.stamp.producer_epoch,
                transaction_result=one.end.commit,
                topics=tuple(
                    make.WritableTxnMarkerTopic(name=name, partition_indexes=tuple(indexes))
                    for name, indexes in by_topic(one.partitions).items()
                ),
                coordinator_epoch=one.end.coordinator_epoch,
                transaction_version=one.end.transaction_version,
            )
            for one in markers
        )
    )


def _codes(answer: Entity) -> Codes:
    codes: Codes = {}
    for marker in answer.markers:
        told = codes.setdefault(marker.producer_id, {})
        for topic in marker.topics:
            for part in topic.partitions:
                told[topic.name, part.partition_index] = _name(part.error_code)
    return codes


def _name(code: ErrorCode) -> str:
    return code.name.upper()
