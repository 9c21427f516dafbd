"""InitProducerId: claims on a transactional id.

Sources: ``TransactionCoordinator.handleInitProducerId``; KIP-98, KIP-360, KIP-939.
"""

from __future__ import annotations

from fencepost.logcore.machine import DecisionBuilder, DomainError, Token
from fencepost.logcore.tracebacks import without_traceback
from fencepost.txn import end_txn, epochs, state
from fencepost.txn.commands import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    InitProducerId,
    InitProducerIdResult,
)
from fencepost.txn.epochs import EpochClaim, ProducerIdentity
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidTransactionTimeoutError,
    InvalidTxnRequestError,
    KeepPreparedUnsupportedError,
    ProducerFencedError,
    TooManyTransactionalIdsError,
    TwoPhaseCommitDisabledError,
)
from fencepost.txn.events import EventKind
from fencepost.txn.limits import TWO_PHASE_COMMIT_TIMEOUT_MS
from fencepost.txn.shard import (
    PARK_TIMER,
    TIMEOUT_TIMER,
    ParkedInit,
    TxnShardState,
    refuse_fenced,
    report_identity,
    require_id,
)
from fencepost.txn.state import TransactionMetadata, TransactionState


def decide(
    shard: TxnShardState, decision: DecisionBuilder, token: Token, command: InitProducerId
) -> None:
    """Assign a producer id and epoch to the sender.

    If a transaction is ongoing, it is aborted first, and the reply waits for its markers. With
    ``keep_prepared`` the transaction stays ongoing instead (KIP-939).
    """
    _validate(shard, command)
    transactional_id = command.transactional_id
    if shard.is_pending(transactional_id):
        raise ConcurrentTransactionsError("the last transaction is being completed")
    txn = shard.transactions.get(transactional_id)
    if txn is None:
        if not shard.memory.has_room(state.memory_bytes(transactional_id)):
            raise TooManyTransactionalIdsError(shard.memory.budget.exceeded)
        txn = state.created(shard.ids.next_id(), command.transaction_timeout_ms, decision.now_ms)
    claimed = _claimed_identity(command)
    owner = txn.client_identity
    if claimed is not None and not epochs.may_continue(claimed, owner, txn.previous_producer_id):
        refuse_fenced(decision, token, transactional_id, claimed, owner, "InitProducerId")
        return
    if txn.state in state.PREPARED:
        raise ConcurrentTransactionsError("the last transaction is being completed")
    if txn.state is TransactionState.ONGOING:
        if command.keep_prepared:
            _keep_prepared(shard, decision, token, command, txn)
        else:
            _fence_previous(shard, decision, token, command, txn)
        return
    try:
        decision.reply(token, init_producer_id(shard, decision, command, txn))
    except ProducerFencedError:
        refuse_fenced(decision, token, transactional_id, claimed, txn.identity, "InitProducerId")


def init_producer_id(
    shard: TxnShardState,
    decision: DecisionBuilder,
    command: InitProducerId,
    txn: TransactionMetadata,
) -> InitProducerIdResult:
    """Record the new identity for a transactional id without an open transaction, and return it.

    Raises ProducerFencedError, ProducerIdsUnavailableError; ``decision`` is unchanged then.
    """
    transactional_id = command.transactional_id
    stored, claimed = txn.identity, _claimed_identity(command)
    verdict = epochs.claim(claimed, stored, shard.last_identity(transactional_id, stored))
    if verdict is EpochClaim.FENCED:
        raise ProducerFencedError(
            f"{transactional_id} belongs to producer {stored.producer_id} at epoch {stored.epoch}"
        )
    if verdict is EpochClaim.ROTATE:
        identity = ProducerIdentity(shard.ids.next_id(), 0)
    elif verdict is EpochClaim.BUMP:
        identity = ProducerIdentity(stored.producer_id, epochs.bump(stored.epoch))
    else:
        identity = stored
    report_identity(decision, transactional_id, stored, identity, "InitProducerId")
    if verdict is not EpochClaim.REPEAT:
        shard.last_producer_identity.pop(transactional_id, None)
        if claimed is not None and stored.epoch != epochs.NO_EPOCH:
            shard.last_producer_identity[transactional_id] = (identity, claimed)
    timeout_ms = command.transaction_timeout_ms
    if command.enable_2pc:
        timeout_ms = TWO_PHASE_COMMIT_TIMEOUT_MS
    decision.append(
        shard.record(
            transactional_id,
            state.initialised(txn, identity, timeout_ms=timeout_ms, now_ms=decision.now_ms),
        )
    )
    return InitProducerIdResult(identity.producer_id, identity.epoch)


def grant_parked(
    shard: TxnShardState,
    decision: DecisionBuilder,
    transactional_id: str,
    txn: TransactionMetadata,
) -> None:
    """Answer the InitProducerId, if any, that waited for the abort of ``txn`` to complete."""
    parked = shard.parked.pop(transactional_id, None)
    if parked is None:
        return
    decision.disarm((PARK_TIMER, transactional_id))
    # A waiting request is decided like a new one, so that its client gets the same answer as a
    # client that retries after CONCURRENT_TRANSACTIONS.
    try:
        response: object = init_producer_id(shard, decision, parked.command, txn)
    except DomainError as error:
        response = without_traceback(error)
    decision.reply(parked.token, response)


def refuse_parked(shard: TxnShardState, decision: DecisionBuilder, transactional_id: str) -> None:
    """Answer CONCURRENT_TRANSACTIONS to a request that waited too long for the markers."""
    parked = shard.parked.pop(transactional_id, None)
    if parked is not None:
        error = ConcurrentTransactionsError("the open transaction is still being aborted")
        decision.reply(parked.token, error)


def _fence_previous(
    shard: TxnShardState,
    decision: DecisionBuilder,
    token: Token,
    command: InitProducerId,
    txn: TransactionMetadata,
) -> None:
    """Abort the open transaction and fence its producer; the request waits for the markers."""
    transactional_id = command.transactional_id
    claimed = _claimed_identity(command)
    # Kafka compares the epoch only after the abort, so a fenced producer aborts its successor's
    # transaction before it gets PRODUCER_FENCED. Here the fenced producer is refused first.
    if claimed is not None and claimed != txn.client_identity:
        refuse_fenced(
            decision, token, transactional_id, claimed, txn.client_identity, "InitProducerId"
        )
        return
    end_txn.abort_fenced(shard, decision, transactional_id, cause="InitProducerId")
    if len(shard.parked) < shard.limits.max_parked_requests:
        shard.parked[transactional_id] = ParkedInit(token, command)
        decision.arm((PARK_TIMER, transactional_id), shard.limits.max_park_ms)
    else:
        decision.reply(token, ConcurrentTransactionsError("the open transaction is being aborted"))


def _keep_prepared(
    shard: TxnShardState,
    decision: DecisionBuilder,
    token: Token,
    command: InitProducerId,
    txn: TransactionMetadata,
) -> None:
    """Keep the open transaction, and give the sender an identity that can end it.

    Each such claim bumps the client's epoch, so that only the last of several restarted producers
    can decide the outcome.
    """
    transactional_id = command.transactional_id
    before = txn.client_identity
    if epochs.is_exhausted(before.epoch):
        client = ProducerIdentity(shard.ids.next_id(), 0)
    else:
        client = ProducerIdentity(before.producer_id, epochs.bump(before.epoch))
    # A claim must not shorten the timeout of an open transaction.
    timeout_ms = TWO_PHASE_COMMIT_TIMEOUT_MS if command.enable_2pc else txn.timeout_ms
    updated = state.kept_prepared(txn, client, timeout_ms=timeout_ms, now_ms=decision.now_ms)
    decision.append(shard.record(transactional_id, updated))
    if timeout_ms != txn.timeout_ms:
        decision.disarm((TIMEOUT_TIMER, transactional_id))
    shard.last_producer_identity.pop(transactional_id, None)
    decision.event(
        EventKind.TRANSACTION_KEPT,
        transactional_id,
        cause="InitProducerId",
        ongoing_producer_id=txn.producer_id,
        ongoing_producer_epoch=txn.producer_epoch,
        former_producer_id=before.producer_id,
        former_producer_epoch=before.epoch,
        producer_id=client.producer_id,
        producer_epoch=client.epoch,
        open_ms=decision.now_ms - txn.start_ms,
    )
    decision.reply(token, InitProducerIdResult(*client, *txn.identity))


def _claimed_identity(command: InitProducerId) -> ProducerIdentity | None:
    if command.producer_id == NO_PRODUCER_ID:
        return None
    return ProducerIdentity(command.producer_id, command.producer_epoch)


def _validate(shard: TxnShardState, command: InitProducerId) -> None:
    require_id(command.transactional_id)
    has_identity = command.producer_id != NO_PRODUCER_ID
    if has_identity != (command.producer_epoch != NO_PRODUCER_EPOCH):
        raise InvalidTxnRequestError("producer id and epoch must be given together")
    if command.enable_2pc and not shard.limits.two_phase_commit_enable:
        raise TwoPhaseCommitDisabledError("two-phase commit is off on this broker")
    if command.keep_prepared and not shard.limits.two_phase_commit_enable:
        raise KeepPreparedUnsupportedError("prepared transactions are not kept on this broker")
    if command.keep_prepared and has_identity:
        raise InvalidTxnRequestError("a producer that has an identity cannot keep a transaction")
    longest_ms = shard.limits.max_transaction_timeout_ms
    if not command.enable_2pc and not 0 < command.transaction_timeout_ms <= longest_ms:
        raise InvalidTransactionTimeoutError(
            f"the transaction timeout must be 1 to {longest_ms} ms"
        )
