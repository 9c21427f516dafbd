"""Share sessions: the partitions that a member fetches from this broker, and its request epochs.

A member has one session per broker, which ShareFetch and ShareAcknowledge requests share. The epoch
rises before a request is processed, so only one of two requests with the same epoch is served. The
acquisition locks of a replaced session remain; when a session ends, its locks are released.

Source: Kafka's ``ShareSession``, ``ShareSessionCache``, ``SharePartitionManager.newContext`` and
``acknowledgeSessionUpdate``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from fencepost.groups.share.errors import (
    InvalidShareRequestError,
    InvalidShareSessionEpochError,
    ShareSessionLimitReachedError,
    ShareSessionNotFoundError,
)
from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
MAX_EPOCH: Final = 2**31 - 1

MAX_SESSION_PARTITIONS: Final = 10_000
"""The maximum number of partitions in a session; a fetch checks each of them. Kafka has no
limit."""
MAX_PARTITIONS: Final = 1_000_000
"""The maximum number of partitions in all sessions of a broker, which take about 150 MB. Kafka has
no limit."""

NOT_FOUND: Final = "The share session was not found."
WRONG_EPOCH: Final = "The share session epoch is invalid."
LIMIT_REACHED: Final = "The limit of share sessions has been reached."
TOO_MANY: Final = f"A share session has at most {MAX_SESSION_PARTITIONS} partitions."


class SessionKey(NamedTuple):
    """The identity of a session."""

    group_id: str
    member_id: str


class TopicPartition(NamedTuple):
    """A partition in a session."""

    topic_id: bytes
    partition: int


@dataclass(slots=True)
class ShareSession:
    """One session. Partitions that returned records move to the end of the order."""

    key: SessionKey
    connection_id: str
    epoch: int
    """The epoch that the next request must have."""
    partitions: dict[TopicPartition, bool]
    """Partition → whether the next response must contain it, because it was added."""

    def update(
        self, additions: Iterable[TopicPartition], forgotten: Iterable[TopicPartition]
    ) -> None:
        """Add partitions, then remove others: a partition in both lists is removed."""
        for partition in additions:
            self.partitions.setdefault(partition, True)
        for partition in forgotten:
            self.partitions.pop(partition, None)

    def include(self, partition: TopicPartition, *, has_records: bool, has_error: bool) -> bool:
        """Return whether the response contains a fetched partition, and prepare the next response.

        Do not call this for the response that opens the session: it contains all partitions.
        """
        is_due = self.partitions.get(partition)
        if is_due is not None:
            if has_records:
                del self.partitions[partition]
            # After an error, the next response reports the partition again.
            self.partitions[partition] = has_error
        return bool(is_due) or has_records or has_error


def next_epoch(epoch: int) -> int:
    """Return the epoch after a request with ``epoch``."""
    return 1 if epoch == MAX_EPOCH else epoch + 1


def rotated(partitions: list[TopicPartition], epoch: int) -> list[TopicPartition]:
    """Return the order in which a fetch reads partitions. The first partition changes each time.

    Source: ``PartitionRotateStrategy``.
    """
    if not partitions or epoch < 1:
        return partitions
    start = epoch % len(partitions)
    return partitions[start:] + partitions[:start]


class ShareSessions:
    """The sessions of a broker, at most ``max_sessions`` (``group.share.max.share.sessions``)."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._sessions: dict[SessionKey, ShareSession] = {}
        self._of_connection: dict[str, set[SessionKey]] = {}
        """Every session that was opened on a connection, even if it has ended since."""
        self._group_sizes: dict[str, int] = {}
        self.partition_count = 0
        """The number of partitions in all sessions."""
        self.evictions = 0
        """The number of sessions that ended with their connections: ShareSessionEvictionsPerSec."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey) -> ShareSession | None:
        """Return a session."""
        return self._sessions.get(key)

    def has_group(self, group_id: str) -> bool:
        """Return whether a member of a group has a session."""
        return group_id in self._group_sizes

    def fetch(
        self,
        key: SessionKey,
        epoch: int,
        connection_id: str,
        *,
        additions: Collection[TopicPartition] = (),
        forgotten: Iterable[TopicPartition] = (),
        has_acknowledgements: bool = False,
    ) -> ShareSession:
        """Begin a ShareFetch. Epoch 0 opens a session; after epoch -1, call :meth:`end` as well.

        The caller should delay the answer SHARE_SESSION_LIMIT_REACHED by MaxWaitMs, because clients
        try again at once.
        """
        if epoch == INITIAL_EPOCH:
            if has_acknowledgements:
                raise InvalidShareRequestError("Acknowledgements in the first request of a session")
            self._remove(key)
            return self._open(key, connection_id, additions)
        session = self._expect(key, epoch)
        if epoch != FINAL_EPOCH:
            size = len(session.partitions)
            self._check_room(session.partitions, additions)
            session.update(additions, forgotten)
            self.partition_count += len(session.partitions) - size
            session.epoch = next_epoch(session.epoch)
        return session

    def _check_room(
        self, partitions: Mapping[TopicPartition, bool], additions: Iterable[TopicPartition]
    ) -> None:
        """Raise an error if a session of ``partitions`` has no room for ``additions``."""
        count = len({addition for addition in additions if addition not in partitions})
        if len(partitions) + count > MAX_SESSION_PARTITIONS:
            raise InvalidShareRequestError(TOO_MANY)
        if self.partition_count + count > MAX_PARTITIONS:
            raise ShareSessionLimitReachedError(LIMIT_REACHED)

    def acknowledge(self, key: SessionKey, epoch: int) -> ShareSession:
        """Begin a ShareAcknowledge; it cannot open a session."""
        if epoch == INITIAL_EPOCH:
            raise InvalidShareSessionEpochError(WRONG_EPOCH)
        session = self._expect(key, epoch)
        if epoch != FINAL_EPOCH:
            session.epoch = next_epoch(session.epoch)
        return session

    def end(self, key: SessionKey) -> list[TopicPartition]:
        """End a session; return the partitions whose acquired records must be released."""
        session = self._remove(key)
        if session is None:
            raise ShareSessionNotFoundError(NOT_FOUND)
        return list(session.partitions)

    def connection_closed(self, connection_id: str) -> ConnectionEnd:
        """End the sessions of a closed connection.

        A session that its member has opened again on another connection stays (KAFKA-19950).
        """
        ended: dict[SessionKey, list[TopicPartition]] = {}
        keys = self._of_connection.pop(connection_id, set())
        for key in sorted(keys):
            session = self._sessions.get(key)
            if session is not None and session.connection_id == connection_id:
                self._remove(key)
                self.evictions += 1
                ended[key] = list(session.partitions)
        groups = {key.group_id for key in keys} - self._group_sizes.keys()
        return ConnectionEnd(ended, frozenset(groups))

    def clear(self) -> None:
        """Forget all sessions: the feature ``share.version`` was set to 0."""
        self._sessions.clear()
        self._of_connection.clear()
        self._group_sizes.clear()
        self.partition_count = 0

    def _expect(self, key: SessionKey, epoch: int) -> ShareSession:
        session = self._sessions.get(key)
        if session is None:
            raise ShareSessionNotFoundError(NOT_FOUND)
        if epoch not in (FINAL_EPOCH, session.epoch):
            raise InvalidShareSessionEpochError(WRONG_EPOCH)
        return session

    def _open(
        self, key: SessionKey, connection_id: str, partitions: Collection[TopicPartition]
    ) -> ShareSession:
        if len(self._sessions) >= self.max_sessions:
            raise ShareSessionLimitReachedError(LIMIT_REACHED)
        self._check_room({}, partitions)
        session = ShareSession(
            key, connection_id, next_epoch(INITIAL_EPOCH), dict.fromkeys(partitions, False)
        )
        self._sessions[key] = session
        self.partition_count += len(session.partitions)
        self._of_connection.setdefault(connection_id, set()).add(key)
        self._group_sizes[key.group_id] = self._group_sizes.get(key.group_id, 0) + 1
        return session

    def _remove(self, key: SessionKey) -> ShareSession | None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.partition_count -= len(session.partitions)
            size = self._group_sizes.pop(key.group_id) - 1
            if size:
                self._group_sizes[key.group_id] = size
        return session

    def check(self) -> None:
        """Raise InvariantViolation unless the tables agree."""
        sizes: dict[str, int] = {}
        for key, session in self._sessions.items():
            sizes[key.group_id] = sizes.get(key.group_id, 0) + 1
            if session.key != key or not 1 <= session.epoch <= MAX_EPOCH:
                raise InvariantViolation(f"{key}: {session}")
            if key not in self._of_connection.get(session.connection_id, ()):
                raise InvariantViolation(f"{key} does not end with its connection")
        if sizes != self._group_sizes:
            raise InvariantViolation(f"sessions of groups: {sizes}, not {self._group_sizes}")
        count = sum(len(session.partitions) for session in self._sessions.values())
        if count != self.partition_count:
            raise InvariantViolation(f"{count} partitions, not {self.partition_count}")
        if len(self._sessions) > self.max_sessions:
            raise InvariantViolation(f"{len(self._sessions)} sessions")


class ConnectionEnd(NamedTuple):
    """The consequences of a closed connection."""

    ended: dict[SessionKey, list[TopicPartition]]
    """Ended sessions, with the partitions whose acquired records must be released."""
    emptied_groups: frozenset[str]
    """Groups without any session: their share partitions must be fenced and dropped."""
