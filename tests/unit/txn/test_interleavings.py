"""Random schedules: two producers with the same id, timeouts, crashes, late markers.

After every step the tests call the machine's own ``check()``, and check these rules:

* a recorded outcome never changes;
* a former identity is never given out again, and two producers never get the same identity;
* a request that was refused as fenced has changed nothing;
* exactly the transactions that were reported as committed are committed.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fencepost.txn import state
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    EndTxn,
    EndTxnResult,
    ExpireTransactionalIds,
    InitProducerId,
    InitProducerIdResult,
)
from fencepost.txn.epochs import ProducerIdentity
from fencepost.txn.errors import ProducerFencedError
from fencepost.txn.limits import TxnLimits
from fencepost.txn.records import decode
from fencepost.txn.state import TransactionMetadata
from tests.unit.txn.driver import (
    TIMEOUT_MS,
    AppendFailedError,
    Driver,
    S,
    T,
    assert_same_after_compaction,
    metadata,
    sweep_crashes,
)

PARTITION = st.sampled_from([("a", 0), ("a", 1), ("b", 0)])
WHO = st.sampled_from([0, 1])
NONE = ProducerIdentity(-1, -1)


Request = InitProducerId | AddPartitions | EndTxn


def _identity(command: Request) -> ProducerIdentity:
    return ProducerIdentity(command.producer_id, command.producer_epoch)


class Producer:
    """The state of one client: its identity, and its requests that have no response yet."""

    def __init__(self, tv: int) -> None:
        self.tv = tv
        self.identity = NONE
        self.last = NONE
        self.begun: dict[ProducerIdentity, int] = {}
        self.waiting: dict[int, Request] = {}
        self.delayed: list[Request] = []


class Schedules(RuleBasedStateMachine):
    @initialize(
        tv=st.sampled_from([0, 1, 2]),
        client_tv=st.tuples(st.sampled_from([0, 2]), st.sampled_from([0, 2])),
        epoch=st.sampled_from([-1, 0, 32_762, 32_764, 32_765, 32_766]),
        hold=st.booleans(),
    )
    def start(self, tv: int, client_tv: tuple[int, int], epoch: int, hold: bool) -> None:
        self.driver = Driver(
            transaction_version=tv,
            hold=hold,
            limits=TxnLimits(
                transactional_id_expiration_ms=20 * TIMEOUT_MS, two_phase_commit_enable=True
            ),
        )
        if epoch >= 0:
            self.driver.place(
                metadata(S.COMPLETE_COMMIT, identity=ProducerIdentity(500, epoch), tv=0)
            )
        self.producers = [Producer(version) for version in client_tv]
        self.owners: dict[ProducerIdentity, Producer] = {}
        self.seen = len(self.driver.log)
        self.was = self.driver.machine.transaction(T)
        self.transaction = 0
        self.outcomes: dict[int, bool] = {}

    # -- the producers' steps

    def _send(self, producer: Producer, command: Request) -> None:
        before, stored = self.driver.machine.digest(), self.driver.machine.transaction(T)
        token = self.driver.submit(command)
        # A TV1 producer that sends InitProducerId during its transaction fences itself, as in
        # Kafka.
        owner = stored is not None and stored.client_identity == _identity(command)
        if isinstance(self.driver.replies.get(token), ProducerFencedError) and not owner:
            assert self.driver.machine.digest() == before, "a fenced producer changed something"
        producer.waiting[token] = command
        self._deliver()

    def _deliver(self) -> None:
        self._read_history()
        for producer in self.producers:
            for token in [token for token in producer.waiting if token in self.driver.replies]:
                command = producer.waiting.pop(token)
                self._heard(producer, command, self.driver.replies[token])

    def _heard(self, producer: Producer, command: Request, answer: object) -> None:
        asked_as = _identity(command)
        if isinstance(answer, AddPartitionsResult):
            assert isinstance(command, AddPartitions)
            if not command.verify_only:
                producer.begun[asked_as] = self.transaction
        elif isinstance(answer, InitProducerIdResult | EndTxnResult):
            identity = ProducerIdentity(answer.producer_id, answer.producer_epoch)
            assert 0 <= identity.epoch <= 32_766
            assert self.owners.setdefault(identity, producer) is producer, "shared identity"
            if isinstance(answer, InitProducerIdResult) and answer.ongoing_producer_id >= 0:
                producer.begun[identity] = self.transaction
            if isinstance(command, EndTxn):
                assert (identity == asked_as) == (producer.tv == 0)
                number = producer.begun.get(asked_as)
                if number is not None:
                    assert self.outcomes[number] is command.commit, "told what is not so"
            if identity != producer.identity:
                producer.last = producer.identity
            producer.identity = identity

    @rule(who=WHO, proceed=st.sampled_from(["fresh", "fresh", "continue", "repeat"]))
    def init(self, who: int, proceed: str) -> None:
        producer = self.producers[who]
        given = {"fresh": NONE, "continue": producer.identity, "repeat": producer.last}[proceed]
        self._send(producer, InitProducerId(T, TIMEOUT_MS, *given))

    @rule(who=WHO, endless=st.booleans())
    def keep(self, who: int, endless: bool) -> None:
        command = InitProducerId(T, TIMEOUT_MS, *NONE, enable_2pc=endless, keep_prepared=True)
        self._send(self.producers[who], command)

    @rule(who=WHO, partition=PARTITION, commit=st.booleans())
    def decide_what_was_kept(self, who: int, partition: tuple[str, int], commit: bool) -> None:
        self.begin(1 - who, partition)
        self.keep(who, endless=False)
        self.end(who, commit, stale=False)

    @rule(who=WHO, partition=PARTITION, verify=st.sampled_from([False, False, True]))
    def add(self, who: int, partition: tuple[str, int], verify: bool) -> None:
        producer = self.producers[who]
        self._send(
            producer,
            AddPartitions(T, *producer.identity, (partition,), verify, producer.tv),
        )

    @rule(who=WHO, commit=st.booleans(), stale=st.sampled_from([False, False, True]))
    def end(self, who: int, commit: bool, stale: bool) -> None:
        producer = self.producers[who]
        identity = producer.last if stale else producer.identity
        self._send(producer, EndTxn(T, *identity, commit, producer.tv))

    @rule(who=WHO, partition=PARTITION, commit=st.booleans(), times=st.integers(1, 3))
    def transact(self, who: int, partition: tuple[str, int], commit: bool, times: int) -> None:
        producer = self.producers[who]
        if producer.identity == NONE:
            self.init(who, "fresh")
        for _ in range(times):
            self.add(who, partition, verify=False)
            self.end(who, commit, stale=False)

    @rule(who=WHO, partition=PARTITION)
    def begin(self, who: int, partition: tuple[str, int]) -> None:
        self.init(who, "fresh")
        self.add(who, partition, verify=False)

    @rule(who=WHO, commit=st.booleans())
    def delay_an_end(self, who: int, commit: bool) -> None:
        producer = self.producers[who]
        producer.delayed.append(EndTxn(T, *producer.identity, commit, producer.tv))

    @precondition(lambda self: any(producer.delayed for producer in self.producers))
    @rule()
    def delayed_requests_arrive(self) -> None:
        for producer in self.producers:
            while producer.delayed:
                self._send(producer, producer.delayed.pop())

    # -- the shard's steps

    @rule(ms=st.sampled_from([1, TIMEOUT_MS // 2, TIMEOUT_MS + 1, 30 * TIMEOUT_MS]))
    def time_passes(self, ms: int) -> None:
        self.driver.advance(ms)
        self._deliver()

    @rule()
    def sweep(self) -> None:
        self.driver.ask(ExpireTransactionalIds())
        self._deliver()

    @precondition(lambda self: self.driver.held)
    @rule(data=st.data())
    def some_markers(self, data: st.DataObject) -> None:
        order = self.driver.held[-1]
        part = data.draw(st.lists(st.sampled_from(order.partitions or (("x", 0),)), max_size=2))
        self.driver.submit(order.written(tuple(part)))
        self._deliver()

    @precondition(lambda self: self.driver.held)
    @rule()
    def all_markers(self) -> None:
        self.driver.write_markers()
        self._deliver()

    @precondition(lambda self: self.driver.orders)
    @rule(data=st.data())
    def an_old_report_again(self, data: st.DataObject) -> None:
        order = data.draw(st.sampled_from(self.driver.orders))
        current = {(held.transactional_id, held.transaction_number) for held in self.driver.held}
        before = self.driver.machine.digest()
        if (order.transactional_id, order.transaction_number) not in current:
            self.driver.submit(order.written())
            assert self.driver.machine.digest() == before

    @rule()
    def crash(self) -> None:
        self.driver.reload()
        self._deliver()

    @rule(who=WHO, commit=st.booleans())
    def an_append_fails(self, who: int, commit: bool) -> None:
        producer = self.producers[who]
        self.driver.fail_append = True
        for command in (
            EndTxn(T, *producer.identity, commit, producer.tv),
            InitProducerId(T, TIMEOUT_MS),
        ):
            with contextlib.suppress(AppendFailedError):
                self.driver.submit(command)
        self.driver.fail_append = False
        self.driver.reload()
        self._deliver()

    @rule()
    def producer_ids_run_dry_or_come_back(self) -> None:
        self.driver.ids.available = not self.driver.ids.available

    @rule(tv=st.sampled_from([0, 1, 2]))
    def the_cluster_changes_its_version(self, tv: int) -> None:
        self.driver.transaction_version = tv

    # -- invariants

    @invariant()
    def all_is_sound(self) -> None:
        if hasattr(self, "driver"):
            self._read_history()
            self.driver.machine.check()

    def _read_history(self) -> None:
        for record in self.driver.log[self.seen :]:
            decoded = decode(record)
            assert decoded is not None
            new, old = decoded.txn, self.was
            if old is not None and new is not None:
                self._read_step(old, new)
            self.was = new
        self.seen = len(self.driver.log)

    def _read_step(self, old: TransactionMetadata, new: TransactionMetadata) -> None:
        state.check_step(old, new)
        if old.state in state.PREPARED:
            committed = old.state is S.PREPARE_COMMIT
            assert new.state is (S.COMPLETE_COMMIT if committed else S.COMPLETE_ABORT)
        if new.producer_id == old.producer_id:
            assert new.producer_epoch >= old.producer_epoch
        else:
            assert new.producer_id > old.producer_id, "an identity came back"
        if new.state is S.ONGOING and old.state is not S.ONGOING:
            self.transaction += 1
        if old.state is S.ONGOING and new.state in state.PREPARED:
            assert self.transaction not in self.outcomes
            self.outcomes[self.transaction] = new.state is S.PREPARE_COMMIT

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.ids.available = True
            self.driver.write_markers()
            sweep_crashes(self.driver)
            assert_same_after_compaction(self.driver)


Schedules.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedules = pytest.mark.slow(Schedules.TestCase)
