"""What Fetch requests do: find the session, read, and wait for more if that was not enough.

What is read are whole batches as they stand in the file, and they stay there where they are many.

One node has no followers: who says to be one is refused, partition by partition.

Source: ``FetchManager``, ``ReplicaManager.fetchMessages`` and ``readFromLog``, ``DelayedFetch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fencepost.coordinator.data.delayed_fetch import DelayedFetch, DelayedFetches, Watched
from fencepost.coordinator.data.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_SESSION,
    FetchedPartition,
    FetchSession,
    FetchSessions,
    Key,
    PartitionFetch,
    TopicKey,
)
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.errors import (
    InvalidFetchSessionEpochError,
    InvalidRequestError,
    NotAReplicaError,
    TopicAuthorizationError,
    UnknownTopicIdError,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.wire.steps import Steps
from fencepost.logcore.errors import OffsetOutOfRangeError, UnknownLeaderEpochError
from fencepost.logcore.file_range import MIN_RANGE_BYTES
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation, LogReadInfo

PARTITION_BYTES = 40
"""About what a partition takes in an answer beside its records."""

MAX_COPIED_BYTES = 262_144
"""Bytes of short reads that one response holds in memory; any more stay in their files."""


@dataclass(slots=True)
class Fetch:
    """One Fetch request. What it asks and forgets may be read once, a step at a time."""

    asked: Iterable[PartitionFetch]
    forgotten: Iterable[Key]
    by_topic_id: bool
    session_id: int
    session_epoch: int
    isolation_level: int
    is_follower: bool
    max_bytes: int
    min_bytes: int
    max_wait_ms: int
    may_read: Callable[[str | None], bool] | None = None
    """Whether its sender may read a topic, or follow one; None where everybody may. It is asked of
    None for an id that no topic has."""
    may_tell: Callable[[int], bool] | None = None
    """Asked before an answer of so many bytes is told; if it may not be, nothing is."""


@dataclass(slots=True)
class Fetched:
    """The answer: the session to go on with, 0 if there is none, and what is told."""

    session_id: int
    partitions: list[FetchedPartition]


class Fetches:
    """``services.fetches``. Belongs to the event loop."""

    def __init__(self, storage: Storage) -> None:
        self.clock, self.config = storage.clock, storage.config
        self.logs, self.metadata = storage.logs, storage.metadata
        self.sessions = FetchSessions(
            storage.config.int("max.incremental.fetch.session.cache.slots")
        )
        self.delayed = DelayedFetches()
        """Requests that wait for records."""

    def run(self, fetch: Fetch) -> Work[Fetched]:
        """Answer a request. Steps that are dropped while they wait leave nothing behind.

        Raises FetchSessionIdNotFoundError, InvalidFetchSessionEpochError, FetchSessionTopicIdError,
        InvalidRequestError.
        """
        session, asked = yield from self._begin(fetch)
        refused: list[FetchedPartition] = []
        if fetch.may_read is not None:
            asked, refused = yield from self._sorted_out(asked, fetch.may_read)
        reading = _Reading(self, fetch, session, asked, refused)
        yield from reading.read()
        if not (reading.is_answer or self.delayed.closed):
            yield from reading.wait()
            yield from reading.read()
        if fetch.may_tell is not None and not fetch.may_tell(reading.size_bytes):
            return reading.untold()
        return (yield from reading.told())

    def _begin(self, fetch: Fetch) -> Steps[tuple[FetchSession | None, list[PartitionFetch]]]:
        """Find or drop the session that the request names, and say what is to be read."""
        sessions, session = self.sessions, None
        if fetch.session_epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            sessions.close(fetch.session_id)
        else:
            session = sessions.resume(
                fetch.session_id, fetch.session_epoch, by_topic_id=fetch.by_topic_id
            )
            sessions.advance(session, self.clock.now_ms())
        asked: list[PartitionFetch] = []
        for part in fetch.asked:
            asked.append(part)
            yield
        if session is not None:
            yield from sessions.change(session, asked, fetch.forgotten)
            if session.partitions:
                return session, list(session.partitions.values())
        return None, asked

    def _sorted_out(
        self, asked: list[PartitionFetch], may_read: Callable[[str | None], bool]
    ) -> Steps[tuple[list[PartitionFetch], list[FetchedPartition]]]:
        """What may be read of it, and what is refused: once, whatever becomes of rights later."""
        rights: dict[TopicKey, bool] = {}
        allowed: list[PartitionFetch] = []
        refused: list[FetchedPartition] = []
        for one in asked:
            topic = one.key[0]
            may = rights.get(topic)
            if may is None:
                may = rights[topic] = may_read(self._name(topic))
            if may:
                allowed.append(one)
            else:
                error = TopicAuthorizationError("the client may not read the topic")
                refused.append(FetchedPartition(one, error=error))
            yield
        return allowed, refused

    def _name(self, topic: TopicKey) -> str | None:
        if isinstance(topic, str):
            return topic
        known = self.metadata.topic_by_id(topic)
        return None if known is None else known.name

    def partition(self, key: Key) -> Partition:
        """Raise UnknownTopicIdError, UnknownTopicOrPartitionError, StorageError."""
        topic, index = key
        name = topic if isinstance(topic, str) else self._name(topic)
        if name is None:
            raise UnknownTopicIdError(f"no topic has the id {topic}")
        return self.logs.partition(name, index)


def isolation_of(level: int) -> Isolation:
    """How far the sender of a request may see. InvalidRequestError where there is no such level."""
    try:
        return Isolation(level)
    except ValueError:
        raise InvalidRequestError(f"there is no isolation level {level}") from None


def _no_replica(epoch: int) -> DomainError:
    # A follower that knows the epoch may know of a replica that we have not heard of (in Kafka).
    if epoch < 0:
        return NotAReplicaError("there is one replica, and that is here")
    return UnknownLeaderEpochError(f"epoch {epoch} has one replica, and that is here")


class _Reading:
    """One request: it is read as often as needed, in its order or in that of its session."""

    def __init__(
        self,
        fetches: Fetches,
        fetch: Fetch,
        session: FetchSession | None,
        asked: list[PartitionFetch],
        refused: list[FetchedPartition],
    ) -> None:
        self._fetches, self._fetch, self._asked = fetches, fetch, asked
        self._refused = refused
        self._session = session
        self._epoch = None if session is None else session.epoch
        self._isolation = isolation_of(fetch.isolation_level)
        limit = fetches.config.int("fetch.max.bytes")
        self._max_bytes = max(0, min(fetch.max_bytes, limit))
        self._min_bytes = min(fetch.min_bytes, self._max_bytes)
        self._answers: list[FetchedPartition] = []
        self._bytes = 0
        self._copied_bytes = 0
        self._news = 0
        self._urgent = False

    @property
    def is_answer(self) -> bool:
        """Whether what was read last must be answered now (kafka: ``fetchMessages``)."""
        return (
            self._fetch.max_wait_ms <= 0
            or self._urgent
            or not self._answers
            or self._bytes >= self._min_bytes
        )

    def read(self) -> Steps[None]:
        """Read every partition once."""
        self._answers = []
        self._bytes, self._copied_bytes, self._news, self._urgent = 0, 0, 0, False
        for asked in self._asked:
            try:
                answer = self._read_one(asked)
            except DomainError as error:
                answer = FetchedPartition(asked, error=error)
            # To wait would bring this client no more, or it has to hear of something.
            self._urgent |= answer.partition is None or answer.read.is_behind
            # A session is not told again what it knows.
            self._news += (
                self._session is None or answer.error is not None or bool(answer.read.records)
            )
            self._answers.append(answer)
            yield

    def _read_one(self, asked: PartitionFetch) -> FetchedPartition:
        partition = self._fetches.partition(asked.key)
        partition.reader.check_leader_epoch(asked.leader_epoch)
        if self._fetch.is_follower:
            raise _no_replica(asked.leader_epoch)
        if asked.last_epoch >= 0:
            diverging = _diverging(partition, asked)
            if diverging is not None:
                return FetchedPartition(asked, self._marks(partition), diverging=diverging)
        # Only the first partition that has anything may go beyond the limits, by one batch.
        read = partition.reader.fetch(
            asked.offset,
            max(0, min(asked.max_bytes, self._max_bytes - self._bytes)),
            self._isolation,
            at_least_one=self._bytes == 0,
            min_range_bytes=MIN_RANGE_BYTES if self._copied_bytes < MAX_COPIED_BYTES else 1,
        )
        self._bytes += len(read.records)
        if isinstance(read.records, bytes):
            self._copied_bytes += len(read.records)
        return FetchedPartition(asked, read, partition)

    def _marks(self, partition: Partition) -> LogReadInfo:
        return LogReadInfo(
            b"",
            partition.high_watermark,
            partition.last_stable_offset,
            partition.log_start_offset,
            () if self._isolation is Isolation.READ_COMMITTED else None,
            is_behind=False,
        )

    def wait(self) -> Work[None]:
        """Until enough has been appended or the time is over."""
        poll = DelayedFetch(
            self._fetches.delayed,
            self._isolation,
            min_bytes=self._min_bytes,
            max_wait_ms=self._fetch.max_wait_ms,
        )
        try:
            for one in self._answers:
                if one.partition is not None:
                    poll.watch(
                        Watched(one.partition, one.asked.offset, max(one.asked.max_bytes, 1))
                    )
                yield None
            yield poll.over
        finally:
            poll.cancel()

    @property
    def size_bytes(self) -> int:
        """About the size of the answer."""
        return self._bytes + PARTITION_BYTES * self._news

    def untold(self) -> Fetched:
        """The answer that says nothing; the same can be asked again. Raises as :meth:`told`."""
        if self._session is None:
            return Fetched(NO_SESSION, [])
        self._check_session(self._session)
        return Fetched(self._fetches.sessions.id_of(self._session), [])

    def _check_session(self, session: FetchSession) -> None:
        if session.epoch != self._epoch:
            raise InvalidFetchSessionEpochError(f"fetch session {session.id} went on meanwhile")

    def told(self) -> Steps[Fetched]:
        """What to say of which partition. InvalidFetchSessionEpochError if it was overtaken."""
        session, sessions = self._session, self._fetches.sessions
        for answer in self._answers:
            if answer.partition is not None:
                answer.partition.traffic.bytes_out += len(answer.read.records)
            yield
        self._answers += self._refused
        if session is None:
            return Fetched((yield from self._opened()), self._answers)
        self._check_session(session)
        told: list[FetchedPartition] = []
        for answer in self._answers:
            if session.is_news(answer):
                told.append(answer)
            yield
        return Fetched(sessions.id_of(session), told)

    def _opened(self) -> Steps[int]:
        """The id of the session that a full request begins; 0 if it wants none, or has no room."""
        if self._fetch.session_epoch != INITIAL_EPOCH:
            return NO_SESSION
        for answer in self._answers:
            answer.asked.learn(answer)
            yield
        return self._fetches.sessions.open(
            [answer.asked for answer in self._answers],
            by_topic_id=self._fetch.by_topic_id,
            now_ms=self._fetches.clock.now_ms(),
        )


def _diverging(partition: Partition, asked: PartitionFetch) -> tuple[int, int] | None:
    """Epoch and end offset where the reader's log parts from ours, if it does."""
    epoch, end_offset = partition.reader.end_of_epoch(asked.last_epoch)
    if epoch < 0 or end_offset < 0:
        raise OffsetOutOfRangeError(f"nothing is known of leader epoch {asked.last_epoch}")
    if epoch >= asked.last_epoch and end_offset >= asked.offset:
        return None
    return epoch, end_offset
