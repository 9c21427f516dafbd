"""The transaction coordinator of this broker: ``fencepost.txn.machine`` on ``__transaction_state``.

EndTxn is one turn: the Prepare record, every marker and the Complete record are appended before the
reply goes out, so that the next transaction never meets CONCURRENT_TRANSACTIONS. A crash anywhere
in between leaves Prepare in the log, and loading it goes on from there.

Source: ``TransactionCoordinator``, ``TransactionStateManager``, ``AddPartitionsToTxnManager``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from fencepost.coordinator.coordinators.base import ShardedCoordinator
from fencepost.coordinator.coordinators.marker_writer import CompleteOffsets, LocalMarkerWriter
from fencepost.coordinator.data.appends import Verdicts
from fencepost.coordinator.data.storage import Storage
from fencepost.coordinator.metadata.log import TRANSACTION_VERSION
from fencepost.coordinator.metadata.names import TRANSACTION_STATE
from fencepost.coordinator.runtime.background import spawn
from fencepost.coordinator.runtime.errors import (
    ShardError,
    TransactionCoordinatorBusyError,
)
from fencepost.coordinator.runtime.origin import Origin
from fencepost.coordinator.runtime.shard import Remember, ShardRuntime
from fencepost.logcore.errors import (
    InvalidProducerEpochError,
    InvalidTxnStateError,
)
from fencepost.logcore.machine import DomainError, InvariantViolation
from fencepost.logcore.partition import Partition
from fencepost.txn.commands import (
    AddPartitions,
    AddPartitionsResult,
    ExpireTransactionalIds,
    InitProducerIdResult,
    ListTransactions,
    ListTransactionsResult,
    ReserveProducerIds,
    TopicPartition,
    WriteMarkers,
)
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    CoordinatorUnloadedError,
    ProducerFencedError,
    ProducerIdsUnavailableError,
    TransactionAbortableError,
)
from fencepost.txn.ids import BlockProducerIds, ProducerIdBlock, may_draw_id
from fencepost.txn.limits import TxnLimits

if TYPE_CHECKING:
    from fencepost.txn.machine import TxnMachine

ADDS_PARTITIONS = {"Produce": 12, "TxnOffsetCommit": 5}
"""From which version an API adds its partition to the transaction by itself (KIP-890, TV2)."""

KNOWS_ABORTABLE = {"Produce": 11, "TxnOffsetCommit": 4}
"""From which version an API may be answered TRANSACTION_ABORTABLE."""


class TxnCoordinator(ShardedCoordinator):
    """``services.txns``: every transactional id of this broker, and the source of producer ids.

    ``complete_offsets`` ends a transaction on an offsets partition, which its group coordinator
    does.
    """

    def __init__(
        self, storage: Storage, remember: Remember, *, complete_offsets: CompleteOffsets
    ) -> None:
        super().__init__(
            storage,
            remember,
            TRANSACTION_STATE,
            upkeep=ExpireTransactionalIds(),
            interval="transaction.remove.expired.transaction.cleanup.interval.ms",
        )
        self._flusher = storage.flusher
        self._ids = BlockProducerIds()
        self._reservation: asyncio.Task[None] | None = None
        self.commits = 0
        """Transactions whose commit was decided or taken up again since the start."""
        self.aborts = 0
        """The same of aborts, whoever wanted them."""
        self.markers = LocalMarkerWriter(storage, self._shards.timers, complete_offsets)

    async def stop(self) -> None:
        """Close every shard; parked requests are answered NOT_COORDINATOR."""
        if self._reservation is not None:
            await asyncio.wait({self._reservation})
        self.markers.close()
        await self._shards.close()

    # --- requests --------------------------------------------------------------------------------

    def submit(
        self, key: str, command: object, origin: Origin | None = None
    ) -> asyncio.Future[object]:
        """See :class:`ShardedCoordinator`; producer ids are reserved before a turn needs them."""
        if not may_draw_id(command):
            return super().submit(key, command, origin)
        return self._with_ids(partial(super().submit, key, command, origin))

    def new_producer(self) -> asyncio.Future[object]:
        """An identity for a producer without a transactional id; nothing is stored.

        An :class:`InitProducerIdResult`, or ProducerIdsUnavailableError.
        """
        return self._with_ids(self._new_producer)

    def _new_producer(self) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(InitProducerIdResult(self._ids.take(), 0))
        except ProducerIdsUnavailableError as error:
            future.set_exception(error)
        return future

    async def list_transactions(self, command: ListTransactions) -> ListTransactionsResult:
        """Merge what all shards list; a shard that does not serve here is passed over.

        Raises CoordinatorLoadInProgressError while any shard loads.
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
    ) -> Verdicts | asyncio.Future[None]:
        """Make sure that partitions are in the producer's transaction before it writes to them.

        ``api`` is ``"Produce"`` or ``"TxnOffsetCommit"``; its version decides whether partitions
        are added (TV2) or only looked up. The whole answer is given now: an append in the same
        turn of the event loop can't be overtaken by the transaction's end. Errors are in the
        words the API's clients understand (kafka.md: KIP-890; ``AddPartitionsToTxnManager``).

        A future: the record that puts the partitions into the transaction is not on disk yet. It
        may be of this call or of an earlier one. The future is done once the record is on disk, and
        verification is due anew then. Data that is written after that can not outlive, in a power
        loss, the record that makes it part of a transaction.
        """
        adds = version >= ADDS_PARTITIONS[api]
        if not adds and not self._config.bool("transaction.partition.verification.enable"):
            return dict.fromkeys(partitions)
        command = AddPartitions(
            transactional_id,
            producer_id,
            producer_epoch,
            tuple(partitions),
            verify_only=not adds,
            client_transaction_version=2 if adds else 0,
        )
        future = self._shards.submit(transactional_id, command, origin, reply_before_flush=True)
        if not future.done():
            raise InvariantViolation("AddPartitions was not answered in its own turn")
        error = future.exception()  # asked for in any case, or the loop would log it
        disk = self._on_disk(transactional_id)
        if disk is not None:
            return disk
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

    def _on_disk(self, transactional_id: str) -> asyncio.Future[None] | None:
        """Done when the id's last record is on disk; None if it is there, or need not be.

        Records of other ids are not waited for: behind a busy log that would take for ever.
        """
        shard = self._shards.shard_for(transactional_id)
        if shard is None:
            return None
        offset = cast("TxnMachine", shard.machine).last_offset(transactional_id)
        if offset is None or offset < shard.partition.high_watermark:
            return None
        return self._flusher.flushed((shard.partition,))

    # --- inside ----------------------------------------------------------------------------------

    def _run_effect(
        self,
        shard: ShardRuntime,
        effect: object,
        _now_ms: int,
        first_attempt_done: Callable[[], None],
    ) -> None:
        if isinstance(effect, WriteMarkers):
            if effect.commit:
                self.commits += 1
            else:
                self.aborts += 1
            self.markers.write(effect, shard.report, first_attempt_done)
        elif isinstance(effect, ReserveProducerIds):
            self._reserve()
            first_attempt_done()
        else:
            raise InvariantViolation(f"not an effect of transactions: {effect!r}")

    def _with_ids(self, ask: Callable[[], asyncio.Future[object]]) -> asyncio.Future[object]:
        """Call ``ask`` once there is an id that it may draw, and return its answer.

        That is now, except right after a start. Where no id can be reserved ``ask`` is called all
        the same: not every command needs one, and those that do are refused.
        """
        if self._ids.remaining:
            answer = ask()
            if self._ids.is_low:
                self._reserve()
        else:
            answer = asyncio.get_running_loop().create_future()
            spawn(self._ask_later(ask, answer), "wait for producer ids")
        return answer

    async def _ask_later(
        self, ask: Callable[[], asyncio.Future[object]], answer: asyncio.Future[object]
    ) -> None:
        if not self._ids.remaining:
            await asyncio.wait({self._reserve()})
        try:
            result = await ask()
        except Exception as error:  # noqa: BLE001 - it is the answer
            if not answer.done():  # the request's connection is gone
                answer.set_exception(error)
        else:
            if not answer.done():
                answer.set_result(result)

    def _reserve(self) -> asyncio.Task[None]:
        """Reserve a block of producer ids, unless that is under way."""
        if self._reservation is None or self._reservation.done():
            self._reservation = spawn(self._reserve_block(), "reserve producer ids")
        return self._reservation

    async def _reserve_block(self) -> None:
        with self._metadata.unforced():
            first, length = self._metadata.allocate_producer_ids()
        flushed = self._flusher.forced(self._metadata.partition)
        if flushed is not None:
            await flushed
        self._ids.add(ProducerIdBlock(first, length))

    def _build(self, partition: Partition) -> TxnMachine:
        # A broker without transactions does without their machine, and starts sooner.
        from fencepost.txn.machine import TxnMachine  # noqa: PLC0415

        config = self._config
        limits = TxnLimits(
            max_transaction_timeout_ms=config.int("transaction.max.timeout.ms"),
            transactional_id_expiration_ms=config.int("transactional.id.expiration.ms"),
            two_phase_commit_enable=config.bool("transaction.two.phase.commit.enable"),
        )
        metadata = self._metadata
        return TxnMachine(
            limits,
            self._ids,
            partition.marks.leader_epoch,
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
