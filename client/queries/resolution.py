"""The verdict about one transaction, from the evidence that a cluster still has.

The functions here do no I/O; :mod:`.resolve` collects the evidence. These rules decide whether a
record or a marker belongs to the transaction (P, E) of producer id P and epoch E:

* An Ongoing record has the transaction's own identity, and the Prepare record that follows it in
  the log ends that transaction. Compaction has removed all but the last record of an id from the
  cleaned part, and nothing from the dirty part, so no record is missing between two that are left.
* The predecessor of a Prepare or Complete record may be gone. Under transaction version 2 (KIP-890)
  each end bumps the epoch, so a record of (P, E + 1) ends (P, E). At the highest epoch the Complete
  record has a new producer id with epoch 0, and the previous producer id. Under version 1 a commit
  does not bump the epoch, but an abort may come from a fence, which does: the record alone then
  proves nothing.
* A transaction that a successor has kept (KIP-939) also has the successor's identity, which must be
  used to end it.
* In a partition, the first marker of P after a batch of (P, E) ends (P, E). A marker without the
  batch proves nothing, because the next transaction of version 1 has the same marker.
* Under version 1 consecutive transactions of a producer share one identity. Their outcomes prove
  something about a single transaction only if all outcomes since the InitProducerId that gave out
  the identity are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from fencepost.client.queries.evidence import EndMarker, StateLog, StateRecord
from fencepost.client.queries.open_transactions import ONGOING, Producer, Transaction
from fencepost.logcore.values import dataclass
from fencepost.txn.epochs import LAST_CLIENT_EPOCH, ProducerIdentity
from fencepost.txn.state import PREPARED, TV2, TransactionMetadata, TransactionState


class Verdict(StrEnum):
    """The kinds of verdicts about a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    HANGING = "hanging"
    NOT_BEGUN = "not begun"
    REPLACED = "replaced"
    EXPIRED = "expired"
    MIXED = "mixed"
    NO_EVIDENCE = "no evidence left"


ENDED = (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)
_COMMITS = {
    TransactionState.PREPARE_COMMIT,
    TransactionState.COMPLETE_COMMIT,
}
VERSION_1 = (
    "transactions of version 1 share one identity until the next InitProducerId, and nothing shows"
    " that this was the only one"
)


class Outcome(NamedTuple):
    """A decided transaction in ``__transaction_state``, and the first record that says so.

    ``others`` are further identities that the record may belong to instead.
    """

    offset: int
    identity: ProducerIdentity
    commit: bool
    version: int
    others: tuple[ProducerIdentity, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """All evidence that a cluster has about one transaction.

    ``current`` is the coordinator's answer, None if it does not know the id. ``searched`` are the
    partitions whose logs were read for ``end_markers``; ``unread`` has the other partitions with
    their errors.
    """

    transactional_id: str
    identity: ProducerIdentity | None
    current: Transaction | None
    log: StateLog
    end_markers: tuple[EndMarker, ...] = ()
    open_here: tuple[Producer, ...] = ()
    searched: tuple[tuple[str, int], ...] = ()
    unread: tuple[str, ...] = ()
    expired_ms: int | None = None
    """The time at which the id expired, from the broker's event history."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """A verdict, the reasons for it, and whether the reasons prove it.

    ``ends_as`` is the identity that EndTxn must have to end the open transaction; None if the
    identity that was asked for cannot end it.
    """

    evidence: Evidence
    identity: ProducerIdentity | None
    verdict: Verdict
    is_proof: bool
    because: tuple[str, ...]
    ends_as: ProducerIdentity | None = None
    version: int | None = None
    """The transaction version of the transaction's producer; None if no record shows it."""


def outcomes_of(records: Sequence[StateRecord]) -> list[Outcome]:
    """Return the decided transactions of an id's records."""
    outcomes: list[Outcome] = []
    before: TransactionMetadata | None = None
    for record in records:
        txn = record.txn
        if txn is not None:
            if txn.state in PREPARED:
                outcomes.append(_ended(record.offset, txn, before))
            elif txn.state in ENDED and (before is None or before.state not in PREPARED):
                outcomes.append(_ended(record.offset, txn, None))
        before = txn
    return outcomes


def _ended(offset: int, txn: TransactionMetadata, before: TransactionMetadata | None) -> Outcome:
    commit, version = txn.state in _COMMITS, txn.client_transaction_version
    if before is not None and before.state is TransactionState.ONGOING:
        return Outcome(offset, before.identity, commit, version)
    is_complete = txn.state in ENDED
    if version >= TV2:
        if is_complete and txn.producer_epoch == 0:
            rotated = ProducerIdentity(txn.previous_producer_id, LAST_CLIENT_EPOCH)
            return Outcome(offset, rotated, commit, version)
        return Outcome(offset, _previous(txn.identity), commit, version)
    if commit and not txn.is_kept_prepared:
        return Outcome(offset, txn.identity, commit, version)
    if commit:
        return Outcome(offset, _previous(txn.identity), commit, version)
    return Outcome(offset, txn.identity, commit, version, (_previous(txn.identity),))


def _previous(identity: ProducerIdentity) -> ProducerIdentity:
    return ProducerIdentity(identity.producer_id, identity.epoch - 1)


def is_whole(records: Sequence[StateRecord], identity: ProducerIdentity) -> bool:
    """Return whether the records begin no later than the InitProducerId that gave ``identity``."""
    return any(
        record.txn is not None
        and record.txn.state is TransactionState.EMPTY
        and record.txn.identity == identity
        for record in records
    )


def begun(records: Iterable[StateRecord], identity: ProducerIdentity) -> list[TransactionMetadata]:
    """Return the Ongoing records of ``identity``."""
    return [
        record.txn
        for record in records
        if record.txn is not None
        and record.txn.state is TransactionState.ONGOING
        and record.txn.identity == identity
    ]


def agree(current: Transaction | None, log: StateLog) -> bool:
    """Return whether the coordinator's answer is the last record of the log.

    The answer and the record differ if the transaction moved on between the two requests.
    """
    last = log.records[-1].txn if log.records else None
    if current is None or last is None:
        return current is None and last is None
    current_state = current.state, current.producer_id, current.epoch
    return current_state == (last.state.kafka_name, last.producer_id, last.producer_epoch)


def partitions_of(
    records: Iterable[StateRecord], identity: ProducerIdentity
) -> set[tuple[str, int]]:
    """Return the partitions of the transactions of ``identity`` that the records name."""
    partitions: set[tuple[str, int]] = set()
    before: TransactionMetadata | None = None
    for record in records:
        txn = record.txn
        if txn is not None and txn.partitions:
            ended = _ended(record.offset, txn, before) if txn.state in PREPARED else None
            names = {txn.identity} if ended is None else {ended.identity, *ended.others}
            if identity in names or (txn.is_kept_prepared and identity == txn.client_identity):
                partitions |= txn.partitions
        before = txn
    return partitions


def target_of(identity: ProducerIdentity, log: StateLog) -> ProducerIdentity:
    """Return the identity of the transaction in question.

    A successor's identity stands for the transaction that it has kept.
    """
    kept = [
        record.txn
        for record in log.records
        if record.txn is not None and record.txn.is_kept_prepared
    ]
    return next(
        (entry.identity for entry in reversed(kept) if entry.client_identity == identity), identity
    )


def resolve(evidence: Evidence) -> Resolution:
    """Return the verdict about the transaction that ``evidence`` is about."""
    current, log = evidence.current, evidence.log
    if evidence.identity is None:
        return _resolve_last(evidence)
    target = target_of(evidence.identity, log)
    matching = tuple(
        outcome
        for outcome in outcomes_of(log.records)
        if outcome.identity == target and not outcome.others
    )
    analysis = _Analysis(evidence, target, matching, _version(log.records, target))
    is_current = current is not None and (current.producer_id, current.epoch) == target
    if current is not None and current.state == ONGOING and is_current:
        return _resolve_open(analysis, current)
    outcomes = {outcome.commit for outcome in matching} | {
        marker.commit for marker in analysis.marked
    }
    if len(outcomes) == len({True, False}):
        return analysis.conclude(
            Verdict.MIXED,
            "there are commits and aborts under this identity: it stands for several transactions"
            " of version 1, or one partition was aborted by WriteTxnMarkers",
        )
    if outcomes:
        return _resolve_decided(analysis, commit=outcomes.pop())
    hanging = [
        transaction for transaction in evidence.open_here if transaction.epoch == target.epoch
    ]
    if hanging:
        places = ", ".join(
            f"{transaction.topic}:{transaction.partition}" for transaction in hanging
        )
        return analysis.conclude(
            Verdict.HANGING,
            f"the leader has it open in {places}, and its coordinator will not end it there:"
            " only `fencepost txns abort` does",
            proof=True,
        )
    if current is None:
        return _resolve_unknown_id(analysis)
    return _resolve_past_identity(analysis, current, is_current=is_current)


def _resolve_last(evidence: Evidence) -> Resolution:
    """Return the verdict about the last transaction of an id."""
    current, records = evidence.current, evidence.log.records
    if current is not None and current.state == ONGOING:
        identity = ProducerIdentity(current.producer_id, current.epoch)
        return _resolve_open(
            _Analysis(evidence, identity, (), _version(records, identity)), current
        )
    outcomes = outcomes_of(records)
    states = [record.txn for record in records if record.txn is not None]
    if outcomes and states[-1].state is not TransactionState.EMPTY:
        last = outcomes[-1]
        analysis = _Analysis(evidence, last.identity, (last,), _version(records, last.identity))
        verdict = Verdict.COMMITTED if last.commit else Verdict.ABORTED
        return analysis.conclude(verdict, "it is the last transaction of the id", proof=True)
    if current is None:
        return _resolve_unknown_id(_Analysis(evidence, None, (), None))
    identity = ProducerIdentity(current.producer_id, current.epoch)
    analysis = _Analysis(evidence, identity, (), None)
    if current.state == "Empty":
        return analysis.conclude(
            Verdict.NOT_BEGUN, "its producer has begun no transaction", proof=True
        )
    commit = current.state in {"PrepareCommit", "CompleteCommit"}
    return analysis.conclude(
        Verdict.COMMITTED if commit else Verdict.ABORTED,
        f"its coordinator has the last transaction of the id as {current.state}",
        proof=True,
    )


class _Analysis(NamedTuple):
    """The intermediate results of :func:`resolve`."""

    evidence: Evidence
    target: ProducerIdentity | None
    outcomes: tuple[Outcome, ...]
    version: int | None

    @property
    def marked(self) -> list[EndMarker]:
        """The markers that end transactions of the identity."""
        return [
            end_marker
            for end_marker in self.evidence.end_markers
            if end_marker.first_offset is not None
        ]

    @property
    def is_all(self) -> bool:
        """Whether the log shows every transaction that can have the identity."""
        if self.version == TV2:
            return True
        log = self.evidence.log.records
        return self.target is not None and is_whole(log, self.target)

    def conclude(
        self,
        verdict: Verdict,
        *because: str,
        proof: bool = False,
        ends_as: ProducerIdentity | None = None,
    ) -> Resolution:
        unreadable = self.evidence.log.unreadable
        notes: tuple[str, ...] = (
            (f"__transaction_state was not read: {unreadable}",) if unreadable else ()
        )
        notes += tuple(f"not read: {name}" for name in self.evidence.unread)
        return Resolution(
            self.evidence,
            self.evidence.identity or self.target,
            verdict,
            proof,
            (*because, *notes),
            ends_as,
            self.version,
        )


def _version(records: Sequence[StateRecord], target: ProducerIdentity | None) -> int | None:
    """Return the transaction version of ``target`` according to the records; None without any.

    The last record of an ongoing transaction decides, or else the last outcome.
    """
    for record in reversed(records):
        txn = record.txn
        if txn is not None and txn.state is TransactionState.ONGOING and txn.identity == target:
            return TV2 if txn.client_transaction_version >= TV2 else 1
    for outcome in reversed(outcomes_of(records)):
        if outcome.identity == target:
            return TV2 if outcome.version >= TV2 else 1
    return None


def _resolve_open(analysis: _Analysis, current: Transaction) -> Resolution:
    target, identity, records = (
        analysis.target,
        analysis.evidence.identity,
        analysis.evidence.log.records,
    )
    because = [f"its coordinator has it as {current.state}"]
    ends_as = target
    last = records[-1].txn if records else None
    if last is not None and last.is_kept_prepared and last.identity == target:
        owner = last.client_identity
        ends_as = owner if identity in {None, owner} else None
        because.append(
            f"a successor has kept it (KIP-939): only producer {owner.producer_id}"
            f" epoch {owner.epoch} can end it"
        )
    earlier = len(analysis.outcomes) or len(analysis.marked)
    if identity is None:
        is_proof = True  # without an identity, the id's last transaction is meant
    elif earlier:
        is_proof = False
        because.append("earlier transactions of this identity have ended: one of them may be meant")
    else:
        is_proof = analysis.is_all
        if not is_proof:
            because.append(VERSION_1)
    return analysis.conclude(Verdict.OPEN, *because, proof=is_proof, ends_as=ends_as)


def _resolve_decided(analysis: _Analysis, *, commit: bool) -> Resolution:
    word = "commit" if commit else "abort"
    because = []
    if analysis.outcomes:
        because.append(f"__transaction_state has the decision to {word}")
    marked: dict[tuple[str, int], EndMarker] = {}
    for marker in analysis.marked:
        marked.setdefault(marker.place, marker)
    if marked:
        places = ", ".join(f"{topic}:{index}" for topic, index in sorted(marked))
        because.append(f"{word} markers follow all its batches in {places}")
    # Each epoch's first batch was read, so no batch of an earlier transaction is missing.
    has_all = bool(marked) and all(marker.first_sequence == 0 for marker in marked.values())
    is_proof = analysis.is_all or has_all
    if not is_proof:
        because.append(VERSION_1)
    verdict = Verdict.COMMITTED if commit else Verdict.ABORTED
    return analysis.conclude(verdict, *because, proof=is_proof)


def _resolve_unknown_id(analysis: _Analysis) -> Resolution:
    """Return the verdict about an id that its coordinator does not know."""
    log, evidence = analysis.evidence.log, analysis.evidence
    no_markers = _searched(evidence)
    expired = [record for record in log.records if record.txn is None]
    if expired:
        return analysis.conclude(
            Verdict.EXPIRED,
            f"its coordinator deleted the id with the record at offset {expired[-1].offset} of"
            f" __transaction_state-{log.partition}",
            no_markers,
        )
    if evidence.expired_ms is not None:
        return analysis.conclude(
            Verdict.EXPIRED, "the broker's history says that the id expired", no_markers
        )
    return analysis.conclude(
        Verdict.NO_EVIDENCE,
        "its coordinator does not know the id: it has expired, or was never used here",
        no_markers,
    )


def _resolve_past_identity(
    analysis: _Analysis, current: Transaction, *, is_current: bool
) -> Resolution:
    """Return the verdict about an identity without an outcome, whose transactional id is known."""
    target, records = analysis.target or ProducerIdentity(-1, -1), analysis.evidence.log.records
    last = records[-1].txn if records else None
    now = f"producer {current.producer_id} epoch {current.epoch}, {current.state}"
    if is_current:
        # Under version 2 the Complete record already has the identity of the next transaction.
        is_next = last is not None and last.client_transaction_version >= TV2
        if current.state == "Empty" or (current.state.startswith("Complete") and is_next):
            return analysis.conclude(
                Verdict.NOT_BEGUN,
                f"its coordinator has {now}: nothing was written under this identity yet",
                proof=True,
            )
        return analysis.conclude(
            Verdict.NO_EVIDENCE,
            f"its coordinator has {now}, which is the outcome of this identity under transaction"
            " version 1, and of the one before it under version 2",
            _searched(analysis.evidence),
        )
    is_next = current.producer_id == target.producer_id and current.epoch == target.epoch + 1
    if is_next and last is None and current.state.startswith(("Prepare", "Complete")):
        return analysis.conclude(
            Verdict.NO_EVIDENCE,
            f"its coordinator has {now}, which is the outcome of this identity under transaction"
            " version 2, and of the one after it under version 1",
            _searched(analysis.evidence),
        )
    if current.producer_id == target.producer_id and current.epoch < target.epoch:
        return analysis.conclude(
            Verdict.NO_EVIDENCE,
            f"its coordinator has the older {now}: this cluster is not the one that gave out the"
            " identity, or it has lost records",
        )
    belonged = current.producer_id == target.producer_id or any(
        record.txn is not None
        and target.producer_id in {record.txn.producer_id, record.txn.previous_producer_id}
        for record in records
    )
    if not belonged:
        return analysis.conclude(
            Verdict.NO_EVIDENCE,
            f"its coordinator has {now}; nothing shows that producer {target.producer_id} ever"
            " had this id",
            _searched(analysis.evidence),
        )
    # The log shows the identity's InitProducerId, all that followed, and no transaction.
    never = (
        is_whole(records, target)
        and not analysis.evidence.end_markers
        and not begun(records, target)
    )
    return analysis.conclude(
        Verdict.REPLACED,
        f"its coordinator has the newer {now}: the transaction is not open and can no longer be"
        " committed",
        "no transaction was begun under the identity"
        if never
        else "if it was still open when it was replaced, it was aborted",
        *(() if never else (_searched(analysis.evidence),)),
        proof=never,
    )


def _searched(evidence: Evidence) -> str:
    if not evidence.searched:
        return "no partition was searched for markers: name its topics with --topic"
    if any(end_marker.first_offset is None for end_marker in evidence.end_markers):
        return (
            "the partitions that were searched have markers that may be its own, but its batches"
            " are gone or were not read (--since)"
        )
    return f"no marker of it is left in the {len(evidence.searched)} partitions that were searched"
