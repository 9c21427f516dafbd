"""One fetcher: the partitions that a broker fetches from one leader over one connection.

At most one request is in flight. A partition that received records moves to the end of the next
request. With an incremental fetch session (KIP-227), a request names only the partitions that have
changed.

Source: ``AbstractFetcherThread.maybeFetch``, ``RemoteLeaderEndPoint.buildFetch``,
``FetchSessionHandler``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Final
from uuid import UUID

from fencepost.cluster.errors import Errors
from fencepost.cluster.follower import (
    FetchState,
    FollowerStep,
    PartitionFetch,
    PartitionFollower,
    PartitionResponse,
)
from fencepost.logcore.values import dataclass

Key = tuple[UUID, int]
"""A partition: topic id and index."""

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
"""The session epoch of a full request, which asks for a new session."""
MAX_EPOCH: Final = 2**31 - 1

SESSION_ERRORS: Final = (Errors.FETCH_SESSION_ID_NOT_FOUND, Errors.INVALID_FETCH_SESSION_EPOCH)
"""The errors of a leader that has lost the session: a full request may follow at once.
FETCH_SESSION_TOPIC_ID_ERROR is not one of them, because newer metadata must arrive first."""


def fetcher_id(topic_hash: int, index: int, fetchers: int) -> int:
    """Return the number of the fetcher that fetches a partition from its leader.

    ``topic_hash`` is ``String.hashCode`` of the topic's name, from −2³¹ to 2³¹−1.
    """
    spread = (31 * topic_hash + index) & 0xFFFFFFFF
    return (0 if spread == 0x80000000 else min(spread, 2**32 - spread)) % fetchers


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """The session and the partitions of a Fetch request."""

    session_id: int
    session_epoch: int
    partitions: tuple[PartitionFetch, ...]
    """New or changed partitions; all partitions in a full request."""
    forgotten: tuple[Key, ...]
    """Partitions to remove from the session."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class FetchResponse:
    """The session and the partitions of a Fetch response."""

    error: int = Errors.NONE
    session_id: int = NO_SESSION
    partitions: Mapping[Key, PartitionResponse] = field(default_factory=dict)


class FetchSessionHandler:
    """The follower's side of a fetch session (kafka: ``FetchSessionHandler``)."""

    def __init__(self) -> None:
        self.session_id = NO_SESSION
        self.epoch = INITIAL_EPOCH
        self.partitions: dict[Key, PartitionFetch] = {}
        """The partitions as the leader knows them from requests."""

    @property
    def is_full(self) -> bool:
        """Whether the next request names every partition."""
        return self.epoch == INITIAL_EPOCH

    def build(self, partitions: Mapping[Key, PartitionFetch]) -> FetchRequest:
        """Build the next request for ``partitions``, in their order."""
        forgotten: tuple[Key, ...] = ()
        if self.is_full:
            send = tuple(partitions.values())
        else:
            in_session = self.partitions
            send = tuple(
                partition
                for key, partition in partitions.items()
                if in_session.get(key) != partition
            )
            forgotten = tuple(key for key in in_session if key not in partitions)
        self.partitions = dict(partitions)
        return FetchRequest(self.session_id, self.epoch, send, forgotten, self.is_full)

    def handle(self, answer: FetchResponse) -> bool:
        """Update the session from an answer; return whether the answer's partitions may be used."""
        if answer.error != Errors.NONE:
            if answer.error == Errors.FETCH_SESSION_ID_NOT_FOUND:
                self._reset_session()
            else:
                self.close()
            return False
        partitions = answer.partitions
        unexpected = any(key not in self.partitions for key in partitions)
        if self.is_full:
            if unexpected or len(partitions) != len(self.partitions):
                self._reset_session()
                return False
            self.session_id = answer.session_id
            self.epoch = INITIAL_EPOCH if answer.session_id == NO_SESSION else 1
        elif unexpected:
            self.close()
            return False
        elif answer.session_id == NO_SESSION:
            self._reset_session()
        else:
            self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1
        return True

    def close(self) -> None:
        """Make the next request end any open session, and ask for a new session."""
        self.epoch = INITIAL_EPOCH

    def _reset_session(self) -> None:
        self.session_id, self.epoch = NO_SESSION, INITIAL_EPOCH


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """A partition's request and answer, and the step that follows from them."""

    follower: PartitionFollower
    sent: PartitionFetch
    answer: PartitionResponse
    step: FollowerStep


class LeaderFetcher:
    """The partitions that one fetcher fetches from one leader."""

    def __init__(self, leader: int, fetcher: int = 0) -> None:
        self.leader, self.fetcher = leader, fetcher
        self.session = FetchSessionHandler()
        self.in_flight: FetchRequest | None = None
        self._followers: dict[Key, PartitionFollower] = {}
        """In request order: a partition that received records moves to the end."""

    def __len__(self) -> int:
        return len(self._followers)

    def __contains__(self, key: Key) -> bool:
        return key in self._followers

    @property
    def followers(self) -> tuple[PartitionFollower, ...]:
        """The followed partitions, in request order."""
        return tuple(self._followers.values())

    def add(self, follower: PartitionFollower) -> None:
        """Add a partition to fetch."""
        self._followers[follower.key] = follower

    def remove(self, key: Key) -> PartitionFollower | None:
        """Stop fetching a partition; the next request removes it from the session."""
        return self._followers.pop(key, None)

    def next_request(
        self, now_ms: int, is_throttled: Callable[[PartitionFollower], bool] | None = None
    ) -> FetchRequest | None:
        """Return the request to send now, and mark it as in flight.

        Returns None while a request is in flight or no partition can be fetched; :meth:`wake_at`
        gives the time to try again. ``is_throttled`` is called for lagging replicas and returns
        whether the replication quota throttles them.
        """
        if self.in_flight is not None:
            return None
        partitions: dict[Key, PartitionFetch] = {}
        for key, follower in self._followers.items():
            fetch = follower.fetch(now_ms)
            if fetch is not None and not (
                is_throttled is not None and not follower.is_in_sync and is_throttled(follower)
            ):
                partitions[key] = fetch
        if not partitions and (self.session.is_full or not self.session.partitions):
            return None
        self.in_flight = self.session.build(partitions)
        return self.in_flight

    def wake_at(self) -> int | None:
        """Return when the first delayed partition is ready again, None if none is delayed."""
        return min(
            (
                follower.delayed_until_ms
                for follower in self._followers.values()
                if follower.state is FetchState.DELAYED and follower.delayed_until_ms is not None
            ),
            default=None,
        )

    def on_answer(self, answer: FetchResponse, now_ms: int) -> tuple[PartitionResult, ...]:
        """Handle the answer to the request in flight; return the result for each partition in it.

        The caller must carry out the steps before it builds the next request. After a session
        error, a full request follows at once; after any other unusable answer, the partitions wait
        for the backoff.
        """
        if self.in_flight is None:
            return ()
        self.in_flight = None
        requested = self.session.partitions
        if not self.session.handle(answer):
            if answer.error not in SESSION_ERRORS:
                self._delay_all(now_ms)
            return ()
        results = []
        for key, part in answer.partitions.items():
            follower, sent = self._followers.get(key), requested[key]
            if follower is None:
                continue
            if part.size:
                self._followers[key] = self._followers.pop(key)
            step = follower.on_answer(sent, part, now_ms)
            results.append(PartitionResult(follower, sent, part, step))
        return tuple(results)

    def on_failure(self, now_ms: int) -> None:
        """Handle a request that got no answer: all partitions wait for the backoff."""
        self.in_flight = None
        self.session.close()
        self._delay_all(now_ms)

    def _delay_all(self, now_ms: int) -> None:
        for follower in self._followers.values():
            follower.delay(now_ms)
