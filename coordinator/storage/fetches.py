"""Fetch requests: find the session, read, and wait if fewer than ``min_bytes`` are available.

Reads return whole batches, unchanged from the file. The records of a large read are not loaded into
memory before they are sent.

A follower reads up to the end of the log; its fetch offset tells the leader which records it has. A
consumer reads committed records, from the leader or, if it sends its rack, from a replica in that
rack (KIP-392).

Source: ``FetchManager``, ``ReplicaManager.fetchMessages`` and ``readFromLog``, ``DelayedFetch``,
``Partition.fetchRecords``, ``RackAwareReplicaSelector``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import Protocol
from uuid import UUID

from fencepost.cluster.divergence import diverging_epoch
from fencepost.coordinator.config.key import RACK_AWARE
from fencepost.coordinator.errors import (
    InvalidFetchSessionEpochError,
    InvalidRequestError,
    NotAReplicaError,
    TopicAuthorizationError,
    UnknownTopicIdError,
)
from fencepost.coordinator.runtime.background import log_failure
from fencepost.coordinator.runtime.delayed_fetch import (
    DelayedFetch,
    DelayedFetches,
    WatchedPartition,
)
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.storage.fetch_sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    NO_REPLICA,
    NO_SESSION,
    CachedPartition,
    FetchedPartition,
    FetchSession,
    FetchSessions,
    Key,
    TopicKey,
)
from fencepost.coordinator.storage.replica_manager import ReplicaManager
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.errors import UnknownLeaderEpochError
from fencepost.logcore.file_range import MIN_RANGE_BYTES
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import Isolation, LogReadInfo
from fencepost.logcore.tracebacks import without_traceback
from fencepost.logcore.values import dataclass
from fencepost.protocol.steps import Steps

PARTITION_BYTES = 40
"""The approximate size of a partition in a response, without its records."""

_OFFSET = Struct(">q")
"""The first field of a batch: its base offset."""

MAX_COPIED_BYTES = 262_144
"""The maximum total size of short reads that a response holds in memory; others stay in files."""


CONSUMER = -1
DEBUGGING_CONSUMER = -2
"""The replica id of a consumer that may read from any replica."""


@dataclass(slots=True)
class Fetch:
    """One Fetch request. ``requested`` and ``forgotten`` may be iterated once, step by step."""

    requested: Iterable[CachedPartition]
    forgotten: Iterable[Key]
    by_topic_id: bool
    session_id: int
    session_epoch: int
    isolation_level: int
    max_bytes: int
    min_bytes: int
    max_wait_ms: int
    replica_id: int = CONSUMER
    """The id of a follower; negative for consumers."""
    broker_epoch: int = -1
    """The follower's broker epoch, −1 if it sends none."""
    rack: str | None = None
    """The client's rack; None for versions that only read from leaders."""
    listener: str = ""
    """The listener of the request, through which the client would reach other brokers."""
    may_read: Callable[[str | None], bool] | None = None
    """Called with a topic's name, or with None if its id is unknown; returns whether the sender may
    read or follow the topic. Not set if no permission is required."""
    may_send: Callable[[int], bool] | None = None
    """Called with the size of the response; if it returns False, the client is throttled, and gets
    a response without partitions."""


@dataclass(slots=True)
class FetchResult:
    """The response: the session id, 0 without a session, and the partitions."""

    session_id: int
    partitions: list[FetchedPartition]


class ReplicationThrottle(Protocol):
    """The leader's replication quota: ``ReplicationQuota``."""

    def covers(self, configs: Mapping[str, str], index: int) -> bool:
        """Return whether a topic's settings throttle this broker's replica of a partition."""

    @property
    def is_exceeded(self) -> bool:
        """Return whether throttled replicas must wait."""

    def record(self, size: int) -> None:
        """Count bytes read by a throttled replica."""


class Fetches:
    """Serves Fetch requests (``services.fetches``), on the event loop only."""

    def __init__(self, storage: Storage) -> None:
        self.clock, self.config = storage.clock, storage.config
        self.replicas, self.metadata = storage.replicas, storage.metadata
        self.selects_by_rack = storage.config.text("replica.selector.class") == RACK_AWARE
        self.sessions = FetchSessions(
            storage.config.int("max.incremental.fetch.session.cache.slots")
        )
        self.throttle: ReplicationThrottle | None = None
        """Throttles followers by ``leader.replication.throttled.rate``."""
        self.delayed = DelayedFetches(storage.actions)
        """Requests that wait for records."""

    def run(self, fetch: Fetch) -> Work[FetchResult]:
        """Answer a request. A generator that is closed during a wait leaves no state behind.

        Raises FetchSessionIdNotFoundError, InvalidFetchSessionEpochError, FetchSessionTopicIdError,
        InvalidRequestError.
        """
        session, requested = yield from self._begin(fetch)
        refused: list[FetchedPartition] = []
        if fetch.may_read is not None:
            requested, refused = yield from self._sorted_out(requested, fetch.may_read)
        reading = _Reading(self, fetch, session, requested, refused)
        yield from reading.read()
        if not (reading.is_answer or self.delayed.closed):
            yield from reading.wait()
            yield from reading.read()
        if fetch.may_send is not None and not fetch.may_send(reading.size_bytes):
            return reading.throttled_response()
        return (yield from reading.response())

    def _begin(self, fetch: Fetch) -> Steps[tuple[FetchSession | None, list[CachedPartition]]]:
        """Find or close the session of the request; return it and the partitions to read."""
        sessions, session = self.sessions, None
        if fetch.session_epoch in (FINAL_EPOCH, INITIAL_EPOCH):
            sessions.close(fetch.session_id)
        else:
            session = sessions.resume(
                fetch.session_id, fetch.session_epoch, by_topic_id=fetch.by_topic_id
            )
            sessions.advance(session, self.clock.now_ms())
        requested: list[CachedPartition] = []
        for part in fetch.requested:
            if requested:
                yield
            requested.append(part)
        if session is not None:
            yield from sessions.change(session, requested, fetch.forgotten)
            if session.partitions:
                return session, list(session.partitions.values())
        return None, requested

    def _sorted_out(
        self, requested: list[CachedPartition], may_read: Callable[[str | None], bool]
    ) -> Steps[tuple[list[CachedPartition], list[FetchedPartition]]]:
        """Split partitions into readable and refused ones, once per request."""
        rights: dict[TopicKey, bool] = {}
        allowed: list[CachedPartition] = []
        refused: list[FetchedPartition] = []
        for partition in requested:
            topic = partition.key[0]
            may = rights.get(topic)
            if may is None:
                may = rights[topic] = may_read(self._name(topic))
            if may:
                allowed.append(partition)
            else:
                error = TopicAuthorizationError("the client may not read the topic")
                refused.append(FetchedPartition(partition, error=error))
            yield
        return allowed, refused

    def _name(self, topic: TopicKey) -> str | None:
        if isinstance(topic, str):
            return topic
        topic_image = self.metadata.topic_by_id(topic)
        return None if topic_image is None else topic_image.name

    def topic_name(self, key: Key) -> str:
        """Return the name of a partition's topic. Raises UnknownTopicIdError."""
        topic = key[0]
        name = topic if isinstance(topic, str) else self._name(topic)
        if name is None:
            raise UnknownTopicIdError(f"no topic has the id {topic}")
        return name

    def preferred_replica(self, name: str, index: int, offset: int, fetch: Fetch) -> int:
        """Return the most caught-up in-sync replica in the client's rack, or NO_REPLICA.

        NO_REPLICA also stands for the leader, if it is in that rack.
        """
        image, machine = self.replicas.image, self.replicas.led(name, index)
        if machine is None:
            return NO_REPLICA

        def is_near(broker_id: int) -> bool:
            broker = image.brokers.get(broker_id)
            return (
                broker is not None
                and not broker.fenced
                and broker.rack == fetch.rack
                and fetch.listener in broker.listeners
            )

        near = [
            replica
            for replica in machine.replicas.values()
            if replica.broker_id in machine.isr
            and replica.log_start_offset <= offset <= replica.log_end_offset
            and is_near(replica.broker_id)
        ]
        if not near or is_near(self.replicas.node_id):
            return NO_REPLICA
        most = lambda replica: (  # noqa: E731 - a key
            replica.log_end_offset,
            replica.last_caught_up_ms,
            replica.broker_id,
        )
        return max(near, key=most).broker_id


def isolation_of(level: int) -> Isolation:
    """Return the isolation for a level in a request. Raises InvalidRequestError if undefined."""
    isolation = _LEVELS.get(level)
    if isolation is None:
        raise InvalidRequestError(f"there is no isolation level {level}")
    return isolation


_LEVELS = {
    int(isolation): isolation
    for isolation in (Isolation.READ_UNCOMMITTED, Isolation.READ_COMMITTED)
}


def _check_replica(
    replicas: ReplicaManager, topic: str, index: int, replica_id: int, leader_epoch: int
) -> None:
    """Refuse a follower that is not a replica of a partition that this broker leads.

    A follower with the current leader epoch may have learned of its assignment before this broker,
    so its error is retriable (KAFKA-13837). Raises UnknownLeaderEpochError, NotAReplicaError.
    """
    machine = replicas.led(topic, index)
    if machine is not None and replica_id in machine.replicas:
        return
    text = f"broker {replica_id} has no replica of {topic}-{index} that this broker knows of"
    if leader_epoch < 0:
        raise NotAReplicaError(text)
    raise UnknownLeaderEpochError(text)


class _Reading:
    """One request, whose partitions are read once, or again after a wait.

    The partitions are read in the order of the request, or of its session.
    """

    def __init__(
        self,
        fetches: Fetches,
        fetch: Fetch,
        session: FetchSession | None,
        requested: list[CachedPartition],
        refused: list[FetchedPartition],
    ) -> None:
        self._fetches, self._fetch, self._requested = fetches, fetch, requested
        self._refused = refused
        self._session = session
        self._epoch = None if session is None else session.epoch
        self._isolation = isolation_of(fetch.isolation_level)
        self._is_follower = fetch.replica_id >= 0
        if self._is_follower:
            self._isolation = Isolation.LOG_END
        self._only_leader = fetch.rack is None and fetch.replica_id == CONSUMER
        self._selects_replica = (
            fetches.selects_by_rack and bool(fetch.rack) and not self._is_follower
        )
        self._has_counted = False
        """Whether the follower's offsets were recorded, which happens once per request."""
        limit = fetches.config.int("fetch.max.bytes")
        self._max_bytes = max(0, min(fetch.max_bytes, limit))
        self._min_bytes = min(fetch.min_bytes, self._max_bytes)
        self._answers: list[FetchedPartition] = []
        self._bytes = 0
        self._copied_bytes = 0
        self._throttled_bytes = 0
        self._held_back: frozenset[tuple[str, int]] = frozenset()
        """Throttled partitions; the request does not wait for their records."""
        self._news = 0
        self._urgent = False

    @property
    def is_answer(self) -> bool:
        """Return whether the last read must be returned now (kafka: ``fetchMessages``)."""
        return (
            self._fetch.max_wait_ms <= 0
            or self._urgent
            or not self._answers
            or self._bytes >= self._min_bytes
        )

    def read(self) -> Steps[None]:
        """Read every partition; in the second read, only the partitions that have changed."""
        former, self._answers = self._answers, []
        self._bytes, self._copied_bytes, self._news, self._urgent = 0, 0, 0, False
        self._throttled_bytes = 0
        self._held_back = frozenset()
        for at, requested in enumerate(self._requested):
            if at:
                yield
            try:
                if former and _is_as_it_was(former[at]):
                    answer = former[at]
                else:
                    answer = self._read_one(requested)
            except DomainError as error:
                answer = FetchedPartition(requested, error=without_traceback(error))
            except Exception as error:  # noqa: BLE001 - the other partitions can be read
                log_failure(
                    "read a partition", error, partition=f"{requested.key[0]}-{requested.key[1]}"
                )
                answer = FetchedPartition(requested, error=DomainError(f"not read: {error}"))
            # Errors, truncations and preferred replicas are sent at once. So are the records of a
            # read that ended at the end of a segment: waiting would not extend such a read.
            self._urgent |= (
                answer.partition is None
                or answer.read.is_behind
                or answer.preferred_replica != NO_REPLICA
            )
            # The response in a session omits unchanged partitions.
            self._news += (
                self._session is None or answer.error is not None or bool(answer.read.records)
            )
            self._answers.append(answer)
        self._has_counted = True

    def _read_one(self, requested: CachedPartition) -> FetchedPartition:
        fetches, (topic, index) = self._fetches, requested.key
        name, replicas = fetches.topic_name(requested.key), fetches.replicas
        if self._only_leader:
            partition = replicas.leader(name, index, requested.leader_epoch)
        else:
            topic_id = topic if isinstance(topic, UUID) else None
            if self._selects_replica:
                preferred = fetches.preferred_replica(name, index, requested.offset, self._fetch)
                if preferred != NO_REPLICA:
                    partition = replicas.readable(name, index, requested.leader_epoch)
                    marks = self._marks(partition)
                    return FetchedPartition(
                        requested, marks, partition, preferred_replica=preferred
                    )
            find = replicas.led_with_id if self._is_follower else replicas.readable
            partition = find(name, index, requested.leader_epoch, topic_id)
        if self._is_follower:
            _check_replica(replicas, name, index, self._fetch.replica_id, requested.leader_epoch)
        end = partition.log.log_end_offset
        if requested.last_epoch >= 0:
            diverging = diverging_epoch(
                _end_of_epoch(partition, requested.last_epoch),
                requested.last_epoch,
                requested.offset,
                partition.log_start_offset,
            )
            if diverging is not None:
                return FetchedPartition(requested, self._marks(partition), diverging=diverging)
        # Only the first partition with records may exceed the limits, by one batch.
        read = partition.reader.fetch(
            requested.offset,
            max(0, min(requested.max_bytes, self._max_bytes - self._bytes)),
            self._isolation,
            at_least_one=self._bytes == 0,
            min_range_bytes=MIN_RANGE_BYTES if self._copied_bytes < MAX_COPIED_BYTES else 1,
        )
        if self._is_follower:
            read = self._throttled(name, index, read)
        self._bytes += len(read.records)
        if isinstance(read.records, bytes):
            self._copied_bytes += len(read.records)
        if self._is_follower and not self._has_counted:
            replicas.fetched(
                name,
                index,
                self._fetch.replica_id,
                self._fetch.broker_epoch,
                _has_upto(requested.offset, partition, read),
                requested.replica_log_start,
                end,
            )
        if read.records or self._held_back:
            return FetchedPartition(requested, read, partition)
        return FetchedPartition(
            requested, read, partition, seen=(partition.marks.leader_epoch, end)
        )

    def _throttled(self, topic: str, index: int, read: LogReadInfo) -> LogReadInfo:
        """Return a follower's read, without its records while the throttle is exceeded.

        An in-sync replica is never throttled, so that it does not fall out of the ISR.
        """
        throttle, replicas = self._fetches.throttle, self._fetches.replicas
        if throttle is None or not read.records:
            return read
        if not throttle.covers(replicas.image.topic_configs(topic), index):
            return read
        machine = replicas.led(topic, index)
        in_sync = machine is not None and self._fetch.replica_id in machine.isr
        if throttle.is_exceeded and not in_sync:
            self._held_back |= {(topic, index)}
            return read._replace(records=b"")
        self._throttled_bytes += len(read.records)
        return read

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
        """Wait until enough bytes are available or ``max_wait_ms`` has passed."""
        delayed = DelayedFetch(
            self._fetches.delayed,
            self._isolation,
            min_bytes=self._min_bytes,
            max_wait_ms=self._fetch.max_wait_ms,
        )
        try:
            for at, answer in enumerate(self._answers):
                if at:
                    yield None
                partition = answer.partition
                if partition is not None and (
                    not self._held_back or (partition.topic, partition.index) not in self._held_back
                ):
                    delayed.watch(
                        WatchedPartition(
                            partition, answer.requested.offset, max(answer.requested.max_bytes, 1)
                        )
                    )
            if not delayed.is_over:
                yield delayed
        finally:
            delayed.cancel()

    @property
    def size_bytes(self) -> int:
        """Return the approximate size of the response."""
        return self._bytes + PARTITION_BYTES * self._news

    def throttled_response(self) -> FetchResult:
        """Return a response without partitions; the client can then repeat the same fetch.

        Raises like :meth:`response`.
        """
        if self._session is None:
            return FetchResult(NO_SESSION, [])
        self._check_session(self._session)
        return FetchResult(self._fetches.sessions.id_of(self._session), [])

    def _check_session(self, session: FetchSession) -> None:
        if session.epoch != self._epoch:
            raise InvalidFetchSessionEpochError(f"fetch session {session.id} went on meanwhile")

    def response(self) -> Steps[FetchResult]:
        """Return the response. Raises InvalidFetchSessionEpochError if the session has advanced."""
        session, sessions = self._session, self._fetches.sessions
        throttle = self._fetches.throttle
        if throttle is not None and self._throttled_bytes:
            throttle.record(self._throttled_bytes)
        for at, answer in enumerate(self._answers):
            if at:
                yield
            if answer.partition is not None:
                answer.partition.traffic.bytes_out += len(answer.read.records)
        self._answers += self._refused
        if session is None:
            return FetchResult((yield from self._opened()), self._answers)
        self._check_session(session)
        answered: list[FetchedPartition] = []
        for answer in self._answers:
            if session.is_news(answer):
                answered.append(answer)
            yield
        return FetchResult(sessions.id_of(session), answered)

    def _opened(self) -> Steps[int]:
        """Open a session for a full request; return its id, 0 without a session."""
        if self._fetch.session_epoch != INITIAL_EPOCH:
            return NO_SESSION
        for answer in self._answers:
            answer.requested.learn(answer)
            yield
        return self._fetches.sessions.open(
            [answer.requested for answer in self._answers],
            by_topic_id=self._fetch.by_topic_id,
            now_ms=self._fetches.clock.now_ms(),
        )


def _is_as_it_was(answer: FetchedPartition) -> bool:
    """Return whether a partition without records to read is unchanged since the first read.

    When a wait ends, most partitions are unchanged, and a follower may fetch thousands of them.
    """
    partition, read = answer.partition, answer.read
    if partition is None or answer.seen is None:
        return False
    marks = partition.marks
    return (
        marks.stopped is None
        and answer.seen == (marks.leader_epoch, partition.log_end_offset)
        and read.high_watermark == marks.high_watermark
        and read.log_start_offset == marks.log_start_offset
        and read.last_stable_offset == marks.last_stable_offset
    )


def _has_upto(offset: int, partition: Partition, read: LogReadInfo) -> int:
    """Return the offset up to which a follower that fetches at ``offset`` has replicated the log.

    If ``offset`` lies inside a batch, return the base offset of that batch: the follower has
    truncated its log there, and fetches the batch again. Raises StorageError.
    """
    records = read.records
    if not records:
        return offset
    try:
        head = records if isinstance(records, bytes) else records.peek(_OFFSET.size)
    except OSError as error:
        raise partition.marks.refuse(error) from error
    base: int = _OFFSET.unpack_from(head)[0]
    return min(offset, base)


def _end_of_epoch(partition: Partition, epoch: int) -> tuple[int, int]:
    """Return an epoch and its end offset.

    In a partition without followers, the current epoch has an end even without records.
    """
    reader = partition.reader
    if partition.marks.is_replicated:
        return reader.offset_for_leader_epoch(epoch)
    return reader.end_of_epoch(epoch)
