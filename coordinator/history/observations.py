"""Observations of clients for ``fencepost doctor``: which of their requests concern exactly-once.

The broker draws no conclusions: it records each observation in the history, once per
:data:`RENEWAL_MS`, and the command compares the entries of all brokers. For a topic that was
observed already, a Produce or Fetch request of the same kind costs one lookup. Nothing is recorded
before the cluster has transactions: when the topic ``__transaction_state`` is created, the
observations since the last renewal are recorded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Final, Protocol

from fencepost.coordinator.history.entries import CLIENT, Observed
from fencepost.coordinator.metadata.names import TRANSACTION_STATE, is_internal
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.runtime.background import call_later
from fencepost.coordinator.runtime.origin import Origin, origin_of
from fencepost.logcore.clock import Clock
from fencepost.logcore.machine import Event
from fencepost.logcore.values import dataclass

if TYPE_CHECKING:
    from fencepost.coordinator.metadata.metadata import Metadata

RENEWAL_MS: Final = 600_000
"""Interval after which an observation is recorded again if the client still does the same."""

RHYTHM_COMMITS: Final = 5
"""How many commits of a member at equal intervals indicate a timer, either the auto-commit timer or
a timer of the application."""

RHYTHM_MIN_MS: Final = 150
"""The minimum interval that indicates a timer: without pauses, a poll loop may also commit at equal
intervals, which are shorter."""

RHYTHM_TOLERANCE: Final = 0.2
"""The greatest deviation of an interval from the mean, as a fraction of the mean."""

LONG_TRANSACTION: Final = 0.8
"""The fraction of the transaction timeout from which a transaction's duration is recorded."""

MAX_JUDGED_COMMITS: Final = 100
"""The maximum number of commits of a member that are timed."""

_LAST_TV1_END_TXN: Final = 4

Record = Callable[[str, str, Event, Origin | None, str | None], None]
"""``HistoryRecorder.remember``."""


class CommittedOffset(Protocol):
    """An offset in an OffsetCommit request."""

    @property
    def topic(self) -> str: ...  # noqa: D102
    @property
    def partition(self) -> int: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class ObservationLimits:
    """Limits on the memory of the observations, and on what they add to the history."""

    max_observations: int = 2_000
    """The maximum number of observations per :data:`RENEWAL_MS`, about 1 MiB. Further observations
    are counted and dropped."""

    max_known: int = 10_000
    """The maximum number of observed pairs of client and topic, about 2 MiB. At the limit, all
    pairs are forgotten."""

    max_members: int = 2_000
    """The maximum number of members whose commits are timed. At the limit, all recorded times are
    dropped."""


@dataclass(slots=True)
class _Commits:
    """The commits of one member outside of transactions."""

    topics: set[str] = field(default_factory=set)
    """The topics whose commits are recorded."""
    count: int = 0
    times_ms: list[int] = field(default_factory=list)
    """The times of the last commits, until they are judged."""
    offsets: int = 0
    """A hash of the last committed offsets."""
    repeats: list[bool] = field(default_factory=list)
    """For each of the times, whether the commit had the same offsets as the one before."""
    is_judged: bool = False


class ClientObservations:
    """Records observations of clients through ``record``; bound to the running event loop."""

    def __init__(
        self,
        record: Record,
        metadata: Metadata,
        clock: Clock,
        *,
        broker: int,
        limits: ObservationLimits | None = None,
    ) -> None:
        self.limits = ObservationLimits() if limits is None else limits
        self._record, self._metadata, self._clock = record, metadata, clock
        self._shard = f"broker {broker}"
        self._loop = asyncio.get_running_loop()
        self._known_keys: set[Hashable] = set()
        self._recorded: set[Hashable] = set()
        """The observations since the last renewal."""
        self._waiting: list[tuple[Event, Origin, str]] = []
        """Observations from before the first transaction of the cluster."""
        self._members: dict[Hashable, _Commits] = {}
        self._groups: set[str] = set()
        """Groups whose offsets were committed in transactions."""
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._records = metadata.topic(TRANSACTION_STATE) is not None
        if not self._records:
            metadata.subscribe(Subscriber.OBSERVATIONS, self._published)

    def stop(self) -> None:
        """Cancel the next renewal; requests must not be observed afterwards."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- requests for records: the hot path, where a known topic costs one lookup ---

    def produced(
        self,
        client_id: str | None,
        host: str,
        transactional_id: str | None,
        acks: int,
        topics: Sequence[str | None],
    ) -> None:
        """Observe a Produce request for ``topics``, which may contain repetitions."""
        for topic in topics if len(topics) == 1 else set(topics):
            key = (client_id, host, transactional_id, acks, topic)
            if topic is None or key in self._known_keys:
                continue
            self._remember(key)
            self._observe(
                Observed.PRODUCED,
                origin_of(client_id, host),
                "Produce",
                topic=topic,
                transactional_id=transactional_id,
                acks=acks,
            )

    def fetched(
        self,
        client_id: str | None,
        host: str,
        isolation_level: int,
        topics: Sequence[Hashable],
        name_of: Callable[[Hashable], str | None],
    ) -> None:
        """Observe a consumer's Fetch request; ``name_of`` returns the name of a readable topic."""
        for topic in topics:
            key = (client_id, host, isolation_level, topic)
            if key in self._known_keys:
                continue
            name = name_of(topic)
            if name is None:
                # The topic may be created or become readable later, and clients can name any topic.
                continue
            self._remember(key)
            if not is_internal(name):
                self._observe(
                    Observed.FETCHED,
                    origin_of(client_id, host),
                    "Fetch",
                    topic=name,
                    isolation_level="read_committed" if isolation_level else "read_uncommitted",
                )

    # --- requests to coordinators ---

    def joined(self, origin: Origin, group: str, api: str) -> None:
        """Observe a client that joins a group."""
        self._observe(Observed.GROUP_JOINED, origin, api, group=group)

    def committed(
        self,
        origin: Origin,
        group: str,
        member_id: str,
        generation: int,
        offsets: Sequence[CommittedOffset],
    ) -> None:
        """Observe an OffsetCommit request; ignore one without a member id."""
        if not member_id or generation < 0:
            return
        key = (origin, group, member_id)
        commits = self._members.get(key)
        if commits is None:
            if len(self._members) >= self.limits.max_members:
                self._members.clear()
            commits = self._members[key] = _Commits()
        for commit in offsets:
            topic = commit.topic
            if topic not in commits.topics:
                commits.topics.add(topic)
                self._observe(
                    Observed.OFFSETS_COMMITTED,
                    origin,
                    "OffsetCommit",
                    topic=topic,
                    group=group,
                    member=member_id,
                    generation=generation,
                    beside_transactions=group in self._groups,
                )
        if not commits.is_judged:
            now = hash(tuple((offset.topic, offset.partition, offset.offset) for offset in offsets))
            self._judge(commits, now, origin, group, member_id)

    def _judge(
        self, commits: _Commits, offsets: int, origin: Origin, group: str, member_id: str
    ) -> None:
        """Record that a member commits by a timer, once its last commits have equal intervals.

        The auto-commit of most clients commits even if nothing was read since the last commit. An
        application that commits the records it has processed has no reason to do so. Repeated
        offsets therefore distinguish auto-commit from a timer of the application.
        """
        commits.count += 1
        commits.times_ms.append(self._clock.monotonic_ms())
        commits.repeats.append(commits.count > 1 and offsets == commits.offsets)
        commits.offsets = offsets
        interval_ms, repeats = rhythm_of(commits.times_ms), any(commits.repeats)
        if interval_ms is not None:
            self._observe(
                Observed.OFFSETS_COMMITTED_BY_TIMER,
                origin,
                "OffsetCommit",
                but=("interval_ms", "member"),
                group=group,
                member=member_id,
                interval_ms=interval_ms,
                repeats=repeats,
            )
        if (interval_ms is not None and repeats) or commits.count >= MAX_JUDGED_COMMITS:
            commits.is_judged = True
            commits.times_ms.clear()
            commits.repeats.clear()
        elif len(commits.times_ms) == RHYTHM_COMMITS:
            del commits.times_ms[0], commits.repeats[0]

    def added_offsets(
        self,
        origin: Origin,
        transactional_id: str,
        group: str,
        *,
        member_id: str,
        generation: int,
        version: int,
        topics: Iterable[str],
    ) -> None:
        """Observe a TxnOffsetCommit request."""
        if group not in self._groups and len(self._groups) < self.limits.max_known:
            self._groups.add(group)
            # From now on, a commit outside of a transaction is a different observation.
            self._members.clear()
        for topic in topics:
            self._observe(
                Observed.OFFSETS_ADDED_TO_TRANSACTION,
                origin,
                "TxnOffsetCommit",
                but=("member", "generation"),
                topic=topic,
                group=group,
                transactional_id=transactional_id,
                by_member=bool(member_id) and generation >= 0,
                member=member_id,
                generation=generation,
                version=version,
            )

    def ended(
        self,
        origin: Origin,
        transactional_id: str,
        version: int,
        *,
        open_ms: int = 0,
        timeout_ms: int = 0,
    ) -> None:
        """Observe an EndTxn request that succeeded."""
        self._observe(
            Observed.TRANSACTION_ENDED,
            origin,
            "EndTxn",
            transactional_id=transactional_id,
            version=version,
            transaction_version=1 if version <= _LAST_TV1_END_TXN else 2,
        )
        if open_ms and open_ms >= LONG_TRANSACTION * timeout_ms:
            self._observe(
                Observed.TRANSACTION_NEARLY_TIMED_OUT,
                origin,
                "EndTxn",
                but=("open_ms",),
                transactional_id=transactional_id,
                open_ms=open_ms,
                transaction_timeout_ms=timeout_ms,
            )

    def refused_timeout(self, origin: Origin, transactional_id: str, timeout_ms: int) -> None:
        """Observe an InitProducerId request whose timeout is above the broker's maximum."""
        self._observe(
            Observed.TRANSACTION_TIMEOUT_REFUSED,
            origin,
            "InitProducerId",
            transactional_id=transactional_id,
            transaction_timeout_ms=timeout_ms,
        )

    # --- recording ---

    def _remember(self, key: Hashable) -> None:
        if len(self._known_keys) >= self.limits.max_known:
            self._known_keys.clear()
        self._known_keys.add(key)

    def _observe(
        self,
        kind: Observed,
        origin: Origin,
        api: str,
        *,
        but: Sequence[str] = (),
        **detail: object,
    ) -> None:
        """Record an observation once per renewal.

        Observations that differ only in the details named in ``but`` count as equal.
        """
        observation = (kind, origin, *(value for name, value in detail.items() if name not in but))
        if observation in self._recorded:
            return
        if len(self._recorded) >= self.limits.max_observations:
            self._dropped += 1
            return
        self._recorded.add(observation)
        if self._timer is None:
            self._timer = call_later(self._loop, RENEWAL_MS, "observations", self.renew)
        event = Event(str(kind), origin.client_id or "", detail, quiet=True)
        if self._records:
            self._record(CLIENT, self._shard, event, origin, f"request {api}")
        else:
            self._waiting.append((event, origin, f"request {api}"))

    def renew(self) -> None:
        """Forget all observations, so that later ones are recorded again.

        If the limit has caused observations to be dropped, record their number.
        """
        self._timer = None
        if self._dropped and self._records:
            event = Event(str(Observed.OBSERVATIONS_DROPPED), "", {"count": self._dropped})
            self._record(CLIENT, self._shard, event, None, "upkeep observations")
        self._dropped = 0
        for table in (self._known_keys, self._recorded, self._members, self._waiting):
            table.clear()

    def _published(self, _old: object, _new: object) -> None:
        """Record the waiting observations once the cluster has transactions."""
        if self._records or self._metadata.topic(TRANSACTION_STATE) is None:
            return
        self._records = True
        waiting, self._waiting = self._waiting, []
        for event, origin, trigger in waiting:
            self._record(CLIENT, self._shard, event, origin, trigger)


def rhythm_of(times_ms: Sequence[int]) -> int | None:
    """Return the mean interval if there are enough times at equal intervals, else None."""
    if len(times_ms) < RHYTHM_COMMITS:
        return None
    intervals = [later - former for former, later in itertools.pairwise(times_ms)]
    mean = sum(intervals) / len(intervals)
    if mean < RHYTHM_MIN_MS:
        return None
    is_steady = all(abs(interval - mean) <= RHYTHM_TOLERANCE * mean for interval in intervals)
    return round(mean) if is_steady else None
