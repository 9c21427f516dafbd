"""The contract between a log and a state machine that lives on it.

A *machine* (``fencepost.groups.machine.GroupMachine``, ``fencepost.txn.machine.TxnMachine``)
decides; a *runtime* (``coordinator/runtime/shard.py``) appends, replays and answers. The order
never changes:

1. ``decide(token, command, now_ms)`` looks at the state and returns a :class:`Decision`. It changes
   nothing that a restart would have to know.
2. The runtime appends ``Decision.records`` to the machine's partition as one batch.
3. The runtime calls ``replay`` for every appended record: this alone changes durable state, both
   live and at load, so what a restart rebuilds is what ran. Live it may be told what the record
   says (:class:`Written`), where reading it again would cost as much as all the rest.
4. The runtime arms ``Decision.timers``, runs ``Decision.effects`` and gives ``Decision.replies``.

If step 2 fails, the shard is unloaded and loaded again from its log; there is no rollback code.
Only the producer of a transactional batch may be refused, before anything is written: that is the
answer to the request, as if ``decide`` had raised it. A decision with a ``stamp`` therefore has no
other traces, neither soft state nor replies to others.

A machine may keep *soft* state that a restart legitimately loses (parked requests, members of a
join phase, session deadlines); it changes that in ``decide`` and ``fire``.

Source: the shape is that of Kafka's ``CoordinatorShard``, ``CoordinatorResult`` and
``CoordinatorTimer``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import field
from typing import NamedTuple, Protocol

from fencepost.logcore.values import dataclass, made_often

Token = int
"""Names one request that waits for an answer; the runtime hands tokens out and never reuses one."""


class DomainError(Exception):
    """A request cannot be served, for a reason its sender must hear.

    Subclasses carry no wire number; ``coordinator/error_codes.py`` maps every one of them to
    Kafka's code. The message is for people and may travel in ``ErrorMessage`` fields.
    """


class InvalidRegularExpressionError(DomainError):
    """A client's regular expression can't be used (INVALID_REGULAR_EXPRESSION)."""


class InvariantViolation(Exception):  # noqa: N818 - the name is the design's, and says more
    """Our own bug: a state that must not exist. The shard stops, says so, and reloads."""


class Record(NamedTuple):
    """One record of a coordinator's log. ``value`` None is a tombstone."""

    key: bytes
    value: bytes | None


class Written(Record):
    """A record just made, which its machine need not read again to apply it."""

    says: object
    """What reading it tells."""

    @classmethod
    def of(cls, key: bytes, value: bytes | None, says: object) -> Written:
        """Return the record of these bytes."""
        record = tuple.__new__(cls, (key, value))
        record.says = says
        return record


@made_often
@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """The producer identity under which records are appended transactionally."""

    producer_id: int
    producer_epoch: int


@made_often
@dataclass(frozen=True, slots=True)
class EndMarker:
    """The end of ``stamp``'s transaction, as a coordinator of that epoch tells it a partition.

    ``transaction_version`` picks the rule for the marker's epoch: from 2 on it must be above that
    of the data, below 2 not lower.
    """

    stamp: ProducerStamp
    commit: bool
    coordinator_epoch: int = 0
    transaction_version: int = 0


@made_often
@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the request behind ``token``.

    ``response`` is one of the package's result dataclasses, or a :class:`DomainError` instance,
    which the runtime raises at the request's caller.
    """

    token: Token
    response: object


@made_often
@dataclass(frozen=True, slots=True)
class Timer:
    """Set (or with ``deadline_ms`` None cancel) the timer named ``key``.

    Setting a key again replaces its deadline. A cancelled or replaced timer never fires. When the
    deadline has passed the runtime calls ``machine.fire(key, now_ms)``.
    """

    key: Hashable
    deadline_ms: int | None


@dataclass(frozen=True, slots=True)
class Event:
    """A cause worth remembering: a rebalance, a fence, an expiry, an epoch bump."""

    kind: str
    """In words joined by hyphens, as the history and the log tell it."""
    subject: str
    detail: Mapping[str, object] = field(default_factory=dict)
    routine: bool = False
    """Whether the normal course of things brings it again and again: the history leaves it out."""
    quiet: bool = False
    """Whether it changed nothing for anybody else: the history keeps it, the log is not for it."""


@made_often
@dataclass(frozen=True, slots=True)
class Decision:
    """What a machine wants done, in the order of the module's docstring.

    ``stamp`` makes the records one *transactional* batch of that producer.
    ``effects`` are requests to the world outside the shard (see
    ``fencepost.txn.commands.WriteMarkers``); their outcome comes back as another command.
    """

    records: tuple[Record, ...] = ()
    replies: tuple[Reply, ...] = ()
    timers: tuple[Timer, ...] = ()
    effects: tuple[object, ...] = ()
    events: tuple[Event, ...] = ()
    stamp: ProducerStamp | None = None


class DecisionBuilder:
    """A :class:`Decision` in the making.

    ``now_ms`` rides along because all that is decided happens at one instant. Where a timer is set
    twice, the later call holds. ``stamp`` is that of the decision.
    """

    __slots__ = ("_effects", "_events", "_replies", "_timers", "now_ms", "records", "stamp")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.records: list[Record] = []
        self.stamp: ProducerStamp | None = None
        self._replies: list[Reply] = []
        self._timers: dict[Hashable, int | None] = {}
        self._effects: list[object] = []
        self._events: list[Event] = []

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

    def event(self, kind: str, subject: str, **detail: object) -> None:
        """Remember a cause."""
        self.remember(Event(str(kind), subject, detail))

    def remember(self, event: Event) -> None:
        """Remember a cause that is said to be routine or quiet."""
        self._events.append(event)

    def build(self) -> Decision:
        """Return everything collected."""
        timers = self._timers
        return Decision(
            tuple(self.records),
            tuple(self._replies),
            tuple([Timer(key, timers[key]) for key in timers]) if timers else (),
            tuple(self._effects),
            tuple(self._events),
            self.stamp if self.records else None,
        )


class Machine(Protocol):
    """One shard's state machine. It knows no clock, no I/O, no event loop and no randomness."""

    def decide(self, token: Token, command: object, now_ms: int) -> Decision:
        """Decide on ``command``; the reply to ``token`` may come now or in a later decision.

        May raise :class:`DomainError` as a short form of a decision that only answers ``token``
        with it.
        """

    def fire(self, key: Hashable, now_ms: int) -> Decision:
        """Decide what the expired timer ``key`` means. Must tolerate a key it no longer knows."""

    def replay(
        self, record: Record, offset: int, timestamp_ms: int, stamp: ProducerStamp | None
    ) -> None:
        """Apply one appended record. ``stamp`` is set for records of a transactional batch."""

    def replay_marker(self, stamp: ProducerStamp, offset: int, *, commit: bool) -> None:
        """Apply the end marker of ``stamp``'s transaction in this partition."""

    def loaded(self, now_ms: int) -> Decision:
        """Everything was replayed and the shard begins to serve: re-arm timers, resume work."""

    def unload(self) -> Decision:
        """The shard stops serving: answer every parked token. No records may be returned."""

    def digest(self) -> str:
        """A hash of the durable state; equal states have equal digests."""

    def check(self) -> None:
        """Verify every internal invariant; raise :class:`InvariantViolation` if one is broken."""
