"""Fetch (1): records from many partitions, at once or as soon as there are enough.

What is read are whole batches as they stand in the file; they go from there to the socket as they
are, many of them piece by piece as the socket takes them.

Versions: 4 has isolation levels, 5 log start offsets, 7 sessions (KIP-227), 9 leader epochs, 12 the
epoch of the last record fetched, 13 topic ids.

One node has no followers: who says to be one is refused, partition by partition.

Source: ``KafkaApis.handleFetchRequest``, ``FetchManager``, ``ReplicaManager.readFromLog``,
``DelayedFetch``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from itertools import groupby
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.coordinator.data.delayed_fetch import DelayedFetch, Watched
from fencepost.coordinator.data.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    CachedPartition,
    FetchSession,
    Key,
    TopicKey,
)
from fencepost.coordinator.error_codes import error_code
from fencepost.coordinator.errors import (
    InvalidFetchSessionEpochError,
    NotAReplicaError,
    UnknownTopicIdError,
    UnknownTopicOrPartitionError,
)
from fencepost.coordinator.handlers import Context, handles, request_ms
from fencepost.coordinator.handlers.epochs import end_of_epoch, isolation_of
from fencepost.coordinator.wire import ApiKey, Entity
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.errors import OffsetOutOfRangeError, StorageError, UnknownLeaderEpochError
from fencepost.logcore.file_range import MIN_RANGE_BYTES
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Isolation, Partition

FIRST_BY_ID = 13
LAST_WITHOUT_STORAGE_ERROR = 5

NO_EPOCH = -1

MAX_COPIED_BYTES = 262_144
"""Bytes of short reads that one response holds in memory; any more stay in their files."""

_Told = tuple[int, list[tuple[Key, Entity]]]


@handles(ApiKey.FETCH, versions=(4, 18), permission="READ Topic")
def run(ctx: Context) -> Steps[Entity | Awaitable[Any]]:
    """Read, and wait for more if that was not enough."""
    asked = yield from _Round.of(ctx)
    try:
        isolation = isolation_of(ctx.body)
    except DomainError as error:
        return (yield from _refuse_all(ctx, error))
    fetch = _Fetch(ctx, asked, isolation)
    yield from fetch.read()
    if fetch.is_answer or ctx.broker.delayed_fetches.closed:
        return (yield from fetch.answer())
    return (yield from fetch.wait())


def _refuse_all(ctx: Context, error: DomainError) -> Steps[Entity]:
    """Every partition is refused, and so is the request where it has sessions."""
    make, code = ctx.respond, error_code(error)
    session_id = getattr(ctx.body, "session_id", NO_SESSION)
    topics = []
    for topic in ctx.body.topics if ctx.version < FIRST_BY_ID else ():
        parts = []
        for part in topic.partitions:
            parts.append(_refused(ctx, part.partition, code, aborted=()))
            yield
        topics.append(make.FetchableTopicResponse(topic=topic.topic, partitions=tuple(parts)))
    return make.FetchResponse(
        throttle_time_ms=0, error_code=code, session_id=session_id, responses=tuple(topics)
    )


def _refused(ctx: Context, index: int, code: ErrorCode, aborted: tuple[()] | None) -> Entity:
    return ctx.respond.PartitionData(
        partition_index=index,
        error_code=code,
        high_watermark=-1,
        last_stable_offset=-1,
        log_start_offset=-1,
        aborted_transactions=aborted,
        records=b"",
    )


class _Round:
    """What one request reads, and what its answer means for the client's session."""

    def __init__(self, ctx: Context, session: FetchSession | None, *, keep: bool) -> None:
        self._ctx = ctx
        self._session = session
        self._epoch = NO_EPOCH if session is None else session.epoch
        self._keep = keep
        self.asked: list[CachedPartition] = []
        """The partitions to read, in this order."""

    @classmethod
    def of(cls, ctx: Context) -> Steps[_Round]:
        """Find or drop the session that the request names; raises its DomainErrors."""
        body, sessions = ctx.body, ctx.broker.fetch_sessions
        epoch = getattr(body, "session_epoch", FINAL_EPOCH)
        by_id = ctx.version >= FIRST_BY_ID
        if epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            sessions.close(getattr(body, "session_id", NO_SESSION))
            return (yield from cls._without(ctx, keep=epoch == INITIAL_EPOCH))
        session = sessions.resume(body.session_id, epoch, by_topic_id=by_id)
        sessions.advance(session, ctx.broker.clock.now_ms())
        forgotten = (
            (topic.topic_id if by_id else topic.topic, index)
            for topic in body.forgotten_topics_data
            for index in topic.partitions
        )
        yield from sessions.change(session, _named(body, by_id=by_id), forgotten)
        if not session.partitions:
            return (yield from cls._without(ctx, keep=False))
        made = cls(ctx, session, keep=False)
        made.asked = list(session.partitions.values())
        return made

    @classmethod
    def _without(cls, ctx: Context, *, keep: bool) -> Steps[_Round]:
        """Read what the request itself names; ``keep`` makes a session of it."""
        made = cls(ctx, None, keep=keep)
        for key, part in _named(ctx.body, by_id=ctx.version >= FIRST_BY_ID):
            made.asked.append(CachedPartition(key, part))
            yield
        return made

    def tell(self, answers: Sequence[tuple[CachedPartition, Entity]]) -> Steps[_Told]:
        """The session id to answer with, and what to say of which partition.

        Raises InvalidFetchSessionEpochError when another request overtook this one.
        """
        session, sessions = self._session, self._ctx.broker.fetch_sessions
        told: list[tuple[Key, Entity]] = []
        if session is not None and session.epoch != self._epoch:
            raise InvalidFetchSessionEpochError(f"fetch session {session.id} went on meanwhile")
        for cached, answer in answers:
            if session is None or session.is_news(cached, answer):
                told.append((cached.key, answer))
            if self._keep:
                cached.learn(answer)
            yield
        if session is not None:
            return sessions.id_of(session), told
        if not self._keep:
            return NO_SESSION, told
        session_id = sessions.open(
            [cached for cached, _ in answers],
            by_topic_id=self._ctx.version >= FIRST_BY_ID,
            now_ms=self._ctx.broker.clock.now_ms(),
        )
        return session_id, told


def _named(body: Any, *, by_id: bool) -> Iterator[tuple[Key, Any]]:
    for topic in body.topics:
        for part in topic.partitions:
            yield (topic.topic_id if by_id else topic.topic, part.partition), part


def _is_follower(body: Any) -> bool:
    state = getattr(body, "replica_state", None)
    return int(body.replica_id if state is None else state.replica_id) >= 0


def _no_replica(epoch: int) -> DomainError:
    # A follower that knows the epoch may know of a replica that we have not heard of (in Kafka).
    if epoch == NO_EPOCH:
        return NotAReplicaError("there is one replica, and that is here")
    return UnknownLeaderEpochError(f"epoch {epoch} has one replica, and that is here")


class _Fetch:
    """One request: reads it as often as needed."""

    def __init__(self, ctx: Context, asked: _Round, isolation: Isolation) -> None:
        self._ctx = ctx
        body = ctx.body
        self._isolation = isolation
        self._is_follower = _is_follower(body)
        limit = ctx.broker.config.int("fetch.max.bytes")
        self._max_bytes = max(0, min(body.max_bytes, limit))
        self._min_bytes = min(body.min_bytes, self._max_bytes)
        self._max_wait_ms = request_ms(body.max_wait)
        self._round = asked
        self._answers: list[tuple[CachedPartition, Entity]] = []
        self._watched: list[Watched] = []
        self._bytes = 0
        self._copied_bytes = 0
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

    def wait(self) -> Steps[Awaitable[Steps[Entity]]]:
        """Read again when enough has been appended or the time is over."""
        ctx = self._ctx
        poll = DelayedFetch(
            ctx.broker.delayed_fetches,
            self._isolation,
            min_bytes=self._min_bytes,
            max_wait_ms=self._max_wait_ms,
            finish=self._finish,
        )
        stay = ctx.connection.on_close(poll.cancel)
        poll.answer.add_done_callback(lambda _: stay())
        for one in self._watched:
            poll.watch(one)
            yield
        return poll.answer

    def _finish(self) -> Steps[Entity]:
        yield from self.read()
        return (yield from self.answer())

    def read(self) -> Steps[None]:
        """Read every partition once, in the order of the request or of the session."""
        self._answers, self._watched = [], []
        self._bytes, self._copied_bytes, self._urgent = 0, 0, False
        for one in self._round.asked:
            answer = yield from self._partition(one)
            self._answers.append((one, answer))
            yield

    def answer(self) -> Steps[Entity]:
        """The response to what was read last."""
        make = self._ctx.respond
        session_id, told = yield from self._round.tell(self._answers)
        topics = []
        for key, group in groupby(told, key=lambda one: one[0][0]):
            parts = tuple(answer for _, answer in group)
            if isinstance(key, str):
                topics.append(make.FetchableTopicResponse(topic=key, partitions=parts))
            else:
                topics.append(make.FetchableTopicResponse(topic_id=key, partitions=parts))
            yield
        return make.FetchResponse(
            throttle_time_ms=0,
            error_code=ErrorCode.none,
            session_id=session_id,
            responses=tuple(topics),
        )

    def _name(self, key: TopicKey | None) -> str:
        if isinstance(key, str):
            return key
        known = self._ctx.broker.metadata.topic_by_id(key)
        if known is None:
            raise UnknownTopicIdError(f"no topic has the id {key}")
        return str(known.name)

    def _partition(self, one: CachedPartition) -> Steps[Entity]:
        part = one.asked
        try:
            name = self._name(one.key[0])
            partition: Partition = self._ctx.broker.logs.partition(name, part.partition)
            epoch = getattr(part, "current_leader_epoch", NO_EPOCH)
            partition.check_leader_epoch(epoch)
            if self._is_follower:
                raise _no_replica(epoch)
            diverging = self._diverging(partition, part)
            if diverging is not None:
                self._urgent = True
                return diverging
            return (yield from self._records(partition, part))
        except DomainError as error:
            self._urgent = True
            return self._refusal(part.partition, error)

    def _records(self, partition: Partition, part: Any) -> Steps[Entity]:
        offset, limit = part.fetch_offset, part.partition_max_bytes
        left = self._max_bytes - self._bytes
        # Only the first partition that has anything may go beyond the limits, by one batch.
        read = partition.fetch_range(
            offset,
            max(0, min(limit, left)),
            self._isolation,
            at_least_one=self._bytes == 0,
            min_range_bytes=MIN_RANGE_BYTES if self._copied_bytes < MAX_COPIED_BYTES else 1,
        )
        self._bytes += len(read.records)
        if isinstance(read.records, bytes):
            self._copied_bytes += len(read.records)
        # To wait would bring this reader no more: the next read begins in a later segment.
        self._urgent |= read.is_behind
        self._watched.append(Watched(partition, offset, max(limit, 1)))
        make = self._ctx.respond
        aborted: list[Entity] | None = None
        if read.aborted is not None:
            aborted = []
            for producer_id, first in read.aborted:
                aborted.append(make.AbortedTransaction(producer_id=producer_id, first_offset=first))
                yield
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

    def _refusal(self, index: int, error: DomainError) -> Entity:
        code = error_code(error)
        if isinstance(error, StorageError) and self._ctx.version <= LAST_WITHOUT_STORAGE_ERROR:
            code = ErrorCode.not_leader_or_follower
        # As in Kafka: an empty list where there is no partition, null where its log refused.
        aborted: tuple[()] | None = None
        if isinstance(error, (UnknownTopicOrPartitionError, UnknownTopicIdError)):
            aborted = ()
        return _refused(self._ctx, index, code, aborted)
