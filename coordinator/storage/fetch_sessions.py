"""Fetch sessions, with which a Fetch contains only changed partitions (KIP-227).

A session holds the partitions that a client fetches and the state last sent for each. An
incremental request contains changes of this set; its response omits every partition without new
records or changed offsets. The number of sessions (slots) is limited, and so is the number of their
partitions. A client without a slot gets session id 0 and continues with full requests.

Source: ``FetchSession``, ``FetchSessionCacheShard`` and ``FetchManager``.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from uuid import UUID

from fencepost.coordinator.errors import (
    FetchSessionIdNotFoundError,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpochError,
)
from fencepost.logcore.machine import DomainError
from fencepost.logcore.partition import Partition
from fencepost.logcore.reading import LogReadInfo
from fencepost.logcore.values import dataclass
from fencepost.protocol.steps import Steps

NO_SESSION = 0
NO_REPLICA = -1
FINAL_EPOCH = -1
INITIAL_EPOCH = 0
_MAX_INT32 = 2**31 - 1

MAX_CACHED_PARTITIONS = 100_000
"""The maximum number of partitions of all sessions together; each takes about 400 bytes. Kafka only
limits the number of sessions: a session may have as many partitions as a request can contain."""

EVICTION_MS = 120_000
"""The age in milliseconds at which a session may be evicted. If the session was last used this long
ago, any new session may evict it. If it was created this long ago, a new session with at least as
many partitions may evict it. Kafka's ``MIN_INCREMENTAL_FETCH_SESSION_EVICTION_MS``."""

TopicKey = str | UUID | None
"""A topic's name, or its id from version 13 on; kio represents the all-zero id as None."""
Key = tuple[TopicKey, int]


@dataclass(slots=True)
class CachedPartition:
    """A client's request for a partition, and, in a session, the state last sent to the client.

    Source: ``FetchSession.CachedPartition``.
    """

    key: Key
    offset: int
    max_bytes: int
    leader_epoch: int = -1
    """The leader epoch known to the client, −1 if it sends none."""
    last_epoch: int = -1
    """The epoch of the last record that the client has, −1 if it sends none."""
    replica_log_start: int = -1
    """A follower's log start offset; consumers send none."""
    high_watermark: int = -1
    log_start_offset: int = -1

    def renew(self, newer: CachedPartition) -> None:
        """Replace the request by ``newer``.

        If the client's leader epoch has changed, the next response contains the partition even if
        nothing else has: the client may have dropped its state, as followers do. (Kafka does not
        resend it to an idle follower.)
        """
        if newer.leader_epoch != self.leader_epoch:
            self.high_watermark = -1
        self.offset, self.max_bytes = newer.offset, newer.max_bytes
        self.replica_log_start = newer.replica_log_start
        self.leader_epoch, self.last_epoch = newer.leader_epoch, newer.last_epoch

    def learn(self, answer: FetchedPartition) -> bool:
        """Store the state sent to the client; return whether the response must contain it."""
        read = answer.read
        news = (
            len(read.records) > 0
            or read.high_watermark != self.high_watermark
            or read.log_start_offset != self.log_start_offset
            or answer.error is not None
            or answer.diverging is not None
            or answer.preferred_replica != NO_REPLICA
        )
        # After an error the high watermark counts as unknown, so that the next result without an
        # error is sent. A follower with a diverging log ignores the high watermark.
        is_lost = answer.error is not None or answer.diverging is not None
        self.high_watermark = -1 if is_lost else read.high_watermark
        self.log_start_offset = read.log_start_offset
        return news


NOTHING = LogReadInfo(b"", -1, -1, -1, None, is_behind=False)
"""The read of a refused partition."""


@dataclass(slots=True)
class FetchedPartition:
    """The result of a :class:`CachedPartition`."""

    requested: CachedPartition
    read: LogReadInfo = NOTHING
    partition: Partition | None = None
    """The partition, if it may receive more records for this fetch."""
    diverging: tuple[int, int] | None = None
    """Epoch and end offset at which the client's log diverges."""
    error: DomainError | None = None
    preferred_replica: int = NO_REPLICA
    """The replica that the client should read from."""
    seen: tuple[int, int] | None = None
    """Leader epoch and log end offset of a read without records."""


@dataclass(slots=True)
class FetchSession:
    """One client's partitions, in the order in which the next response serves them."""

    id: int
    by_topic_id: bool
    created_ms: int
    partitions: dict[Key, CachedPartition]
    epoch: int = 1
    """The epoch that the next request must have."""
    last_used_ms: int = 0

    def put(self, part: CachedPartition) -> int:
        """Add or replace a partition; return the number of added partitions."""
        existing = self.partitions.setdefault(part.key, part)
        if existing is part:
            return 1
        existing.renew(part)
        return 0

    def drop(self, key: Key) -> int:
        """Remove a partition; return the number of removed partitions."""
        return 0 if self.partitions.pop(key, None) is None else 1

    def is_news(self, answer: FetchedPartition) -> bool:
        """Return whether a result must be sent; move a partition with records to the end."""
        requested = answer.requested
        if not requested.learn(answer):
            return False
        if len(answer.read.records) and self.partitions.pop(requested.key, None) is not None:
            self.partitions[requested.key] = requested
        return True


class FetchSessions:
    """All open fetch sessions (``services.fetches.sessions``)."""

    def __init__(self, max_sessions: int, max_partitions: int = MAX_CACHED_PARTITIONS) -> None:
        self.max_sessions = max_sessions
        self.max_partitions = max_partitions
        self.partitions = 0
        """The number of partitions of all sessions together."""
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def resume(self, session_id: int, epoch: int, *, by_topic_id: bool) -> FetchSession:
        """Return the session that an incremental request belongs to.

        Raises FetchSessionIdNotFoundError, InvalidFetchSessionEpochError, FetchSessionTopicIdError.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise FetchSessionIdNotFoundError(f"there is no fetch session {session_id}")
        if session.epoch != epoch:
            raise InvalidFetchSessionEpochError(
                f"fetch session {session_id} is at epoch {session.epoch}, the request at {epoch}"
            )
        if session.by_topic_id is not by_topic_id:
            raise FetchSessionTopicIdError("names and ids of topics do not mix in a session")
        return session

    def advance(self, session: FetchSession, now_ms: int) -> None:
        """Begin an incremental request. Call :meth:`change` next."""
        session.epoch = 1 if session.epoch == _MAX_INT32 else session.epoch + 1
        session.last_used_ms = now_ms
        self._sessions.move_to_end(session.id)

    def change(
        self,
        session: FetchSession,
        requested: Iterable[CachedPartition],
        forgotten: Iterable[Key],
    ) -> Steps[None]:
        """Apply an incremental request's changes.

        Closes the session if it has no partitions left, or if all sessions together have too many.
        The response then contains session id 0, and the client starts with a full request.
        """
        for part in requested:
            self._count(session, session.put(part))
            yield
        for key in forgotten:
            self._count(session, -session.drop(key))
            yield
        if not session.partitions or self.partitions > self.max_partitions:
            self.close(session.id)

    def _count(self, session: FetchSession, more: int) -> None:
        """Add ``more`` to the partition count, unless the session was closed in the meantime."""
        if more and self.id_of(session) != NO_SESSION:
            self.partitions += more

    def id_of(self, session: FetchSession) -> int:
        """Return the session id for the response: 0 once the session is closed."""
        return session.id if self._sessions.get(session.id) is session else NO_SESSION

    def open(
        self,
        requested: list[CachedPartition],
        *,
        by_topic_id: bool,
        now_ms: int,
    ) -> int:
        """Open a session for a full request; return its id, or 0 if there is no room for it."""
        size = len(requested)
        while len(self._sessions) >= self.max_sessions or (
            self.partitions + size > self.max_partitions
        ):
            victim = self._victim(size, now_ms)
            if victim is None:
                return NO_SESSION
            self.close(victim.id)
        session = FetchSession(
            id=self._new_id(),
            by_topic_id=by_topic_id,
            created_ms=now_ms,
            partitions={partition.key: partition for partition in requested},
            last_used_ms=now_ms,
        )
        self._sessions[session.id] = session
        self.partitions += len(session.partitions)
        return session.id

    def close(self, session_id: int) -> None:
        """Close a session; an unknown id is ignored."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.partitions -= len(session.partitions)

    def _new_id(self) -> int:
        while True:
            session_id = 1 + secrets.randbelow(_MAX_INT32 - 1)
            if session_id not in self._sessions:
                return session_id

    def _victim(self, size: int, now_ms: int) -> FetchSession | None:
        """Return a session that a new one of ``size`` partitions may evict, or None.

        It is an unused session, or an old one with at most ``size`` partitions.
        """
        if not self._sessions:
            return None
        oldest = next(iter(self._sessions.values()))
        if now_ms - oldest.last_used_ms > EVICTION_MS:
            return oldest
        old_enough = (
            session
            for session in self._sessions.values()
            if now_ms - session.created_ms > EVICTION_MS
        )
        least = min(old_enough, key=lambda session: len(session.partitions), default=None)
        return None if least is None or size < len(least.partitions) else least
