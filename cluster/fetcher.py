"""One fetcher: what a broker fetches from one leader over one connection.

Partitions take turns, one request is in flight, and an incremental fetch session (KIP-227) has each
request name only what has changed.

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
    PartitionAnswer,
    PartitionFetch,
    PartitionFollower,
)
from fencepost.logcore.values import dataclass

Key = tuple[UUID, int]
"""A partition: topic id and index."""

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
"""Full request that asks for a session."""
MAX_EPOCH: Final = 2**31 - 1

SESSION_ERRORS: Final = (Errors.FETCH_SESSION_ID_NOT_FOUND, Errors.INVALID_FETCH_SESSION_EPOCH)
"""The leader has lost the session. (FETCH_SESSION_TOPIC_ID_ERROR is none of them: metadata have to
arrive first.)"""


def fetcher_id(topic_hash: int, index: int, fetchers: int) -> int:
    """Which of the ``num.replica.fetchers`` of a leader fetches a partition.

    ``topic_hash`` is ``String.hashCode`` of the topic's name, from −2³¹ to 2³¹−1.
    """
    spread = (31 * topic_hash + index) & 0xFFFFFFFF
    return (0 if spread == 0x80000000 else min(spread, 2**32 - spread)) % fetchers


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """What a Fetch request has to say of its session and its partitions."""

    session_id: int
    session_epoch: int
    partitions: tuple[PartitionFetch, ...]
    """New or changed ones; all of them in a full request."""
    forgotten: tuple[Key, ...]
    """No longer wanted in the session."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class FetchAnswer:
    """What a Fetch answer says."""

    error: int = Errors.NONE
    session_id: int = NO_SESSION
    partitions: Mapping[Key, PartitionAnswer] = field(default_factory=dict)


class FetchSession:
    """The follower's side of a fetch session (kafka: ``FetchSessionHandler``)."""

    def __init__(self) -> None:
        self.session_id = NO_SESSION
        self.epoch = INITIAL_EPOCH
        self.partitions: dict[Key, PartitionFetch] = {}
        """What the leader has been told."""

    @property
    def is_full(self) -> bool:
        """Whether the next request names every partition."""
        return self.epoch == INITIAL_EPOCH

    def build(self, wanted: Mapping[Key, PartitionFetch]) -> FetchRequest:
        """The next request for what is wanted, in that order."""
        forgotten: tuple[Key, ...] = ()
        if self.is_full:
            send = tuple(wanted.values())
        else:
            known = self.partitions
            send = tuple(one for key, one in wanted.items() if known.get(key) != one)
            forgotten = tuple(key for key in known if key not in wanted)
        self.partitions = dict(wanted)
        return FetchRequest(self.session_id, self.epoch, send, forgotten, self.is_full)

    def handle(self, answer: FetchAnswer) -> bool:
        """Take note of an answer; False where nothing in it may be used."""
        if answer.error != Errors.NONE:
            if answer.error == Errors.FETCH_SESSION_ID_NOT_FOUND:
                self._forget()
            else:
                self.close()
            return False
        told = answer.partitions
        strange = any(key not in self.partitions for key in told)
        if self.is_full:
            if strange or len(told) != len(self.partitions):
                self._forget()
                return False
            self.session_id = answer.session_id
            self.epoch = INITIAL_EPOCH if answer.session_id == NO_SESSION else 1
        elif strange:
            self.close()
            return False
        elif answer.session_id == NO_SESSION:
            self._forget()
        else:
            self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1
        return True

    def close(self) -> None:
        """Have the next request end the session, if there is one, and ask for a new one."""
        self.epoch = INITIAL_EPOCH

    def _forget(self) -> None:
        self.session_id, self.epoch = NO_SESSION, INITIAL_EPOCH


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """What an answer meant for one partition."""

    follower: PartitionFollower
    sent: PartitionFetch
    answer: PartitionAnswer
    step: FollowerStep


class LeaderFetcher:
    """The partitions that one fetcher fetches from one leader."""

    def __init__(self, leader: int, fetcher: int = 0) -> None:
        self.leader, self.fetcher = leader, fetcher
        self.session = FetchSession()
        self.in_flight: FetchRequest | None = None
        self._followers: dict[Key, PartitionFollower] = {}
        """In the order in which they are asked for: who got records goes to the end."""

    def __len__(self) -> int:
        return len(self._followers)

    def __contains__(self, key: Key) -> bool:
        return key in self._followers

    @property
    def followers(self) -> tuple[PartitionFollower, ...]:
        """All of them."""
        return tuple(self._followers.values())

    def add(self, follower: PartitionFollower) -> None:
        """Fetch a partition too."""
        self._followers[follower.key] = follower

    def remove(self, key: Key) -> PartitionFollower | None:
        """Fetch it no longer; the session forgets it with the next request."""
        return self._followers.pop(key, None)

    def next_request(
        self, now_ms: int, is_throttled: Callable[[PartitionFollower], bool] | None = None
    ) -> FetchRequest | None:
        """The request to send now, in flight from then on.

        None while one is in flight, or while nothing can be fetched: :meth:`wake_at` says when to
        try again. ``is_throttled`` is asked for replicas that lag: whether the quota is exceeded
        and they count for it.
        """
        if self.in_flight is not None:
            return None
        wanted: dict[Key, PartitionFetch] = {}
        for key, follower in self._followers.items():
            fetch = follower.fetch(now_ms)
            if fetch is not None and not (
                is_throttled is not None and not follower.is_in_sync and is_throttled(follower)
            ):
                wanted[key] = fetch
        if not wanted and (self.session.is_full or not self.session.partitions):
            return None
        self.in_flight = self.session.build(wanted)
        return self.in_flight

    def wake_at(self) -> int | None:
        """When the first delayed partition is ready again, None if none is delayed."""
        return min(
            (
                one.delayed_until_ms
                for one in self._followers.values()
                if one.state is FetchState.DELAYED and one.delayed_until_ms is not None
            ),
            default=None,
        )

    def answered(self, answer: FetchAnswer, now_ms: int) -> tuple[PartitionResult, ...]:
        """The answer to the request in flight: what it means for each partition in it.

        What it says of the logs has to be done before the next request is built. Where the session
        is at fault all is asked for anew at once; after any other answer that cannot be used, the
        partitions wait for the backoff.
        """
        if self.in_flight is None:
            return ()
        self.in_flight = None
        asked = self.session.partitions
        if not self.session.handle(answer):
            if answer.error not in SESSION_ERRORS:
                self._delay_all(now_ms)
            return ()
        results = []
        for key, part in answer.partitions.items():
            follower, sent = self._followers.get(key), asked[key]
            if follower is None:
                continue
            if part.size:
                self._followers[key] = self._followers.pop(key)
            step = follower.answered(sent, part, now_ms)
            results.append(PartitionResult(follower, sent, part, step))
        return tuple(results)

    def failed(self, now_ms: int) -> None:
        """The request in flight got no answer: all partitions wait for the backoff."""
        self.in_flight = None
        self.session.close()
        self._delay_all(now_ms)

    def _delay_all(self, now_ms: int) -> None:
        for follower in self._followers.values():
            follower.delay(now_ms)
