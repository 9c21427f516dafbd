"""A driver that runs a TxnMachine as the runtime does, and checks its contract at every step.

A decision must not change the durable state; only the replay of its records may do so. The driver
keeps the log, so that a test can reload any prefix of the log. The ``shard`` fixture does so after
every test.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from fencepost.logcore.budget import Account, Budget
from fencepost.logcore.machine import Decision, DomainError, Event, Record, Token
from fencepost.txn import records, state
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    EndTxn,
    EndTxnResult,
    InitProducerId,
    InitProducerIdResult,
    ReserveProducerIds,
    WriteMarkers,
)
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import ProducerIdsUnavailableError
from fencepost.txn.limits import TxnLimits
from fencepost.txn.machine import TxnMachine
from fencepost.txn.shard import TIMEOUT_TIMER
from fencepost.txn.state import TransactionMetadata, TransactionState

S = TransactionState
START_MS = 1_000_000
TIMEOUT_MS = 60_000
T = "orders-1"
A, B, C = ("a", 0), ("b", 0), ("b", 1)


class CountingIds:
    """Producer ids 1000, 1001, …; the source is exhausted if ``available`` is False."""

    def __init__(self, first: int = 1000) -> None:
        self.next = first
        self.available = True

    def next_id(self) -> int:
        if not self.available:
            raise ProducerIdsUnavailableError("no block")
        self.next += 1
        return self.next - 1


class AppendFailedError(Exception):
    """The log refused a batch; the shard has been unloaded and loaded again."""


GIVEN = frozenset({"epoch-bumped", "producer-id-rotated", "transaction-kept"})
"""Kinds of events that contain a client's new identity and its former identity."""


def check_told(
    before: Mapping[str, TransactionMetadata],
    after: Mapping[str, TransactionMetadata],
    events: Iterable[Event],
) -> None:
    """Raise AssertionError unless every new identity, abort and expiration has an event."""
    told: dict[str, list[Event]] = {}
    for event in events:
        told.setdefault(event.subject, []).append(event)
    for name in before.keys() | after.keys():
        old, new, mine = before.get(name), after.get(name), told.get(name, [])
        kinds = {event.kind for event in mine}
        if new is None:
            assert "transactional-id-expired" in kinds, (old, mine)
            continue
        former = None if old is None else old.next_identity
        if new.next_identity != former:
            given = [event.detail for event in mine if event.kind in GIVEN]
            assert given, (old, new, mine)
            last = given[-1]
            assert (last["producer_id"], last["producer_epoch"]) == new.next_identity, (new, mine)
            if former is not None:
                known = given[0].get("former_producer_id", former.producer_id)
                assert (known, given[0]["former_producer_epoch"]) == former, (old, mine)
            assert all(detail["cause"] for detail in given)
        was_prepared = old is not None and old.state in state.PREPARED
        if new.state is S.PREPARE_ABORT and not was_prepared:
            assert "transaction-aborted" in kinds, (old, new, mine)


class Driver:
    """One shard with its log, timers, clock and (held or immediate) marker writes."""

    def __init__(
        self,
        *,
        transaction_version: int = 2,
        limits: TxnLimits | None = None,
        coordinator_epoch: int = 7,
        log: Sequence[Record] = (),
        ids: CountingIds | None = None,
        now_ms: int = START_MS,
        hold: bool = False,
        budget: Budget | None = None,
    ) -> None:
        self.budget = budget
        self.transaction_version = transaction_version
        self.limits = limits or TxnLimits()
        self.coordinator_epoch = coordinator_epoch
        self.ids = ids or CountingIds()
        self.now_ms = now_ms
        self.hold = hold
        self.fail_append = False
        self.log: list[Record] = list(log)
        self.held: list[WriteMarkers] = []
        self.orders: list[WriteMarkers] = []
        self.reservations = 0
        self.replies: dict[Token, object] = {}
        self.timers: dict[Hashable, int] = {}
        self.events: list[Event] = []
        self._token = 0
        self.load()

    # -- the lifecycle of a shard

    def load(self) -> str:
        """Load the log as after a crash, and return the digest of the replayed state."""
        memory = Account(self.budget)
        self.machine = TxnMachine(
            self.limits, self.ids, self.coordinator_epoch, lambda: self.transaction_version, memory
        )
        weakref.finalize(self.machine, memory.close)
        self.timers = {}
        self.held = []
        for offset, record in enumerate(self.log):
            self.machine.replay(record, offset, self.now_ms, None)
        digest = self.machine.digest()
        self.apply(self.machine.on_loaded(self.now_ms))
        return digest

    def reload(self) -> None:
        """Unload the shard, load it again, and check that no durable state is lost."""
        before = self.machine.digest()
        decision = self.machine.on_unloaded()
        assert not decision.records
        assert not decision.effects
        self.take_replies(decision)
        assert self.load() == before

    def apply(self, decision: Decision) -> None:
        """Append, replay, arm timers, run effects, deliver replies."""
        assert decision.stamp is None
        if decision.records and self.fail_append:
            self.take_replies(self.machine.on_unloaded())
            self.load()
            raise AppendFailedError
        before = dict(self.machine._shard.transactions)
        for record in decision.records:
            self.log.append(record)
            self.machine.replay(record, len(self.log) - 1, self.now_ms, None)
        check_told(before, self.machine._shard.transactions, decision.events)
        for timer in decision.timers:
            if timer.deadline_ms is None:
                self.timers.pop(timer.key, None)
            else:
                self.timers[timer.key] = timer.deadline_ms
        self.events.extend(decision.events)
        orders = [effect for effect in decision.effects if isinstance(effect, WriteMarkers)]
        self.reservations += decision.effects.count(ReserveProducerIds())
        assert len(orders) + decision.effects.count(ReserveProducerIds()) == len(decision.effects)
        self.orders.extend(orders)
        self.held.extend(orders)
        self.machine.check()
        if not self.hold:
            self.write_markers()
        self.take_replies(decision)

    def take_replies(self, decision: Decision) -> None:
        for reply in decision.replies:
            assert reply.token not in self.replies, "a request was answered twice"
            self.replies[reply.token] = reply.response

    # -- requests

    def submit(self, command: object) -> Token:
        """Submit a command and return its token; ``replies`` has the reply once it is sent."""
        self._token += 1
        token = self._token
        before = self.machine.digest()
        try:
            decision = self.machine.decide(token, command, self.now_ms)
        except DomainError as error:
            assert self.machine.digest() == before
            self.machine.check()
            self.replies[token] = error
            return token
        assert self.machine.digest() == before, "a decision changed durable state"
        self.apply(decision)
        return token

    def ask(self, command: object) -> Any:
        """Submit a command and return its reply, which must be sent before ``submit`` returns."""
        token = self.submit(command)
        assert token in self.replies, "no answer at the end of the turn"
        return self.replies[token]

    def write_markers(self, orders: Iterable[WriteMarkers] | None = None) -> None:
        """Write held markers (all, or those of ``orders``) and report them as written."""
        for order in list(self.held if orders is None else orders):
            if order in self.held:
                self.held.remove(order)
            self.submit(order.written())

    def advance(self, ms: int) -> None:
        """Let time pass, firing every timer that comes due."""
        end_ms = self.now_ms + ms
        while due := [(at, key) for key, at in self.timers.items() if at <= end_ms]:
            at, key = min(due, key=lambda pair: pair[0])
            self.now_ms = max(self.now_ms, at)
            del self.timers[key]
            before = self.machine.digest()
            decision = self.machine.fire(key, self.now_ms)
            assert self.machine.digest() == before
            self.apply(decision)
        self.now_ms = end_ms

    # -- shorthands

    def init(self, identity: ProducerIdentity | None = None, **fields: Any) -> Any:
        given = identity or ProducerIdentity(-1, -1)
        command = InitProducerId(
            fields.pop("transactional_id", T),
            fields.pop("timeout_ms", TIMEOUT_MS),
            *given,
            **fields,
        )
        return self.ask(command)

    def started(self, **fields: Any) -> ProducerIdentity:
        """Send InitProducerId and return the identity, that is, producer id and epoch."""
        result = self.init(**fields)
        assert isinstance(result, InitProducerIdResult), result
        return ProducerIdentity(result.producer_id, result.producer_epoch)

    def add(
        self, identity: ProducerIdentity, *partitions: tuple[str, int], tv: int = 2, **fields: Any
    ) -> Any:
        transactional_id = fields.pop("transactional_id", T)
        return self.ask(
            AddPartitions(
                transactional_id,
                *identity,
                partitions or (A,),
                client_transaction_version=tv,
                **fields,
            )
        )

    def begin(self, identity: ProducerIdentity, *partitions: tuple[str, int], tv: int = 2) -> None:
        assert self.add(identity, *partitions, tv=tv) == AddPartitionsResult()

    def end(
        self, identity: ProducerIdentity, *, commit: bool, tv: int = 2, transactional_id: str = T
    ) -> Any:
        return self.ask(EndTxn(transactional_id, *identity, commit, tv))

    def ended(self, identity: ProducerIdentity, *, commit: bool, tv: int = 2) -> ProducerIdentity:
        """End the transaction and return the identity for the next one."""
        result = self.end(identity, commit=commit, tv=tv)
        assert isinstance(result, EndTxnResult), result
        return ProducerIdentity(result.producer_id, result.producer_epoch)

    def transact(
        self, identity: ProducerIdentity, *, commit: bool = True, tv: int = 2
    ) -> ProducerIdentity:
        self.begin(identity, tv=tv)
        return self.ended(identity, commit=commit, tv=tv)

    def txn(self, transactional_id: str = T) -> TransactionMetadata:
        found = self.machine.transaction(transactional_id)
        assert found is not None
        return found

    @property
    def state(self) -> TransactionState:
        return self.txn().state

    @property
    def stored(self) -> ProducerIdentity:
        return self.txn().identity

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def place(self, txn: TransactionMetadata, transactional_id: str = T) -> None:
        """Append a transaction's state to the log, and load the log."""
        self.log.append(records.encode(transactional_id, txn, self.transaction_version))
        self.load()


def metadata(
    where: TransactionState,
    *,
    identity: ProducerIdentity = ProducerIdentity(500, 5),  # noqa: B008 - a tuple
    previous: int = 500,
    next_id: int = -1,
    partitions: Iterable[tuple[str, int]] = (A,),
    tv: int = 2,
    start_ms: int = START_MS,
    timeout_ms: int = TIMEOUT_MS,
) -> TransactionMetadata:
    begun = where in {S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT}
    return TransactionMetadata(
        producer_id=identity.producer_id,
        previous_producer_id=previous,
        next_producer_id=next_id,
        producer_epoch=identity.epoch,
        timeout_ms=timeout_ms,
        state=where,
        partitions=frozenset(partitions) if begun else frozenset(),
        start_ms=-1 if where is S.EMPTY else start_ms,
        last_update_ms=START_MS,
        client_transaction_version=tv,
    )


def states_in(log: Iterable[Record]) -> dict[str, TransactionMetadata]:
    """Return each id's last state in the log, except ids whose last record is a tombstone."""
    found: dict[str, TransactionMetadata] = {}
    for record in log:
        decoded = records.decode(record)
        assert decoded is not None
        if decoded.txn is None:
            found.pop(decoded.transactional_id, None)
        else:
            found[decoded.transactional_id] = decoded.txn
    return found


def sweep_crashes(driver: Driver) -> None:
    """Load every prefix of the log and write its markers: recorded outcomes must not change."""
    for length in range(len(driver.log) + 1):
        log = driver.log[:length]
        expected = states_in(log)
        held = Driver(
            transaction_version=driver.transaction_version,
            limits=driver.limits,
            log=log,
            ids=CountingIds(50_000_000),
            now_ms=driver.now_ms,
            hold=True,
        )
        loaded = {name: held.txn(name) for name in expected}
        assert loaded == expected
        assert len(held.machine) == len(expected)
        held.machine.check()
        orders = list(held.held)
        assert {order.transactional_id for order in orders} == {
            name for name, txn in expected.items() if txn.state in state.PREPARED
        }
        # A second crash before any marker is reported changes nothing.
        digest = held.machine.digest()
        held.reload()
        assert held.machine.digest() == digest
        # Responses to the markers of earlier transactions change nothing either.
        current = {(order.transactional_id, order.transaction_number) for order in held.held}
        for order in driver.orders:
            if (order.transactional_id, order.transaction_number) not in current:
                held.submit(order.written())
        assert held.machine.digest() == digest
        held.write_markers()
        for name, txn in expected.items():
            after = held.txn(name)
            if txn.state is S.PREPARE_COMMIT:
                assert after.state is S.COMPLETE_COMMIT
            elif txn.state is S.PREPARE_ABORT:
                assert after.state is S.COMPLETE_ABORT
            else:
                assert after == txn
                if txn.state is S.ONGOING and txn.timeout_ms < 2**31 - 1:
                    assert (TIMEOUT_TIMER, name) in held.timers
            assert after.client_identity == txn.next_identity
        # Reporting the same markers again changes nothing.
        digest, written = held.machine.digest(), len(held.log)
        for order in orders:
            held.submit(order.written())
        assert (held.machine.digest(), len(held.log)) == (digest, written)


def assert_same_after_compaction(driver: Driver) -> None:
    """Check that the digest stays the same if all or half of the superseded records are removed."""
    last = {record.key: number for number, record in enumerate(driver.log)}
    keep_last = [record for number, record in enumerate(driver.log) if last[record.key] == number]
    halfway = [
        record
        for number, record in enumerate(driver.log)
        if last[record.key] == number or number % 2
    ]
    reference = Driver(log=driver.log, hold=True, now_ms=driver.now_ms).machine.digest()
    assert driver.machine.digest() == reference
    for log in (keep_last, halfway, [record for record in keep_last if record.value is not None]):
        assert Driver(log=log, hold=True, now_ms=driver.now_ms).machine.digest() == reference
