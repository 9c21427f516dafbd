"""Fetch (1): records from many partitions, at once or as soon as there are enough.

What is read are whole batches as they stand in the file; they go to the socket as they are.

Versions: 4 has isolation levels, 5 log start offsets, 7 sessions (of which none is ever made: every
answer has session id 0), 9 leader epochs, 12 the epoch of the last record fetched, 13 topic ids.

Differences from Kafka: READ_UNCOMMITTED and followers see the same, the log end, on one node. The
answer is never made from a partition's cached state, so a client that insists on a session is told
that it does not exist.

Source: ``KafkaApis.handleFetchRequest``, ``ReplicaManager.readFromLog``, ``DelayedFetch``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Any

from kio.schema.errors import ErrorCode

from coordinator.data_errors import UnknownTopicIdError, UnknownTopicOrPartitionError
from coordinator.errors import error_code
from coordinator.handlers import Context, handles, request_ms
from coordinator.handlers.epochs import end_of_epoch
from coordinator.polls import Poll, Watched
from coordinator.wire import ApiKey, Entity
from logcore.errors import OffsetOutOfRangeError, StorageError
from logcore.machine import DomainError
from logcore.partition import Isolation, Partition

FIRST_BY_ID = 13
LAST_WITHOUT_STORAGE_ERROR = 5

NO_EPOCH = -1


@handles(ApiKey.FETCH, versions=(4, 18), permission="READ Topic")
def run(ctx: Context) -> Entity | Awaitable[Entity]:
    """Read, and wait for more if that was not enough."""
    if getattr(ctx.body, "session_epoch", NO_EPOCH) > 0:
        return ctx.respond.error(ErrorCode.fetch_session_id_not_found)
    fetch = _Fetch(ctx)
    response = fetch.read()
    if fetch.is_answer or ctx.broker.polls.closed:
        return response
    return fetch.wait()


class _Fetch:
    """One request: reads it as often as needed."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        body = ctx.body
        self._isolation = Isolation(1 if body.isolation_level == 1 else 0)
        limit = ctx.broker.config.int("fetch.max.bytes")
        self._max_bytes = max(0, min(body.max_bytes, limit))
        self._min_bytes = min(body.min_bytes, self._max_bytes)
        self._max_wait_ms = request_ms(body.max_wait)
        self._watched: list[Watched] = []
        self._bytes = 0
        self._urgent = False

    @property
    def is_answer(self) -> bool:
        """Whether what was read last must be answered now (kafka: ``fetchMessages``)."""
        return (
            self._max_wait_ms <= 0
            or self._urgent
            or not self._watched
            or self._bytes >= self._min_bytes
        )

    def wait(self) -> asyncio.Future[Entity]:
        """Read again when enough has been appended or the time is over."""
        ctx = self._ctx
        poll = Poll(
            ctx.broker.polls,
            self._watched,
            self._isolation,
            min_bytes=self._min_bytes,
            max_wait_ms=self._max_wait_ms,
            finish=self.read,
        )
        stay = ctx.connection.on_close(poll.cancel)
        poll.answer.add_done_callback(lambda _: stay())
        return poll.answer

    def read(self) -> Entity:
        """Read every partition once, in the order of the request; returns the response."""
        ctx = self._ctx
        make = ctx.respond
        self._watched, self._bytes, self._urgent = [], 0, False
        topics = []
        for topic in ctx.body.topics:
            name, topic_id = self._identify(topic)
            parts = [self._partition(name, topic_id, part) for part in topic.partitions]
            topics.append(
                make.FetchableTopicResponse(topic=name, topic_id=topic_id, partitions=tuple(parts))
            )
        return make.FetchResponse(
            throttle_time_ms=0, error_code=ErrorCode.none, session_id=0, responses=tuple(topics)
        )

    def _identify(self, topic: Any) -> tuple[str | None, uuid.UUID | None]:
        if self._ctx.version < FIRST_BY_ID:
            return topic.topic, None
        known = self._ctx.broker.metadata.topic_by_id(topic.topic_id)
        return (None if known is None else known.name), topic.topic_id

    def _partition(self, name: str | None, topic_id: uuid.UUID | None, part: Any) -> Entity:
        try:
            if name is None:
                raise UnknownTopicIdError(f"no topic has the id {topic_id}")
            partition: Partition = self._ctx.broker.replicas.partition(name, part.partition)
            partition.check_leader_epoch(getattr(part, "current_leader_epoch", NO_EPOCH))
            diverging = self._diverging(partition, part)
            if diverging is not None:
                self._urgent = True
                return diverging
            return self._records(partition, part)
        except DomainError as error:
            self._urgent = True
            return self._refused(part.partition, error)

    def _records(self, partition: Partition, part: Any) -> Entity:
        offset, limit = part.fetch_offset, part.partition_max_bytes
        left = self._max_bytes - self._bytes
        # Only the first partition that has anything may go beyond the limits, by one batch.
        read = partition.fetch(
            offset, max(0, min(limit, left)), self._isolation, at_least_one=self._bytes == 0
        )
        self._bytes += len(read.records)
        self._watched.append(Watched(partition, offset, max(limit, 1)))
        make = self._ctx.respond
        aborted = None
        if read.aborted is not None:
            aborted = tuple(
                make.AbortedTransaction(producer_id=producer_id, first_offset=first)
                for producer_id, first in read.aborted
            )
        return make.PartitionData(
            partition_index=part.partition,
            error_code=ErrorCode.none,
            high_watermark=read.high_watermark,
            last_stable_offset=read.last_stable_offset,
            log_start_offset=read.log_start_offset,
            aborted_transactions=aborted,
            records=read.records,
        )

    def _diverging(self, partition: Partition, part: Any) -> Entity | None:
        """Where the reader's log parts from ours; None if it does not, or if it did not say."""
        last_epoch = getattr(part, "last_fetched_epoch", NO_EPOCH)
        if last_epoch < 0:
            return None
        epoch, end_offset = end_of_epoch(partition, last_epoch)
        if epoch < 0 or end_offset < 0:
            raise OffsetOutOfRangeError(f"nothing is known of leader epoch {last_epoch}")
        if epoch >= last_epoch and end_offset >= part.fetch_offset:
            return None
        make = self._ctx.respond
        return make.PartitionData(
            partition_index=part.partition,
            error_code=ErrorCode.none,
            high_watermark=partition.high_watermark,
            last_stable_offset=partition.last_stable_offset,
            log_start_offset=partition.log_start_offset,
            diverging_epoch=make.EpochEndOffset(epoch=epoch, end_offset=end_offset),
            aborted_transactions=() if self._isolation is Isolation.READ_COMMITTED else None,
            records=b"",
        )

    def _refused(self, index: int, error: DomainError) -> Entity:
        code = error_code(error)
        if isinstance(error, StorageError) and self._ctx.version <= LAST_WITHOUT_STORAGE_ERROR:
            code = ErrorCode.not_leader_or_follower
        # As in Kafka: an empty list where there is no partition, null where its log refused.
        aborted: tuple[()] | None = None
        if isinstance(error, (UnknownTopicOrPartitionError, UnknownTopicIdError)):
            aborted = ()
        return self._ctx.respond.PartitionData(
            partition_index=index,
            error_code=code,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
            aborted_transactions=aborted,
            records=b"",
        )
