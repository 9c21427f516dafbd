"""Collects what one decision wants done, in the order in which it was wanted."""

from __future__ import annotations

from collections.abc import Hashable
from enum import StrEnum

from fencepost.logcore.machine import Decision, Event, ProducerStamp, Record, Reply, Timer, Token


class EventKind(StrEnum):
    """The causes that are remembered; the subject of each event is the group id."""

    GROUP_CREATED = "group_created"
    GROUP_DELETED = "group_deleted"
    GROUP_UPGRADED = "group_upgraded"
    GROUP_DOWNGRADED = "group_downgraded"
    REBALANCE_STARTED = "rebalance_started"
    GENERATION_STARTED = "generation_started"
    ASSIGNMENT_REFUSED = "assignment_refused"
    MEMBER_JOINED = "member_joined"
    MEMBER_LEFT = "member_left"
    MEMBER_EXPIRED = "member_expired"
    MEMBER_FENCED = "member_fenced"
    PENDING_MEMBER_EXPIRED = "pending_member_expired"
    PENDING_MEMBER_EVICTED = "pending_member_evicted"
    GROUP_EPOCH_BUMPED = "group_epoch_bumped"
    TARGET_ASSIGNED = "target_assigned"
    ASSIGNOR_FAILED = "assignor_failed"
    MEMBER_RECONCILED = "member_reconciled"
    REGEX_RESOLVED = "regex_resolved"
    REGEX_REFUSED = "regex_refused"
    OFFSETS_EXPIRED = "offsets_expired"
    OFFSETS_OF_DELETED_TOPIC = "offsets_of_deleted_topic"
    RECORDS_SKIPPED = "records_skipped"


class Outcome:
    """A :class:`logcore.machine.Decision` in the making.

    ``now_ms`` rides along because everything that is decided happens at one instant. A timer that
    is armed twice keeps the later call's deadline, as the runtime would do with two decisions.
    """

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.records: list[Record] = []
        self._replies: list[Reply] = []
        self._timers: dict[Hashable, int | None] = {}
        self._events: list[Event] = []
        self._effects: list[object] = []

    def append(self, record: Record) -> None:
        """Have ``record`` appended and replayed."""
        self.records.append(record)

    def reply(self, token: Token, response: object) -> None:
        """Answer the request behind ``token`` with a result or a :class:`DomainError`."""
        self._replies.append(Reply(token, response))

    def arm(self, key: Hashable, delay_ms: int) -> None:
        """Have ``key`` fire ``delay_ms`` from now, and not at any time set before."""
        self._timers[key] = self.now_ms + delay_ms

    def disarm(self, key: Hashable) -> None:
        """Cancel the timer ``key``, armed or not."""
        self._timers[key] = None

    def effect(self, effect: object) -> None:
        """Ask something of the world outside the shard."""
        self._effects.append(effect)

    def event(self, kind: EventKind, group_id: str, **detail: object) -> None:
        """Remember a cause."""
        self._events.append(Event(kind.value, group_id, detail))

    def decision(self, stamp: ProducerStamp | None = None) -> Decision:
        """Return everything collected; ``stamp`` makes the records one transactional batch."""
        return Decision(
            records=tuple(self.records),
            replies=tuple(self._replies),
            timers=tuple(Timer(key, deadline) for key, deadline in self._timers.items()),
            effects=tuple(self._effects),
            events=tuple(self._events),
            stamp=stamp if self.records else None,
        )
