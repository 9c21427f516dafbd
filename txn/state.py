"""The states of a transaction, their legal transitions, and the step from each state to the next.

A transition that is not in :data:`TRANSITIONS` raises InvariantViolation. The README's diagram is
generated from this table.

Sources: ``TransactionState``, ``TransactionMetadata`` (its ``prepare…`` methods and the checks of
``completeTransitionTo``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from fencepost.logcore.machine import InvariantViolation
from fencepost.logcore.values import dataclass, fast_init
from fencepost.txn import epochs
from fencepost.txn.commands import NO_PRODUCER_ID, TopicPartition
from fencepost.txn.epochs import NO_EPOCH, ProducerIdentity

NO_TIMESTAMP_MS = -1
"""The start time of a transaction that has not begun."""

ID_BYTES: Final = 768
"""The memory, in bytes, of a transactional id at rest, without the characters of the id.
``test_budget.py`` measures 510 bytes, and 710 if the producer's previous identity is known."""
OPEN_BYTES: Final = 512
"""The memory, in bytes, of an open transaction without its partitions: a timer and a set.
``test_budget.py`` measures 410 bytes."""
PARTITION_BYTES: Final = 256
"""The memory, in bytes, of a partition in an open transaction, with the name of its topic.
``test_budget.py`` measures 210 bytes."""

TV2 = 2
"""The transaction version that gives each transaction its own producer epoch (KIP-890)."""


class TransactionState(IntEnum):
    """Kafka's states, with their numbers in ``__transaction_state``."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    """Only in memory: the step before the tombstone."""
    PREPARE_EPOCH_FENCE = 7
    """Only in memory: the step before PREPARE_ABORT for a transaction whose owner is fenced."""

    @property
    def kafka_name(self) -> str:
        """The name in the admin APIs, such as ``CompleteCommit``."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_S = TransactionState

AT_REST = frozenset({_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT})
"""No transaction is open or being completed."""

PREPARED = frozenset({_S.PREPARE_COMMIT, _S.PREPARE_ABORT})
"""The outcome is decided and final; markers are being written."""

TRANSITIONS: Mapping[tuple[TransactionState, TransactionState], str] = MappingProxyType(
    {(old, _S.EMPTY): "InitProducerId" for old in AT_REST}
    | {(old, _S.ONGOING): "AddPartitions" for old in AT_REST}
    | {(old, _S.PREPARE_ABORT): "EndTxn abort, TV2" for old in AT_REST}
    | {(old, _S.DEAD): "expiry" for old in AT_REST}
    | {
        (_S.ONGOING, _S.ONGOING): "AddPartitions, InitProducerId keeping it",
        (_S.ONGOING, _S.PREPARE_COMMIT): "EndTxn commit",
        (_S.ONGOING, _S.PREPARE_ABORT): "EndTxn abort",
        (_S.ONGOING, _S.PREPARE_EPOCH_FENCE): "timeout, InitProducerId",
        (_S.PREPARE_EPOCH_FENCE, _S.PREPARE_ABORT): "fenced",
        (_S.PREPARE_COMMIT, _S.COMPLETE_COMMIT): "markers written",
        (_S.PREPARE_ABORT, _S.COMPLETE_ABORT): "markers written",
    }
)
"""Every legal transition, from one state to the next, and its cause."""


@fast_init
@dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """The durable state of one transactional id; a transition builds a new instance.

    ``previous_producer_id`` is the producer id before the last transition, and ``next_producer_id``
    the id that the Complete record will have (-1: no change). Kafka's ``lastProducerEpoch`` is
    missing because Kafka does not store it either; see ``TxnShardState.last_producer_identity``.

    KIP-939: a transaction that InitProducerId *kept* has two identities. Its batches and markers
    use ``producer_id`` and ``producer_epoch``; its client uses ``next_producer_id`` and
    ``next_producer_epoch``. Every other transaction has a ``next_producer_epoch`` of -1.
    """

    producer_id: int
    previous_producer_id: int
    next_producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    partitions: frozenset[TopicPartition]
    start_ms: int
    last_update_ms: int
    client_transaction_version: int
    next_producer_epoch: int = NO_EPOCH

    @property
    def identity(self) -> ProducerIdentity:
        """The producer id and epoch of the transaction's batches and markers."""
        return ProducerIdentity(self.producer_id, self.producer_epoch)

    @property
    def is_kept_prepared(self) -> bool:
        """Whether the client's identity differs from the transaction's identity (KIP-939)."""
        return self.next_producer_epoch != NO_EPOCH

    @property
    def client_identity(self) -> ProducerIdentity:
        """The producer id and epoch that the current producer must send."""
        return self.next_identity if self.is_kept_prepared else self.identity

    @property
    def next_identity(self) -> ProducerIdentity:
        """The client's identity once the transaction is complete."""
        if self.is_kept_prepared:
            return ProducerIdentity(self.next_producer_id, self.next_producer_epoch)
        if self.next_producer_id != NO_PRODUCER_ID:
            return ProducerIdentity(self.next_producer_id, 0)
        return self.identity


def require_legal(old: TransactionState, new: TransactionState) -> None:
    """Raise InvariantViolation unless the table lists the transition."""
    if (old, new) not in TRANSITIONS:
        raise InvariantViolation(f"a transaction cannot go from {old.name} to {new.name}")


def created(producer_id: int, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """Return the state of a new id before its first epoch; this state is never written."""
    return TransactionMetadata(
        producer_id=producer_id,
        previous_producer_id=NO_PRODUCER_ID,
        next_producer_id=NO_PRODUCER_ID,
        producer_epoch=epochs.NO_EPOCH,
        timeout_ms=timeout_ms,
        state=_S.EMPTY,
        partitions=frozenset(),
        start_ms=NO_TIMESTAMP_MS,
        last_update_ms=now_ms,
        client_transaction_version=0,
    )


def initialised(
    old: TransactionMetadata,
    identity: ProducerIdentity,
    *,
    timeout_ms: int,
    now_ms: int,
) -> TransactionMetadata:
    """Return the EMPTY state of a transactional id that ``identity`` now owns."""
    require_legal(old.state, _S.EMPTY)
    # A repeated InitProducerId keeps the previous id: after a rotation the client still sends that
    # id until an answer with the new id arrives.
    repeated = identity == old.identity
    return replace(
        old,
        producer_id=identity.producer_id,
        previous_producer_id=old.previous_producer_id if repeated else old.producer_id,
        next_producer_id=NO_PRODUCER_ID,
        producer_epoch=identity.epoch,
        timeout_ms=timeout_ms,
        state=_S.EMPTY,
        partitions=frozenset(),
        start_ms=NO_TIMESTAMP_MS,
        last_update_ms=now_ms,
    )


def kept_prepared(
    old: TransactionMetadata, client: ProducerIdentity, *, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    """Keep an open transaction, and give its transactional id to ``client`` (KIP-939)."""
    require_legal(old.state, _S.ONGOING)
    if old.state is not _S.ONGOING:
        raise InvariantViolation(f"nothing to keep in {old.state.name}")
    return replace(
        old,
        previous_producer_id=old.client_identity.producer_id,
        next_producer_id=client.producer_id,
        next_producer_epoch=client.epoch,
        timeout_ms=timeout_ms,
        last_update_ms=now_ms,
    )


def extended(
    old: TransactionMetadata,
    partitions: frozenset[TopicPartition],
    *,
    client_transaction_version: int,
    now_ms: int,
) -> TransactionMetadata:
    """Add ``partitions``; the first addition begins the transaction."""
    require_legal(old.state, _S.ONGOING)
    begun = old.state is _S.ONGOING
    return TransactionMetadata(  # ``replace`` would double the time of this step
        producer_id=old.producer_id,
        previous_producer_id=old.producer_id,
        next_producer_id=old.next_producer_id,
        producer_epoch=old.producer_epoch,
        timeout_ms=old.timeout_ms,
        state=_S.ONGOING,
        partitions=old.partitions | partitions,
        start_ms=old.start_ms if begun else now_ms,
        last_update_ms=now_ms,
        client_transaction_version=client_transaction_version,
        next_producer_epoch=old.next_producer_epoch,
    )


def fenced(old: TransactionMetadata, transaction_version: int) -> TransactionMetadata:
    """Fence the owner of an open transaction; ``prepared`` must follow at once.

    Under TV2 the Prepare record bumps the epoch, which fences the owner. A bump here as well would
    skip an epoch, and could exceed the last epoch (KAFKA-19367).
    """
    require_legal(old.state, _S.PREPARE_EPOCH_FENCE)
    turned = replace(old, state=_S.PREPARE_EPOCH_FENCE)
    if transaction_version >= TV2:
        return turned
    if old.is_kept_prepared:
        return replace(turned, next_producer_epoch=epochs.bump_to_fence(old.next_producer_epoch))
    return replace(turned, producer_epoch=epochs.bump_to_fence(old.producer_epoch))


def prepared(
    old: TransactionMetadata,
    *,
    commit: bool,
    client_transaction_version: int,
    next_producer_id: int,
    now_ms: int,
) -> TransactionMetadata:
    """Return PREPARE_COMMIT or PREPARE_ABORT. TV2 bumps the epoch, which fences late requests.

    The markers of a kept transaction always have a bumped epoch, which fences the producer that
    prepared it. Under TV2 the client's own epoch is bumped too: a delayed EndTxn must not end the
    client's next transaction.
    """
    new_state = _S.PREPARE_COMMIT if commit else _S.PREPARE_ABORT
    require_legal(old.state, new_state)
    if old.state in AT_REST and client_transaction_version < TV2:
        raise InvariantViolation(f"only TV2 may abort what has not begun ({old.state.name})")
    tv2 = client_transaction_version >= TV2
    epoch = old.producer_epoch
    if tv2 or old.is_kept_prepared:
        epoch = epochs.bump(epoch) if commit else epochs.bump_to_fence(epoch)
    next_epoch = NO_EPOCH
    if old.is_kept_prepared:
        next_epoch = epochs.bump(old.next_producer_epoch) if tv2 else old.next_producer_epoch
        if next_producer_id != NO_PRODUCER_ID:
            next_epoch = 0
        else:
            next_producer_id = old.next_producer_id
    return TransactionMetadata(
        producer_id=old.producer_id,
        previous_producer_id=old.client_identity.producer_id,
        next_producer_id=next_producer_id,
        producer_epoch=epoch,
        timeout_ms=old.timeout_ms,
        state=new_state,
        partitions=old.partitions,
        start_ms=now_ms if old.state in AT_REST else old.start_ms,
        last_update_ms=now_ms,
        client_transaction_version=client_transaction_version,
        next_producer_epoch=next_epoch,
    )


def completed(old: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Return COMPLETE_COMMIT or COMPLETE_ABORT, with the next producer id if there is one."""
    new_state = _S.COMPLETE_COMMIT if old.state is _S.PREPARE_COMMIT else _S.COMPLETE_ABORT
    require_legal(old.state, new_state)
    producer_id, epoch = old.next_identity
    return TransactionMetadata(
        producer_id=producer_id,
        # The client's previous id, which identifies a retry of its EndTxn across a rotation.
        previous_producer_id=old.previous_producer_id if old.is_kept_prepared else old.producer_id,
        next_producer_id=NO_PRODUCER_ID,
        producer_epoch=epoch,
        timeout_ms=old.timeout_ms,
        state=new_state,
        partitions=frozenset(),
        start_ms=old.start_ms,
        last_update_ms=now_ms,
        client_transaction_version=old.client_transaction_version,
        next_producer_epoch=NO_EPOCH,
    )


def dead(old: TransactionMetadata) -> TransactionMetadata:
    """Return the state of an id that is about to be deleted."""
    require_legal(old.state, _S.DEAD)
    return replace(old, state=_S.DEAD, partitions=frozenset())


def check_step(old: TransactionMetadata | None, new: TransactionMetadata) -> None:
    """Check a live transition from ``old`` (None: the id is new) to ``new``.

    This is not checked while loading: compaction may have removed the records between these states.
    """
    if old is None:
        if new.state is not _S.EMPTY or new.producer_epoch != 0:
            raise InvariantViolation(f"an id cannot begin as {new}")
        return
    # PREPARE_EPOCH_FENCE is not recorded: replay sees only the step from ONGOING to PREPARE_ABORT.
    require_legal(old.state, new.state)
    if new.state is _S.EMPTY:
        sound = _is_legal_claim(old, new)
    elif new.state is _S.ONGOING:
        sound = new.identity == old.identity and _is_legal_addition(old, new)
    elif new.state in PREPARED:
        sound = _is_legal_prepare(old, new)
    else:
        sound = new.identity == old.next_identity and new.start_ms != NO_TIMESTAMP_MS
    timeout_may_change = new.state is _S.EMPTY or new.is_kept_prepared
    if not sound or (new.timeout_ms != old.timeout_ms and not timeout_may_change):
        raise InvariantViolation(f"unsound transition from {old} to {new}")


def _is_legal_addition(old: TransactionMetadata, new: TransactionMetadata) -> bool:
    if not new.is_kept_prepared:
        return new.partitions >= old.partitions and not old.is_kept_prepared
    same = new.partitions == old.partitions and new.start_ms == old.start_ms
    return same and _moves_on(old.client_identity, new.client_identity)


def _moves_on(old: ProducerIdentity, new: ProducerIdentity) -> bool:
    if new.producer_id == old.producer_id:
        return new.epoch == old.epoch + 1
    return new.epoch == 0 and epochs.is_exhausted(old.epoch)


def _is_legal_claim(old: TransactionMetadata, new: TransactionMetadata) -> bool:
    if new.producer_id == old.producer_id:
        return new.producer_epoch - old.producer_epoch in {0, 1}
    return new.producer_epoch == 0 and epochs.is_exhausted(old.producer_epoch)


def _is_legal_prepare(old: TransactionMetadata, new: TransactionMetadata) -> bool:
    tv2 = new.client_transaction_version >= TV2
    legal_epochs = {epochs.bump_to_fence(old.producer_epoch)} if tv2 else {old.producer_epoch}
    if new.state is _S.PREPARE_ABORT:
        legal_epochs.add(epochs.bump_to_fence(old.producer_epoch))
    if old.is_kept_prepared:
        legal_epochs = {epochs.bump_to_fence(old.producer_epoch)}
        moved = _moves_on(old.client_identity, new.next_identity)
        succession = moved or (not tv2 and _is_legal_tv1_end(old, new))
    else:
        rotates = new.next_producer_id != NO_PRODUCER_ID
        succession = rotates == (tv2 and epochs.is_exhausted(old.producer_epoch))
    return (
        new.producer_id == old.producer_id
        and new.producer_epoch in legal_epochs
        and new.partitions == old.partitions
        and new.is_kept_prepared == old.is_kept_prepared
        and (new.start_ms == old.start_ms or old.state in AT_REST)
        and succession
    )


def _is_legal_tv1_end(old: TransactionMetadata, new: TransactionMetadata) -> bool:
    """Whether the client's identity is unchanged, or an abort has bumped its epoch to fence it."""
    legal = {old.next_producer_epoch}
    if new.state is _S.PREPARE_ABORT:
        legal.add(epochs.bump_to_fence(old.next_producer_epoch))
    return new.next_producer_id == old.next_producer_id and new.next_producer_epoch in legal


def check_shape(transactional_id: str, txn: TransactionMetadata) -> None:
    """Check the invariants of a single durable state."""
    begun = txn.state is _S.ONGOING or txn.state in PREPARED
    sound = (
        txn.state not in {_S.DEAD, _S.PREPARE_EPOCH_FENCE}
        and txn.producer_id >= 0
        and 0 <= txn.producer_epoch <= epochs.FENCE_EPOCH
        and (begun or not txn.partitions)
        and (not begun or txn.start_ms != NO_TIMESTAMP_MS)
        and (txn.state is not _S.EMPTY or txn.start_ms == NO_TIMESTAMP_MS)
        and _is_legal_next(txn)
    )
    if not sound:
        raise InvariantViolation(f"{transactional_id}: impossible state {txn}")


def _is_legal_next(txn: TransactionMetadata) -> bool:
    if txn.is_kept_prepared:
        begun = txn.state is _S.ONGOING or txn.state in PREPARED
        ahead = txn.next_producer_id != txn.producer_id or (
            txn.next_producer_epoch > txn.producer_epoch
            or (txn.state in PREPARED and txn.next_producer_epoch == txn.producer_epoch)
        )
        return begun and ahead and txn.next_producer_id >= 0 and txn.next_producer_epoch >= 0
    if txn.next_producer_id == NO_PRODUCER_ID:
        return True
    return txn.state in PREPARED and txn.next_producer_id != txn.producer_id


def memory_bytes(transactional_id: str, txn: TransactionMetadata | None = None) -> int:
    """Return the estimated memory of an id, in bytes; without ``txn``, of a new id."""
    width = 1 if transactional_id.isascii() else 4
    at_rest = ID_BYTES + len(transactional_id) * width
    if txn is None or not txn.partitions:
        return at_rest
    return at_rest + OPEN_BYTES + len(txn.partitions) * PARTITION_BYTES
