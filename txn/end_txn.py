"""The end of a transaction: requested by its producer, or forced by the coordinator.

The two tables below are Kafka's. The version of the EndTxn request selects the table. When the
coordinator itself aborts (timeout, InitProducerId), the cluster's transaction.version decides.

Sources: ``TransactionCoordinator.endTransaction`` and ``endTransactionWithTV1``; KIP-890.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

from fencepost.logcore.machine import DecisionBuilder, Event, Token
from fencepost.txn import epochs, state
from fencepost.txn.commands import NO_PRODUCER_ID, EndTxn, EndTxnResult
from fencepost.txn.epochs import EpochRelation, ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    InvalidTransactionStateError,
)
from fencepost.txn.events import EventKind
from fencepost.txn.shard import TxnShardState, refuse_fenced, report_identity, require_id
from fencepost.txn.state import TV2, TransactionMetadata, TransactionState


class EndTxnVerdict(Enum):
    """The result of an EndTxn request."""

    END = auto()
    """The outcome is recorded and its markers are requested."""
    DONE = auto()
    """The transaction has already ended with this outcome: the same answer is given."""
    WAIT = auto()
    """The transaction is being completed with this outcome: CONCURRENT_TRANSACTIONS."""
    ILLEGAL = auto()
    """The request does not fit the state: INVALID_TXN_STATE."""
    FENCED = auto()
    """The sender's epoch is outdated: PRODUCER_FENCED."""


_S, _V = TransactionState, EndTxnVerdict

COMMIT, ABORT = True, False
CURRENT, RETRY = EpochRelation.CURRENT, EpochRelation.RETRY

TV1_COLUMNS = (COMMIT, ABORT)
TV2_COLUMNS = ((COMMIT, CURRENT), (COMMIT, RETRY), (ABORT, CURRENT), (ABORT, RETRY))

TV1_TABLE: Mapping[tuple[TransactionState, bool], EndTxnVerdict] = MappingProxyType(
    {
        (where, column): cell
        for where, row in (
            (_S.EMPTY, (_V.ILLEGAL, _V.ILLEGAL)),
            (_S.ONGOING, (_V.END, _V.END)),
            (_S.PREPARE_COMMIT, (_V.WAIT, _V.ILLEGAL)),
            (_S.PREPARE_ABORT, (_V.ILLEGAL, _V.WAIT)),
            (_S.COMPLETE_COMMIT, (_V.DONE, _V.ILLEGAL)),
            (_S.COMPLETE_ABORT, (_V.ILLEGAL, _V.DONE)),
        )
        for column, cell in zip(TV1_COLUMNS, row, strict=True)
    }
)
"""The verdicts by state and requested outcome. The request must have the stored identity."""

TV2_TABLE: Mapping[tuple[TransactionState, bool, EpochRelation], EndTxnVerdict] = MappingProxyType(
    {
        (where, *column): cell
        for where, row in (
            (_S.EMPTY, (_V.ILLEGAL, _V.FENCED, _V.END, _V.FENCED)),
            (_S.ONGOING, (_V.END, _V.FENCED, _V.END, _V.FENCED)),
            (_S.PREPARE_COMMIT, (_V.FENCED, _V.WAIT, _V.FENCED, _V.ILLEGAL)),
            (_S.PREPARE_ABORT, (_V.FENCED, _V.ILLEGAL, _V.FENCED, _V.WAIT)),
            (_S.COMPLETE_COMMIT, (_V.ILLEGAL, _V.DONE, _V.END, _V.ILLEGAL)),
            (_S.COMPLETE_ABORT, (_V.ILLEGAL, _V.ILLEGAL, _V.END, _V.DONE)),
        )
        for column, cell in zip(TV2_COLUMNS, row, strict=True)
    }
)
"""The verdicts by state, requested outcome, and whether the request has the stored identity or the
previous one."""


def verdict(
    state: TransactionState, *, commit: bool, relation: EpochRelation, transaction_version: int
) -> EndTxnVerdict:
    """Return the verdict on an EndTxn whose producer id is the stored id or the previous id."""
    if relation is EpochRelation.FENCED:
        return EndTxnVerdict.FENCED
    if transaction_version >= TV2:
        return TV2_TABLE[state, commit, relation]
    return TV1_TABLE[state, commit]


def decide(shard: TxnShardState, decision: DecisionBuilder, token: Token, command: EndTxn) -> None:
    """Commit or abort."""
    transactional_id = command.transactional_id
    require_id(transactional_id)
    version = _rules(command.client_transaction_version)
    pending = shard.is_pending(transactional_id)
    # Under TV2 a pending id is refused before the identity is checked. The answer to an EndTxn
    # contains the identity of the next transaction, and the client may use it before the completion
    # has stored it.
    if version >= TV2 and pending:
        raise ConcurrentTransactionsError("the last transaction is being completed")
    txn = shard.transactions.get(transactional_id)
    request = ProducerIdentity(command.producer_id, command.producer_epoch)
    relation = EpochRelation.OTHER_ID if txn is None else relate(request, txn, version)
    if txn is None or relation is EpochRelation.OTHER_ID:
        raise InvalidProducerIdMappingError(
            f"{transactional_id} is not the id of producer {command.producer_id}"
        )
    owner = txn.client_identity
    outcome = verdict(
        txn.state, commit=command.commit, relation=relation, transaction_version=version
    )
    if outcome is EndTxnVerdict.FENCED:
        refuse_fenced(decision, token, transactional_id, request, owner, "EndTxn")
        return
    if pending or outcome is EndTxnVerdict.WAIT:
        raise ConcurrentTransactionsError("the last transaction is being completed")
    if outcome is EndTxnVerdict.ILLEGAL:
        operation = "commit" if command.commit else "abort"
        raise InvalidTransactionStateError(f"no {operation} in state {txn.state.kafka_name}")
    after, open_ms = owner, 0
    if outcome is EndTxnVerdict.END:
        prepared = _end(shard, decision, transactional_id, txn, version, commit=command.commit)
        by_operator = command.by_operator
        _record_end(decision, transactional_id, txn, prepared, "EndTxn", by_operator=by_operator)
        after = prepared.next_identity
        if txn.state is TransactionState.ONGOING:
            open_ms = prepared.last_update_ms - txn.start_ms
    result = EndTxnResult(after.producer_id, after.epoch, open_ms, txn.timeout_ms)
    decision.reply(token, result)


def abort_fenced(
    shard: TxnShardState, decision: DecisionBuilder, transactional_id: str, *, cause: str
) -> None:
    """Abort an open transaction and fence its producer.

    Raises ProducerIdsUnavailableError, which leaves ``decision`` unchanged.
    """
    owned = shard.transactions[transactional_id]
    version = _rules(shard.transaction_version())
    fenced = state.fenced(owned, version)
    prepared = _end(shard, decision, transactional_id, fenced, version, commit=False)
    _record_end(decision, transactional_id, owned, prepared, cause)
    decision.event(
        EventKind.PRODUCER_FENCED,
        transactional_id,
        cause=cause,
        producer_id=owned.producer_id,
        fenced_epoch=owned.client_identity.epoch,
        producer_epoch=prepared.next_identity.epoch,
    )


def _rules(transaction_version: int) -> int:
    """Return 2 for TV2 and 0 for lower versions, the values of ClientTransactionVersion."""
    return TV2 if transaction_version >= TV2 else 0


def relate(request: ProducerIdentity, txn: TransactionMetadata, version: int) -> EpochRelation:
    """Compare an EndTxn's identity with the stored client's, by the rules of ``version``."""
    if version < TV2:
        relation = epochs.relate_tv1(request, txn.client_identity)
    else:
        relation = epochs.relate_tv2(request, txn.client_identity, txn.previous_producer_id)
    # A kept transaction: the sender prepared it, and a successor with another producer id now owns
    # it. The sender must get PRODUCER_FENCED, not INVALID_PRODUCER_ID_MAPPING.
    if relation is EpochRelation.OTHER_ID and request == txn.identity:
        return EpochRelation.FENCED
    # The coordinator never gives the last epoch to a client.
    if relation is not EpochRelation.OTHER_ID and request.epoch > epochs.LAST_CLIENT_EPOCH:
        return EpochRelation.FENCED
    # Only a TV2 end bumps the epoch. After a TV1 end, a producer that is one epoch behind has been
    # fenced. Kafka takes its EndTxn for a retry, and so confirms another producer's commit.
    if relation is EpochRelation.RETRY and txn.client_transaction_version < TV2:
        return EpochRelation.FENCED
    return relation


def _end(
    shard: TxnShardState,
    decision: DecisionBuilder,
    transactional_id: str,
    txn: TransactionMetadata,
    version: int,
    *,
    commit: bool,
) -> TransactionMetadata:
    """Add the Prepare record and its markers to the decision."""
    next_producer_id = NO_PRODUCER_ID
    if version >= TV2 and epochs.is_exhausted(txn.client_identity.epoch):
        next_producer_id = shard.ids.next_id()
    prepared = state.prepared(
        txn,
        commit=commit,
        client_transaction_version=version,
        next_producer_id=next_producer_id,
        now_ms=decision.now_ms,
    )
    shard.prepare(decision, transactional_id, prepared)
    if version >= TV2:
        shard.last_producer_identity[transactional_id] = (
            prepared.next_identity,
            txn.client_identity,
        )
    return prepared


def _record_end(
    decision: DecisionBuilder,
    transactional_id: str,
    owned: TransactionMetadata,
    prepared: TransactionMetadata,
    cause: str,
    *,
    by_operator: bool = False,
) -> None:
    is_commit = prepared.state is TransactionState.PREPARE_COMMIT
    detail: dict[str, object] = {
        "cause": cause,
        "producer_id": owned.producer_id,
        "producer_epoch": owned.producer_epoch,
        "partitions": len(owned.partitions),
    }
    if owned.state is TransactionState.ONGOING:  # no transaction is open in other states
        detail["open_ms"] = max(0, decision.now_ms - owned.start_ms)
    if not is_commit:
        detail["state"] = owned.state.kafka_name
    kind = EventKind.TRANSACTION_COMMITTED if is_commit else EventKind.TRANSACTION_ABORTED
    # A commit is routine, unless an operator has decided it or the transaction was kept.
    is_routine = is_commit and not owned.is_kept_prepared and not by_operator
    decision.add_event(Event(str(kind), transactional_id, detail, routine=is_routine))
    report_identity(
        decision, transactional_id, owned.client_identity, prepared.next_identity, cause
    )
