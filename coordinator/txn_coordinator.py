"""The transaction coordinator of this broker: ``txn.machine`` on ``__transaction_state``.

EndTxn is one turn: the Prepare record, every marker and the Complete record are appended before the
reply goes out, so that the next transaction never meets CONCURRENT_TRANSACTIONS. A crash anywhere
in between leaves Prepare in the log, and loading it goes on from there.

Source: ``TransactionCoordinator``, ``TransactionStateManager``, ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from coordinator.history import Origin
from coordinator.markers import LocalMarkerWriter, MarkerWriter
from coordinator.metadata import TRANSACTION_STATE, TRANSACTION_VERSION
from coordinator.runtime import Shard
from coordinator.shard_errors import (
    ShardError,
    TransactionCoordinatorBusyError,
)
from coordinator.sharded import ShardedCoordinator
from logcore.errors import (
    InvalidProducerEpochError,
    InvalidTxnStateError,
)
from logcore.machine import DomainError, InvariantViolation
from logcore.partition import Partition
from txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    ExpireTransactionalIds,
    InitProducerIdResult,
    ListTransactions,
    ListTransactionsResult,
    TopicPartition,
    WriteMarkers,
)
from txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    ProducerFencedError,
    ProducerIdsUnavailableError,
    TransactionAbortableError,
)
from txn.ids import BlockProducerIds, ProducerIdBlock
from txn.limits import TxnLimits
from txn.machine import TxnMachine

if TYPE_CHECKING:
    from coordinator.broker import Broker

ADDS_PARTITIONS = {"Produce": 12, "TxnOffsetCommit": 5}
"""From which version an API adds its partition to the transaction by itself (KIP-890, TV2)."""

KNOWS_ABORTABLE = {"Produce": 11, "TxnOffsetCommit": 4}
"""From which version an API may be answered TRANSACTION_ABORTABLE."""

RESERVE_INTERVAL_MS = 10_000
"""How often it is looked whether producer ids run short."""

_EXPIRY_INTERVAL = "transaction.remove.expired.transaction.cleanup.interval.ms"
_RESERVE_IDS = "reserve producer ids"
_EXPIRE_IDS = "expire transactional ids"


class TxnCoordinator(ShardedCoordinator):
    """``broker.txns``: every transactional id of this broker, and the source of producer ids."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, TRANSACTION_STATE)
        self._ids = BlockProducerIds(self._allocate)
        self.markers: MarkerWriter

    async def start(self) -> None:
        """Open the shards if the topic exists, after the group coordinator has started.

        Transactions that a crash left in Prepare are completed as their shards load.
        """
        self._shards.bind(asyncio.get_running_loop())
        self.markers = LocalMarkerWriter(self._broker, self._shards.timers)
        self._upkeep = self._shards.timers.timers(self._do_upkeep)
        self._upkeep.set(_RESERVE_IDS, self._broker.clock.now_ms() + RESERVE_INTERVAL_MS)
        self._set_expiry()
        await self._open_existing()

    async def stop(self) -> None:
        """Close every shard; parked requests are answered NOT_COORDINATOR."""
        self.markers.close()
        await self._shards.close()

    # --- requests --------------------------------------------------------------------------------

    def new_producer(self) -> InitProducerIdResult:
        """An identity for a producer without a transactional id; nothing is stored.

        Raises ProducerIdsUnavailableError.
        """
        return InitProducerIdResult(self._ids.take(), 0)

    async def list_transactions(self, command: ListTransactions) -> ListTransactionsResult:
        """Merge what all shards list; one that does not serve here has none to list.

        Raises CoordinatorLoadInProgressError while any shard loads, InvalidIdPatternError.
        """
        found = await self._everywhere(command, ListTransactionsResult)
        unknown = dict.fromkeys(state for result in found for state in result.unknown_states)
        listed = (one for result in found for one in result.transactions)
        return ListTransactionsResult(tuple(listed), tuple(unknown))

    # --- verification ----------------------------------------------------------------------------

    def verify(
        self,
        api: str,
        version: int,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        origin: Origin | None = None,
        again: Callable[[], None] | None = None,
    ) -> dict[TopicPartition, DomainError | None] | None:
        """Make sure that partitions are in the producer's transaction before it writes to them.

        ``api`` is ``"Produce"`` or ``"TxnOffsetCommit"``; its version decides whether partitions
        are added (TV2) or only looked up. The whole answer is given now: an append in the same
        turn of the event loop can't be overtaken by the transaction's end. Errors are in the
        words the API's clients understand (kafka.md: KIP-890; ``AddPartitionsToTxnManager``).

        None: the record that has the partitions in the transaction, be it of this call or of an
        earlier one, is not on disk yet. ``again`` is called once it is; only data written after
        that can't outlive, in a power loss, what makes it part of a transaction.
        """
        adds = version >= ADDS_PARTITIONS[api]
        if not adds and not self._broker.config.bool("transaction.partition.verification.enable"):
            return dict.fromkeys(partitions)
        command = AddPartitions(
            transactional_id,
            producer_id,
            producer_epoch,
            tuple(partitions),
            verify_only=not adds,
            client_transaction_version=2 if adds else 0,
        )
        future = self._shards.submit(transactional_id, command, origin, at_once=True)
        if not future.done():
            raise InvariantViolation("AddPartitions was not answered in its own turn")
        if again is not None and self._waits_for_disk(transactional_id, again):
            return None
        error = future.exception()
        if error is None:
            result = future.result()
            if not isinstance(result, AddPartitionsResult):
                raise InvariantViolation(f"AddPartitions was answered {result!r}")
            missing = result.errors
        elif isinstance(error, DomainError):
            missing = dict.fromkeys(partitions, error)
        else:
            raise error
        return {
            partition: verification_error(missing.get(partition), api, version)
            for partition in partitions
        }

    def _waits_for_disk(self, transactional_id: str, again: Callable[[], None]) -> bool:
        """Have ``again`` called when the id's last record is on disk; False if it is, or need not.

        Records of other ids are not waited for: behind a busy log that would take for ever.
        """
        shard = self._shards.shard_for(transactional_id)
        if shard is None or not isinstance(shard.machine, TxnMachine):
            return False
        offset = shard.machine.last_offset(transactional_id)
        if offset is None or offset < shard.partition.high_watermark:
            return False
        return self._broker.commit.after((shard.partition,), again)

    # --- inside ----------------------------------------------------------------------------------

    def _perform(
        self, shard: Shard, effect: object, _now_ms: int, tried: Callable[[], None]
    ) -> None:
        if not isinstance(effect, WriteMarkers):
            raise InvariantViolation(f"not an effect of transactions: {effect!r}")
        self.markers.write(effect, shard.feed, tried)

    def _do_upkeep(self, key: Hashable, now_ms: int) -> None:
        if key == _EXPIRE_IDS:
            self._set_expiry()
            self._shards.sweep(ExpireTransactionalIds(), _EXPIRE_IDS)
            return
        self._upkeep.set(_RESERVE_IDS, now_ms + RESERVE_INTERVAL_MS)
        # An idle moment is as good as any to reserve producer ids; taking one will try again.
        with suppress(ProducerIdsUnavailableError):
            self._ids.prefetch()

    def _set_expiry(self) -> None:
        interval_ms = self._broker.config.int(_EXPIRY_INTERVAL)
        self._upkeep.set(_EXPIRE_IDS, self._broker.clock.now_ms() + interval_ms)

    def _allocate(self) -> ProducerIdBlock:
        first, length = self._broker.metadata.allocate_producer_ids()
        return ProducerIdBlock(first, length)

    def _build(self, partition: Partition) -> TxnMachine:
        config = self._broker.config
        limits = TxnLimits(
            max_transaction_timeout_ms=config.int("transaction.max.timeout.ms"),
            transactional_id_expiration_ms=config.int("transactional.id.expiration.ms"),
            two_phase_commit_enable=config.bool("transaction.two.phase.commit.enable"),
        )
        metadata = self._broker.metadata
        return TxnMachine(
            limits,
            self._ids,
            partition.leader_epoch,
            lambda: metadata.feature_level(TRANSACTION_VERSION),
        )


def verification_error(error: DomainError | None, api: str, version: int) -> DomainError | None:
    """Say an error of the transaction coordinator in the words of a partition leader.

    Partition leaders know no PRODUCER_FENCED. Producers do not retry the coordinator's errors, so
    Produce turns them, and CONCURRENT_TRANSACTIONS for clients before TV2, into one that every
    producer retries (NOT_ENOUGH_REPLICAS); TxnOffsetCommit keeps their names.
    """
    if isinstance(error, ProducerFencedError):
        return InvalidProducerEpochError(str(error))
    if isinstance(error, TransactionAbortableError) and version < KNOWS_ABORTABLE[api]:
        return InvalidTxnStateError(str(error))
    if api == "Produce":
        retriable: tuple[type[DomainError], ...] = (ShardError, CoordinatorUnloadedError)
        if version < ADDS_PARTITIONS[api]:
            retriable += (ConcurrentTransactionsError,)
        if isinstance(error, retriable):
            return TransactionCoordinatorBusyError(str(error))
    return error
