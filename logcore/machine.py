"""The contract between a log and the state machine whose records it holds.

A *machine* (``fencepost.groups.machine.GroupMachine``, ``fencepost.txn.machine.TxnMachine``)
decides; a *runtime* (``coordinator/runtime/shard.py``) appends, replays and answers. The order
never changes:

1. ``decide(token, command, now_ms)`` reads the state and returns a :class:`Decision`. It changes no
   state that a restart must restore.
2. The runtime appends ``Decision.records`` to the machine's partition as one batch.
3. The runtime calls ``replay`` for every appended record. Only this changes durable state, both
   live and at load, so a restart rebuilds exactly the live state. A live replay may get a record
   with its decoded content (:class:`Written`), if decoding would cost as much as all other steps.
4. The runtime arms ``Decision.timers``, runs ``Decision.effects`` and gives ``Decision.replies``.

If step 2 fails, the shard is unloaded and loaded again from its log; there is no rollback code.
One failure does not unload the shard: the log may refuse the producer of a transactional batch
before anything is written. The request then gets that error, as if ``decide`` had raised it. A
decision with a ``stamp`` therefore changes no soft state and answers no other request.

A machine may keep *soft* state that a restart may lose (parked requests, members of a join phase,
session deadlines); it changes that in ``decide`` and ``fire``.

Source: the same shape as Kafka's ``CoordinatorShard``, ``CoordinatorResult`` and
``CoordinatorTimer``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import field
from typing import NamedTuple, Protocol

from fencepost.logcore.values import dataclass, fast_init

Token = int
"""Identifies a request that waits for a reply; the runtime never reuses a token."""


class DomainError(Exception):
    """The coordinator cannot serve a request, and its sender must get the reason.

    Subclasses carry no wire number; ``coordinator/error_codes.py`` maps every one of them to
    Kafka's code. The message is for people and may travel in ``ErrorMessage`` fields.
    """


class InvalidRegularExpressionError(DomainError):
    """A client's regular expression is unusable (INVALID_REGULAR_EXPRESSION)."""


class InvariantViolation(Exception):  # noqa: N818 - the name is the design's, and says more
    """A bug of the broker: a state that must not exist. The shard logs it, stops and reloads."""


class Record(NamedTuple):
    """One record of a coordinator's log. ``value`` None is a tombstone."""

    key: bytes
    value: bytes | None


class Written(Record):
    """A new record with its decoded content, which its machine applies without decoding it."""

    decoded: object
    """The decoded content."""

    @classmethod
    def of(cls, key: bytes, value: bytes | None, decoded: object) -> Written:
        """Return the record with its decoded content."""
        record = tuple.__new__(cls, (key, value))
        record.decoded = decoded
        return record


@fast_init
@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """The producer identity under which records are appended transactionally."""

    producer_id: int
    producer_epoch: int


@fast_init
@dataclass(frozen=True, slots=True)
class EndMarker:
    """The marker that ends ``stamp``'s transaction in one partition.

    ``coordinator_epoch`` is the epoch of the coordinator that sends it. ``transaction_version``
    determines the rule for the marker's producer epoch: in version 2 and later it must be above the
    epoch of the transaction's batches, in earlier versions at least as high.
    """

    stamp: ProducerStamp
    commit: bool
    coordinator_epoch: int = 0
    transaction_version: int = 0


@fast_init
@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to the request that ``token`` identifies.

    ``response`` is one of the package's result dataclasses, or a :class:`DomainError` instance,
    which the runtime raises at the request's caller.
    """

    token: Token
    response: object


@fast_init
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
    """An entry for the event history and the broker's log, such as a rebalance or an epoch bump."""

    kind: str
    """Words joined by hyphens, as the event history and the broker's log show them."""
    subject: str
    detail: Mapping[str, object] = field(default_factory=dict)
    routine: bool = False
    """Whether the event recurs in normal operation. The event history omits such events."""
    quiet: bool = False
    """Whether the event changed nothing for other members; if so, it is logged at debug level."""


@fast_init
@dataclass(frozen=True, slots=True)
class Decision:
    """The actions that a machine asks for, in the order of the module's docstring.

    ``stamp`` makes the records one *transactional* batch of that producer.
    ``effects`` are requests to components outside the shard (see
    ``fencepost.txn.commands.WriteMarkers``); their outcome comes back as another command.
    """

    records: tuple[Record, ...] = ()
    replies: tuple[Reply, ...] = ()
    timers: tuple[Timer, ...] = ()
    effects: tuple[object, ...] = ()
    events: tuple[Event, ...] = ()
    stamp: ProducerStamp | None = None


class DecisionBuilder:
    """A mutable builder of a :class:`Decision`.

    ``now_ms`` is part of the builder because the whole decision happens at one instant. If a timer
    is set twice, the later call wins. ``stamp`` becomes the decision's stamp.
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
        """Answer the request of ``token`` with a result or a :class:`DomainError`."""
        self._replies.append(Reply(token, response))

    def arm(self, key: Hashable, delay_ms: int) -> None:
        """Have ``key`` fire ``delay_ms`` from now; this replaces an earlier deadline."""
        self._timers[key] = self.now_ms + delay_ms

    def disarm(self, key: Hashable) -> None:
        """Cancel the timer ``key``, armed or not."""
        self._timers[key] = None

    def effect(self, effect: object) -> None:
        """Request an effect outside the shard."""
        self._effects.append(effect)

    def event(self, kind: str, subject: str, **detail: object) -> None:
        """Record an event."""
        self.add_event(Event(str(kind), subject, detail))

    def add_event(self, event: Event) -> None:
        """Record an event that may be marked as routine or quiet."""
        self._events.append(event)

    def build(self) -> Decision:
        """Return the decision."""
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

        A raised :class:`DomainError` has the same effect as a decision whose only content is
        this error as the reply to ``token``.
        """

    def fire(self, key: Hashable, now_ms: int) -> Decision:
        """Decide on the expired timer ``key``. A key that no longer exists must be tolerated."""

    def replay(
        self, record: Record, offset: int, timestamp_ms: int, stamp: ProducerStamp | None
    ) -> None:
        """Apply one appended record. ``stamp`` is set for records of a transactional batch."""

    def replay_marker(self, stamp: ProducerStamp, offset: int, *, commit: bool) -> None:
        """Apply the end marker of ``stamp``'s transaction in this partition."""

    def on_loaded(self, now_ms: int) -> Decision:
        """Begin to serve after all records were replayed: re-arm timers, resume work."""

    def on_unloaded(self) -> Decision:
        """Stop serving: reply to all waiting requests. The decision must have no records."""

    def digest(self) -> str:
        """Return a hash of the durable state; equal states have equal digests."""

    def check(self) -> None:
        """Verify every internal invariant; raise :class:`InvariantViolation` if one is broken."""
