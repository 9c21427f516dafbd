"""Verdicts about transactions, from records that the coordinator's machine writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fencepost.client.queries.evidence import EndMarker, StateLog, StateRecord
from fencepost.client.queries.open_transactions import Producer, Transaction
from fencepost.client.queries.resolution import Evidence, Resolution, Verdict, agree, resolve
from fencepost.txn import state
from fencepost.txn.commands import NO_PRODUCER_ID
from fencepost.txn.epochs import LAST_CLIENT_EPOCH, ProducerIdentity
from fencepost.txn.state import TransactionMetadata

P = 42
PLACE = ("orders", 3)
NAME = "pipeline"


class Log:
    """The records that a coordinator writes for one transactional id."""

    def __init__(self, epoch: int = 0) -> None:
        self.txn = state.created(P, 60_000, 0)
        self.records: list[StateRecord] = []
        self.put(state.initialised(self.txn, ProducerIdentity(P, epoch), timeout_ms=1, now_ms=0))

    def put(self, txn: TransactionMetadata) -> Log:
        self.txn = txn
        self.records.append(StateRecord(len(self.records), 0, txn))
        return self

    def init(self) -> Log:
        identity = ProducerIdentity(self.txn.producer_id, self.txn.producer_epoch + 1)
        return self.put(state.initialised(self.txn, identity, timeout_ms=1, now_ms=0))

    def begin(self, version: int = 2) -> Log:
        places = frozenset({PLACE})
        return self.put(
            state.extended(self.txn, places, client_transaction_version=version, now_ms=0)
        )

    def end(self, *, commit: bool, version: int = 2, next_id: int = NO_PRODUCER_ID) -> Log:
        self.put(
            state.prepared(
                self.txn,
                commit=commit,
                client_transaction_version=version,
                next_producer_id=next_id,
                now_ms=0,
            )
        )
        return self.put(state.completed(self.txn, 0))

    def fence(self, version: int) -> Log:
        self.txn = state.fenced(self.txn, version)
        return self.end(commit=False, version=version)

    def keep(self, epoch: int) -> Log:
        client = ProducerIdentity(P, epoch)
        return self.put(state.kept_prepared(self.txn, client, timeout_ms=1, now_ms=0))

    def compacted(self, keep: int = 1) -> Log:
        self.records = self.records[-keep:]
        return self

    def expired(self) -> Log:
        self.records.append(StateRecord(len(self.records), 0, None))
        return self

    @property
    def current(self) -> Transaction | None:
        last = self.records[-1].txn
        if last is None:
            return None
        identity = last.producer_id, last.producer_epoch
        return Transaction(NAME, last.state.kafka_name, *identity, 1, 0, last.partitions)


def judge(
    log: Log,
    epoch: int | None,
    end_markers: Sequence[EndMarker] = (),
    *,
    open_here: Sequence[Producer] = (),
    producer_id: int = P,
    readable: bool = True,
) -> Resolution:
    read = StateLog(0, tuple(log.records))
    evidence = Evidence(
        NAME,
        None if epoch is None else ProducerIdentity(producer_id, epoch),
        log.current,
        read if readable else StateLog(-1, unreadable="no right"),
        tuple(end_markers),
        tuple(open_here),
        (PLACE,) if end_markers else (),
    )
    return resolve(evidence)


def marker(
    epoch: int, *, commit: bool, first: int | None = 0, sequence: int | None = 0, at: int = 9
) -> EndMarker:
    return EndMarker(PLACE, at, epoch, 0, commit, 0, first, None if first is None else sequence)


def told(found: Resolution) -> tuple[Verdict, bool]:
    return found.verdict, found.is_proof


def test_tv2_end_belongs_to_the_epoch_before_it() -> None:
    log = Log().begin().end(commit=True).begin().end(commit=False).begin()
    assert told(judge(log, 0)) == (Verdict.COMMITTED, True)
    assert told(judge(log, 1)) == (Verdict.ABORTED, True)
    assert told(judge(log, 2)) == (Verdict.OPEN, True)
    assert judge(log, 2).ends_as == (P, 2)


def test_tv2_complete_record_alone_proves_the_outcome() -> None:
    for commit, verdict in ((True, Verdict.COMMITTED), (False, Verdict.ABORTED)):
        log = Log().begin().end(commit=commit).compacted()
        assert told(judge(log, 0)) == (verdict, True)
        assert told(judge(log, 1)) == (Verdict.NOT_BEGUN, True)


def test_end_at_last_epoch_is_found_under_the_former_producer_id() -> None:
    log = Log(LAST_CLIENT_EPOCH).begin().end(commit=True, next_id=P + 1)
    assert (log.txn.producer_id, log.txn.producer_epoch) == (P + 1, 0)
    for kept in (4, 1):
        assert told(judge(log.compacted(kept), LAST_CLIENT_EPOCH)) == (Verdict.COMMITTED, True)
        assert told(judge(log, 0, producer_id=P + 1)) == (Verdict.NOT_BEGUN, True)
    log.begin()
    assert told(judge(log, LAST_CLIENT_EPOCH)) == (Verdict.COMMITTED, True)
    # The record of the next transaction no longer has the former producer id.
    assert told(judge(log.compacted(), LAST_CLIENT_EPOCH)) == (Verdict.NO_EVIDENCE, False)


def test_tv1_commit_is_proof_only_with_all_records_of_the_epoch() -> None:
    log = Log().begin(0).end(commit=True, version=0)
    assert told(judge(log, 0)) == (Verdict.COMMITTED, True)
    assert told(judge(log.compacted(), 0)) == (Verdict.COMMITTED, False)
    # Sequence numbers begin at 0 in each epoch, so no earlier batch of the identity is missing.
    assert told(judge(log, 0, [marker(0, commit=True)])) == (Verdict.COMMITTED, True)
    late = judge(log, 0, [marker(0, commit=True, sequence=7)])
    assert told(late) == (Verdict.COMMITTED, False)


def test_tv1_fence_aborts_the_epoch_before_the_one_in_its_record() -> None:
    log = Log().begin(0).fence(0)
    assert log.txn.producer_epoch == 1
    assert told(judge(log, 0)) == (Verdict.ABORTED, True)
    # The last record alone could also mean that the producer aborted a transaction of epoch 1.
    log.compacted()
    assert told(judge(log, 0)) == (Verdict.REPLACED, False)
    assert told(judge(log, 1)) == (Verdict.NO_EVIDENCE, False)
    assert told(judge(log, 0, [marker(1, commit=False)])) == (Verdict.ABORTED, True)


def test_tv1_epoch_with_commit_and_abort_is_mixed() -> None:
    log = Log().begin(0).end(commit=True, version=0).begin(0).end(commit=False, version=0)
    assert told(judge(log, 0)) == (Verdict.MIXED, False)
    log.begin(0)
    again = judge(log, 0)
    assert told(again) == (Verdict.OPEN, False)
    assert "earlier transactions" in again.because[-1]


def test_tv1_open_transaction_in_compacted_log_is_no_proof() -> None:
    log = Log().begin(0)
    assert told(judge(log, 0)) == (Verdict.OPEN, True)
    assert told(judge(log.compacted(), 0)) == (Verdict.OPEN, False)
    assert told(judge(log, None)) == (Verdict.OPEN, True)
    assert told(judge(Log().begin(2).compacted(), 0)) == (Verdict.OPEN, True)


def test_kept_transaction_can_only_be_ended_by_its_latest_client() -> None:
    log = Log(100).begin().keep(101).keep(102)
    old, successor = judge(log, 100), judge(log, 102)
    assert told(old) == told(successor) == (Verdict.OPEN, True)
    assert (old.ends_as, successor.ends_as) == (None, (P, 102))
    assert judge(log, None).ends_as == (P, 102)
    log.end(commit=True)
    for epoch in (100, 102):
        assert told(judge(log, epoch)) == (Verdict.COMMITTED, True)
    # The Complete record no longer has the transaction's own epoch, 100.
    log.compacted()
    assert told(judge(log, 102)) == (Verdict.COMMITTED, True)
    assert told(judge(log, 100)) == (Verdict.REPLACED, False)
    assert told(judge(log, 100, [marker(101, commit=True)])) == (Verdict.COMMITTED, True)


def test_marker_without_its_batches_is_no_proof() -> None:
    log = Log().begin().end(commit=True).init().init().compacted()
    for epoch in (0, 1):
        found = judge(log, 0, [marker(epoch, commit=True, first=None)])
        assert told(found) == (Verdict.REPLACED, False)
        assert "batches are gone" in found.because[-1]


def test_replaced_epoch_without_a_transaction_is_proven() -> None:
    log = Log().init()
    assert told(judge(log, 0)) == (Verdict.REPLACED, True)
    assert told(judge(log.compacted(), 0)) == (Verdict.REPLACED, False)
    assert told(judge(log, 1)) == (Verdict.NOT_BEGUN, True)


def test_transaction_with_state_newer_than_the_log_is_not_proven() -> None:
    """The coordinator's state was queried after the coordinator's log had been read."""
    log = Log().begin()
    before = tuple(log.records)
    later = log.end(commit=True).init().current
    found = resolve(Evidence(NAME, ProducerIdentity(P, 0), later, StateLog(0, before)))
    assert told(found) == (Verdict.REPLACED, False)
    assert not agree(later, StateLog(0, before))
    assert agree(later, StateLog(0, tuple(log.records)))
    assert agree(None, StateLog(0, tuple(log.expired().records)))
    assert agree(None, StateLog(0))


def test_producer_epoch_never_assigned_has_no_evidence() -> None:
    log = Log().begin()
    later = judge(log, 5)
    assert told(later) == (Verdict.NO_EVIDENCE, False)
    assert "older producer" in later.because[0]
    assert told(judge(log, 0, producer_id=P + 9)) == (Verdict.NO_EVIDENCE, False)


def test_expired_id_has_an_outcome_while_records_or_markers_remain() -> None:
    log = Log().begin().end(commit=True).expired()
    assert told(judge(log, 0)) == (Verdict.COMMITTED, True)
    assert told(judge(log, None)) == (Verdict.COMMITTED, True)
    log.compacted()
    assert told(judge(log, 0)) == (Verdict.EXPIRED, False)
    assert told(judge(log, None)) == (Verdict.EXPIRED, False)
    assert told(judge(log, 0, [marker(1, commit=True)])) == (Verdict.COMMITTED, True)


def test_complete_state_without_the_log_is_no_evidence_for_an_epoch() -> None:
    """With versions 1 and 2, the same coordinator response refers to different transactions."""
    for version in (0, 2):
        log = Log().begin(version).end(commit=True, version=version)
        epoch = log.txn.producer_epoch
        found = judge(log, epoch, readable=False)
        assert told(found) == (Verdict.NO_EVIDENCE, False)
        assert "__transaction_state was not read: no right" in found.because
        assert told(judge(log, None, readable=False)) == (Verdict.COMMITTED, True)
    before = judge(log, log.txn.producer_epoch - 1, readable=False)
    assert told(before) == (Verdict.NO_EVIDENCE, False)
    open_one = judge(Log().begin(), 0, readable=False)
    assert told(open_one) == (Verdict.OPEN, False)


def test_prepare_record_proves_the_outcome_before_markers_are_written() -> None:
    log = Log().begin().end(commit=False)
    log.records.pop()
    assert told(judge(log, 0)) == (Verdict.ABORTED, True)
    assert told(judge(log, None)) == (Verdict.ABORTED, True)


def test_transaction_open_only_at_a_partition_leader_is_hanging() -> None:
    here = Producer(*PLACE, P, 0, 0, 0, -1, 5)
    assert told(judge(Log(), 0, open_here=[here])) == (Verdict.HANGING, True)
    assert told(judge(Log(), 0, open_here=[replace(here, epoch=1)])) == (Verdict.NOT_BEGUN, True)


def test_abort_marker_in_a_committed_transaction_is_mixed() -> None:
    log = Log().begin().end(commit=True)
    assert told(judge(log, 0, [marker(0, commit=False)])) == (Verdict.MIXED, False)
